"""The attention backend of the CPU: one call of a kernel for each layer, or plain PyTorch."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import structlog
import torch

from executor.batch.forward_batch import ForwardBatch
from executor.batch.kv_pool import KVPool, KVShape
from executor.model.cpu_kernels.library import Library, load
from executor.model.layers.attention import PLAIN, Attention, LayerOptions
from executor.model.layers.attention_torch import TorchAttention, check_tree

_LOG = structlog.stdlib.get_logger(__name__)
_WIDTH_STEP = 32  # widths that the kernels take are multiples of it
_KERNELS = {torch.bfloat16: "attention", torch.float32: "attention_float32"}


def cpu_attention(
    num_heads: int,
    shape: KVShape,
    *,
    scale: float | None = None,
    layers: Sequence[LayerOptions] = (),
) -> Attention:
    """Returns attention by a kernel where one runs, else in plain PyTorch after a line in the log.

    Args:
        num_heads: H.
        shape: Of the KV pool.
        scale, layers: As ``TorchAttention`` takes them.
    """
    keys, values = shape.parts[0], shape.value_width
    kernels = load() if keys.dtype in _KERNELS else None
    if kernels is not None:
        if not (keys.width % _WIDTH_STEP or values % _WIDTH_STEP):
            return CpuAttention(kernels, num_heads, shape, scale=scale, layers=layers)
        problem = f"heads of {keys.width}, values of {values}: need multiples of {_WIDTH_STEP}"
        _LOG.warning("attention_without_kernel", problem=problem, running="plain PyTorch")
    return TorchAttention(num_heads, shape, scale=scale, layers=layers)


class CpuAttention(TorchAttention):
    """Attention in a kernel.

    A row's bits do not depend on its batch, on chunks, or on whether it is decoded, verified or
    prefilled. Padded sequences may have fewer keys than queries, which then see none or few.

    Args:
        kernels: From ``library.load``.
        num_heads, shape, options: As ``TorchAttention`` takes them.
    """

    is_capturable = True

    def __init__(self, kernels: Library, num_heads: int, shape: KVShape, **options: Any) -> None:
        super().__init__(num_heads, shape, **options)
        self._attend_all = partial(kernels, _KERNELS[shape.parts[0].dtype])
        self._layers = (*self._layers, PLAIN)  # the last: of those behind
        # What the kernel takes of each layer, and of the batch for each group of them.
        self._of_layers = []
        for layer in self._layers:
            sinks = None if layer.sinks is None else layer.sinks.float().contiguous()
            kind = self.value_width, layer.window or 0, sinks, self.scale
            self._of_layers.append((num_heads, self.num_kv_heads, shape.parts[0].width, *kind))
        self._of_groups: dict[int, tuple[torch.Tensor | int | None, ...]] = {}

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, kv_pool: KVPool) -> None:
        if batch is self._batch and kv_pool is self._kv_pool:
            return  # a graph's: what its tensors hold is read when a layer runs
        counts, tree = batch.extend_seq_lens_cpu, batch.tree_mask
        check_tree(batch, [1] * batch.batch_size if counts is None else counts.tolist())
        self._batch, self._kv_pool = batch, kv_pool
        sizes = (
            kv_pool.block_size,
            kv_pool.max_blocks_per_row,
            0 if tree is None else tree.shape[-1],
        )
        counted = None if counts is None else torch.from_numpy(counts)
        sequences = batch.req_pool_indices, batch.seq_lens_cpu, counted
        # A draft's batch has no slots for a group of the target's that it does not read.
        for group in {kv_pool.shape.group_of(layer.window) for layer in self._layers}:
            slots = batch.slots_of(group)
            columns = (x for x in (*sequences, slots) if x is not None)
            assert all(x.dtype is torch.int64 and x.is_contiguous() for x in columns)
            of_batch = len(slots), batch.batch_size, *sizes
            self._of_groups[group] = (*of_batch, *sequences, slots, tree)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer_id: int
    ) -> torch.Tensor:
        kv_pool = self._kv_pool
        assert kv_pool is not None, "init_forward_metadata_out_graph runs before each pass"
        place = min(layer_id, len(self._layers) - 1)
        group = kv_pool.shape.group_of(self._layers[place].window)
        caches, table = kv_pool.caches[layer_id], kv_pool.tables[group]
        of_layer, of_group = self._of_layers[place], self._of_groups[group]
        num_rows, num_heads, _ = q.shape
        out = q.new_empty(num_rows, num_heads * self.value_width)
        rows = [None if x is None else _by_head(x) for x in (q, k, v)]
        assert all(x is None or x.shape[0] == of_group[0] for x in rows), "a row for each slot"
        assert all(x is None or x.dtype is caches[0].dtype for x in rows), (
            "read as such, by pointers"
        )
        strides = [0 if x is None else x.stride(0) for x in rows]
        memory = caches[0], caches[-1], table, out
        self._attend_all(*of_layer, *of_group, *rows, *strides, *memory)
        return out


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """Returns [T, heads, width] with the heads of a row side by side."""
    is_dense = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x if is_dense else x.contiguous()
