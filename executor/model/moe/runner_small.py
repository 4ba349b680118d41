"""Small experts on the CPU: every row through every expert, in two products.

A product of a few rows with a small weight costs its call, about ten microseconds; so does all that
sorts rows by expert. Here a layer is two calls, with the experts' weights side by side, and experts
that a row did not choose count nothing:

    x [R, D] ──▶ gates and ups of all [R, 2·L·F] ──▶ silu, times routing weights [R, L·F] ──▶ [R, D]

Measured on one core with AVX-512 (``tests/bench/executor/bench_moe_runners.py``), against an expert at a
time: with D = F = 128, 8 experts and 2 per row in bfloat16, 1 row takes 0.8 of the time, 8 rows
0.25, 32 rows 0.4, 128 rows 0.9 and 512 rows 1.6. Dimensions as in ``layer.py``.
"""

import torch
import torch.nn.functional as F

from executor.model.layers.linear import Linear
from executor.model.moe.layer import Dispatched, MoERunner

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


class SmallExpertsRunner:
    """Runs all experts on all rows while these are few, and hands more rows on.

    Args:
        w13: D to 2·L·F: gates of all experts, then their up projections.
        w2: L·F to D: their down projections.
        num_experts: L.
        one_by_one: Runs more rows.
    """

    def __init__(self, w13: Linear, w2: Linear, num_experts: int, one_by_one: MoERunner) -> None:
        self._w13 = w13
        self._w2 = w2
        self._num_experts = num_experts
        self._one_by_one = one_by_one
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
        hidden_RLF = F.silu(gate).mul_(up).view(num_rows, num_experts, -1)
        # Filled as well as multiplied: what an expert that nobody chose computes may be infinite.
        hidden_RLF.mul_(weights_RL1).masked_fill_(weights_RL1 == 0, 0)
        return self._w2(hidden_RLF.flatten(1))
