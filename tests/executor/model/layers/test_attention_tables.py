"""If this fails, attention over pages reads keys of other sequences, or misses some of its own."""

import numpy as np
import pytest
import torch

from executor.model.layers.attention_tables import look_up_pages, plan_pages
from tests.executor.model.layers.attention_cases import BLOCK_SIZE, Case
from tests.executor.support.kv import out_cache_loc


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
    case = Case([(int(rng.integers(0, 96)), 1) for _ in range(rng.integers(1, 9))])
    rows, seq_lens = np.array(case.rows), np.array(case.num_keys)
    plan = plan_pages(seq_lens, None, BLOCK_SIZE)
    places = torch.arange(plan.num_pages, dtype=torch.int32)
    pages = look_up_pages(
        case.pool.tables[0], torch.from_numpy(rows), torch.from_numpy(plan.kv_indptr), places
    )
    assert pages.dtype == torch.int32
    slots = []
    for i, seq_len in enumerate(seq_lens):
        mine = pages[plan.kv_indptr[i] : plan.kv_indptr[i + 1]].numpy()
        assert (len(mine) - 1) * BLOCK_SIZE + plan.last_page_len[i] == seq_len
        position = np.arange(seq_len)
        slots.append(mine[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
    expected = out_cache_loc(case.pool, rows, np.zeros_like(rows), seq_lens).numpy()
    assert np.array_equal(np.concatenate(slots), expected)
