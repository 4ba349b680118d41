"""Sequences over a KV pool, the backends that attend to them, and plain attention beside them."""

from collections.abc import Sequence

import numpy as np
import torch

from executor.batch.kv_pool import KVPool, KVShape
from executor.model.layers.attention import Attention, LayerOptions
from executor.model.layers.attention_cpu import cpu_attention
from executor.model.layers.attention_flashinfer import FlashInferAttention, LayeredAttention
from executor.model.layers.attention_torch import TorchAttention
from executor.model.layers.attention_workspace import AttentionWorkspace
from executor.model.triton.operators import TritonOps
from executor.parallel.layout import DpLayout
from tests.executor.support.flashinfer.attention import flashinfer_attention
from tests.executor.support.kv import batch_of, out_cache_loc

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, MAX_LEN = 6, 2, 8, 4, 96
LATENT_DIM, ROPE_DIM = 8, 4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

Mix = Sequence[tuple[int, int]]  # of each sequence, keys before the pass and new tokens in it
MIXES: dict[str, Mix] = {
    "one decode": [(17, 1)],
    "first tokens": [(0, 1), (0, 1)],
    "block edges": [(3, 1), (4, 1), (7, 1), (8, 1), (47, 1)],
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
    """Sequences with keys and values of their own in layer 1; other slots of the pool hold garbage.

    With a window, layer 1 has a table of its own, and blocks wholly before the window are given back.
    Queries, keys and values of the pass are strided as a model's are.

    Args:
        mix: The sequences.
        dtype: Of everything.
        num_heads: Query heads.
        garbage: The value of what is nobody's.
        spare_blocks: Blocks of the pool that belong to none of them.
        window: Keys that a query of layer 1 sees; None for all.
        sinks: Whether its softmax has a sink for each head.
        times: What all widths are multiplied by.
        is_latent: Whether all heads share one latent, whose first columns are the values.
        layout: Of the pass; that of an executor without peers and graphs if None.
    """

    def __init__(
        self,
        mix: Mix,
        dtype: torch.dtype = torch.float32,
        *,
        num_heads: int = HEADS,
        garbage: float = torch.nan,
        spare_blocks: int = 2,
        layout: DpLayout | None = None,
        is_latent: bool = False,
        window: int | None = None,
        sinks: bool = False,
        times: int = 1,
    ) -> None:
        self.window = window
        self.sinks = torch.linspace(-2, 4, num_heads).to(dtype) if sinks else None
        self.dtype, self.num_heads, self.is_latent = dtype, num_heads, is_latent
        head_dim, latent_dim, rope_dim = times * HEAD_DIM, times * LATENT_DIM, times * ROPE_DIM
        self.kv_heads, self.width, self.value_width = KV_HEADS, head_dim, head_dim
        self.scale = head_dim**-0.5
        shape = KVShape.of_heads(
            num_layers=2,
            num_kv_heads=KV_HEADS,
            head_dim=head_dim,
            block_size=BLOCK_SIZE,
            dtype=dtype,
            windowed=() if window is None else (1,),
            window=window,
        )
        if is_latent:
            self.kv_heads, self.width, self.value_width = 1, latent_dim + rope_dim, latent_dim
            self.scale = 0.3 if times == 1 else self.width**-0.5
            shape = KVShape.of_latents(
                num_layers=2,
                latent_dim=latent_dim,
                rope_dim=rope_dim,
                block_size=BLOCK_SIZE,
                dtype=dtype,
            )
        prefixes, self.counts = [p for p, _ in mix], [n for _, n in mix]
        self.num_keys = [p + n for p, n in mix]
        blocks = [-(-n // BLOCK_SIZE) for n in self.num_keys]
        self.group = 0 if window is None else 1
        self.rows = list(range(len(mix), 0, -1))
        self.pool = KVPool(
            shape,
            num_blocks=1 + (1 + self.group) * sum(blocks) + spare_blocks,
            num_rows=len(mix) + 1,
            max_blocks_per_row=max([MAX_LEN // BLOCK_SIZE, *blocks]) + 1,
        )
        shuffled = np.random.default_rng(0).permutation((1 + self.group) * sum(blocks)) + 1
        self.pool.append_blocks(self.rows, [0] * len(mix), blocks, shuffled)
        for cache in self.caches:
            cache.fill_(garbage)
        generator = torch.Generator().manual_seed(len(mix) * 100 + sum(self.counts))

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        heads = random(sum(self.counts), num_heads + 2 * self.kv_heads, self.width)
        self.q, self.k, v = heads.split((num_heads, self.kv_heads, self.kv_heads), dim=1)
        self.v = None if is_latent else v
        self.keys, self.values = [], []
        for row, prefix, k, new_values in zip(
            self.rows, prefixes, self.k.split(self.counts), v.split(self.counts), strict=True
        ):
            before = random(2, prefix, self.kv_heads, self.width)
            at = out_cache_loc(self.pool, [row], [0], [prefix], self.group)
            for cache, x in zip(self.pool.caches[1], before, strict=False):
                cache[at] = x
                cache[at[: self.num_given_back(prefix)]] = garbage
            self.keys.append(torch.cat((before[0], k)))
            values = self.keys[-1][..., : self.value_width]
            self.values.append(values if is_latent else torch.cat((before[1], new_values)))
        self.batch = batch_of(self.pool, self.rows, prefixes, self.counts, layout=layout)

    @property
    def caches(self) -> list[torch.Tensor]:
        return self.pool.tensors

    @property
    def layers(self) -> tuple[LayerOptions, ...]:
        return (LayerOptions(), LayerOptions(self.window, self.sinks))

    def attention(self, backend: str = "torch") -> Attention:
        if backend == "flashinfer":
            return self.flashinfer()
        new = cpu_attention if backend == "cpu" else TorchAttention
        return new(self.num_heads, self.pool.shape, scale=self.scale, layers=self.layers)

    def flashinfer(
        self, workspace: AttentionWorkspace | None = None, triton: TritonOps | None = None
    ) -> FlashInferAttention | LayeredAttention:
        """Returns the backend for passes of up to 64 more rows than this one."""
        return flashinfer_attention(
            self.num_heads,
            self.pool,
            workspace=workspace,
            max_num_tokens=len(self.q) + 64,
            scale=self.scale,
            layers=self.layers,
            triton=triton,
        )

    def run(self, attention: Attention, *, stores: bool = True) -> torch.Tensor:
        """Plans, and attends in layer 1. Keys and values are not handed over if it stores none."""
        attention.init_forward_metadata_out_graph(self.batch, self.pool)
        attention.init_forward_metadata_in_graph()
        k, v = (self.k, self.v) if stores else (None, None)
        return attention.forward(self.q, k, v, 1)

    def expected(self, seen: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """Plain softmax attention of each query over the keys [Q, n] that it sees, in float32.

        Without ``seen`` it sees those up to its own.
        """
        outs = []
        for i, queries in enumerate(self.q.float().split(self.counts)):
            k, v = (
                x[i].float().repeat_interleave(self.num_heads // self.kv_heads, dim=1)
                for x in (self.keys, self.values)
            )
            count = self.counts[i]
            shown = (
                torch.ones(count, len(k)).bool().tril(len(k) - count) if seen is None else seen[i]
            )
            for j, (query, mine) in enumerate(zip(queries, shown, strict=True)):
                if self.window is not None:
                    place = len(k) - count + j
                    mine = mine & (torch.arange(len(k)) > place - self.window)
                scores = torch.einsum("hd,shd->hs", query, k[mine]) * self.scale
                if self.sinks is not None:
                    scores = torch.cat((scores, self.sinks.float()[:, None]), dim=1)
                    outs.append(
                        torch.einsum("hs,shd->hd", scores.softmax(-1)[:, :-1], v[mine]).flatten()
                    )
                    continue
                outs.append(torch.einsum("hs,shd->hd", scores.softmax(-1), v[mine]).flatten())
        return torch.stack(outs)

    def check(self, out: torch.Tensor, seen: Sequence[torch.Tensor] | None = None) -> None:
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(out.float(), self.expected(seen), atol=tolerance, rtol=tolerance)

    def check_stored(self) -> None:
        """Every key and value lies where the block table says, the pass's own ones included."""
        for i, row in enumerate(self.rows):
            first = self.num_given_back(self.num_keys[i] - self.counts[i])
            at = out_cache_loc(self.pool, [row], [first], [self.num_keys[i] - first], self.group)
            kept = (self.keys[i], self.values[i])
            for cache, x in zip(self.pool.caches[1], kept, strict=not self.is_latent):
                assert torch.equal(cache[at], x[first:])

    def num_given_back(self, prefix: int) -> int:
        """Returns the tokens in blocks wholly before the window of the token behind a prefix."""
        unseen = 0 if self.window is None else max(prefix + 1 - self.window, 0)
        return unseen // BLOCK_SIZE * BLOCK_SIZE

    def pad(self, num_rows: int, value: float) -> None:
        """Adds rows behind the sequences' own, which write to the scratch block."""
        zeros = torch.zeros(num_rows, dtype=torch.int64)
        self.batch.input_ids = torch.cat((self.batch.input_ids, zeros))
        self.batch.out_cache_loc = torch.cat((self.batch.out_cache_loc, zeros))
        if self.batch.window_cache_loc is not None:
            self.batch.window_cache_loc = torch.cat((self.batch.window_cache_loc, zeros))
        self.q, self.k, self.v = (
            None if x is None else torch.cat((x, x.new_full((num_rows, *x.shape[1:]), value)))
            for x in (self.q, self.k, self.v)
        )


def random_trees(num_sequences: int, width: int, seed: int) -> torch.Tensor:
    """Returns bool [B, Q, Q]: each node of a random tree sees its ancestors and itself."""
    generator = torch.Generator().manual_seed(seed)
    masks = torch.eye(width, dtype=torch.bool).repeat(num_sequences, 1, 1)
    for mask in masks:
        for node in range(1, width):
            parent = int(torch.randint(node, (), generator=generator))
            mask[node] |= mask[parent]
    return masks


def with_trees(num_keys: list[int], masks: torch.Tensor) -> list[torch.Tensor]:
    """Returns bool [Q, n] of each sequence: all keys before the tree, and the tree's own."""
    width = masks.shape[2]
    seen = []
    for mask, n in zip(masks, num_keys, strict=True):
        before = torch.ones(len(mask), max(n - width, 0), dtype=torch.bool)
        seen.append(torch.cat((before, mask[:, max(width - n, 0) :]), dim=1))
    return seen
