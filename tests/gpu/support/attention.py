"""Attention on two devices over the same keys and values, and how results are compared."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from executor.batch.forward_batch import ForwardBatch
from executor.batch.kv_pool import KVPool
from executor.model.decoder.sizes import attention_of
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.layers.attention import Attention
from executor.model.layers.attention_flashinfer import FlashInferAttention
from executor.model.spec import ModelSpec
from executor.model.triton.operators import TritonOps
from executor.parallel.layout import DpLayout
from tests.executor.support import kv
from tests.gpu.support.cases import CPU, fill_pool, flashinfer_attention, new_pool, torch_attention
from tests.gpu.support.machine import IS_STAND_IN
from tests.gpu.support.shapes import Sizes

ATOL, RTOL = 2e-2, 2**-5  # weights of keys are rounded before they are summed

SIZES = Sizes(block_size=4, num_rows=9, max_len=48, decode=(1, 2, 4, 8), prefill=(8, 64))
if not IS_STAND_IN:
    SIZES = Sizes(
        block_size=16, num_rows=64, max_len=4096, decode=(1, 2, 8, 64), prefill=(64, 4096)
    )
LONG, BLOCK = SIZES.max_len, SIZES.block_size


class Twins:
    """The same pool on the device and, in float32, on the CPU."""

    def __init__(
        self, config: ModelSpec, device: torch.device, triton: TritonOps | None = None
    ) -> None:
        self.config = config
        self._triton = triton
        self.ours = new_pool(config, SIZES, device)
        self.exact_config = replace(config, dtype=torch.float32)
        self.theirs = new_pool(self.exact_config, SIZES, CPU)
        for pool in (self.ours, self.theirs):
            fill_pool(pool)

    def flashinfer(self, ops: FlashInferOps, **options: Any) -> FlashInferAttention:
        """Returns what is tested, for the pool on the device."""
        new = flashinfer_attention(ops, triton=self._triton, **options)
        attention = new(self.config, self.ours, SIZES)
        assert isinstance(attention, FlashInferAttention)
        return attention

    def authority(self) -> Attention:
        """Returns what is right, for the pool on the CPU."""
        return torch_attention(self.exact_config, self.theirs, SIZES)

    def check(
        self,
        attention: Attention,
        mix: list[tuple[int, int]],
        *,
        graph_size: int | None = None,
        tree_mask: torch.Tensor | None = None,
        has_keys: bool = True,
    ) -> None:
        """Attends with both, and compares results and all keys and values.

        Args:
            attention: To be compared with the authority.
            mix: What the batch consists of.
            graph_size: Token rows of the graph whose wrapper runs it.
            tree_mask: bool [B, Q, W] on the CPU.
            has_keys: Whether the pass stores keys and values.
        """
        authority = self.authority()
        heads = self.heads(sum(count for _, count in mix))
        what = (mix, heads, graph_size, tree_mask, has_keys)
        ours = self._planned(attention, self.ours, *what)()
        assert_close(ours, self._planned(authority, self.theirs, *what)())
        for stored, right in zip(self.ours.tensors, self.theirs.tensors, strict=True):
            assert torch.equal(stored.to(CPU, torch.float32), right)

    def check_together(
        self, attentions: Sequence[Attention], mix_of: Callable[[int], list[tuple[int, int]]]
    ) -> None:
        """Plans all, each for a batch of queries without keys, before the first of them attends.

        Args:
            attentions: To be compared with the authority, with wrappers for graphs.
            mix_of: Takes the place of one to its batch.
        """
        authority = self.authority()
        runs, expected = [], []
        for place, attention in enumerate(attentions):
            mix = mix_of(place)
            what = (mix, self.heads(len(mix) + place)[place:], len(mix), None, False)
            runs.append(self._planned(attention, self.ours, *what))
            expected.append(self._planned(authority, self.theirs, *what)())
        for ours, theirs in zip([run() for run in runs], expected, strict=True):
            assert_close(ours, theirs)

    def check_result(
        self,
        ours: torch.Tensor,
        mix: list[tuple[int, int]],
        heads: torch.Tensor,
        tree: torch.Tensor,
    ) -> None:
        """Compares what was computed of such heads under tree masks, bool [B, Q, W] on the CPU."""
        authority = self.authority()
        assert_close(ours, self._planned(authority, self.theirs, mix, heads, None, tree, True)())

    def split(self, heads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns queries, keys and values."""
        splits = (
            attention_of(self.config).num_heads,
            *[attention_of(self.config).num_kv_heads] * 2,
        )
        return torch.split_with_sizes(heads, splits, dim=1)

    def heads(self, num_rows: int, seed: int = 0) -> torch.Tensor:
        """Returns queries, keys and values side by side, as the projection leaves them."""
        config = self.config
        size = (num_rows, attention_of(config).num_heads + 2 * attention_of(config).num_kv_heads)
        generator = torch.Generator().manual_seed(num_rows + seed)
        return torch.randn(*size, attention_of(config).head_dim, generator=generator).bfloat16()

    def _planned(
        self,
        attention: Attention,
        pool: KVPool,
        mix: list[tuple[int, int]],
        heads: torch.Tensor,
        graph_size: int | None,
        tree_mask: torch.Tensor | None,
        has_keys: bool,
    ) -> Callable[[], torch.Tensor]:
        """Plans a batch, and returns what attends."""
        batch = batch_of(pool, mix, graph_size)
        batch.tree_mask = None if tree_mask is None else tree_mask.to(pool.device)
        q, k, v = self.split(heads.to(pool.device, pool.tensors[0].dtype))
        attention.init_forward_metadata_out_graph(batch, pool)

        def attend() -> torch.Tensor:
            attention.init_forward_metadata_in_graph()
            return attention.forward(q, *((k, v) if has_keys else (None, None)), 0)

        return attend


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.to(CPU, torch.float32), theirs, atol=ATOL, rtol=RTOL)


def batch_of(pool: KVPool, mix: list[tuple[int, int]], graph_size: int | None) -> ForwardBatch:
    prefixes, counts = [p for p, _ in mix], [n for _, n in mix]
    rows = list(range(len(mix)))[::-1]
    total = sum(counts)
    return kv.batch_of(pool, rows, prefixes, counts, layout=DpLayout.single(total, graph_size))
