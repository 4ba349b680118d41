"""Experts by FlashInfer's fused CUTLASS kernels. Dimensions as in ``layer.py``."""

from typing import ClassVar

import torch

from executor.model.flashinfer.operators import FlashInferOps
from executor.model.moe.layer import Dispatched
from executor.model.moe.stacked import check_stacked


class CutlassWorkspace:
    """Scratch memory of the fused kernels. All layers share one, as they never run at once.

    Args:
        ops: The library.
        max_num_rows: R at most, all passes and captures considered, from the token budget: every
            executor's rows where they are all-gathered, what an EP rank may send times the EP ranks
            where an all-to-all brings them.
        top_k: K.
        w2: [L, D, F] of any layer, for sizes, dtype and device.
    """

    def __init__(
        self, ops: FlashInferOps, *, max_num_rows: int, top_k: int, w2: torch.Tensor
    ) -> None:
        self.max_num_rows = max_num_rows
        self.top_k = top_k
        num_bytes = ops.fused_moe_workspace_size(max_num_rows, top_k, w2)
        self.buffer = torch.empty(num_bytes, dtype=torch.uint8, device=w2.device)


class CutlassMoERunner:
    """Runs all experts of a rank in one call, on the device alone.

    The sum over a row's experts has a fixed order: the faster variant, which adds as results come,
    is not asked for.

    Args:
        ops: The library.
        w31: [L, 2F, D], **up** and gate projections of each expert, in this order.
        w2: [L, D, F], down projections.
        workspace: For passes as large as any.

    Raises:
        ValueError: The weights do not fit one another.
    """

    gate_first: ClassVar[bool] = False  # how w31 lies

    def __init__(
        self,
        ops: FlashInferOps,
        w31: torch.Tensor,
        w2: torch.Tensor,
        workspace: CutlassWorkspace,
    ) -> None:
        check_stacked("w31", w31, w2)
        self._ops = ops
        self._w31 = w31
        self._w2 = w2
        self._workspace = workspace

    def run(self, dispatched: Dispatched) -> torch.Tensor:
        num_rows, top_k = dispatched.topk_ids_RK.shape
        workspace = self._workspace
        assert top_k == workspace.top_k, f"{top_k} experts; the workspace is for {workspace.top_k}"
        assert num_rows <= workspace.max_num_rows, (
            f"{num_rows} rows; the workspace is for {workspace.max_num_rows}"
        )
        out = dispatched.place_for_results()
        self._ops.fused_moe(
            dispatched.x_RD.contiguous(),
            dispatched.topk_ids_RK,
            dispatched.topk_weights_RK,
            self._w31,
            self._w2,
            out=out,
            workspace=workspace.buffer,
            max_num_rows=workspace.max_num_rows,
        )
        return out
