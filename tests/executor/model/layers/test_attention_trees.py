"""If this fails, a draft token is verified against keys that are not on its path, or not all of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from executor.model.layers.attention_tables import TreeBits
from tests.executor.model.layers.attention_cases import (
    BLOCK_SIZE,
    HEAD_DIM,
    HEADS,
    MAX_LEN,
    TOLERANCE,
    Case,
    random_trees,
    with_trees,
)

PREFIXES = [9, 0, 63, 31, 12, 1, 64, 3]  # keys before a pass, of each sequence


def chains(width: int, dtype: torch.dtype = torch.float32) -> Case:
    """Returns sequences of which each has so many new tokens, behind ``PREFIXES`` keys."""
    return Case([(prefix, width) for prefix in PREFIXES], dtype)


# Chains: several new tokens of each sequence at once.


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 2, 5, 16, 17])
def test_every_width_equals_plain_attention(width: int, dtype: torch.dtype) -> None:
    case = chains(width, dtype)
    case.check(case.run(case.attention()))


# Trees.


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 2, 5, 16, 20])
def test_a_node_sees_its_path_and_nothing_else(
    width: int, dtype: torch.dtype, backend: str
) -> None:
    case = chains(width, dtype)
    case.batch.tree_mask = random_trees(len(PREFIXES), width, seed=width)
    out = case.run(case.attention(backend))
    case.check(out, with_trees(case.num_keys, case.batch.tree_mask))


def test_a_tree_that_is_a_chain_equals_no_tree(backend: str) -> None:
    case = chains(4)
    plain = case.run(case.attention(backend))
    chain = torch.ones(4, 4, dtype=torch.bool).tril().repeat(len(PREFIXES), 1, 1)
    case.batch.tree_mask = chain
    torch.testing.assert_close(case.run(case.attention(backend)), plain, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("tree_width", [3, 8, 15])
def test_a_tree_may_hold_earlier_levels_and_be_longer_than_a_sequence(
    tree_width: int, backend: str
) -> None:
    """As in a draft's third level: its queries are the tree's last keys."""
    width = 3
    case = chains(width)
    masks = torch.rand(len(PREFIXES), width, tree_width) < 0.5
    own = torch.arange(width)
    masks[:, own, tree_width - width + own] = True
    case.batch.tree_mask = masks
    case.check(case.run(case.attention(backend)), with_trees(case.num_keys, masks))


def test_the_mask_is_read_when_the_pass_begins(backend: str) -> None:
    case = chains(4)
    masks = torch.zeros(len(PREFIXES), 4, 4, dtype=torch.bool)
    case.batch.tree_mask = masks
    attention = case.attention(backend)
    attention.init_forward_metadata_out_graph(case.batch, case.pool)
    for seed in range(3):
        masks.copy_(random_trees(len(PREFIXES), 4, seed))
        attention.init_forward_metadata_in_graph()
        out = attention.forward(case.q, case.k, case.v, 1)
        case.check(out, with_trees(case.num_keys, masks))


def test_padded_sequences_stay_finite_and_change_nothing(backend: str) -> None:
    """They say that they are shorter than what they run, and their part of the mask is empty."""
    case = chains(4)
    masks = random_trees(len(PREFIXES), 4, seed=0)
    case.batch.tree_mask = masks
    plain = case.run(case.attention(backend))
    total = len(case.q)
    zeros = torch.zeros(3, dtype=torch.int64)
    seq_lens = torch.cat((case.batch.seq_lens, torch.tensor([0, 1, 4])))
    case.pad(3 * 4, 1.0)
    case.batch = replace(
        case.batch,
        batch_size=len(seq_lens),
        req_pool_indices=torch.cat((case.batch.req_pool_indices, zeros)),
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens,
        extend_seq_lens_cpu=np.full(len(seq_lens), 4),
        tree_mask=torch.cat((masks, torch.zeros(3, 4, 4, dtype=torch.bool))),
    )
    for cache in case.caches:
        cache[:BLOCK_SIZE] = 0  # the scratch block: what row 0 of the block table points at
    out = case.run(case.attention(backend))
    assert torch.equal(out[:total], plain)
    assert out.isfinite().all()


def test_a_mask_for_other_widths_is_refused() -> None:
    case = chains(4)
    case.batch.tree_mask = random_trees(len(PREFIXES), 5, seed=0)
    with pytest.raises(AssertionError, match=r"8 sequences of 5 tokens; the batch has 8, of \[4\]"):
        case.run(case.attention())


# Queries without keys of their own.


def test_queries_alone_see_all_keys_and_store_none(backend: str) -> None:
    case = chains(1)
    attention = case.attention(backend)
    case.run(attention)
    before = [cache.clone() for cache in case.caches]
    case.check(case.run(attention, stores=False))
    for cache, old in zip(case.caches, before, strict=True):
        assert torch.equal(cache.view(torch.int32), old.view(torch.int32))


def test_several_queries_may_be_of_one_row_and_a_row_may_be_empty(backend: str) -> None:
    case = chains(1)
    case.run(case.attention(backend))
    beams, num_rows = 3, len(PREFIXES)
    total = beams * num_rows + 2
    none = torch.zeros(2, dtype=torch.int64)
    rows, seq_lens = (
        torch.cat((x.repeat_interleave(beams), none))
        for x in (case.batch.req_pool_indices, case.batch.seq_lens)
    )
    case.batch = replace(
        case.batch,
        batch_size=total,
        req_pool_indices=rows,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens,
        input_ids=torch.zeros(total, dtype=torch.int64),
        out_cache_loc=torch.zeros(total, dtype=torch.int64),
    )
    if backend == "flashinfer":  # reads one key of an empty row
        for cache in case.pool.caches[1]:
            cache[:BLOCK_SIZE] = 0
    q = torch.randn(total, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(5))
    case.q = q
    out = case.run(case.attention(backend), stores=False)
    assert out.isfinite().all()
    for beam in range(beams):
        case.q = q[: beams * num_rows][beam::beams]
        case.check(out[: beams * num_rows][beam::beams])


# FlashInfer: bits.


@pytest.mark.parametrize("seed", range(8))
def test_bits_are_those_of_the_mask_whatever_was_there_before(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, width, tree_width = (int(n) for n in rng.integers(1, (6, 9, 20)))
    indptr, num_keys = (torch.zeros(n, dtype=torch.int32) for n in (size + 1, size))
    num_bytes = TreeBits.num_bytes(size, width, MAX_LEN)
    bits = TreeBits(torch.zeros(num_bytes, dtype=torch.uint8), indptr, num_keys, width)
    for _ in range(4):
        lens = rng.integers(1, MAX_LEN + 1, size).astype(np.int32)
        masks = torch.from_numpy(rng.random((size, width, tree_width)) < 0.5)
        bits.plan(lens)
        bits.write(masks)
        for i, seen in enumerate(with_trees(lens.tolist(), masks)):
            packed = np.packbits(seen.flatten().numpy(), bitorder="little")
            ours = bits.bits[int(indptr[i]) : int(indptr[i + 1])].numpy()
            unused = -(width * int(lens[i])) % 8  # high bits of the last byte
            ours[-1] &= 0xFF >> unused
            assert np.array_equal(ours, packed)
