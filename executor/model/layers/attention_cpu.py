"""The attention backend of the CPU: one call of a kernel for each layer, or plain PyTorch."""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial

import structlog
import torch

from executor.batch.forward_batch import ForwardBatch
from executor.batch.kv_pool import KVPool, KVShape
from executor.model.cpu_kernels.attention import Batch, Layer, attention, misfit
from executor.model.cpu_kernels.library import load
from executor.model.layers.attention import PLAIN, Attention, LayerOptions
from executor.model.layers.attention_torch import TorchAttention, check_tree

_LOG = structlog.stdlib.get_logger(__name__)


def cpu_attention(
    num_heads: int,
    shape: KVShape,
    *,
    scale: float | None = None,
    layers: Sequence[LayerOptions] = (),
) -> Attention:
    """Returns attention by the kernel where that runs, else in plain PyTorch after a line in the log.

    Args:
        num_heads: H.
        shape: Of the KV pool.
        scale, layers: As ``TorchAttention`` takes them.
    """
    keys = shape.parts[0]
    kernels = load() if keys.dtype is torch.bfloat16 else None
    new: Callable[..., Attention] = TorchAttention
    if kernels is not None:
        problem = misfit(keys.width, shape.value_width)
        if problem is None:
            new = partial(CpuAttention, kernels)
        else:
            _LOG.warning("attention_without_kernel", problem=problem, running="plain PyTorch")
    return new(
        num_heads,
        keys.num_heads,
        keys.width,
        scale=scale,
        latent_dim=shape.latent_dim,
        layers=layers,
    )


class CpuAttention:
    """What ``TorchAttention`` does, whose arguments it takes, in a kernel.

    A row's bits do not depend on its batch, on chunks, or on whether it is decoded, verified or
    prefilled.

    Args:
        kernels: From ``library.load``.
    """

    is_capturable = True

    def __init__(
        self,
        kernels: ctypes.CDLL,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        latent_dim: int | None = None,
        layers: Sequence[LayerOptions] = (),
    ) -> None:
        self._kernels = kernels
        self._windows = [layer.window for layer in (*layers, PLAIN)]  # the last: of those behind
        self._layers = [
            Layer.of(
                num_heads,
                num_kv_heads,
                head_dim,
                latent_dim or head_dim,
                scale=head_dim**-0.5 if scale is None else scale,
                window=layer.window,
                sinks=layer.sinks,
            )
            for layer in (*layers, PLAIN)
        ]
        self._planned: ForwardBatch | None = None
        self._kv_pool: KVPool | None = None
        self._batches: dict[int, Batch] = {}  # by the group of layers

    def init_forward_metadata_in_graph(self) -> None:
        """Nothing: the tree mask is read when a layer runs."""

    def on_after_cuda_graph_warmup(self) -> None:
        """Nothing: metadata stays as planned."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, kv_pool: KVPool) -> None:
        if batch is self._planned and kv_pool is self._kv_pool:
            return  # a graph's: what its tensors hold is read when a layer runs
        counts = batch.extend_seq_lens_cpu
        check_tree(batch, [1] * batch.batch_size if counts is None else counts.tolist())
        self._planned, self._kv_pool = batch, kv_pool
        # A draft's batch has no slots for a group of the target's that it does not read.
        groups = set(map(kv_pool.shape.group_of, self._windows))
        self._batches = {
            group: Batch.of(
                table_rows=batch.req_pool_indices,
                lengths=batch.seq_lens_cpu,
                counts=None if counts is None else torch.from_numpy(counts),
                slots=batch.slots_of(group),
                block_size=kv_pool.block_size,
                columns=kv_pool.max_blocks_per_row,
                tree_mask=batch.tree_mask,
            )
            for group in groups
        }

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer_id: int
    ) -> torch.Tensor:
        kv_pool = self._kv_pool
        assert kv_pool is not None, "init_forward_metadata_out_graph runs before each pass"
        place = min(layer_id, len(self._layers) - 1)
        group = kv_pool.shape.group_of(self._windows[place])
        caches = kv_pool.caches[layer_id]
        return attention(
            self._kernels,
            self._layers[place],
            self._batches[group],
            q,
            k,
            v,
            caches[0],
            caches[-1],
            kv_pool.tables[group],
        )
