"""Experts in plain PyTorch: runs anywhere, and is what every kernel must match.

Dimensions as in ``layer.py``.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from executor.layers.linear import Linear
from executor.moe.layer import Dispatched


class TorchMoERunner:
    """Sorts rows by expert, runs one expert after another, and unsorts.

    The sum over a row's experts has a fixed order, so a row's result does not change from run
    to run.

    Args:
        w13: Gate and up projections of each expert, stacked, D to 2F.
        w2: Down projection of each expert, F to D.
    """

    def __init__(self, w13: Sequence[Linear], w2: Sequence[Linear]) -> None:
        self._w13 = w13
        self._w2 = w2

    def run(self, dispatched: Dispatched) -> torch.Tensor:
        if dispatched.x_RD.shape[0] == 1:
            return self._run_one_row(dispatched)
        return self._run_sorted(dispatched)

    def _run_one_row(self, dispatched: Dispatched) -> torch.Tensor:
        """A single row needs no sorting: its experts run in the order of their weights."""
        x_1D = dispatched.x_RD
        y_1D = torch.zeros_like(x_1D)
        ids = dispatched.topk_ids_RK[0].tolist()
        weights = dispatched.topk_weights_RK[0].tolist()
        for expert, weight in zip(ids, weights, strict=True):
            if expert < len(self._w2):
                y_1D.add_(self._expert(expert, x_1D), alpha=weight)
        return y_1D

    def _run_sorted(self, dispatched: Dispatched) -> torch.Tensor:
        x_RD, ids_RK = dispatched.x_RD, dispatched.topk_ids_RK
        num_rows, top_k = ids_RK.shape
        ids = ids_RK.flatten()
        counts = torch.bincount(ids, minlength=len(self._w2) + 1).tolist()
        order = torch.argsort(ids, stable=True)
        num_pairs = len(ids) - counts[-1]  # the rest are elsewhere, and sort last
        if num_pairs == 0:
            return x_RD.new_zeros(x_RD.shape)
        x_PD = x_RD.index_select(0, order[:num_pairs] // top_k)
        outputs, start = [], 0
        for expert, count in enumerate(counts[:-1]):
            if count:
                outputs.append(self._expert(expert, x_PD[start : start + count]))
                start += count
        if counts[-1]:
            outputs.append(x_RD.new_zeros(counts[-1], x_RD.shape[1]))
        unsorted = torch.empty_like(order)
        unsorted[order] = torch.arange(len(order), device=order.device)
        y_RKD = torch.cat(outputs).index_select(0, unsorted).view(num_rows, top_k, -1)
        weights_R1K = dispatched.topk_weights_RK.to(x_RD.dtype).unsqueeze(1)
        return torch.bmm(weights_R1K, y_RKD).squeeze(1)

    def _expert(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._w13[expert](x).chunk(2, dim=-1)
        return self._w2[expert](F.silu(gate).mul_(up))
