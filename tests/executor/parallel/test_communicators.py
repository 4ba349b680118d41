"""If this fails, executors compute with each other's padding, or hang on an idle peer.

Row i of DP rank d holds 16 * d + i everywhere, small enough for bfloat16 to add up exactly.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from executor.parallel.communicators import (
    WORD,
    AttnTpCommunicator,
    DpCommunicator,
    moe_words,
    pack,
    unpack,
    view_rows,
    words_of,
)
from executor.parallel.layout import DpLayout, DpPaddingMode, Place, Topology
from executor.parallel.mesh import Mesh
from executor.parallel.process_groups import EpochGroups, TcpGroup, add_up
from tests.executor.support.ranks.ranks import join, run_ranks, topology_of

WIDTH, VOCAB_SLICE, MAX_TOKENS, NUM_LOGITS = 6, 5, 8, 3
DTYPES = (torch.float32, torch.bfloat16)

# (dp_size, attn_tp_size), one after another in the same processes, each in an epoch of its own.
SHAPES = [(2, 2), (1, 4), (4, 1), (1, 2), (2, 1)]
COUNTS = {
    1: [(5,), (8,), (0,), (1,)],
    2: [(3, 5), (8, 8), (0, 4), (1, 0), (0, 0), (1, 1), (7, 2)],
    4: [(3, 0, 5, 1), (8, 8, 8, 8), (0, 0, 0, 0), (0, 0, 0, 2), (1, 1, 1, 1)],
}


def layouts(topology: Topology) -> Iterator[DpLayout]:
    """Yields every step twice, so that leftovers of one would show in another."""
    for counts in COUNTS[topology.dp_size] * 2:
        for mode in DpPaddingMode:
            for graph_size in (None, MAX_TOKENS) if mode is DpPaddingMode.MAX_LEN else (None,):
                yield DpLayout(
                    counts,
                    mode,
                    topology.dp_rank,
                    graph_size,
                    attn_tp_rank=topology.attn_tp_rank,
                    attn_tp_size=topology.attn_tp_size,
                )


def dp_communicator(topology: Topology, dtype: torch.dtype = torch.float32) -> DpCommunicator:
    return DpCommunicator(
        place=Place(topology),
        max_tokens_per_rank=MAX_TOKENS // topology.attn_tp_size,
        hidden_size=WIDTH,
        dtype=dtype,
        top_k=2,
    )


def attn_tp_communicator(
    topology: Topology, dtype: torch.dtype = torch.float32
) -> AttnTpCommunicator:
    return AttnTpCommunicator(
        capacity=topology.capacity,
        max_shard_tokens_per_rank=MAX_TOKENS // topology.attn_tp_size,
        hidden_size=WIDTH,
        dtype=dtype,
        max_logits_rows=NUM_LOGITS,
        vocab_slice=VOCAB_SLICE,
    )


def exchange(rank: int, port: int) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Returns what this rank saw, by shape, of the shapes that it has a place in."""
    seen = {}
    for epoch, (dp_size, attn_tp_size) in enumerate(SHAPES):
        if rank >= dp_size * attn_tp_size:
            continue
        topology = topology_of(rank, dp_size, attn_tp_size)
        groups = join(port, topology, epoch)
        seen[dp_size, attn_tp_size] = [
            step for dtype in DTYPES for step in exchange_in_group(groups, topology, dtype)
        ]
        groups.close()
    return seen


def exchange_in_group(
    groups: EpochGroups, topology: Topology, dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    communicator = dp_communicator(topology, dtype)
    attn_tp = attn_tp_communicator(topology, dtype)
    communicator.join(groups)
    attn_tp.join(groups)
    for layout in layouts(topology):
        yield over_the_world(communicator, layout, dtype) | in_the_dp_rank(attn_tp, layout, dtype)


def rows_of(dp_rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(count) + 16 * dp_rank)[:, None].expand(-1, WIDTH).to(dtype).contiguous()


def values(rows: torch.Tensor) -> list[float]:
    """Returns the value of each row, which all of its columns must have."""
    assert rows.eq(rows[:, :1]).all(), rows
    return [float(row[0]) for row in rows]


def over_the_world(
    communicator: DpCommunicator, layout: DpLayout, dtype: torch.dtype
) -> dict[str, Any]:
    """Gathers this executor's shard, and sums what each rank makes of the result."""
    first = layout.attn_tp_rank * layout.shard_num_rows
    x = rows_of(layout.dp_rank, MAX_TOKENS, dtype)[first : first + layout.shard_num_rows].clone()
    x[layout.shard_num_tokens :] = torch.nan  # must reach no real row
    ids = torch.full((len(x), 2), layout.world_rank, dtype=torch.int32)
    spans = zip(layout.offsets, layout.global_shard_num_tokens, strict=True)
    real = torch.cat([torch.arange(offset, offset + count) for offset, count in spans])
    gathered, gathered_ids = (c.clone() for c in communicator.gather_columns((x, ids), layout))
    alone = communicator.gather(x, layout)
    summed = communicator.scatter_sum(alone.clone() + layout.world_rank, layout)
    return {
        "layout": layout,
        "num_gathered": len(gathered),
        "real": values(gathered[real]),
        "real_alone": values(alone[real]),
        "owners": gathered_ids[real].flatten().tolist(),
        "own": values(x[: layout.shard_num_tokens]),
        "num_summed": len(summed),
        "summed": values(summed[: layout.shard_num_tokens]),
    }


def in_the_dp_rank(
    attn_tp: AttnTpCommunicator, layout: DpLayout, dtype: torch.dtype
) -> dict[str, Any]:
    x = rows_of(layout.dp_rank, layout.num_rows, dtype)
    shard = attn_tp.shard(x, layout)
    gathered = attn_tp.gather(shard, layout)
    kept = gathered.clone()
    summed = attn_tp.scatter_sum(x + layout.attn_tp_rank, layout)
    assert gathered.equal(kept), "a sum overwrote what was gathered"
    tokens = torch.arange(3) + 10 * layout.world_rank
    attn_tp.agree(tokens)
    attn_tp.agree(tokens[:0])
    first = VOCAB_SLICE * layout.attn_tp_rank
    columns = torch.arange(first, first + VOCAB_SLICE)
    logits = [
        attn_tp.gather_logits((torch.arange(count)[:, None] * 32 + columns).to(dtype)).tolist()
        for count in (NUM_LOGITS, 1, 0)
    ]
    return {
        "shard": values(shard),
        "shard_ids": attn_tp.shard(torch.arange(layout.num_rows), layout).tolist(),
        "is_gathered": torch.equal(gathered, x),
        "attn_summed": values(summed),
        "agreed": tokens.tolist(),
        "logits": logits,
    }


@pytest.fixture(scope="module")
def exchanged() -> list[dict[tuple[int, int], list[dict[str, Any]]]]:
    return run_ranks(exchange, 4)


@pytest.fixture(params=SHAPES, ids=str)
def seen(request: pytest.FixtureRequest, exchanged: Any) -> list[dict[str, Any]]:
    """Every step of every rank of one shape."""
    return [step for by_shape in exchanged for step in by_shape.get(request.param, [])]


def test_every_executor_sees_every_row_in_order(seen: list[dict[str, Any]]):
    for step in seen:
        layout = step["layout"]
        expected = [
            16 * dp_rank + row
            for dp_rank, count in enumerate(layout.global_num_tokens_cpu)
            for row in range(count)
        ]
        assert step["real"] == step["real_alone"] == expected
        assert step["num_gathered"] == layout.global_dp_buffer_len


def test_columns_of_other_types_travel_with_their_rows(seen: list[dict[str, Any]]):
    for step in seen:
        counts = step["layout"].global_shard_num_tokens
        assert step["owners"] == [rank for rank, n in enumerate(counts) for _ in range(2 * n)]


def test_every_executor_gets_its_own_rows_summed(seen: list[dict[str, Any]]):
    """Each added its rank to what it had gathered."""
    for step in seen:
        layout = step["layout"]
        world_size = len(layout.offsets)
        added = sum(range(world_size))
        assert step["summed"] == [world_size * value + added for value in step["own"]]
        assert step["num_summed"] == layout.shard_num_rows


def test_shards_of_attention_tp_come_together_again(seen: list[dict[str, Any]]):
    for step in seen:
        layout = step["layout"]
        rows = layout.shard_num_rows
        padded = [*range(layout.num_rows), *[0] * rows * layout.attn_tp_size]
        own = padded[rows * layout.attn_tp_rank :][:rows]
        assert step["shard_ids"] == own
        assert len(step["shard"]) == rows
        assert step["is_gathered"]


def test_attention_outputs_are_summed_and_padding_is_zero(seen: list[dict[str, Any]]):
    for step in seen:
        layout = step["layout"]
        size, rows = layout.attn_tp_size, layout.shard_num_rows
        sums = [
            size * (16 * layout.dp_rank + row) + sum(range(size)) for row in range(layout.num_rows)
        ]
        assert step["attn_summed"] == (sums + [0] * size)[rows * layout.attn_tp_rank :][:rows]


def test_executors_of_a_dp_rank_agree_on_logits_and_tokens(seen: list[dict[str, Any]]):
    for step in seen:
        layout = step["layout"]
        first = layout.dp_rank * layout.attn_tp_size
        assert step["agreed"] == [10 * first, 10 * first + 1, 10 * first + 2]
        width = VOCAB_SLICE * layout.attn_tp_size
        rows = [[32 * row + column for column in range(width)] for row in range(NUM_LOGITS)]
        assert step["logits"] == [rows, rows[:1], []]


# Without peers


def test_alone_nothing_moves():
    communicator, attn_tp = DpCommunicator.single(), AttnTpCommunicator.single()
    x, layout = rows_of(0, 3, torch.float32), DpLayout.single(3)
    group = TcpGroup(0, 1, Mesh(0, {}, 1.0))
    attn_tp.join(EpochGroups(1, group, None, group))
    of_attn_tp = (attn_tp.shard, attn_tp.gather, attn_tp.scatter_sum)
    for move in (communicator.gather, communicator.scatter_sum, *of_attn_tp):
        assert move(x, layout) is x
    assert attn_tp.gather_logits(x) is x
    attn_tp.agree(x)


def test_a_group_of_other_ranks_is_refused():
    nobody = Mesh(0, {}, 1.0)
    three, two = TcpGroup(0, 3, nobody), TcpGroup(1, 2, nobody)
    with pytest.raises(
        ValueError, match="rank 0 of 3, but this executor was placed as rank 1 of 2"
    ):
        dp_communicator(Topology(dp_rank=1, dp_size=2)).join(EpochGroups(0, three, None, three))
    attn_tp = attn_tp_communicator(Topology(attn_tp_size=2))
    for given, found in ((None, "none"), (two, "rank 1 of 2"), (three, "rank 0 of 3")):
        with pytest.raises(
            ValueError, match=f"has {found}, but this executor was placed as rank 0"
        ):
            attn_tp.join(EpochGroups(0, two, given, two))


def test_a_step_over_the_buffers_is_refused():
    layout = DpLayout((MAX_TOKENS + 1, 0), DpPaddingMode.SUM_LEN, 0)
    with pytest.raises(AssertionError, match="the buffers were made for 8"):
        dp_communicator(Topology(dp_size=2)).gather(
            rows_of(0, MAX_TOKENS + 1, torch.float32), layout
        )
    attn_tp = attn_tp_communicator(Topology(attn_tp_size=2))
    layout = DpLayout((MAX_TOKENS + 1,), DpPaddingMode.MAX_LEN, 0, attn_tp_size=2)
    with pytest.raises(AssertionError, match="a shard has 5 rows; the buffers were made for 4"):
        attn_tp.gather(rows_of(0, 5, torch.float32), layout)
    with pytest.raises(AssertionError, match="4 rows of logits; the buffers were made for 3"):
        attn_tp.gather_logits(torch.zeros(4, VOCAB_SLICE))


def test_rows_that_do_not_fit_the_layout_are_refused():
    attn_tp = attn_tp_communicator(Topology(attn_tp_size=2))
    layout = DpLayout((5,), DpPaddingMode.MAX_LEN, 0, attn_tp_size=2)
    for collect, given, right in (
        (attn_tp.gather, 5, 3),
        (attn_tp.scatter_sum, 3, 5),
        (attn_tp.shard, 3, 5),
    ):
        with pytest.raises(AssertionError, match=f"{given} rows, {right} in the layout"):
            collect(rows_of(0, given, torch.float32), layout)


def test_parts_of_several_ranks_are_added_up_before_they_are_rounded():
    """In bfloat16 256 + 1 is 256; with the third rank's 1 it is 258."""
    parts = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    out = torch.empty(1, dtype=torch.bfloat16)
    add_up(parts, out)
    assert out.item() == 258


# Rows side by side: hidden states, experts and weights in one collective


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_columns_come_out_as_they_went_in(dtype: torch.dtype, num_rows: int):
    columns = (
        torch.randn(num_rows, 6).to(dtype),
        torch.randint(-(2**31), 2**31 - 1, (num_rows, 3), dtype=torch.int32),
        torch.randn(num_rows, 3),
    )
    num_words = moe_words(6, dtype, 3)
    out = view_rows(torch.zeros(5 * num_words, dtype=WORD), num_rows, num_words)
    pack(columns, out=out)
    for column, seen in zip(columns, unpack(out, columns), strict=True):
        assert seen.dtype == column.dtype
        assert torch.equal(seen, column)


def test_rows_that_are_no_whole_number_of_words_are_refused():
    with pytest.raises(ValueError, match=r"3 numbers of torch.bfloat16 are 6 bytes"):
        words_of(3, torch.bfloat16)


def test_rows_past_the_buffers_are_refused():
    with pytest.raises(AssertionError, match="3 rows of 4 numbers; the buffers were made for 11"):
        view_rows(torch.zeros(11, dtype=WORD), 3, 4)
