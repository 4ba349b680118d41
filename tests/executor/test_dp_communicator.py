"""If this fails, ranks compute with each other's padding, or hang on an idle peer."""

import pytest
import torch

from executor.dp_layout import DpLayout, DpPaddingMode
from executor.layers.dp_communicator import DpCommunicator
from executor.moe.dispatch_all_gather import AllGatherDispatcher
from executor.parallel import RankGroup, join_group
from executor.topology import Topology
from tests.executor.ranks import HOST, run_ranks

WIDTH, TOP_K, MAX_TOKENS, EXPERTS = 6, 2, 8, 4
COUNTS = [(3, 5), (8, 8), (0, 4), (1, 0), (0, 0), (1, 1)]
MODES = list(DpPaddingMode)


def make(rank: int, dtype: torch.dtype) -> DpCommunicator:
    return DpCommunicator(
        topology=Topology(dp_rank=rank, dp_size=2),
        max_tokens_per_rank=MAX_TOKENS,
        hidden_size=WIDTH,
        dtype=dtype,
        top_k=TOP_K,
    )


def rows_of(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that tell whose they are: rank 1's second one holds 101."""
    return (torch.arange(count) + 100 * rank)[:, None].expand(-1, WIDTH).to(dtype).contiguous()


def exchange(rank: int, port: int) -> list[dict[str, object]]:
    group = join_group(HOST, port, epoch=0, rank=rank, world_size=2, bind_host=HOST)
    seen = []
    for dtype in (torch.float32, torch.bfloat16):
        communicator = make(rank, dtype)
        communicator.join(group)
        # Every count twice, so that leftovers of a step would show in the next.
        for counts in COUNTS * 2:
            for mode in MODES:
                seen.append(one_step(communicator, DpLayout(counts, mode, rank), dtype))
    group.close()
    return seen


def one_step(
    communicator: DpCommunicator, layout: DpLayout, dtype: torch.dtype
) -> dict[str, object]:
    rank = layout.dp_rank
    x = rows_of(rank, layout.num_tokens, dtype)
    gathered = communicator.gather(x, layout)
    real = [
        gathered[offset : offset + count, 0].tolist()
        for offset, count in zip(layout.offsets, layout.global_num_tokens_cpu, strict=True)
    ]
    summed = communicator.scatter_sum(gathered.clone() * (rank + 1), layout)
    dispatcher = AllGatherDispatcher(communicator, range(2 * rank, 2 * rank + 2))
    ids = torch.arange(layout.num_tokens * TOP_K).view(-1, TOP_K).to(torch.int32) % EXPERTS
    dispatched = dispatcher.dispatch(x, ids, torch.ones(ids.shape) * (rank + 0.5), layout)
    return {
        "counts": layout.global_num_tokens_cpu,
        "rows": len(gathered),
        "real": real,
        "summed": summed[:, 0].tolist(),
        "ids": dispatched.topk_ids_RK.tolist(),
        "weights": dispatched.topk_weights_RK.tolist(),
        "offsets": layout.offsets,
    }


@pytest.fixture(scope="module")
def exchanged() -> list[list[dict[str, object]]]:
    return run_ranks(exchange, 2)


def test_every_rank_sees_every_rank_rows_in_order(exchanged: list[list[dict[str, object]]]):
    for per_rank in exchanged:
        for step in per_rank:
            counts = step["counts"]
            assert isinstance(counts, tuple)
            assert step["real"] == [list(range(n)) for n in counts[:1]] + [
                [100 + i for i in range(n)] for n in counts[1:]
            ]


def test_every_rank_gets_its_own_rows_summed(exchanged: list[list[dict[str, object]]]):
    for rank, per_rank in enumerate(exchanged):
        for step in per_rank:
            counts = step["counts"]
            assert isinstance(counts, tuple)
            # Rank r added its gathered rows times r + 1. Up to 107 * 3 is exact to 8 bits.
            expected = [3 * (100 * rank + i) for i in range(counts[rank])]
            assert step["summed"] == pytest.approx(expected, rel=2**-8)


def test_each_choice_of_an_expert_reaches_one_rank_and_padding_none(
    exchanged: list[list[dict[str, object]]],
):
    elsewhere = EXPERTS // 2
    for first, second in zip(*exchanged, strict=True):
        counts, offsets = first["counts"], first["offsets"]
        ids = [torch.tensor(step["ids"]).view(-1, TOP_K) for step in (first, second)]
        is_real = torch.zeros(len(ids[0]), dtype=torch.bool)
        assert isinstance(counts, tuple)
        assert isinstance(offsets, tuple)
        for offset, count in zip(offsets, counts, strict=True):
            is_real[offset : offset + count] = True
        owners = sum((per_rank != elsewhere).int() for per_rank in ids)
        assert torch.equal(owners, is_real[:, None].expand(-1, TOP_K).int())


def test_routing_weights_travel_with_their_rows(exchanged: list[list[dict[str, object]]]):
    for per_rank in exchanged:
        for step in per_rank:
            counts, offsets = step["counts"], step["offsets"]
            weights = torch.tensor(step["weights"]).view(-1, TOP_K)
            assert isinstance(counts, tuple)
            assert isinstance(offsets, tuple)
            for rank, (offset, count) in enumerate(zip(offsets, counts, strict=True)):
                assert weights[offset : offset + count].eq(rank + 0.5).all()


def test_a_world_of_one_moves_nothing():
    communicator = DpCommunicator.single()
    x = rows_of(0, 3, torch.float32)
    assert communicator.gather(x, DpLayout.single(3)) is x
    assert communicator.scatter_sum(x, DpLayout.single(3)) is x


def test_padding_rows_of_a_graph_reach_no_expert():
    dispatcher = AllGatherDispatcher(DpCommunicator.single(), range(EXPERTS))
    ids = torch.zeros(8, TOP_K, dtype=torch.int32)
    dispatched = dispatcher.dispatch(
        torch.zeros(8, WIDTH), ids, torch.ones(8, TOP_K), DpLayout.single(5, graph_size=8)
    )
    assert dispatched.topk_ids_RK[:5].eq(0).all()
    assert dispatched.topk_ids_RK[5:].eq(EXPERTS).all()


def test_a_group_of_other_ranks_is_refused():
    with pytest.raises(ValueError, match="rank 0 of 3, but the model was loaded for rank 1 of 2"):
        make(1, torch.float32).join(RankGroup(epoch=0, rank=0, world_size=3, backend=None))


def test_a_step_over_the_buffers_is_refused():
    layout = DpLayout((MAX_TOKENS + 1, 0), DpPaddingMode.SUM_LEN, 0)
    with pytest.raises(AssertionError, match="the buffers were made for 8"):
        make(0, torch.float32).gather(rows_of(0, MAX_TOKENS + 1, torch.float32), layout)
