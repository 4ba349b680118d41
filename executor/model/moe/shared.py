"""Shared expert: a gated MLP that every token goes through beside its routed experts.

Each executor has all of it and runs it on the rows that it holds between attention calls, as those that
it dispatches: no row moves for it, however dense MLPs and experts are split. T and D as in
``layer.py``, F its own width.
"""

from functools import partial

import torch

from executor.model.cpu_kernels.library import Library
from executor.model.layers.linear import Linear
from executor.model.layers.linear_kept import KeptLinears
from executor.model.layers.operators import Operators
from executor.model.spec import SharedSpec
from executor.model.weights import WeightGroup


class SharedExpert:
    """y = down(silu(gate(x)) * up(x)), and where it is gated, times sigmoid(x · w).

    Args:
        spec: Its sizes.
        hidden_size: D.
        operators: Of the model.
        library: Kernels of its products; None for plain PyTorch.
        kept: Keeps its weights quantised; None dequantises.
    """

    def __init__(
        self,
        spec: SharedSpec,
        hidden_size: int,
        operators: Operators,
        library: Library | None,
        kept: KeptLinears | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        linear = partial(Linear, dtype=dtype, device=device, library=library, kept=kept)
        self._operators = operators
        self._size = size = spec.intermediate_size
        self._gate_up = linear(hidden_size, 2 * size, parts=(size,))
        self._down = linear(spec.intermediate_size, hidden_size)
        self._scale: Linear | None = None
        if spec.gated:
            self._scale = Linear(hidden_size, 1, dtype=dtype, device=device, library=library)

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Returns [T, D], in memory of its own."""
        y_TD = self._down(self._operators.silu_and_mul(self._gate_up(x_TD)))
        return y_TD if self._scale is None else y_TD * self._scale(x_TD).sigmoid()

    def weight_groups(self, prefix: str, scale: str) -> list[WeightGroup]:
        """Returns what the checkpoint must hold.

        Args:
            prefix: Of its projections' names, with a dot at its end.
            scale: Name of the weight [1, D] of its scale, if it is gated.
        """
        gate, up = self._gate_up.rows(self._size, self._size)
        targets = {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        down = {f"{prefix}down_proj.weight": self._down.filled}
        groups = [WeightGroup(targets, self._gate_up.finish), WeightGroup(down, self._down.finish)]
        if self._scale is not None:
            groups.append(WeightGroup({scale: self._scale.weight}, self._scale.finish))
        return groups
