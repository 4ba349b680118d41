"""FlashInfer's latent attention (MLA) over the KV pool: one latent for all heads, values its columns.

    B sequences    T token rows    H query heads    C width of the values    R of the turned key

Planning refuses what the kernels cannot run by the lengths of a batch: heads that do not divide a tile of
64 or 128 rows drop a key of some lengths, and there is room for 16,384 pieces of work. Heads are
therefore padded to a power of two. What planning might refuse is refused at start.

Source: FlashInfer 0.7.2, mla/_batch_mla/_backends/_fa_common.py, _validate_fa_plan_workload.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from executor.model.flashinfer.operators import FlashInferOps
from executor.model.flashinfer.paged import PageTable, PageTableBuffers, PlanSchedule

MAX_WORK_ITEMS = 16384
_TILE_ROWS, _MAX_HEADS = 128, 128
_LIBRARY_BYTES = 8 << 20  # of each wrapper, for its plans; as many on the host


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentShape:
    """Sizes of latent attention.

    Attributes:
        num_heads: H.
        latent_dim: C.
        rope_dim: R.
        block_size: Tokens per page.
        dtype: Type of queries, latents and results.
        sm_scale: What scores are multiplied by before the softmax.

    Raises:
        ValueError: There are more heads than the kernels take.
    """

    num_heads: int
    latent_dim: int
    rope_dim: int
    block_size: int
    dtype: torch.dtype
    sm_scale: float

    def __post_init__(self) -> None:
        if self.num_heads > _MAX_HEADS:
            raise ValueError(
                f"{self.num_heads} heads of latent attention on an executor: FlashInfer's kernels "
                f"take {_MAX_HEADS}; raise attn_tp_size"
            )

    @property
    def padded_heads(self) -> int:
        """The next power of two, which divides every tile."""
        return 1 << (self.num_heads - 1).bit_length()

    def check_widths(self) -> None:
        """Refuses widths for which the library has no kernel.

        Raises:
            ValueError: Says which it has.
        """
        if self.latent_dim % 128 or self.rope_dim % 64:
            raise ValueError(
                f"kv_lora_rank={self.latent_dim} and qk_rope_head_dim={self.rope_dim}: FlashInfer's "
                f"latent attention takes multiples of 128 and of 64; run this model with device=cpu"
            )

    def check_rows(self, max_num_tokens: int, max_num_seqs: int, num_clusters: int) -> None:
        """Refuses passes that planning might refuse.

        Args:
            max_num_tokens: Token rows of the largest pass.
            max_num_seqs: Sequences of the largest pass.
            num_clusters: Processors of the device, each of which may begin a piece within a sequence.

        Raises:
            ValueError: They may need more work items than there is room for. Says what fits.
        """
        room = (MAX_WORK_ITEMS - num_clusters - 2 * max_num_seqs) * _TILE_ROWS
        most = max(room // self.padded_heads, 0)
        if max_num_tokens > most:
            raise ValueError(
                f"max_num_batched_tokens={max_num_tokens}: FlashInfer's latent attention runs up to "
                f"{most} rows of {self.num_heads} heads in a pass of {max_num_seqs} sequences; use "
                f"at most {most}"
            )


class PagedLatent:
    """One wrapper of FlashInfer's, for any number of query rows of each sequence.

    Args:
        ops: The library.
        shape: Sizes.
        float_workspace: uint8 zeros on the device, which wrappers that never run at once may share.
        backend: ``fa2``, ``fa3`` (Hopper only) or ``auto``.
        buffers: Where a graph reads its page table; None for batches of any size, outside graphs.
            ``last_page_len`` holds the keys of each sequence.

    Attributes:
        library_bytes: What the wrapper allocates on the device by itself and keeps.
        buffers: Where graphs read; None outside graphs.
    """

    def __init__(
        self,
        ops: FlashInferOps,
        shape: LatentShape,
        float_workspace: torch.Tensor,
        *,
        backend: str = "auto",
        buffers: PageTableBuffers | None = None,
    ) -> None:
        self.library_bytes = _LIBRARY_BYTES
        self.buffers = buffers
        self._mla: Any = ops.library.mla
        # True is refused for kernels that have none, those of Hopper; None is as they have it.
        self._enable_pdl = None if ops.enable_pdl else False
        self._shape = shape
        self._wrapper = self._mla.BatchMLAPagedAttentionWrapper(
            float_workspace_buffer=float_workspace,
            use_cuda_graph=buffers is not None,
            qo_indptr=None if buffers is None else buffers.qo_indptr,
            kv_indptr=None if buffers is None else buffers.kv_indptr,
            kv_indices=None if buffers is None else buffers.kv_indices,
            kv_len_arr=None if buffers is None else buffers.last_page_len,
            backend=backend,
        )
        self._schedule = PlanSchedule(float_workspace.device)

    def workspace_size(self, table: PageTable) -> tuple[int, int]:
        """Returns no bytes: the wrapper does not say, and has its own for plans."""
        return 0, 0

    def set_workspace(self, float_workspace: torch.Tensor, int_workspace: torch.Tensor) -> None:
        """Leaves the wrapper with those that it was made with: it takes no others."""

    def plan(self, table: PageTable) -> None:
        """Schedules a batch, on the host. Before each pass and each replay, never captured.

        With buffers, these have the table's offsets already, or get them before the replay.
        """
        shape, num_pages = self._shape, table.kv_indptr.diff()
        num_keys = ((num_pages - 1) * shape.block_size + table.last_page_len).to(torch.int32)
        is_causal = int(table.qo_indptr[-1]) > len(num_keys)
        with self._schedule.written():
            if self.buffers is not None and self._plan_again(table, num_keys, is_causal):
                return
            self._wrapper.plan(
                metadata=self._mla.MLAPlanMetadata.csr(
                    qo_indptr=table.qo_indptr,
                    kv_indptr=table.kv_indptr,
                    kv_indices=table.kv_indices,
                    kv_len_arr=num_keys,
                ),
                num_heads=shape.padded_heads,
                head_dim_ckv=shape.latent_dim,
                head_dim_kpe=shape.rope_dim,
                page_size=shape.block_size,
                causal=is_causal,
                sm_scale=shape.sm_scale,
                q_data_type=shape.dtype,
                kv_data_type=shape.dtype,
                query_layout="packed",
                kv_cache_layout="packed",
                lse_mode="none",
                output_dtype=shape.dtype,
                enable_pdl=self._enable_pdl,
            )

    def _plan_again(self, table: PageTable, num_keys: torch.Tensor, is_causal: bool) -> bool:
        """Schedules where the first planning did. Returns whether it could.

        The library's planning makes a new plan beside the old one and copies both about, 14 launches.
        """
        planned = getattr(self._wrapper, "_planned_backend", None)
        module = getattr(planned, "_cached_module", None)
        schedule = getattr(module, "plan_with_staged_workspace_bytes", None)
        if planned is None or schedule is None:
            return False
        planned._plan_info, planned._staged_int_workspace_bytes = schedule(
            planned._float_workspace_buffer,
            planned._int_workspace_buffer,
            planned._pin_memory_int_workspace_buffer,
            table.qo_indptr,
            table.kv_indptr,
            num_keys,
            self._shape.padded_heads,
            self._shape.latent_dim,
            is_causal,
        )
        return True

    def run(self, q: torch.Tensor, pages: torch.Tensor, out: torch.Tensor) -> None:
        """Attends. The latents of this pass must be in their pages already.

        Args:
            q: [T, H, C + R], T the last of ``qo_indptr``.
            pages: [blocks, block_size, C + R].
            out: [T, H, C], contiguous.
        """
        padding = self._shape.padded_heads - self._shape.num_heads
        if not padding:
            self._wrapper.run(query=q, kv_cache=pages, out=out, return_lse=False)
            return
        padded = out.new_empty(len(out), self._shape.padded_heads, out.shape[2])
        q = F.pad(q, (0, 0, 0, padding))
        self._wrapper.run(query=q, kv_cache=pages, out=padded, return_lse=False)
        out.copy_(padded[:, : self._shape.num_heads])
