"""Experts by FlashInfer's fused CUTLASS kernels. Dimensions as in ``layer.py``."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from executor.model.flashinfer.operators import ClampOfExperts
from executor.model.moe.layer import Dispatched, ExpertBiases, ExpertScratch, StackedMoERunner
from executor.model.spec import ActivationSpec
from executor.model.weights import KeptWeight, Weight


class CutlassWorkspace(ExpertScratch):
    """Scratch memory of the fused kernels."""

    _buffer: torch.Tensor | None = None

    def for_layer(self, w2: torch.Tensor, *, is_clamped: bool) -> torch.Tensor:
        """Returns the memory, uint8. All layers have the sizes of the first, w2 [L, D, F]."""
        if self._buffer is None:
            num_bytes = self.ops.fused_moe_workspace_size(
                self.max_num_rows, self.top_k, w2, is_clamped=is_clamped
            )
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=w2.device)
        return self._buffer


class CutlassMoERunner(StackedMoERunner):
    """Runs all experts of a rank in one call, without the host.

    The sum over a row's experts has a fixed order: the faster variant, which adds as results come,
    is not asked for.

    Args:
        w31: [L, 2F, D], **up** and gate projections of each expert, in this order.
        w2: [L, D, F], down projections.
        workspace: For passes as large as any.
        activation: Between the two.
        biases: Of both; None without.
    """

    gate_first = False

    def __init__(
        self,
        w31: Weight,
        w2: Weight,
        workspace: CutlassWorkspace,
        activation: ActivationSpec = None,
        biases: ExpertBiases | None = None,
    ) -> None:
        super().__init__(w31, w2, biases)
        self._workspace = workspace
        self._buffer = workspace.for_layer(self._w2, is_clamped=activation is not None)
        self._clamp: ClampOfExperts | None = None
        if activation is not None:
            numbers = (activation.alpha, 1.0, activation.limit)
            self._clamp = ClampOfExperts(
                *(torch.full((len(self._w2),), x, device=self._w2.device) for x in numbers)
            )

    def run(self, dispatched: Dispatched) -> torch.Tensor:
        self._workspace.check(dispatched)
        out = dispatched.place_for_results()
        self._workspace.ops.fused_moe(
            dispatched.x_RD.contiguous(),
            dispatched.topk_ids_RK,
            dispatched.topk_weights_RK,
            self._w13,
            self._w2,
            scales=self._scales,
            clamp=self._clamp,
            biases=self._biases,
            out=out,
            workspace=self._buffer,
            max_num_rows=self._workspace.max_num_rows,
        )
        return out


class KeptCutlassRunner(CutlassMoERunner):
    """The same with weights kept in FP8 or MXFP4; never run on a GPU yet.

    Rows are padded to the width of the weights, and run a workspace's worth at once.

    Args:
        As of ``CutlassMoERunner``; both weights are kept, with sides as ``KeptAs.padded`` says.
    """

    def arrange_kept(self, w13: KeptWeight, w2: KeptWeight) -> None:
        if w13.kind.per_byte == 1:
            return
        for tensors in ((w.numbers, w.scales) for w in (w13, w2)):
            laid = self._workspace.ops.interleave_mxfp4(*(x.unsqueeze(0) for x in tensors))
            for tensor, new in zip(tensors, laid, strict=True):
                tensor.copy_(new.view(tensor.shape))

    def run(self, dispatched: Dispatched) -> torch.Tensor:
        x, out = dispatched.x_RD, dispatched.place_for_results()
        padding = self._w2.shape[1] - x.shape[1]
        y = out
        if padding:
            x = F.pad(x, (0, padding))
            y = torch.empty_like(x)
        step = self._workspace.max_num_rows
        for rows in (slice(start, start + step) for start in range(0, len(x), step)):
            piece = replace(
                dispatched,
                x_RD=x[rows],
                topk_ids_RK=dispatched.topk_ids_RK[rows],
                topk_weights_RK=dispatched.topk_weights_RK[rows],
                out_RD=y[rows],
            )
            super().run(piece)
        return out if y is out else out.copy_(y[:, : out.shape[1]])
