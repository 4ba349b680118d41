"""FlashInfer's attention over the KV pool: planned on the host, then run once per layer.

    B sequences    T token rows    H query heads    N KV heads    D head width    P pages

A page is a block of the KV pool.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from executor.model.flashinfer.operators import LAYOUT, FlashInferOps, KVPages

# Bytes that a prefill wrapper takes for lengths of sequences, which other kernels than ours read.
# Source: FlashInfer 0.7.2, prefill.py, BatchPrefillWithPagedKVCacheWrapper, ``_kv_lens_buffer``.
_PREFILL_LENGTHS = 32768 * 4

# What planning copies offsets and lengths to, in wrappers of graphs.
_OFFSETS = (
    "_qo_indptr_buf",
    "_paged_kv_indptr_buf",
    "_paged_kv_last_page_len_buf",
    "_kv_lens_buffer",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedShape:
    """Sizes of grouped-query attention.

    Attributes:
        num_heads: H.
        num_kv_heads: N, a divisor of H.
        head_dim: D.
        block_size: Tokens per page.
        dtype: Type of queries, keys, values and results.
        sm_scale: What scores are multiplied by before the softmax.
        window: Keys that a query sees, with its own; None for all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    sm_scale: float
    window: int | None = None

    @property
    def window_left(self) -> int:
        """Keys that a query sees before its own, as the library counts them; -1 for all."""
        return -1 if self.window is None else self.window - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PageTable:
    """Which pages hold the keys of which sequence, and which rows are its queries.

    The three on the host are read there while planning; on a device they would make planning wait.

    Attributes:
        qo_indptr: int32 [B + 1] on the host, first query row of each sequence, then their sum.
        kv_indptr: int32 [B + 1] on the host, first entry in ``kv_indices`` of each sequence.
        last_page_len: int32 [B] on the host, keys in each sequence's last page, 1 to block_size.
        kv_indices: int32 [P] on the device, pages, sequence after sequence.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    last_page_len: torch.Tensor
    kv_indices: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskBuffers:
    """Where runs read which keys each query sees. Nothing here writes them.

    Attributes:
        bits: uint8 on the device, a bit for each query and key, as ``attention_tables.py`` lays them.
        indptr: int32 [B + 1] on the device, first byte of each sequence. To be written after
            planning, which leaves something else there.
    """

    bits: torch.Tensor
    indptr: torch.Tensor


class PageTableBuffers:
    """Where a captured graph reads its page table, all int32 on the device.

    They are written before each replay, so graphs that are planned before each of theirs can share them.

    Args:
        offsets: [4 * B + 2], of which all but the pages are parts.
        kv_indices: As many as any batch of B sequences needs.

    Attributes:
        qo_indptr: [B + 1].
        kv_indptr: [B + 1].
        last_page_len: [B].
        firsts: [B], the column of the block table with each sequence's first page.
    """

    def __init__(self, offsets: torch.Tensor, kv_indices: torch.Tensor) -> None:
        size = len(offsets) // 4
        self.offsets = offsets
        self.kv_indices = kv_indices
        parts = offsets.split_with_sizes((size + 1, size + 1, size, size))
        self.qo_indptr, self.kv_indptr, self.last_page_len, self.firsts = parts

    @staticmethod
    def num_offsets(num_sequences: int) -> int:
        """Returns how many B sequences have."""
        return 4 * num_sequences + 2


class PagedAttention:
    """One wrapper of FlashInfer's. Made by ``paged_decode`` and ``paged_prefill``.

    Attributes:
        library_bytes: What the wrapper allocates on the device by itself and keeps, besides
            the workspace that it is given.
        buffers: Where graphs read; None outside graphs.
    """

    def __init__(
        self,
        wrapper: Any,
        arguments: Callable[[PageTable], dict[str, Any]],
        *,
        enable_pdl: bool,
        library_bytes: int = 0,
        mask: MaskBuffers | None = None,
        buffers: PageTableBuffers | None = None,
    ) -> None:
        self.buffers = buffers
        self._mask = mask
        self.library_bytes = library_bytes
        self._wrapper = wrapper
        # In a graph planning would copy offsets to buffers that have them, one after another.
        self._on_host: dict[str, torch.Tensor] = {}
        if buffers is not None:
            found = {name: getattr(wrapper, name, None) for name in _OFFSETS}
            self._on_host = {
                name: torch.empty(x.shape, dtype=x.dtype)
                for name, x in found.items()
                if isinstance(x, torch.Tensor)
            }
        self._arguments = arguments
        self._enable_pdl = enable_pdl
        self._schedule = PlanSchedule(wrapper.device)

    def workspace_size(self, table: PageTable) -> tuple[int, int]:
        """Returns the bytes of float and of int workspace that planning this batch needs.

        With buffers they depend on the number of sequences, not on their lengths.
        """
        num_float, num_int = self._wrapper.workspace_size(**self._arguments(table))
        return int(num_float), int(num_int)

    def set_workspace(self, float_workspace: torch.Tensor, int_workspace: torch.Tensor) -> None:
        """Takes other workspaces, uint8 zeros on the device. Plan again before the next ``run``.

        Wrappers that never run at once may share the first, never the second.
        """
        self._wrapper.reset_workspace_buffer(
            float_workspace_buffer=float_workspace, int_workspace_buffer=int_workspace
        )

    def plan(self, table: PageTable) -> None:
        """Schedules a batch, on the host. Before each pass and each replay, never captured.

        With buffers, these have the table's offsets already, or get them before the replay.
        """
        with self._schedule.written(), _replaced(self._wrapper, self._on_host):
            self._wrapper.plan(**self._arguments(table), non_blocking=True)
        if self._mask is not None:  # which plans outside graphs replace
            self._wrapper._custom_mask_buf = self._mask.bits
            self._wrapper._mask_indptr_buf = self._mask.indptr

    def run(
        self, q: torch.Tensor, pages: KVPages, out: torch.Tensor, lse: torch.Tensor | None = None
    ) -> None:
        """Attends. The keys of this pass must be in their pages already.

        Args:
            q: [T, H, D], T the last of ``qo_indptr``; rows and heads may be strided.
            pages: Keys and values.
            out: [T, H, D], contiguous.
            lse: float32 [T, H], where the logarithm to base 2 of each softmax's sum goes; None: nowhere.
        """
        self._wrapper.run(
            q=q,
            paged_kv_cache=pages,
            out=out,
            lse=lse,
            return_lse=lse is not None,
            enable_pdl=self._enable_pdl,
        )


@contextmanager
def _replaced(wrapper: Any, attributes: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Within it, a wrapper has other tensors."""
    own = {name: getattr(wrapper, name) for name in attributes}
    for name, tensor in attributes.items():
        setattr(wrapper, name, tensor)
    try:
        yield
    finally:
        for name, tensor in own.items():
            setattr(wrapper, name, tensor)


def paged_decode(
    ops: FlashInferOps,
    shape: PagedShape,
    float_workspace: torch.Tensor,
    *,
    use_tensor_cores: bool,
    buffers: PageTableBuffers | None = None,
) -> PagedAttention:
    """Returns attention of one query row per sequence.

    Args:
        ops: The library.
        shape: Sizes.
        float_workspace: uint8 zeros on the device.
        use_tensor_cores: Whether to compute on tensor cores, which pays with many query heads per
            KV head.
        buffers: Where graphs read; None for batches of any size, outside graphs.
    """
    wrapper = ops.library.BatchDecodeWithPagedKVCacheWrapper(
        float_workspace_buffer=float_workspace,
        kv_layout=LAYOUT,
        use_cuda_graph=buffers is not None,
        use_tensor_cores=use_tensor_cores,
        paged_kv_indptr_buffer=None if buffers is None else buffers.kv_indptr,
        paged_kv_indices_buffer=None if buffers is None else buffers.kv_indices,
        paged_kv_last_page_len_buffer=None if buffers is None else buffers.last_page_len,
        backend="fa2",
    )
    arguments = partial(_decode_arguments, shape)
    return PagedAttention(wrapper, arguments, enable_pdl=ops.enable_pdl, buffers=buffers)


def paged_prefill(
    ops: FlashInferOps,
    shape: PagedShape,
    float_workspace: torch.Tensor,
    *,
    backend: str,
    buffers: PageTableBuffers | None = None,
    uniform_len: int | None = None,
    is_causal: bool = True,
    mask: MaskBuffers | None = None,
) -> PagedAttention:
    """Returns attention of the last query rows of each sequence, any number of them.

    Args:
        ops: The library.
        shape: Sizes.
        float_workspace: uint8 zeros on the device.
        backend: ``fa2``, ``fa3`` (Hopper only) or ``auto``. In graphs ``fa2``.
        buffers: Where graphs read. The first plan then fixes the most query rows.
        uniform_len: Query rows of each sequence, if every plan has as many.
        is_causal: Whether each query sees the keys up to its own; if not, a mask says what it sees,
            and the backend is ``fa2``.
        mask: Where that mask is.
    """
    wrapper = ops.library.BatchPrefillWithPagedKVCacheWrapper(
        float_workspace_buffer=float_workspace,
        kv_layout=LAYOUT,
        use_cuda_graph=buffers is not None,
        qo_indptr_buf=None if buffers is None else buffers.qo_indptr,
        paged_kv_indptr_buf=None if buffers is None else buffers.kv_indptr,
        paged_kv_indices_buf=None if buffers is None else buffers.kv_indices,
        paged_kv_last_page_len_buf=None if buffers is None else buffers.last_page_len,
        custom_mask_buf=None if mask is None else mask.bits,
        mask_indptr_buf=None if mask is None else mask.indptr,
        backend=backend,
    )
    arguments = partial(_prefill_arguments, shape, uniform_len, is_causal, mask)
    return PagedAttention(
        wrapper,
        arguments,
        enable_pdl=ops.enable_pdl,
        library_bytes=_PREFILL_LENGTHS,
        mask=mask,
        buffers=buffers,
    )


def _decode_arguments(shape: PagedShape, table: PageTable) -> dict[str, Any]:
    """What ``workspace_size`` and ``plan`` are told."""
    return {
        "indptr": table.kv_indptr,
        "indices": table.kv_indices,
        "last_page_len": table.last_page_len,
        "num_qo_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "page_size": shape.block_size,
        "pos_encoding_mode": "NONE",
        "window_left": shape.window_left,
        "logits_soft_cap": None,
        "q_data_type": shape.dtype,
        "kv_data_type": shape.dtype,
        "o_data_type": shape.dtype,
        "sm_scale": shape.sm_scale,
        "q_len_per_req": 1,
    }


def _prefill_arguments(
    shape: PagedShape,
    uniform_len: int | None,
    is_causal: bool,
    mask: MaskBuffers | None,
    table: PageTable,
) -> dict[str, Any]:
    """What ``workspace_size`` and ``plan`` are told.

    A mask is given as no bytes: planning copies none, packs none and waits for nothing.
    """
    return {
        "qo_indptr": table.qo_indptr,
        "paged_kv_indptr": table.kv_indptr,
        "paged_kv_indices": table.kv_indices,
        "paged_kv_last_page_len": table.last_page_len,
        "num_qo_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim_qk": shape.head_dim,
        "head_dim_vo": shape.head_dim,
        "page_size": shape.block_size,
        "custom_mask": None,
        "packed_custom_mask": None if mask is None else mask.bits[:0],
        "causal": is_causal,
        "pos_encoding_mode": "NONE",
        "use_fp16_qk_reduction": False,
        "window_left": shape.window_left,
        "logits_soft_cap": None,
        "q_data_type": shape.dtype,
        "kv_data_type": shape.dtype,
        "o_data_type": shape.dtype,
        "sm_scale": shape.sm_scale,
        "uniform_q_len": uniform_len,
    }


class PlanSchedule:
    """Guards the pinned memory in which planning leaves its schedule to be copied from.

    FlashInfer copies it without waiting and writes it anew at the next planning; with two steps in
    flight the first copy might not have run by then. Waits until it has, which it usually has.

    Source: FlashInfer, attention/scheduler.cuh, the cudaMemcpyAsync that ends PrefillPlanImpl.
    """

    def __init__(self, device: torch.device) -> None:
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @contextmanager
    def written(self) -> Iterator[None]:
        """Goes around one planning."""
        if self._copied is not None:
            self._copied.synchronize()
        yield
        if self._copied is not None:
            self._copied.record()
