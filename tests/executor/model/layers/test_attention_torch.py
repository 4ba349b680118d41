"""If this fails, a token attends to what it must not see, or misses what it must."""

import numpy as np
import pytest
import torch

from executor.batch.kv_pool import KVPool, KVShape
from executor.model.layers.attention_torch import TorchAttention
from tests.executor.support.kv import batch_of, out_cache_loc

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 8, 4
SHAPE = KVShape(
    num_layers=2,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    block_size=BLOCK_SIZE,
    dtype=torch.float32,
)
# One entry per sequence: tokens before this pass, tokens in it.
MIXES = {
    "one decode": [(17, 1)],
    "first tokens": [(0, 1), (0, 1)],
    "ragged decodes": [(0, 1), (3, 1), (150, 1), (4, 1), (63, 1), (64, 1)],
    "ragged decodes in one group": [(29, 1), (1, 1), (14, 1), (0, 1), (7, 1), (8, 1)],
    "one prompt": [(0, 9)],
    "prompts": [(0, 5), (0, 2), (0, 12)],
    "chunks": [(4, 5), (13, 7), (0, 3)],
    "mixed": [(30, 1), (0, 6), (2, 1), (9, 4), (90, 1)],
    "more queries than a tile": [(7, 600), (5, 1), (0, 530)],
    "more keys than the workspace holds for all": [(4000, 1), (3000, 1), (2500, 3), (9, 1)],
}


class Case:
    """Sequences of random keys and values, of which the first part is already in the pool."""

    def __init__(self, mix: list[tuple[int, int]], garbage: float) -> None:
        generator = torch.Generator().manual_seed(len(mix))
        self.mix = mix
        lens = [prefix + new for prefix, new in mix]
        self.keys = [torch.randn(n, KV_HEADS, HEAD_DIM, generator=generator) for n in lens]
        self.values = [torch.randn(n, KV_HEADS, HEAD_DIM, generator=generator) for n in lens]
        self.q = torch.randn(sum(n for _, n in mix), HEADS, HEAD_DIM, generator=generator)
        counts = [-(-n // BLOCK_SIZE) for n in lens]
        self.pool = KVPool(
            SHAPE,
            num_blocks=sum(counts) + 3,
            num_rows=len(mix) + 1,
            max_blocks_per_row=max(counts) + 2,
        )
        for cache in (*self.pool.key_cache, *self.pool.value_cache):
            cache.fill_(garbage)
        self.rows = list(range(len(mix), 0, -1))
        blocks = np.random.default_rng(0).permutation(sum(counts)) + 1
        self.pool.append_blocks(self.rows, [0] * len(mix), counts, blocks)
        for row, (prefix, _), k, v in zip(self.rows, mix, self.keys, self.values, strict=True):
            loc = out_cache_loc(self.pool, [row], [0], [prefix])
            self.pool.key_cache[1][loc], self.pool.value_cache[1][loc] = k[:prefix], v[:prefix]

    def run(self, num_workers: int = 1) -> torch.Tensor:
        prefixes, counts = [p for p, _ in self.mix], [n for _, n in self.mix]
        batch = batch_of(self.pool, self.rows, prefixes, counts)
        attention = TorchAttention(
            HEADS, KV_HEADS, HEAD_DIM, dtype=torch.float32, num_workers=num_workers
        )
        attention.init_forward_metadata_out_graph(batch, self.pool)
        new = list(zip(self.keys, self.values, prefixes, strict=True))
        k = torch.cat([k[prefix:] for k, _, prefix in new])
        v = torch.cat([v[prefix:] for _, v, prefix in new])
        return attention.forward(self.q, k, v, layer_id=1)

    def expected(self) -> torch.Tensor:
        """Plain softmax attention, one query at a time."""
        outs, row = [], 0
        for (prefix, new), keys, values in zip(self.mix, self.keys, self.values, strict=True):
            k = keys.repeat_interleave(HEADS // KV_HEADS, dim=1)
            v = values.repeat_interleave(HEADS // KV_HEADS, dim=1)
            for position in range(prefix, prefix + new):
                scores = torch.einsum("hd,shd->hs", self.q[row], k[: position + 1])
                weights = torch.softmax(scores * HEAD_DIM**-0.5, dim=-1)
                outs.append(torch.einsum("hs,shd->hd", weights, v[: position + 1]).flatten())
                row += 1
        return torch.stack(outs)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_every_mix_equals_plain_attention(mix: list[tuple[int, int]]):
    case = Case(mix, garbage=0.0)
    torch.testing.assert_close(case.run(), case.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_workers_change_no_bit(mix: list[tuple[int, int]]):
    alone = Case(mix, garbage=0.0).run(num_workers=1)
    assert torch.equal(Case(mix, garbage=0.0).run(num_workers=3), alone)


@pytest.mark.parametrize("garbage", [1e30, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_what_unused_slots_hold_does_not_matter(mix: list[tuple[int, int]], garbage: float):
    assert torch.equal(Case(mix, garbage=garbage).run(), Case(mix, garbage=0.0).run())


@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_a_sequence_that_overflowed_poisons_no_other(mix: list[tuple[int, int]], poison: float):
    clean, poisoned = Case(mix, garbage=0.0), Case(mix, garbage=0.0)
    first, *others = poisoned.rows
    blocks = poisoned.pool.block_table_cpu[first, : poisoned.pool.row_num_blocks[first]]
    for row in others:  # held one of its blocks before
        num_blocks = poisoned.pool.row_num_blocks[row]
        poisoned.pool.append_blocks([row], [num_blocks], [1], blocks[:1])
        poisoned.pool.append_blocks([row], [num_blocks], [0], [])
    for cache in (poisoned.pool.key_cache[1], poisoned.pool.value_cache[1]):
        cache.view(-1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)[blocks] = poison
    theirs = slice(mix[0][1], None)
    assert torch.equal(poisoned.run()[theirs], clean.run()[theirs])


def test_no_sequences_attend_to_nothing():
    case = Case([(5, 1)], garbage=0.0)
    batch = batch_of(case.pool, [], [], [])
    attention = TorchAttention(HEADS, KV_HEADS, HEAD_DIM, dtype=torch.float32)
    attention.init_forward_metadata_out_graph(batch, case.pool)
    nothing = torch.zeros(0, KV_HEADS, HEAD_DIM)
    assert attention.forward(case.q[:0], nothing, nothing, layer_id=0).shape == (0, 48)


@pytest.mark.parametrize("mix", [MIXES["mixed"], MIXES["ragged decodes"]])
def test_padding_rows_write_to_the_scratch_block_only(mix: list[tuple[int, int]]):
    plain, padded = Case(mix, garbage=0.0), Case(mix, garbage=0.0)
    prefixes, counts = [p for p, _ in mix], [n for _, n in mix]
    total = sum(counts)
    batch = batch_of(padded.pool, padded.rows, prefixes, counts)
    batch.input_ids = torch.zeros(total + 3, dtype=torch.int64)
    batch.out_cache_loc = torch.cat((batch.out_cache_loc, torch.zeros(3, dtype=torch.int64)))
    attention = TorchAttention(HEADS, KV_HEADS, HEAD_DIM, dtype=torch.float32)
    attention.init_forward_metadata_out_graph(batch, padded.pool)
    poison = torch.full((3, KV_HEADS, HEAD_DIM), torch.nan)
    new = list(zip(padded.keys, padded.values, prefixes, strict=True))
    out = attention.forward(
        torch.cat((padded.q, torch.full((3, HEADS, HEAD_DIM), torch.nan))),
        torch.cat([k[prefix:] for k, _, prefix in new] + [poison]),
        torch.cat([v[prefix:] for _, v, prefix in new] + [poison]),
        layer_id=1,
    )
    assert torch.equal(out[:total], plain.run())
    used = slice(BLOCK_SIZE, None)
    assert torch.equal(padded.pool.key_cache[1][used], plain.pool.key_cache[1][used])
