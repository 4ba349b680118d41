"""If this fails, a draft token is verified against keys that are not on its path, or not all of them."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from executor.batch.forward_batch import ForwardBatch
from executor.batch.kv_pool import KVPool, KVShape
from executor.graph.backend import ShapeKey
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.layers import attention_torch
from executor.model.layers.attention import Attention
from executor.model.layers.attention_flashinfer import FlashInferAttention
from executor.model.layers.attention_tables import TreeBits, flat_mask
from executor.model.layers.attention_torch import MAX_GROUPED_WIDTH, TorchAttention
from executor.model.layers.attention_workspace import AttentionWorkspace
from executor.parallel.layout import DpLayout
from tests.executor.support.flashinfer.cpu_flashinfer import (
    WORKSPACE,
    CpuFlashInfer,
)
from tests.executor.support.kv import batch_of, out_cache_loc
from tests.executor.support.recording.recording_backend import RecordingBackend

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, MAX_LEN = 6, 2, 8, 4, 96
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
PREFIXES = [9, 0, 63, 31, 12, 1, 64, 3]  # keys before a pass, of each sequence
BACKENDS = ["torch", "flashinfer"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "flashinfer":
        request.getfixturevalue("library")
    name: str = request.param
    return name


class Case:
    """Sequences with keys and values of their own; all other slots of the pool hold NaN.

    The last keys of each sequence are new in the pass, one per query.

    Args:
        num_keys: Of each sequence, new ones included.
        width: Q.
        dtype: Of everything.
        spare_blocks: Blocks of the pool that belong to none of them.
    """

    def __init__(
        self,
        num_keys: list[int],
        width: int,
        dtype: torch.dtype = torch.float32,
        *,
        spare_blocks: int = 0,
    ) -> None:
        self.num_keys, self.width, self.dtype = num_keys, width, dtype
        generator = torch.Generator().manual_seed(len(num_keys) * 100 + width)
        rows = list(range(len(num_keys), 0, -1))
        shape = KVShape(
            num_layers=2,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            block_size=BLOCK_SIZE,
            dtype=dtype,
        )
        counts = [-(-n // BLOCK_SIZE) for n in num_keys]
        self.pool = KVPool(
            shape,
            num_blocks=1 + sum(counts) + spare_blocks,
            num_rows=len(num_keys) + 1,
            max_blocks_per_row=MAX_LEN // BLOCK_SIZE,
        )
        blocks = np.random.default_rng(0).permutation(sum(counts)) + 1
        self.pool.append_blocks(rows, [0] * len(rows), counts, blocks)
        for cache in (*self.pool.key_cache, *self.pool.value_cache):
            cache.fill_(torch.nan)
        self.keys, self.values = [], []
        for row, n in zip(rows, num_keys, strict=True):
            size = (2, n, KV_HEADS, HEAD_DIM)
            k, v = torch.randn(size, generator=generator).to(dtype)
            loc = out_cache_loc(self.pool, [row], [0], [n - width])
            self.pool.key_cache[1][loc] = k[: n - width]
            self.pool.value_cache[1][loc] = v[: n - width]
            self.keys.append(k)
            self.values.append(v)
        total = len(rows) * width
        self.q = torch.randn(total, HEADS, HEAD_DIM, generator=generator).to(dtype)
        self.k = torch.cat([k[n - width :] for k, n in zip(self.keys, num_keys, strict=True)])
        self.v = torch.cat([v[n - width :] for v, n in zip(self.values, num_keys, strict=True)])
        prefixes = [n - width for n in num_keys]
        self.batch = batch_of(self.pool, rows, prefixes, [width] * len(rows))

    def new_attention(self, backend: str) -> Attention:
        if backend == "flashinfer":
            ops = FlashInferOps(enable_pdl=True)
            workspace = AttentionWorkspace(self.pool.device, WORKSPACE[0])
            return FlashInferAttention(
                ops, self.pool, HEADS, workspace, max_num_tokens=64 * self.width
            )
        return TorchAttention(HEADS, KV_HEADS, HEAD_DIM, dtype=self.dtype)

    def run(self, attention: Attention) -> torch.Tensor:
        attention.init_forward_metadata_out_graph(self.batch, self.pool)
        attention.init_forward_metadata_in_graph()
        return attention.forward(self.q, self.k, self.v, 1)

    def expected(self, seen: list[torch.Tensor]) -> torch.Tensor:
        """Plain softmax attention of each query over the keys [Q, n] that it sees, in float32."""
        outs = []
        for i, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            q = self.q[i * self.width : (i + 1) * self.width].float()
            k, v = (x.float().repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
            for query, shown in zip(q, seen[i], strict=True):
                scores = torch.einsum("hd,shd->hs", query, k[shown]) * HEAD_DIM**-0.5
                outs.append(torch.einsum("hs,shd->hd", scores.softmax(-1), v[shown]).flatten())
        return torch.stack(outs)

    def check(self, out: torch.Tensor, seen: list[torch.Tensor]) -> None:
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(out.float(), self.expected(seen), atol=tolerance, rtol=tolerance)


def random_trees(num_sequences: int, width: int, seed: int) -> torch.Tensor:
    """Returns bool [B, Q, Q]: each node of a random tree sees its ancestors and itself."""
    generator = torch.Generator().manual_seed(seed)
    masks = torch.eye(width, dtype=torch.bool).repeat(num_sequences, 1, 1)
    for mask in masks:
        for node in range(1, width):
            parent = int(torch.randint(node, (), generator=generator))
            mask[node] |= mask[parent]
    return masks


def causal(num_keys: list[int], width: int) -> list[torch.Tensor]:
    return [torch.ones(width, n, dtype=torch.bool).tril(n - width) for n in num_keys]


def with_trees(num_keys: list[int], masks: torch.Tensor) -> list[torch.Tensor]:
    """Returns bool [Q, n] of each sequence: all keys before the tree, and the tree's own."""
    width = masks.shape[2]
    seen = []
    for mask, n in zip(masks, num_keys, strict=True):
        before = torch.ones(len(mask), max(n - width, 0), dtype=torch.bool)
        seen.append(torch.cat((before, mask[:, max(width - n, 0) :]), dim=1))
    return seen


# Chains: several new tokens of each sequence at once.


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [*range(1, MAX_GROUPED_WIDTH + 1), MAX_GROUPED_WIDTH + 1])
def test_every_width_equals_plain_attention_and_one_sequence_at_a_time(
    width: int, dtype: torch.dtype
) -> None:
    case = Case([n + width for n in PREFIXES], width, dtype)
    out = case.run(case.new_attention("torch"))
    case.check(out, causal(case.num_keys, width))
    with patch.object(attention_torch, "MAX_GROUPED_WIDTH", 0):
        alone = case.run(case.new_attention("torch"))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out, alone, atol=tolerance, rtol=tolerance)


def test_small_widths_are_attended_in_fewer_calls_than_sequences() -> None:
    case = Case([n + 4 for n in PREFIXES], 4)
    attention = case.new_attention("torch")
    with patch.object(
        F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention
    ) as calls:
        case.run(attention)
    assert calls.call_count == 2  # up to 8 blocks, and more


# Trees.


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 2, 5, 16, 20])
def test_a_node_sees_its_path_and_nothing_else(
    width: int, dtype: torch.dtype, backend: str
) -> None:
    case = Case([n + width for n in PREFIXES], width, dtype)
    case.batch.tree_mask = random_trees(len(PREFIXES), width, seed=width)
    out = case.run(case.new_attention(backend))
    case.check(out, with_trees(case.num_keys, case.batch.tree_mask))


def test_a_tree_that_is_a_chain_equals_no_tree(backend: str) -> None:
    case = Case([n + 4 for n in PREFIXES], 4)
    plain = case.run(case.new_attention(backend))
    chain = torch.ones(4, 4, dtype=torch.bool).tril().repeat(len(PREFIXES), 1, 1)
    case.batch.tree_mask = chain
    torch.testing.assert_close(case.run(case.new_attention(backend)), plain, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("tree_width", [3, 8, 15])
def test_a_tree_may_hold_earlier_levels_and_be_longer_than_a_sequence(
    tree_width: int, backend: str
) -> None:
    """As in a draft's third level: its queries are the tree's last keys."""
    width = 3
    num_keys = [n + width for n in PREFIXES]
    case = Case(num_keys, width)
    masks = torch.rand(len(num_keys), width, tree_width) < 0.5
    own = torch.arange(width)
    masks[:, own, tree_width - width + own] = True
    case.batch.tree_mask = masks
    case.check(case.run(case.new_attention(backend)), with_trees(num_keys, masks))


def test_the_mask_is_read_when_the_pass_begins(backend: str) -> None:
    case = Case([n + 4 for n in PREFIXES], 4)
    masks = torch.zeros(len(PREFIXES), 4, 4, dtype=torch.bool)
    case.batch.tree_mask = masks
    attention = case.new_attention(backend)
    attention.init_forward_metadata_out_graph(case.batch, case.pool)
    for seed in range(3):
        masks.copy_(random_trees(len(PREFIXES), 4, seed))
        attention.init_forward_metadata_in_graph()
        out = attention.forward(case.q, case.k, case.v, 1)
        case.check(out, with_trees(case.num_keys, masks))


def test_padded_sequences_stay_finite_and_change_nothing(backend: str) -> None:
    """They say that they are shorter than what they run, and their part of the mask is empty."""
    case = Case([n + 4 for n in PREFIXES], 4)
    masks = random_trees(len(PREFIXES), 4, seed=0)
    case.batch.tree_mask = masks
    plain = case.run(case.new_attention(backend))
    num_padded, total = 3, len(case.q)
    zeros = torch.zeros(num_padded, dtype=torch.int64)
    seq_lens = torch.cat((case.batch.seq_lens, torch.tensor([0, 1, 4])))
    padded = replace(
        case.batch,
        batch_size=len(PREFIXES) + num_padded,
        req_pool_indices=torch.cat((case.batch.req_pool_indices, zeros)),
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens,
        extend_seq_lens_cpu=np.full(len(seq_lens), 4),
        input_ids=torch.zeros(total + 4 * num_padded, dtype=torch.int64),
        out_cache_loc=torch.cat((case.batch.out_cache_loc, zeros.repeat(4))),
        tree_mask=torch.cat((masks, torch.zeros(num_padded, 4, 4, dtype=torch.bool))),
    )
    for cache in (*case.pool.key_cache, *case.pool.value_cache):
        cache[:BLOCK_SIZE] = 0  # the scratch block: what row 0 of the block table points at
    case.batch = padded
    case.q, case.k, case.v = (
        torch.cat((x, torch.ones(4 * num_padded, *x.shape[1:]))) for x in (case.q, case.k, case.v)
    )
    out = case.run(case.new_attention(backend))
    assert torch.equal(out[:total], plain)
    assert out.isfinite().all()


def test_a_mask_for_other_widths_is_refused() -> None:
    case = Case([n + 4 for n in PREFIXES], 4)
    case.batch.tree_mask = random_trees(len(PREFIXES), 5, seed=0)
    with pytest.raises(AssertionError, match=r"8 sequences of 5 tokens; the batch has 8, of \[4\]"):
        case.run(case.new_attention("torch"))


# Queries without keys of their own.


def test_queries_alone_see_all_keys_and_store_none(backend: str) -> None:
    case = Case([n + 1 for n in PREFIXES], 1)
    attention = case.new_attention(backend)
    case.run(attention)
    caches = (*case.pool.key_cache, *case.pool.value_cache)
    before = [cache.clone() for cache in caches]
    attention.init_forward_metadata_out_graph(case.batch, case.pool)
    attention.init_forward_metadata_in_graph()
    out = attention.forward(case.q, None, None, 1)
    case.check(out, causal(case.num_keys, 1))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache.view(torch.int32), old.view(torch.int32))


def test_several_queries_may_be_of_one_row_and_a_row_may_be_empty(backend: str) -> None:
    case = Case([n + 1 for n in PREFIXES], 1)
    case.run(case.new_attention(backend))
    beams, num_rows = 3, len(PREFIXES)
    seq_lens = case.batch.seq_lens.repeat_interleave(beams)
    seq_lens = torch.cat((seq_lens, torch.zeros(2, dtype=torch.int64)))
    rows = torch.cat(
        (case.batch.req_pool_indices.repeat_interleave(beams), torch.zeros(2, dtype=torch.int64))
    )
    total = beams * num_rows + 2
    batch = replace(
        case.batch,
        batch_size=total,
        req_pool_indices=rows,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens,
        input_ids=torch.zeros(total, dtype=torch.int64),
        out_cache_loc=torch.zeros(total, dtype=torch.int64),
    )
    if backend == "flashinfer":  # reads one key of an empty row
        case.pool.key_cache[1][:BLOCK_SIZE] = case.pool.value_cache[1][:BLOCK_SIZE] = 0
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(total, HEADS, HEAD_DIM, generator=generator)
    attention = case.new_attention(backend)
    attention.init_forward_metadata_out_graph(batch, case.pool)
    attention.init_forward_metadata_in_graph()
    out = attention.forward(q, None, None, 1)
    assert out.isfinite().all()
    for beam in range(beams):
        case.q = q[: beams * num_rows][beam::beams]
        case.check(out[: beams * num_rows][beam::beams], causal(case.num_keys, 1))


# FlashInfer: bits, and graphs.


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
        parts = torch.split_with_sizes(flat_mask(masks, lens), (width * lens).tolist())
        for i, (part, seen) in enumerate(zip(parts, with_trees(lens.tolist(), masks), strict=True)):
            assert torch.equal(part.view(seen.shape), seen)
            packed = np.packbits(part.numpy(), bitorder="little")
            ours = bits.bits[int(indptr[i]) : int(indptr[i + 1])].numpy()
            unused = -(width * int(lens[i])) % 8  # high bits of the last byte
            ours[-1] &= 0xFF >> unused
            assert np.array_equal(ours, packed)


def test_a_replay_reads_its_own_tree(library: CpuFlashInfer) -> None:
    """The graph is captured once; lengths are planned and trees are written before each replay."""
    width, size = 4, len(PREFIXES)
    recording = RecordingBackend()
    library.launch = recording.kernel
    case = Case([width] * size, width, spare_blocks=size * MAX_LEN // BLOCK_SIZE)
    attention = FlashInferAttention(
        FlashInferOps(enable_pdl=True),
        case.pool,
        HEADS,
        AttentionWorkspace(case.pool.device, WORKSPACE[0]),
        max_num_tokens=size * width,
    )
    attention.init_cuda_graph_state([2, size], width, has_tree=True)
    masks = torch.zeros(size, width, width, dtype=torch.bool)
    q, k, v = (torch.zeros_like(x) for x in (case.q, case.k, case.v))
    out, slots = torch.zeros(size * width, HEADS * HEAD_DIM), case.batch.out_cache_loc.clone()

    def plan(batch: ForwardBatch) -> None:
        layout = DpLayout.single(size * width, size * width)
        view = replace(batch, layout=layout, tree_mask=masks, out_cache_loc=slots)
        attention.init_forward_metadata_out_graph(view, case.pool)

    def run() -> None:
        attention.init_forward_metadata_in_graph()
        out.copy_(attention.forward(q, k, v, 1))

    plan(case.batch)
    with torch.inference_mode(), recording.session(label="verify", num_captures=1):
        recording.warm_up(run)
        recording.capture(ShapeKey(size), run)
    for seed in range(3):
        lens = (np.random.default_rng(seed).integers(0, MAX_LEN - width, size) + width).tolist()
        new = Case(lens, width)
        for ours, theirs in (
            (q, new.q),
            (k, new.k),
            (v, new.v),
            (slots, new.batch.out_cache_loc),
            (case.pool.block_table, new.pool.block_table),
        ):
            ours.copy_(theirs)
        num_slots = len(new.pool.key_cache[1])
        for cache in ("key_cache", "value_cache"):
            getattr(case.pool, cache)[1][:num_slots] = getattr(new.pool, cache)[1]
        plan(new.batch)
        masks.copy_(random_trees(size, width, seed))
        recording.replay(ShapeKey(size))
        new.check(out, with_trees(lens, masks))
