"""Expert weights of one layer on one executor, as the device that runs them reads them.

Executors that hold the same experts (``moe_tp_size`` of them) have a share of the hidden columns of
each: rows of gate and up, columns of down. What they compute adds up to the experts' results, which
is what ``combine`` does. Dimensions as in ``layer.py``; F is what this executor holds of an expert.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from executor.model.layers.linear import Linear, WorkerPool
from executor.model.moe.layer import MoERunner, StackedMoERunner
from executor.model.moe.runner_torch import SmallExpertsRunner, TorchMoERunner, are_small
from executor.model.weights import Part, WeightGroup
from executor.parallel.layout import Topology, share_of

# Takes w13 [L, 2F, D], w2 [L, D, F], and an activation or scratch memory.
NewRunner = Callable[[torch.Tensor, torch.Tensor, Any], StackedMoERunner]


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """What one executor holds of a layer's experts.

    Attributes:
        experts: Their numbers.
        columns: Which hidden columns it holds of each.
        intermediate_size: All hidden columns of an expert.
    """

    experts: range
    columns: range
    intermediate_size: int

    @classmethod
    def of(cls, topology: Topology, num_experts: int, intermediate_size: int) -> "ExpertShare":
        """Returns the share of one executor.

        Args:
            topology: Its place in the group.
            num_experts: Of the layer, on all executors.
            intermediate_size: Hidden columns of a whole expert.

        Raises:
            ValueError: Experts or columns do not divide. Says which sizes there could be.
        """
        columns = share_of(
            "moe_intermediate_size", intermediate_size, topology.moe_tp_rank, topology.moe_tp_size
        )
        return cls(topology.local_experts(num_experts), columns, intermediate_size)

    def targets(
        self, prefix: str, expert: int, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
    ) -> dict[str, Part]:
        """Returns where the tensors of one expert go: this executor's part of each.

        Args:
            prefix: Of their names in the checkpoint, with a dot at its end.
            expert: Its number.
            gate: [F, D].
            up: [F, D].
            down: [D, F].
        """
        size, columns = self.intermediate_size, self.columns
        return {
            f"{prefix}{expert}.gate_proj.weight": Part(gate, 0, columns, size),
            f"{prefix}{expert}.up_proj.weight": Part(up, 0, columns, size),
            f"{prefix}{expert}.down_proj.weight": Part(down, 1, columns, size),
        }


class PackedExperts:
    """Each expert's products by themselves, packed for the CPU; small ones side by side as well.

    Args:
        share: What this executor holds.
        hidden_size: D.
        workers: Share the experts of a step.

    Attributes:
        runner: Runs them, once all weight groups are filled.
    """

    def __init__(
        self,
        share: ExpertShare,
        hidden_size: int,
        workers: WorkerPool,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def linear(in_features: int, out_features: int) -> Linear:
            return Linear(in_features, out_features, dtype=dtype, device=device)

        count, size = len(share.experts), len(share.columns)
        self._share = share
        self._w13 = [linear(hidden_size, 2 * size) for _ in share.experts]
        self._w2 = [linear(size, hidden_size) for _ in share.experts]
        self._side_by_side: tuple[Linear, Linear] | None = None
        self.runner: MoERunner = TorchMoERunner(self._w13, self._w2, workers)
        if are_small(count, hidden_size, size, dtype.itemsize):
            w13, w2 = linear(hidden_size, 2 * count * size), linear(count * size, hidden_size)
            self._side_by_side = w13, w2
            self.runner = SmallExpertsRunner(w13, w2, count, self.runner)

    def weight_groups(self, prefix: str) -> list[WeightGroup]:
        """Returns what the checkpoint must hold, under ``{prefix}{expert}.``."""
        groups = []
        for expert, w13, w2 in zip(self._share.experts, self._w13, self._w2, strict=True):
            gate, up = w13.weight.chunk(2)
            targets = self._share.targets(prefix, expert, gate, up, w2.weight)
            groups.append(WeightGroup(targets, partial(_finish, w13, w2)))
        if self._side_by_side is None:
            return groups
        together = {name: part for group in groups for name, part in group.targets.items()}
        return [WeightGroup(together, self._finish_side_by_side)]

    def _finish_side_by_side(self) -> None:
        assert self._side_by_side is not None
        gates_ups = zip(*(linear.weight.chunk(2) for linear in self._w13), strict=True)
        weights = torch.cat([weight for part in gates_ups for weight in part])
        self._side_by_side[0].finish(weights)
        self._side_by_side[1].finish(torch.cat([linear.weight for linear in self._w2], dim=1))
        _finish(*self._w13, *self._w2)


class StackedExperts:
    """All experts' weights in two tensors, for kernels that run all experts at once.

    Args:
        share: What this executor holds.
        hidden_size: D.
        kind: What runs them.
        tool: Its third argument: an activation or scratch memory, which all layers share.

    Attributes:
        runner: Runs them, once all weight groups are filled.
    """

    def __init__(
        self,
        share: ExpertShare,
        hidden_size: int,
        kind: NewRunner,
        tool: Any,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._share = share
        count, size = len(share.experts), len(share.columns)
        self._w13 = torch.empty(count, 2 * size, hidden_size, dtype=dtype, device=device)
        self._w2 = torch.empty(count, hidden_size, size, dtype=dtype, device=device)
        self.runner = kind(self._w13, self._w2, tool)

    def weight_groups(self, prefix: str) -> list[WeightGroup]:
        """Returns what the checkpoint must hold, under ``{prefix}{expert}.``."""
        groups = []
        for expert, w13, w2 in zip(self._share.experts, self._w13, self._w2, strict=True):
            first, second = w13.chunk(2)
            gate, up = (first, second) if self.runner.gate_first else (second, first)
            targets = self._share.targets(prefix, expert, gate, up, w2)
            groups.append(WeightGroup(targets, partial(self._arrange, w13)))
        return groups

    def _arrange(self, w13: torch.Tensor) -> None:
        w13.copy_(self.runner.arrange(w13))


Experts = PackedExperts | StackedExperts


def _finish(*linears: Linear) -> None:
    for linear in linears:
        linear.finish()
