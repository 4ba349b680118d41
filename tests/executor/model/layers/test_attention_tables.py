"""If this fails, attention over pages reads keys of other sequences, or misses some of its own."""

import numpy as np
import pytest
import torch

from executor.batch.kv_pool import KVPool, KVShape
from executor.model.layers.attention_tables import look_up_pages, plan_pages
from tests.executor.support.kv import out_cache_loc

BLOCK_SIZE, BLOCKS_PER_ROW, NUM_ROWS = 4, 12, 9
MAX_LEN = BLOCKS_PER_ROW * BLOCK_SIZE


def new_pool() -> KVPool:
    """Returns a pool whose rows own shuffled blocks."""
    shape = KVShape(
        num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, dtype=torch.float32
    )
    num_blocks = 1 + NUM_ROWS * BLOCKS_PER_ROW
    pool = KVPool(
        shape, num_blocks=num_blocks, num_rows=NUM_ROWS, max_blocks_per_row=BLOCKS_PER_ROW
    )
    blocks = np.random.default_rng(0).permutation(np.arange(1, num_blocks))
    pool.append_blocks(range(NUM_ROWS), [0] * NUM_ROWS, [BLOCKS_PER_ROW] * NUM_ROWS, blocks)
    return pool


def test_offsets_count_rows_and_pages() -> None:
    plan = plan_pages(np.array([1, 4, 5, 12]), np.array([1, 3, 1, 4]), 4)
    assert plan.qo_indptr.tolist() == [0, 1, 4, 5, 9]
    assert plan.kv_indptr.tolist() == [0, 1, 2, 4, 7]
    assert plan.last_page_len.tolist() == [1, 4, 1, 4]
    assert plan.num_keys.tolist() == [1, 4, 5, 12]
    assert (plan.num_rows, plan.num_pages) == (9, 7)
    assert {x.dtype for x in (plan.qo_indptr, plan.kv_indptr, plan.last_page_len)} == {
        np.dtype(np.int32)
    }


def test_a_decode_has_one_row_per_sequence() -> None:
    assert plan_pages(np.array([9, 1]), None, 4).qo_indptr.tolist() == [0, 1, 2]


def test_a_padded_sequence_has_a_key_for_each_of_its_rows() -> None:
    plan = plan_pages(np.array([7, 1, 0]), np.array([5, 5, 5]), 4)
    assert plan.num_keys.tolist() == [7, 5, 5]
    assert plan.kv_indptr.tolist() == [0, 2, 4, 6]
    assert plan.last_page_len.tolist() == [3, 1, 1]


@pytest.mark.parametrize("seed", range(5))
def test_every_key_is_found_where_the_pool_put_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = new_pool()
    rows = rng.permutation(NUM_ROWS)[: rng.integers(1, NUM_ROWS + 1)]
    seq_lens = rng.integers(1, MAX_LEN + 1, len(rows))
    plan = plan_pages(seq_lens, None, BLOCK_SIZE)
    places = torch.arange(plan.num_pages, dtype=torch.int32)
    pages = look_up_pages(
        pool.block_table, torch.from_numpy(rows), torch.from_numpy(plan.kv_indptr), places
    )
    assert pages.dtype == torch.int32
    slots = []
    for i, seq_len in enumerate(seq_lens):
        mine = pages[plan.kv_indptr[i] : plan.kv_indptr[i + 1]].numpy()
        assert (len(mine) - 1) * BLOCK_SIZE + plan.last_page_len[i] == seq_len
        position = np.arange(seq_len)
        slots.append(mine[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
    expected = out_cache_loc(pool, rows, np.zeros_like(rows), seq_lens).numpy()
    assert np.array_equal(np.concatenate(slots), expected)
