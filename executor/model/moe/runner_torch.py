"""Experts in plain PyTorch: runs anywhere, and is what every kernel must match.

One expert at a time, because oneDNN's packed weights outweigh what a call per expert costs: PyTorch's
grouped product, which reads plain weights in one call, takes 1.1 to 2.1 times as long with experts of
D = 1024 and F = 512, at 1 to 512 rows, and batched products of padded rows 1.2 to 13 times
(``tests/bench/executor/bench_moe_runners.py``). Small experts are another matter: ``runner_small.py``.

Dimensions as in ``layer.py``.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from executor.model.layers.linear import Linear
from executor.model.layers.workers import WorkerPool
from executor.model.moe.layer import Dispatched

_EXPERT_COST = 8  # reading an expert's weights from memory takes as long as computing 8 rows


class TorchMoERunner:
    """Sorts rows by expert, runs the experts, and unsorts. Workers share the experts.

    The sum over a row's experts has a fixed order, so a row's result does not change from run
    to run.

    Args:
        w13: Gate and up projections of each expert, stacked, D to 2F.
        w2: Down projection of each expert, F to D.
        workers: Run the experts; None leaves them to the caller's thread.
    """

    def __init__(
        self, w13: Sequence[Linear], w2: Sequence[Linear], workers: WorkerPool | None = None
    ) -> None:
        self._w13 = w13
        self._w2 = w2
        self._workers = workers or WorkerPool(1)

    def run(self, dispatched: Dispatched) -> torch.Tensor:
        if dispatched.x_RD.shape[0] == 1:
            return self._run_one_row(dispatched)
        return self._run_sorted(dispatched)

    def _run_one_row(self, dispatched: Dispatched) -> torch.Tensor:
        """A single row needs no sorting: its experts run in the order of their weights."""
        x_1D, weights_K1 = dispatched.x_RD, dispatched.topk_weights_RK.t()
        (experts,) = dispatched.topk_ids_RK.tolist()
        chosen = [k for k, expert in enumerate(experts) if expert < len(self._w2)]
        if not chosen:
            return torch.zeros_like(x_1D)
        if len(chosen) < len(experts):
            weights_K1 = weights_K1[chosen]
            experts = [experts[k] for k in chosen]
        y_PD = self._experts(experts, [x_1D] * len(experts))
        return y_PD.mul_(weights_K1).sum(dim=0, keepdim=True)

    def _run_sorted(self, dispatched: Dispatched) -> torch.Tensor:
        x_RD, ids_RK = dispatched.x_RD, dispatched.topk_ids_RK
        num_rows, top_k = ids_RK.shape
        ids = ids_RK.flatten()
        counts = torch.bincount(ids, minlength=len(self._w2) + 1).tolist()
        order = torch.argsort(ids, stable=True)
        num_pairs = len(ids) - counts[-1]  # the rest are elsewhere, and sort last
        if num_pairs == 0:
            return x_RD.new_zeros(x_RD.shape)
        used = [expert for expert, count in enumerate(counts[:-1]) if count]
        x_PD = x_RD.index_select(0, order[:num_pairs] // top_k)
        y_PD = self._experts(
            used, torch.split_with_sizes(x_PD, [counts[expert] for expert in used])
        )
        if counts[-1]:
            y_PD = torch.cat((y_PD, y_PD.new_zeros(counts[-1], y_PD.shape[1])))
        unsorted = torch.empty_like(order)
        unsorted[order] = torch.arange(len(order), device=order.device)
        y_RKD = y_PD.index_select(0, unsorted).view(num_rows, top_k, -1)
        weights_R1K = dispatched.topk_weights_RK.to(x_RD.dtype).unsqueeze(1)
        return torch.bmm(weights_R1K, y_RKD).squeeze(1)

    def _experts(self, experts: Sequence[int], xs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns each expert's rows of results, [P, D]."""
        if not self._workers.is_sharing:
            return self._share(experts, xs)
        shares = self._workers.shares([_EXPERT_COST + len(x) for x in xs])
        pieces = [partial(self._share, experts[share], xs[share]) for share in shares]
        ys = self._workers.run(pieces)
        return ys[0] if len(ys) == 1 else torch.cat(ys)

    def _share(self, experts: Sequence[int], xs: Sequence[torch.Tensor]) -> torch.Tensor:
        """What one thread runs of ``_experts``. One activation for all: small operators cost."""
        hidden = torch.cat([self._w13[expert](x) for expert, x in zip(experts, xs, strict=True)])
        gate, up = hidden.chunk(2, dim=-1)
        activated = torch.split_with_sizes(F.silu(gate).mul_(up), [len(x) for x in xs])
        return torch.cat([self._w2[e](x) for e, x in zip(experts, activated, strict=True)])
