"""If this fails, one user's tokens are written over another's."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from executor.kv_pool import SCRATCH_BLOCK, KVPool, KVShape

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.bfloat16)


@pytest.fixture
def pool() -> KVPool:
    return KVPool(SHAPE, num_blocks=12, num_rows=3, max_blocks_per_row=4)


def test_bytes_per_block_counts_keys_and_values_of_all_layers(pool: KVPool):
    held = sum(cache.nbytes for cache in (*pool.key_cache, *pool.value_cache))
    assert pool.bytes_per_block == held // pool.num_blocks


def test_tokens_go_where_the_block_table_says(pool: KVPool):
    pool.append_blocks([2, 0], [0, 0], [2, 1], [7, 3, 9])
    locations = pool.out_cache_loc([0, 2], [1, 2], [3, 4])
    assert locations.tolist() == [37, 38, 39, 30, 31, 12, 13]
    assert locations.dtype == torch.int64


def test_blocks_are_added_after_those_that_stay(pool: KVPool):
    pool.append_blocks([1], [0], [2], [5, 6])
    pool.append_blocks([1, 0], [2, 0], [1, 2], [8, 1, 2])
    assert pool.block_table[1, :3].tolist() == [5, 6, 8]
    assert pool.row_num_blocks.tolist() == [2, 3, 0]


def test_a_start_of_zero_gives_the_row_to_a_new_sequence(pool: KVPool):
    pool.append_blocks([1], [0], [3], [5, 6, 7])
    pool.append_blocks([1], [0], [1], [2])
    assert pool.row_num_blocks[1] == 1
    with pytest.raises(ValueError, match="holds blocks for 4 tokens, not for 5"):
        pool.out_cache_loc([1], [4], [1])


def test_the_places_of_new_blocks_bring_another_table_up_to_date(pool: KVPool):
    other = KVPool(SHAPE, num_blocks=12, num_rows=3, max_blocks_per_row=4)
    for columns in (
        ([2, 0], [0, 0], [2, 1], [7, 3, 9]),
        ([1, 2], [0, 1], [3, 2], [4, 5, 6, 8, 10]),
        ([0], [1], [0], []),
    ):
        places = pool.append_blocks_on_host(*columns)
        other.write_blocks(torch.from_numpy(places), torch.tensor(columns[3], dtype=torch.int64))
    assert torch.equal(other.block_table, pool.block_table_cpu)
    assert pool.block_table_cpu[:, :3].tolist() == [[9, 0, 0], [4, 5, 6], [7, 8, 10]]


def test_a_table_of_the_devices_own_is_kept_up_to_date(pool: KVPool):
    assert pool.is_table_shared
    pool.block_table = pool.block_table_cpu.clone()
    pool.append_blocks([1], [0], [2], [5, 6])
    assert pool.block_table[1, :2].tolist() == [5, 6]
    assert not pool.is_table_shared


def test_a_sibling_has_keys_and_values_of_its_own_in_the_same_blocks(pool: KVPool):
    pool.append_blocks([1], [0], [2], [5, 6])
    draft = pool.sibling(replace(SHAPE, num_layers=1, num_kv_heads=1, head_dim=16))
    assert [cache.shape for cache in draft.key_cache] == [(48, 1, 16)]
    assert draft.bytes_per_block == 2 * 16 * 4 * 2
    draft.key_cache[0].fill_(1.0)
    assert not pool.key_cache[0].any()
    assert len(pool.key_cache) == len(pool.value_cache) == 2
    assert draft.out_cache_loc([1], [3], [3]).tolist() == [23, 24, 25]


@pytest.mark.parametrize("appends_to_draft", [False, True])
def test_blocks_appended_to_one_sibling_are_in_both(pool: KVPool, appends_to_draft: bool):
    draft = pool.sibling(replace(SHAPE, num_layers=1))
    (draft if appends_to_draft else pool).append_blocks([2], [0], [2], [7, 3])
    for either in (pool, draft):
        assert either.out_cache_loc([2], [3], [2]).tolist() == [31, 12]
        assert either.block_table[2, :2].tolist() == [7, 3]
        assert either.row_num_blocks.tolist() == [0, 0, 2]


def test_a_sibling_of_another_block_size_is_refused(pool: KVPool):
    with pytest.raises(ValueError, match="block_size=8: the blocks that it shares have 4 tokens"):
        pool.sibling(replace(SHAPE, block_size=8))


def test_locations_may_be_written_over_the_rows(pool: KVPool):
    pool.append_blocks([2, 0], [0, 0], [2, 1], [7, 3, 9])
    rows, positions = np.array([2, 0, 2]), np.array([5, 0, 3])
    pool.locate(rows, positions, out=rows)
    assert rows.tolist() == [13, 36, 31]


def test_no_sequences_are_no_error(pool: KVPool):
    pool.append_blocks([], [], [], [])
    assert pool.out_cache_loc([], [], []).shape == (0,)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([0], [0], [1], [SCRATCH_BLOCK]), "hands out 1 to 11"),
        (([0], [0], [1], [12]), "hands out 1 to 11"),
        (([0], [1], [1], [3]), "hole"),
        (([0], [0], [5], [1, 2, 3, 4, 5]), "at most 4 fit"),
        (([3], [0], [1], [1]), "0 to 2"),
        (([0], [0], [2], [1]), "adds up to 2"),
        (([0, 1], [0], [1], [1]), "unequal length"),
    ],
)
def test_columns_that_do_not_fit_change_nothing(
    pool: KVPool, columns: tuple[list[int], ...], message: str
):
    with pytest.raises(ValueError, match=message):
        pool.append_blocks(*columns)
    assert not pool.row_num_blocks.any()
    assert not np.any(pool.block_table_cpu.numpy())
