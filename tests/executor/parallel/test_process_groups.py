"""If this fails, a group cannot form again, or a lost peer is waited for.

Each rank of a group over TCP is a thread here, with connections of its own.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, distributed_c10d

from executor.parallel import process_groups as parallel
from executor.parallel.layout import Topology
from executor.parallel.mesh import Place
from executor.parallel.process_groups import (
    EpochGroups,
    NcclGroup,
    RankGroup,
    TcpGroup,
    join_group,
)
from executor.parallel.rendezvous import open_store
from tests.executor.support.ranks.rank_threads import on_every_rank, topologies
from tests.executor.support.ranks.ranks import HOST, SECRET, TIMEOUT_S

SO_MAX_PACING_RATE = 47  # of Linux; Python has no name for it


@pytest.fixture
def store() -> Iterator[Any]:
    """Where the ranks of a test meet."""
    store = open_store(HOST, SECRET)
    yield store
    store.close()


def sums(place: Topology, groups: EpochGroups) -> list[int]:
    """Returns sums over the world and, if there is one, over the attention-TP group."""
    found = []
    for group in (groups.world, groups.attn_tp):
        if group is not None:
            x = torch.tensor([10**place.world_rank])
            group.all_reduce(x)
            found.append(int(x))
    return found


def test_groups_form_again_under_every_epoch_in_one_process(store: Any):
    for epoch, places in enumerate((topologies(2, 1), topologies(1, 2), topologies(2, 1))):
        seen = on_every_rank(store.port, epoch, places, sums)
        assert seen == [[11] * (1 + (places[0].attn_tp_size > 1))] * 2


def test_an_attention_tp_group_has_the_executors_of_one_dp_rank(store: Any):
    seen = on_every_rank(store.port, 1, topologies(2, 2), sums)
    assert seen == [[1111, 11]] * 2 + [[1111, 1100]] * 2


@pytest.mark.parametrize("waits_in", ["world", "attn_tp", "host"])
def test_a_rank_whose_peer_left_gets_an_error_and_can_join_the_next_epoch(
    waits_in: str, store: Any
):
    """Also while what failed is still referred to, as by an error that is on its way."""
    held = []

    def act(place: Topology, groups: EpochGroups) -> None:
        held.append(groups)
        if place.world_rank == 1:
            return
        group: RankGroup = getattr(groups, waits_in)
        if group is groups.attn_tp and place.dp_rank == 1:
            return  # no executor of its DP rank has left
        group.all_reduce(torch.zeros(3))

    seen = on_every_rank(store.port, 1, topologies(2, 2), act)
    for result in (result for result in seen if result is not None):
        assert "left the group" in str(result), result
    waited = [True, False, False, False] if waits_in == "attn_tp" else [True, False, True, True]
    assert [isinstance(result, RuntimeError) for result in seen] == waited
    assert on_every_rank(store.port, 2, topologies(2, 2), sums)[0] == [1111, 11]


def collect(place: Topology, groups: EpochGroups) -> dict[str, Any]:
    """Returns what each collective gives a rank that has its own number, and one more row than it."""
    group, rank, size = groups.world, place.world_rank, place.world_size
    own = torch.full((2, 3), 1.5 * rank + 1)
    gathered, summed = torch.zeros(2 * size, 3), torch.zeros(rank + 1, 3, dtype=torch.bfloat16)
    group.all_gather(gathered, own)
    counts = [1 + other for other in range(size)]
    rows = torch.full((sum(counts), 2), -1, dtype=torch.int32)
    rows[sum(counts[:rank]) :][: counts[rank]] = rank
    group.all_gather_rows(rows, counts)
    x = torch.arange(sum(counts), dtype=torch.bfloat16)[:, None].expand(-1, 3).contiguous()
    group.reduce_scatter(summed, x, torch.zeros(100, dtype=torch.bfloat16), counts)
    dealt = torch.zeros(size * rank, dtype=torch.int64)
    group.all_to_all(dealt, torch.full((sum(range(size)),), rank), [rank] * size, list(range(size)))
    told, total = torch.tensor(float(rank)), torch.tensor([2**40 + rank])
    group.broadcast(told, 1)
    group.all_reduce(total)
    none = torch.zeros(0, 3)
    group.all_gather(none, none)
    return {
        "gathered": gathered[::2, 0].tolist(),
        "rows": rows[:, 1].tolist(),
        "summed": summed[:, 2].tolist(),
        "dealt": dealt.tolist(),
        "told": told.item(),
        "total": int(total),
    }


def test_collectives_give_every_rank_what_is_its_own(store: Any):
    assert on_every_rank(store.port, 1, topologies(3, 1), collect) == [
        {
            "gathered": [1.0, 2.5, 4.0],
            "rows": [0, 1, 1, 2, 2, 2],
            "summed": [[0.0], [3.0, 6.0], [9.0, 12.0, 15.0]][rank],
            "dealt": [other for other in range(3) for _ in range(rank)],
            "told": 1.0,
            "total": 3 * 2**40 + 3,
        }
        for rank in range(3)
    ]


def test_messages_that_are_longer_than_what_the_kernel_holds_arrive_whole(store: Any):
    """Every rank sends before it receives: none of them could go on if it had to send all first."""
    num_bytes = 2**25

    def act(place: Topology, groups: EpochGroups) -> bool:
        rank, size = place.world_rank, place.world_size
        x = torch.arange(size * num_bytes, dtype=torch.uint8) + rank
        out = torch.zeros_like(x)
        groups.world.all_to_all(out, x)
        expected = torch.arange(rank * num_bytes, (rank + 1) * num_bytes, dtype=torch.uint8)
        return all(torch.equal(part, expected + r) for r, part in enumerate(out.chunk(size)))

    assert on_every_rank(store.port, 1, topologies(3, 1), act) == [True] * 3


def test_a_group_that_was_left_collects_nothing(store: Any):
    def act(place: Topology, groups: EpochGroups) -> None:
        groups.close()
        groups.close()
        groups.world.all_reduce(torch.zeros(1))

    for result in on_every_rank(store.port, 1, topologies(2, 1), act):
        assert "has left the group" in str(result)


def test_a_group_that_does_not_form_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, store: Any
):
    """Peers that did form it would else wait for this executor until their timeout."""
    closed = []
    host = SimpleNamespace(close=lambda: closed.append("host"))
    monkeypatch.setattr(parallel, "_tcp_group", lambda *args: host)

    def fail(*args: Any) -> NcclGroup:
        raise RuntimeError("no NCCL here")

    monkeypatch.setattr(parallel, "_nccl_group", fail)
    with pytest.raises(RuntimeError, match="no NCCL here"):
        join_group(
            HOST,
            store.port,
            SECRET,
            epoch=1,
            topology=Topology(dp_size=2),
            device=torch.device("cuda"),
        )
    assert closed == ["host"]


def test_a_member_whose_host_is_another_machines_says_so_and_does_not_wait_for_peers(store: Any):
    """They wait for its address, and it would wait for them."""
    place = Topology(dp_rank=1, dp_size=2)
    with pytest.raises(RuntimeError, match=r"call this one on 203\.0\.113\.7: .*advertised_host"):
        join_group(HOST, store.port, SECRET, epoch=1, topology=place, bind_host="203.0.113.7")


# NCCL, whose calls are checked against the signatures that every backend shares


class RecordingNccl:
    """Stands in for ProcessGroupNCCL. Takes only what gloo's binding of each method takes too.

    As that, it returns nothing for a collective that runs on the current stream.
    """

    class Options:
        pass

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.place = (rank, size)
        self.options = options
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.aborted_in: list[threading.Thread] = []
        self.is_aborted = threading.Event()

    def abort(self) -> None:
        self.aborted_in.append(threading.current_thread())
        self.is_aborted.set()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        assert hasattr(distributed_c10d.ProcessGroupGloo, name), f"no process group has {name}"

        def call(*args: Any) -> Any:
            self.calls.append((name, args))
            return None

        return call


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> NcclGroup:
    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", RecordingNccl, raising=False)
    store = PrefixStore("a", HashStore())
    device = torch.device("cuda", 3)
    place, board = Place("attn-tp-1", 1, 2), object()
    return parallel._nccl_group(store, place, range(2, 4), device, 7.0, board)


@pytest.fixture
def backend(nccl: NcclGroup) -> RecordingNccl:
    [backend] = nccl._backend
    return backend


def test_an_nccl_group_connects_before_its_first_collective(
    nccl: NcclGroup, backend: RecordingNccl
):
    assert (nccl.rank, nccl.world_size) == backend.place == (1, 2)
    assert backend.options._timeout == timedelta(seconds=7)
    assert backend.options.global_ranks_in_group == [2, 3]
    assert backend.calls == [("eager_connect_single_device", (torch.device("cuda", 3),))]


IN, OUT, SCRATCH = torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(12)
DEALT = ([2], [2])  # rows from and to each rank
NAMES = {id(IN): "in", id(OUT): "out"}
# The method of a process group, its arguments but for the last, and what kind of options that is.
COLLECTIVES: list[tuple[Callable[[RankGroup], None], str, list[Any], str]] = [
    (lambda g: g.all_gather(OUT, IN), "_allgather_base", ["out", "in"], "Allgather"),
    (
        lambda g: g.reduce_scatter(OUT, IN, SCRATCH),
        "_reduce_scatter_base",
        ["out", "in"],
        "ReduceScatter",
    ),
    (lambda g: g.all_reduce(IN), "allreduce", [["in"]], "Allreduce"),
    (lambda g: g.all_gather_rows(IN, [1, 1]), "allreduce", [["in"]], "Allreduce"),
    (lambda g: g.all_to_all(OUT, IN), "alltoall_base", ["out", "in", [], []], "AllToAll"),
    (lambda g: g.all_to_all(OUT, IN, *DEALT), "alltoall_base", ["out", "in", *DEALT], "AllToAll"),
    (lambda g: g.broadcast(IN, g.rank), "broadcast", [["in"]], "Broadcast"),
]


def named(argument: Any) -> Any:
    if isinstance(argument, list):
        return [named(item) for item in argument]
    return NAMES.get(id(argument), argument)


@pytest.mark.parametrize(("collect", "method", "arguments", "options"), COLLECTIVES)
def test_nccl_collectives_run_on_the_current_stream(
    nccl: NcclGroup,
    backend: RecordingNccl,
    collect: Any,
    method: str,
    arguments: list[Any],
    options: str,
):
    backend.calls.clear()
    collect(nccl)
    [(called, (*given, last))] = backend.calls
    assert (called, named(given)) == (method, arguments)
    assert type(last).__name__ == f"{options}Options"
    assert last.asyncOp is False
    if options == "Broadcast":
        assert last.rootRank == 1
    if options in ("ReduceScatter", "Allreduce"):
        assert last.reduceOp == distributed_c10d.ReduceOp.SUM


def test_what_nccl_is_called_with_every_backend_takes():
    """Gloo's binding raises TypeError for arguments that ProcessGroupNCCL, too, would refuse."""
    kind = distributed_c10d.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=HOST)]
    alone = NcclGroup(0, 1, kind(PrefixStore("alone", HashStore()), 0, 1, options), None)
    for collect, *_ in COLLECTIVES:
        collect(alone)


def test_closing_an_nccl_group_aborts_it_once_and_from_a_thread_of_its_own(
    nccl: NcclGroup, backend: RecordingNccl
):
    """NCCL's abort waits until captured graphs are gone, which the caller holds."""
    nccl.close()
    nccl.close()
    assert backend.is_aborted.wait(TIMEOUT_S)
    [thread] = backend.aborted_in
    assert thread is not threading.current_thread()
    assert thread.daemon, "the process would wait for it while it holds the graphs"


def test_a_rank_whose_peer_stands_still_says_that_it_waits_and_the_other_does_not(store: Any):
    """A router takes whoever is waited for as lost."""
    is_waiting, said = threading.Event(), dict[int, bool]()

    def wait_or_stand_still(place: Topology, groups: EpochGroups) -> None:
        if place.world_rank == 0:
            with calling_after(lambda: groups.is_waiting, is_waiting.set):
                groups.world.all_reduce(torch.zeros(1))
        else:
            assert is_waiting.wait(TIMEOUT_S)
            said[1] = groups.is_waiting
            groups.world.all_reduce(torch.zeros(1))
        assert not groups.is_waiting

    assert on_every_rank(store.port, 0, topologies(2, 1), wait_or_stand_still) == [None, None]
    assert said == {1: False}


def test_a_thread_that_waits_for_a_stopped_peer_is_freed_when_its_group_is_closed(store: Any):
    is_freed = threading.Event()

    def wait_or_stand_still(place: Topology, groups: EpochGroups) -> None:
        if place.world_rank == 1:
            is_freed.wait(TIMEOUT_S)
            return
        with closing_after(lambda: groups.is_waiting, groups):
            try:
                groups.world.all_reduce(torch.zeros(1))
            finally:
                is_freed.set()

    error, _ = on_every_rank(store.port, 0, topologies(2, 1), wait_or_stand_still)
    assert "this executor has left the group" in str(error)


def test_a_thread_that_has_received_half_a_message_is_freed_when_its_group_is_closed(store: Any):
    is_freed = threading.Event()
    received = torch.zeros(2**26, dtype=torch.uint8)

    def send_slowly_or_receive(place: Topology, groups: EpochGroups) -> None:
        if place.world_rank == 1:
            set_pace(groups.host, len(received) / TIMEOUT_S)
            with closing_after(is_freed.is_set, groups):
                groups.world.broadcast(torch.ones_like(received), 1)
        else:
            with closing_after(lambda: bool(received[0]), groups):
                try:
                    groups.world.broadcast(received, 1)
                finally:
                    is_freed.set()

    errors = on_every_rank(store.port, 0, topologies(2, 1), send_slowly_or_receive)
    for error in errors:
        assert "left the group" in str(error)
    assert received[0], "some of it came"
    assert not received[-1], "not all of it came"


def set_pace(group: RankGroup, bytes_per_s: float) -> None:
    """Has the kernel send so much at most through each of a group's connections."""
    assert isinstance(group, TcpGroup)
    for _, connection in group._mesh._peers:
        connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(bytes_per_s))


@contextmanager
def closing_after(happened: Callable[[], bool], groups: EpochGroups) -> Iterator[None]:
    """Closes the groups, in another thread, when something has happened, and at the end."""
    with calling_after(happened, groups.close):
        yield


@contextmanager
def calling_after(happened: Callable[[], bool], call: Callable[[], object]) -> Iterator[None]:
    """Calls, in another thread, when something has happened or the block ends."""
    has_ended = threading.Event()

    def wait() -> None:
        while not happened() and not has_ended.wait(0.001):
            pass
        call()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
