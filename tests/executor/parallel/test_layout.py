"""If ranks see different lengths in one step, a collective hangs; if rows overlap, answers mix.

The oracle lays real rows out one by one, as lists of labels, and counts them.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from executor.parallel.layout import DpLayout, DpPaddingMode
from tests.executor.support.ranks.ranks import topology_of

NUM_CASES = 400  # for each of the seeds
PADDING = None

Row = tuple[int, int] | None  # the DP rank and the number of a token; PADDING
Shards = list[list[Row]]  # what each executor holds, by world rank


def naive_shards(counts: Sequence[int], attn_tp_size: int, graph_size: int | None) -> Shards:
    """Deals each DP rank's rows out to its executors, filling one after another."""
    shards: Shards = []
    for dp_rank, count in enumerate(counts):
        rows: list[Row] = [(dp_rank, token) for token in range(count)]
        while len(rows) < (graph_size or 0) or len(rows) % attn_tp_size:
            rows.append(PADDING)
        each = len(rows) // attn_tp_size
        shards += [rows[i * each : (i + 1) * each] for i in range(attn_tp_size)]
    return shards


def naive_buffer(shards: Shards, padding_mode: DpPaddingMode) -> Shards:
    """Puts what each executor holds into its part of the gathered buffer."""
    if padding_mode is DpPaddingMode.SUM_LEN:
        return shards
    longest = max(len(shard) for shard in shards)
    return [shard + [PADDING] * (longest - len(shard)) for shard in shards]


def num_real(rows: Sequence[Row]) -> int:
    return sum(row is not PADDING for row in rows)


def layouts_of(
    counts: tuple[int, ...],
    padding_mode: DpPaddingMode,
    attn_tp_size: int,
    graph_size: int | None = None,
) -> list[DpLayout]:
    """The layout of each executor, by world rank."""
    return [
        DpLayout(counts, padding_mode, dp_rank, graph_size, False, attn_tp_rank, attn_tp_size)
        for dp_rank in range(len(counts))
        for attn_tp_rank in range(attn_tp_size)
    ]


def draw_step(rng: random.Random) -> tuple[tuple[int, ...], int, DpPaddingMode, int | None]:
    """Returns counts, attn_tp_size, padding mode and graph size."""
    dp_size, attn_tp_size = rng.randint(1, 6), rng.randint(1, 5)
    most = rng.choice([1, 3, 20, 40])
    counts = tuple(rng.choice([0, rng.randint(0, most)]) for _ in range(dp_size))
    if rng.random() < 0.3:
        least = -(-max(counts) // attn_tp_size)
        graph_size = attn_tp_size * (least + rng.randint(0, 3))
        return counts, attn_tp_size, DpPaddingMode.MAX_LEN, graph_size
    return counts, attn_tp_size, rng.choice(list(DpPaddingMode)), None


@pytest.mark.parametrize("seed", range(10))
def test_every_length_is_what_rows_laid_out_one_by_one_have(seed: int):
    rng = random.Random(seed)
    for _ in range(NUM_CASES):
        counts, attn_tp_size, mode, graph_size = draw_step(rng)
        shards = naive_shards(counts, attn_tp_size, graph_size)
        buffer = naive_buffer(shards, mode)
        for world_rank, layout in enumerate(layouts_of(counts, mode, attn_tp_size, graph_size)):
            assert layout.world_rank == world_rank, layout
            assert layout.dp_size == len(counts), layout
            assert layout.num_tokens == counts[layout.dp_rank], layout
            assert layout.max_num_tokens == sorted(counts)[-1], layout
            assert layout.num_rows == (graph_size or counts[layout.dp_rank]), layout
            assert layout.shard_num_rows == len(shards[world_rank]), layout
            assert layout.shard_num_tokens == num_real(shards[world_rank]), layout
            assert layout.global_shard_num_tokens == tuple(map(num_real, shards)), layout
            assert layout.global_shard_num_rows == tuple(map(len, buffer)), layout
            assert layout.padded_num_tokens == len(buffer[world_rank]), layout
            assert layout.runtime_max_tokens_per_rank == max(map(len, shards)), layout
            assert layout.global_dp_buffer_len == sum(map(len, buffer)), layout


@pytest.mark.parametrize("seed", range(10))
def test_the_gathered_buffer_holds_each_real_row_once_and_no_executor_overlaps_another(seed: int):
    rng = random.Random(100 + seed)
    for _ in range(NUM_CASES):
        counts, attn_tp_size, mode, graph_size = draw_step(rng)
        shards = naive_shards(counts, attn_tp_size, graph_size)
        layouts = layouts_of(counts, mode, attn_tp_size, graph_size)
        # Each executor writes where its own layout says; whoever wrote there first is an overlap.
        buffer: dict[int, Row] = {}
        for layout, shard in zip(layouts, shards, strict=True):
            start = layout.offsets[layout.world_rank]
            places = range(start, start + layout.padded_num_tokens)
            assert not buffer.keys() & set(places), layout
            padding = [PADDING] * (len(places) - len(shard))
            buffer |= zip(places, shard + padding, strict=True)
        assert sorted(buffer) == list(range(layouts[0].global_dp_buffer_len)), layouts[0]
        expected = [(dp_rank, i) for dp_rank, count in enumerate(counts) for i in range(count)]
        assert [buffer[place] for place in sorted(buffer) if buffer[place]] == expected, layouts[0]


@pytest.mark.parametrize("has_extend", [False, True])
def test_the_layout_of_a_capture_is_that_of_a_replay_in_which_every_row_is_real(has_extend: bool):
    for rank, replayed in enumerate(layouts_of((12, 12), DpPaddingMode.MAX_LEN, 3, 12)):
        captured = DpLayout.captured(12, topology_of(rank, 2, 3), has_extend=has_extend)
        assert captured == replace(replayed, has_extend=has_extend)
        assert captured.shard_num_rows == captured.shard_num_tokens == 4


def test_a_rank_without_peers_has_all_rows_to_itself():
    layout = DpLayout.single(7)

    assert layout.shard_num_rows == layout.shard_num_tokens == layout.global_dp_buffer_len == 7
    assert DpLayout.single(7, 8).shard_num_rows == 8


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"dp_rank": 2}, "dp_rank=2 with 2 token counts"),
        ({"dp_rank": -1}, "dp_rank=-1 with 2 token counts"),
        ({"global_num_tokens_cpu": (3, -1)}, r"\(3, -1\): a count cannot be negative"),
        ({"attn_tp_rank": 2, "attn_tp_size": 2}, "attn_tp_rank=2: .* it is 0 to 1"),
        ({"graph_size": 8, "padding_mode": DpPaddingMode.SUM_LEN}, "needs MAX_LEN, not SUM_LEN"),
        ({"graph_size": 4}, "graph_size=4 is below the 5 tokens given"),
        ({"graph_size": 9, "attn_tp_size": 2}, "graph_size=9 does not divide by attn_tp_size=2"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_the_values_at_fault(
    arguments: dict[str, object], problem: str
):
    fitting = {"global_num_tokens_cpu": (5, 2), "padding_mode": DpPaddingMode.MAX_LEN, "dp_rank": 0}
    with pytest.raises(ValueError, match=problem):
        DpLayout(**(fitting | arguments))  # type: ignore[arg-type]
