"""Experts in plain PyTorch: one after another, and small ones all at once.

One after another, because oneDNN's packed weights outweigh what a call per expert costs: PyTorch's
grouped product, which reads plain weights in one call, takes 1.1 to 2.1 times as long with experts of
D = 1024 and F = 512, at 1 to 512 rows, and batched products of padded rows 1.2 to 13 times
(``tests/bench/executor/bench_moe_runners.py``). This is what every kernel must match.

A product of a few rows with a small weight costs its call, about ten microseconds; so does all that
sorts rows by expert. So where experts are small and rows few, a layer is two calls, with the
experts' weights side by side, and experts that a row did not choose count nothing:

    x [R, D] ──▶ gates and ups of all [R, 2·L·F] ──▶ silu, times routing weights [R, L·F] ──▶ [R, D]

Measured on one core with AVX-512, against one after another: with D = F = 128, 8 experts and 2 per
row in bfloat16, 1 row takes 0.8 of the time, 8 rows 0.25, 32 rows 0.4, 128 rows 0.9 and 512 rows 1.6.
Dimensions as in ``layer.py``.
"""

from collections.abc import Sequence
from functools import partial

import torch

from executor.model.layers.linear import Linear, WorkerPool
from executor.model.moe.activation import Activation, swiglu
from executor.model.moe.layer import Dispatched, MoERunner

_EXPERT_COST = 8  # reading an expert's weights from memory takes as long as computing 8 rows


class TorchMoERunner(MoERunner):
    """Sorts rows by expert, runs the experts, and unsorts. Workers share the experts.

    The sum over a row's experts has a fixed order, so a row's result does not change from run
    to run.

    Args:
        w13: Gate and up projections of each expert, stacked, D to 2F. May have biases, as w2 may.
        w2: Down projection of each expert, F to D.
        workers: Run the experts; None leaves them to the caller's thread.
        activation: Between the two.
    """

    def __init__(
        self,
        w13: Sequence[Linear],
        w2: Sequence[Linear],
        workers: WorkerPool | None = None,
        activation: Activation = swiglu,
    ) -> None:
        self._w13 = w13
        self._w2 = w2
        self._activation = activation
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
        activated = torch.split_with_sizes(self._activation(gate, up), [len(x) for x in xs])
        return torch.cat([self._w2[e](x) for e, x in zip(experts, activated, strict=True)])


_KIB, _MIB = 1 << 10, 1 << 20

# Up to here it was the faster way in both types, for 4 to 32 experts of D * F from 16 Ki to 128 Ki.
# How many rows are few does not depend on the number of experts: both the calls that this saves and
# the products that it computes in vain grow with it.
_MAX_LAYER_BYTES = 2 * _MIB  # L * D * F * itemsize; a third of what the layer's weights take
_MAX_ONE_ROW_BYTES = 512 * _KIB  # the same for a single row, which needs but K of the experts
_MAX_ROWS_BYTES = 4 * _MIB  # R * D * F * itemsize


def are_small(num_experts: int, hidden_size: int, intermediate_size: int, itemsize: int) -> bool:
    """Returns whether experts of these sizes are worth a second copy, side by side."""
    return num_experts * hidden_size * intermediate_size * itemsize <= _MAX_LAYER_BYTES


class SmallExpertsRunner(MoERunner):
    """Runs all experts on all rows while these are few, and hands more rows on.

    Args:
        w13: D to 2·L·F: gates of all experts, then their up projections. May have a bias.
        w2: L·F to D: their down projections.
        num_experts: L.
        one_by_one: Runs more rows.
        activation: Between the two.
        down_bias: [L, D], of the down projections; None without.
    """

    def __init__(
        self,
        w13: Linear,
        w2: Linear,
        num_experts: int,
        one_by_one: MoERunner,
        activation: Activation = swiglu,
        down_bias: torch.Tensor | None = None,
    ) -> None:
        self._w13 = w13
        self._w2 = w2
        self._num_experts = num_experts
        self._one_by_one = one_by_one
        self._activation = activation
        self._down_bias = down_bias
        layer_bytes = w2.weight.numel() * w2.weight.itemsize
        self._min_rows = 1 if layer_bytes <= _MAX_ONE_ROW_BYTES else 2
        self._max_rows = _MAX_ROWS_BYTES * num_experts // layer_bytes

    def run(self, dispatched: Dispatched) -> torch.Tensor:
        if self.takes(len(dispatched.x_RD)):
            return self.run_all(dispatched)
        return self._one_by_one.run(dispatched)

    def takes(self, num_rows: int) -> bool:
        """Returns whether so many rows are few."""
        return self._min_rows <= num_rows <= self._max_rows

    def run_all(self, dispatched: Dispatched) -> torch.Tensor:
        """Runs all experts on all rows, however many these are."""
        x_RD, weights_RK = dispatched.x_RD, dispatched.topk_weights_RK
        num_rows, num_experts = len(x_RD), self._num_experts
        weights = weights_RK.new_zeros(num_rows, num_experts + 1)  # the last: experts elsewhere
        weights.scatter_add_(1, dispatched.topk_ids_RK.long(), weights_RK)
        weights_RL1 = weights[:, :num_experts].to(x_RD.dtype).unsqueeze(-1)
        gate, up = self._w13(x_RD).chunk(2, dim=-1)
        hidden_RLF = self._activation(gate, up).view(num_rows, num_experts, -1)
        # Filled as well as multiplied: what an expert that nobody chose computes may be infinite.
        hidden_RLF.mul_(weights_RL1).masked_fill_(weights_RL1 == 0, 0)
        y_RD = self._w2(hidden_RLF.flatten(1))
        return (
            y_RD if self._down_bias is None else y_RD.addmm_(weights_RL1[..., 0], self._down_bias)
        )
