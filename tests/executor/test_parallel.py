"""If this fails, a group cannot form again, or a lost peer is waited for."""

import threading

import torch

from executor.parallel import join_group, open_store

HOST = "127.0.0.1"


def on_both_ranks(seen: list[str], port: int, epoch: int, action: str) -> None:
    def run(rank: int) -> None:
        group = join_group(
            HOST, port, epoch=epoch, rank=rank, world_size=2, bind_host=HOST, timeout_s=30
        )
        try:
            if action == "leave" and rank == 1:
                return
            for _ in range(2):
                x = torch.full((3,), rank + 1)
                group.all_reduce(x)
                seen.append(str(x.tolist()))
        except RuntimeError:
            seen.append("error")
        finally:
            group.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_group_forms_again_under_every_epoch_in_one_process():
    store = open_store(HOST, timeout_s=30)
    for epoch in range(3):
        seen: list[str] = []
        on_both_ranks(seen, store.port, epoch, "stay")
        assert seen == ["[3, 3, 3]"] * 4


def test_a_rank_whose_peer_left_gets_an_error_and_can_join_the_next_epoch():
    store = open_store(HOST, timeout_s=30)
    seen: list[str] = []
    on_both_ranks(seen, store.port, 1, "leave")
    assert seen == ["error"]
    seen.clear()
    on_both_ranks(seen, store.port, 2, "stay")
    assert seen == ["[3, 3, 3]"] * 4
