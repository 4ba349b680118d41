"""If this fails, a token attends to what it must not see, or misses what it must."""

import pytest
import torch

from tests.executor.model.layers.attention_cases import (
    BLOCK_SIZE,
    HEAD_DIM,
    HEADS,
    MIXES,
    Case,
    Mix,
)
from tests.executor.support.kv import out_cache_loc

KINDS = pytest.mark.parametrize("is_latent", [False, True], ids=["heads", "latents"])
EVERY_MIX = pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)


@pytest.mark.parametrize(
    ("num_heads", "is_latent"), [(2, False), (HEADS, False), (8, False), (3, True), (8, True)]
)
@EVERY_MIX
def test_every_mix_equals_plain_attention_and_is_stored_where_the_pool_says(
    mix: Mix, num_heads: int, is_latent: bool, backend: str
):
    case = Case(mix, num_heads=num_heads, is_latent=is_latent)
    case.check(case.run(case.attention(backend)))
    case.check_stored()


@pytest.mark.parametrize("garbage", [1e30, torch.inf, -torch.inf, torch.nan])
@KINDS
@EVERY_MIX
def test_what_unused_slots_hold_does_not_matter(mix: Mix, is_latent: bool, garbage: float):
    clean, dirty = (Case(mix, garbage=left, is_latent=is_latent) for left in (0.0, garbage))
    assert torch.equal(dirty.run(dirty.attention()), clean.run(clean.attention()))


@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
@KINDS
@EVERY_MIX
def test_a_sequence_that_overflowed_poisons_no_other(mix: Mix, is_latent: bool, poison: float):
    clean, poisoned = Case(mix, is_latent=is_latent), Case(mix, is_latent=is_latent)
    first, *others = poisoned.rows
    pool = poisoned.pool
    blocks = pool.tables_cpu[0, first, : pool.row_num_blocks[first]]
    for row in others:  # held one of its blocks before
        num_blocks = pool.row_num_blocks[row]
        pool.append_blocks([row], [num_blocks], [1], blocks[:1])
        pool.append_blocks([row], [num_blocks], [0], [])
    for cache in pool.caches[1]:
        cache.view(-1, BLOCK_SIZE, *cache.shape[1:])[blocks] = poison
    theirs = slice(mix[0][1], None)
    out = poisoned.run(poisoned.attention())
    assert torch.equal(out[theirs], clean.run(clean.attention())[theirs])


@KINDS
def test_no_sequences_attend_to_nothing(is_latent: bool, backend: str):
    case = Case([], is_latent=is_latent)
    assert case.run(case.attention(backend)).shape == (0, HEADS * HEAD_DIM)


@KINDS
@pytest.mark.parametrize("mix", [MIXES["mixed"], MIXES["ragged decodes"]])
def test_padding_rows_write_to_the_scratch_block_only(mix: Mix, is_latent: bool, backend: str):
    plain, padded = (Case(mix, garbage=0.0, is_latent=is_latent) for _ in range(2))
    padded.pad(3, torch.nan)
    out = padded.run(padded.attention(backend))
    total = sum(padded.counts)
    assert torch.equal(out[:total], plain.run(plain.attention(backend)))
    assert backend == "torch" or not out[total:].any()
    for ours, theirs in zip(padded.caches, plain.caches, strict=True):
        assert torch.equal(ours[BLOCK_SIZE:], theirs[BLOCK_SIZE:])


# Windows and sinks.

OPTIONS = pytest.mark.parametrize(
    ("window", "sinks"), [(1, False), (5, False), (8, True), (None, True)], ids=str
)


@OPTIONS
@EVERY_MIX
def test_every_mix_equals_plain_attention_with_windows_and_sinks(
    mix: Mix, window: int | None, sinks: bool, backend: str
):
    case = Case(mix, window=window, sinks=sinks)
    case.check(case.run(case.attention(backend)))
    case.check_stored()


def test_a_long_window_changes_no_bit():
    for mix in MIXES.values():
        plain, windowed = Case(mix), Case(mix, window=5000)
        assert torch.equal(windowed.run(windowed.attention()), plain.run(plain.attention()))


def test_layers_without_options_are_plain():
    case, other = Case(MIXES["mixed"], window=5, sinks=True), Case(MIXES["mixed"])
    attention = case.attention()
    attention.init_forward_metadata_out_graph(case.batch, case.pool)
    for row, *kept in zip(case.rows, case.keys, case.values, strict=True):
        at = out_cache_loc(case.pool, [row], [0], [len(kept[0])])
        for cache, x in zip(case.pool.caches[0], kept, strict=True):
            cache[at] = x
    out = attention.forward(case.q, case.k, case.v, 0)
    assert torch.equal(out, other.run(other.attention()))
