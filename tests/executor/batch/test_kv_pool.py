"""If this fails, one user's tokens are written over another's."""

import resource
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from executor.batch.kv_pool import SCRATCH_BLOCK, KVPool, KVShape
from tests.executor.support.kv import out_cache_loc

new_shape = partial(
    KVShape.of_heads,
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    block_size=4,
    dtype=torch.bfloat16,
)
SHAPE = new_shape()


@pytest.fixture
def pool() -> KVPool:
    return KVPool(SHAPE, num_blocks=12, num_rows=3, max_blocks_per_row=4)


def test_bytes_per_block_counts_keys_and_values_of_all_layers(pool: KVPool):
    held = sum(cache.nbytes for cache in pool.tensors)
    assert pool.bytes_per_block == held // pool.num_blocks


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_memory_of_blocks_that_nobody_has_written_is_not_taken():
    def resident() -> int:
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    num_blocks = (256 << 20) // SHAPE.bytes_per_block
    before = resident()
    pool = KVPool(SHAPE, num_blocks=num_blocks, num_rows=1, max_blocks_per_row=1)
    assert resident() - before < 64 << 20
    assert not pool.caches[0][0][-1].any()


@pytest.mark.parametrize("windowed", [(0, 2), (0, 2, 3), (1,)])
def test_layers_of_both_groups_keep_theirs_in_the_same_tensors(windowed: tuple[int, ...]):
    shape = new_shape(num_layers=4, windowed=windowed, window=8)
    pool = KVPool(shape, num_blocks=3, num_rows=1, max_blocks_per_row=2)
    full = [layer for layer in range(4) if layer not in windowed]
    assert shape.groups == (tuple(full), windowed)
    for group in shape.groups:
        assert len({pool.caches[layer][0].data_ptr() for layer in group}) == len(group)
    for ours, theirs in zip(full, windowed, strict=False):
        assert pool.caches[ours][0] is pool.caches[theirs][0]
    assert len(pool.tensors) == 2 * max(map(len, shape.groups))
    assert pool.bytes_per_block == sum(cache.nbytes for cache in pool.tensors) // 3


def test_windows_of_gpt_oss_take_as_many_bytes_as_published():
    sizes = {"num_layers": 36, "num_kv_heads": 8, "head_dim": 64, "block_size": 16}
    shape = new_shape(**sizes, windowed=range(0, 36, 2), window=128)
    assert shape.bytes_per_block == 16 * 36_864
    assert shape.window_blocks * 16 == 144
    assert 2 * shape.bytes_per_block == new_shape(**sizes).bytes_per_block


@pytest.mark.parametrize("window", range(1, 14))
def test_a_window_lies_in_no_more_blocks_than_the_shape_says(window: int):
    shape = new_shape(windowed=(1,), window=window)
    counts = [position // 4 - max(position + 1 - window, 0) // 4 + 1 for position in range(40)]
    assert max(counts) == shape.window_blocks


def test_each_group_has_a_table_of_its_own_which_one_append_fills():
    pool = KVPool(
        new_shape(windowed=(1,), window=8), num_blocks=20, num_rows=3, max_blocks_per_row=4
    )
    pool.append_blocks([2, 0], [0, 0], [2, 1], [7, 3, 9, 11, 12, 13])
    pool.append_blocks([2], [2], [1], [5, 6])
    assert pool.tables[0, [2, 0], :3].tolist() == [[7, 3, 5], [9, 0, 0]]
    assert pool.tables[1, [2, 0], :3].tolist() == [[11, 12, 6], [13, 0, 0]]
    assert pool.row_num_blocks.tolist() == [1, 0, 3]
    assert out_cache_loc(pool, [2], [3], [2], group=1).tolist() == [47, 48]


def test_latents_take_as_many_bytes_as_published_for_deepseek_v3():
    shape = KVShape.of_latents(
        num_layers=61, latent_dim=512, rope_dim=64, block_size=1, dtype=torch.bfloat16
    )
    assert shape.bytes_per_block == 70_272


def test_tokens_go_where_the_block_table_says(pool: KVPool):
    pool.append_blocks([2, 0], [0, 0], [2, 1], [7, 3, 9])
    locations = out_cache_loc(pool, [0, 2], [1, 2], [3, 4])
    assert locations.tolist() == [37, 38, 39, 30, 31, 12, 13]
    assert locations.dtype == torch.int64


def test_a_start_of_zero_gives_the_row_to_a_new_sequence(pool: KVPool):
    pool.append_blocks([1], [0], [3], [5, 6, 7])
    pool.append_blocks([1], [0], [1], [2])
    assert pool.row_num_blocks[1] == 1
    with pytest.raises(AssertionError, match=r"rows \[1\] lack blocks"):
        out_cache_loc(pool, [1], [4], [1])


def test_the_places_of_new_blocks_bring_another_table_up_to_date(pool: KVPool):
    other = KVPool(SHAPE, num_blocks=12, num_rows=3, max_blocks_per_row=4)
    for columns in (
        ([2, 0], [0, 0], [2, 1], [7, 3, 9]),
        ([1, 2], [0, 1], [3, 2], [4, 5, 6, 8, 10]),
        ([0], [1], [0], []),
    ):
        places = pool.append_blocks_on_host(*(np.array(x, np.int64) for x in columns))
        other.write_blocks(torch.from_numpy(places), torch.tensor(columns[3], dtype=torch.int64))
    assert torch.equal(other.tables, pool.tables_cpu)
    assert pool.tables_cpu[0, :, :3].tolist() == [[9, 0, 0], [4, 5, 6], [7, 8, 10]]


def test_a_sibling_has_keys_and_values_of_its_own_in_the_same_blocks(pool: KVPool):
    pool.append_blocks([1], [0], [2], [5, 6])
    draft = pool.sibling(new_shape(num_layers=1, num_kv_heads=1, head_dim=16))
    assert [[cache.shape for cache in parts] for parts in draft.caches] == [[(48, 1, 16)] * 2]
    assert draft.bytes_per_block == 2 * 16 * 4 * 2
    draft.caches[0][0].fill_(1.0)
    assert not any(cache.any() for cache in pool.tensors)
    assert [len(parts) for parts in pool.caches] == [2, 2]
    assert out_cache_loc(draft, [1], [3], [3]).tolist() == [23, 24, 25]


@pytest.mark.parametrize("appends_to_draft", [False, True])
def test_blocks_appended_to_one_sibling_are_in_both(pool: KVPool, appends_to_draft: bool):
    draft = pool.sibling(new_shape(num_layers=1))
    (draft if appends_to_draft else pool).append_blocks([2], [0], [2], [7, 3])
    for either in (pool, draft):
        assert out_cache_loc(either, [2], [3], [2]).tolist() == [31, 12]
        assert either.tables[0, 2, :2].tolist() == [7, 3]
        assert either.row_num_blocks.tolist() == [0, 0, 2]


def test_a_sibling_of_another_block_size_is_refused(pool: KVPool):
    with pytest.raises(ValueError, match="block_size=8: the blocks that it shares have 4 tokens"):
        pool.sibling(new_shape(block_size=8))


def test_locations_may_be_written_over_the_rows(pool: KVPool):
    pool.append_blocks([2, 0], [0, 0], [2, 1], [7, 3, 9])
    rows, positions = np.array([2, 0, 2]), np.array([5, 0, 3])
    pool.locate(rows, positions, out=rows)
    assert rows.tolist() == [13, 36, 31]


def test_no_sequences_are_no_error(pool: KVPool):
    pool.append_blocks([], [], [], [])
    assert out_cache_loc(pool, [], [], []).shape == (0,)


# ---- spill blocks

NUM_ROWS, COLUMNS, BLOCKS = 3, 9, 24


def spilling_pool(count: int, shape: KVShape = SHAPE, *, is_apart: bool = False) -> KVPool:
    """Returns a pool of rows with ``count`` spill blocks each, whose device may have its own table."""
    pool = KVPool(
        shape,
        num_blocks=BLOCKS,
        num_rows=NUM_ROWS,
        max_blocks_per_row=COLUMNS,
        spill_blocks_per_row=count,
    )
    if is_apart:
        pool.tables = pool.tables_cpu.clone()
    return pool


def test_spill_blocks_lie_behind_those_that_are_handed_out():
    pool = spilling_pool(2)
    assert (pool.num_blocks, pool.num_spill_blocks, pool.num_physical_blocks) == (24, 6, 30)
    draft = pool.sibling(new_shape(num_layers=1, head_dim=16))
    for either in (pool, draft):
        assert {len(cache) for cache in either.tensors} == {30 * 4}


def test_a_row_that_begins_leads_to_its_own_spill_blocks_in_turn():
    pool = spilling_pool(2)
    pool.append_blocks([1], [0], [3], [5, 6, 7])
    pool.clear_rows(np.array([1, 2]))
    pool.append_blocks([1], [0], [1], [9])
    assert pool.tables[0].tolist() == [
        [SCRATCH_BLOCK] * 9,
        [9, 27, 26, 27, 26, 27, 26, 27, 26],
        [28, 29, 28, 29, 28, 29, 28, 29, 28],
    ]


def test_without_spill_blocks_a_row_that_begins_leads_to_the_scratch_block():
    pool = spilling_pool(0)
    assert pool.num_physical_blocks == pool.num_blocks
    pool.append_blocks([1], [0], [3], [5, 6, 7])
    pool.clear_rows(np.array([1]))
    assert not pool.tables.any()


def test_a_negative_number_of_spill_blocks_is_refused():
    with pytest.raises(ValueError, match="spill_blocks_per_row=-1: need at least 0"):
        spilling_pool(-1)


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_no_row_shares_a_place_with_another_nor_uses_one_twice_in_a_step(
    seed: int, count: int, is_apart: bool
):
    """Rows begin, grow and end at random; those that have begun write as far as a step may."""
    rng = np.random.default_rng(seed)
    shape = new_shape(windowed=(1,), window=8) if seed else SHAPE
    pool, groups = spilling_pool(count, shape, is_apart=is_apart), range(len(shape.groups))
    assert pool.is_table_shared is not is_apart
    free = list(range(1, BLOCKS))
    held: dict[int, list[list[int]]] = {}
    block_size = pool.block_size
    for _ in range(200):
        row = int(rng.integers(NUM_ROWS))
        if row not in held or rng.random() < 0.2:
            free += [block for blocks in held.pop(row, []) for block in blocks]
            pool.clear_rows(np.array([row]))
            held[row] = [[] for _ in groups]
        num_held = len(held[row][0])
        num_new = min(int(rng.integers(3)), COLUMNS - num_held, len(free) // len(groups))
        rng.shuffle(free)
        new = [[free.pop() for _ in range(num_new)] for _ in groups]
        pool.append_blocks([row], [num_held], [num_new], [block for one in new for block in one])
        for blocks, more in zip(held[row], new, strict=True):
            blocks += more

        assert torch.equal(pool.tables, pool.tables_cpu)
        own = [set(pool.tables[group, row].tolist()) for row in held for group in groups]
        assert len(set().union(*own)) == sum(map(len, own)), "a block of two rows or tables"
        assert SCRATCH_BLOCK not in set().union(*own)
        for row, lists in held.items():
            assert pool.row_num_blocks[row] == len(lists[0])
            end = min(len(lists[0]) + count, COLUMNS) * block_size
            for group, blocks in enumerate(lists):
                assert pool.tables[group, row, : len(blocks)].tolist() == blocks
                slots = np.empty(end, dtype=np.int64)
                pool.locate(np.full(end, row), np.arange(end), out=slots, group=group)
                assert len(np.unique(slots)) == end, "two positions at one place"
                assert slots.max(initial=0) < len(pool.caches[0][0])
