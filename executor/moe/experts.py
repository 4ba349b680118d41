"""The weights of one layer's experts on one rank, as the device that runs them wants them.

Dimensions as in ``layer.py``.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from executor.layers.linear import Linear
from executor.layers.workers import WorkerPool
from executor.moe.layer import MoERunner
from executor.moe.runner_torch import TorchMoERunner
from executor.weights import WeightGroup

NewRunner = Callable[[torch.Tensor, torch.Tensor], MoERunner]


class Experts(Protocol):
    """Experts that the loader fills and a layer runs."""

    @property
    def runner(self) -> MoERunner:
        """Runs them, once all weight groups are filled."""
        ...

    def weight_groups(self, prefix: str) -> list[WeightGroup]:
        """Returns what the checkpoint must hold, under ``{prefix}{expert}.``."""
        ...


class PackedExperts:
    """Each expert's products by themselves, packed for the CPU.

    Args:
        experts: This rank's, by number.
        hidden_size: D.
        intermediate_size: F.
        workers: Share the experts of a step.
    """

    def __init__(
        self,
        experts: range,
        hidden_size: int,
        intermediate_size: int,
        workers: WorkerPool,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def linears(in_features: int, out_features: int) -> list[Linear]:
            return [Linear(in_features, out_features, dtype=dtype, device=device) for _ in experts]

        self._experts = experts
        self._w13 = linears(hidden_size, 2 * intermediate_size)
        self._w2 = linears(intermediate_size, hidden_size)
        self.runner = TorchMoERunner(self._w13, self._w2, workers)

    def weight_groups(self, prefix: str) -> list[WeightGroup]:
        groups = []
        for expert, w13, w2 in zip(self._experts, self._w13, self._w2, strict=True):
            gate, up = w13.weight.chunk(2)
            names = _names(prefix, expert)
            groups.append(WeightGroup({names.gate: gate, names.up: up}, w13.finish))
            groups.append(WeightGroup({names.down: w2.weight}, w2.finish))
        return groups


class StackedExperts:
    """All experts' weights in two tensors, for kernels that run all experts at once.

    Args:
        experts: This rank's, by number.
        hidden_size: D.
        intermediate_size: F.
        new_runner: Makes the runner of w13 [L, 2F, D] and w2 [L, D, F].
        gate_first: Whether gate or up comes first in w13.
    """

    def __init__(
        self,
        experts: range,
        hidden_size: int,
        intermediate_size: int,
        new_runner: NewRunner,
        *,
        gate_first: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._experts = experts
        self._gate_first = gate_first
        count = len(experts)
        w13_size = (count, 2 * intermediate_size, hidden_size)
        self._w13 = torch.empty(w13_size, dtype=dtype, device=device)
        self._w2 = torch.empty(count, hidden_size, intermediate_size, dtype=dtype, device=device)
        self.runner = new_runner(self._w13, self._w2)

    def weight_groups(self, prefix: str) -> list[WeightGroup]:
        groups = []
        for expert, w13, w2 in zip(self._experts, self._w13, self._w2, strict=True):
            first, second = w13.chunk(2)
            gate, up = (first, second) if self._gate_first else (second, first)
            names = _names(prefix, expert)
            groups.append(WeightGroup({names.gate: gate, names.up: up, names.down: w2}))
        return groups


class _Names:
    """What an expert's tensors are called in the checkpoint."""

    def __init__(self, prefix: str) -> None:
        self.gate, self.up, self.down = (
            f"{prefix}{name}_proj.weight" for name in ("gate", "up", "down")
        )


def _names(prefix: str, expert: int) -> _Names:
    return _Names(f"{prefix}{expert}.")
