"""Expert weights of one layer on one executor, as the device that runs them reads them.

Executors that hold the same experts (``moe_tp_size`` of them) have a share of the hidden columns of
each: rows of gate and up, columns of down. What they compute adds up to the experts' results, which
is what ``combine`` does. Dimensions as in ``layer.py``; F is what this executor holds of an expert.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from executor.model.layers.linear import Linear, WorkerPool
from executor.model.moe.activation import activation_of
from executor.model.moe.layer import ExpertBiases, MoERunner, StackedMoERunner
from executor.model.moe.runner_torch import SmallExpertsRunner, TorchMoERunner, are_small
from executor.model.spec import ActivationSpec, MoeSpec
from executor.model.weights import KeptAs, KeptWeight, Part, Target, Weight, WeightGroup
from executor.parallel.layout import Topology, share_of

T = TypeVar("T")

# Takes w13 [L, 2F, D], w2 [L, D, F], both kept or both plain, a kernel for silu(gate) * up or scratch memory, what takes the
# place of that activation, and biases.
NewRunner = Callable[[Any, Any, Any, ActivationSpec, ExpertBiases | None], StackedMoERunner]


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
    def of(cls, topology: Topology, spec: MoeSpec) -> "ExpertShare":
        """Returns the share of one executor.

        Args:
            topology: Its place in the group.
            spec: Of the layer.

        Raises:
            ValueError: Experts or columns do not divide. Says which sizes there could be.
        """
        columns = share_of(
            "moe_intermediate_size",
            spec.intermediate_size,
            topology.moe_tp_rank,
            topology.moe_tp_size,
        )
        return cls(topology.local_experts(spec.num_experts), columns, spec.intermediate_size)

    @property
    def adds_down_bias(self) -> bool:
        """Whether it is the one of the executors with these experts that adds their last bias."""
        return self.columns.start == 0

    def targets(
        self, prefix: str, expert: int, gate: Weight, up: Weight, down: Weight
    ) -> dict[str, Target]:
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

    def bias_targets(
        self,
        prefix: str,
        expert: int,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor | None,
    ) -> dict[str, Target]:
        """Returns where the biases of one expert go: [F], [F] and, if it adds that one, [D]."""
        size, columns = self.intermediate_size, self.columns
        targets: dict[str, Target] = {
            f"{prefix}{expert}.gate_proj.bias": Part(gate, 0, columns, size),
            f"{prefix}{expert}.up_proj.bias": Part(up, 0, columns, size),
        }
        if self.adds_down_bias and down is not None:
            targets[f"{prefix}{expert}.down_proj.bias"] = down
        return targets


class PackedExperts:
    """Each expert's products by themselves, packed for the CPU; small ones side by side as well.

    Args:
        spec: The layer's.
        share: What this executor holds.
        hidden_size: D.
        workers: Share the experts of a step.

    Attributes:
        runner: Runs them, once all weight groups are filled.
    """

    def __init__(
        self,
        spec: MoeSpec,
        share: ExpertShare,
        hidden_size: int,
        workers: WorkerPool,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def linear(in_features: int, out_features: int, *, has_bias: bool) -> Linear:
            return Linear(in_features, out_features, has_bias=has_bias, dtype=dtype, device=device)

        count, size = len(share.experts), len(share.columns)
        has_down_bias = spec.bias and share.adds_down_bias
        activation = activation_of(spec.activation)
        self._share = share
        self._w13 = [linear(hidden_size, 2 * size, has_bias=spec.bias) for _ in share.experts]
        self._w2 = [linear(size, hidden_size, has_bias=has_down_bias) for _ in share.experts]
        self._side_by_side: tuple[Linear, Linear] | None = None
        self._down_bias: torch.Tensor | None = None
        self.runner: MoERunner = TorchMoERunner(self._w13, self._w2, workers, activation)
        if are_small(count, hidden_size, size, dtype.itemsize):
            w13 = linear(hidden_size, 2 * count * size, has_bias=spec.bias)
            w2 = linear(count * size, hidden_size, has_bias=False)
            self._side_by_side = w13, w2
            if has_down_bias:
                self._down_bias = torch.empty(count, hidden_size, dtype=dtype, device=device)
            self.runner = SmallExpertsRunner(
                w13, w2, count, self.runner, activation, self._down_bias
            )

    def weight_groups(self, prefix: str) -> list[WeightGroup]:
        """Returns what the checkpoint must hold, under ``{prefix}{expert}.``."""
        groups = []
        for expert, w13, w2 in zip(self._share.experts, self._w13, self._w2, strict=True):
            gate, up = w13.weight.chunk(2)
            targets = self._share.targets(prefix, expert, gate, up, w2.weight)
            if w13.bias is not None:
                gate, up = w13.bias.chunk(2)
                targets |= self._share.bias_targets(prefix, expert, gate, up, w2.bias)
            groups.append(WeightGroup(targets, partial(_finish, w13, w2)))
        if self._side_by_side is None:
            return groups
        together = {name: part for group in groups for name, part in group.targets.items()}
        return [WeightGroup(together, self._finish_side_by_side)]

    def _finish_side_by_side(self) -> None:
        assert self._side_by_side is not None
        w13, w2 = self._side_by_side
        if w13.bias is not None:
            w13.bias.copy_(_gates_then_ups(x.bias for x in self._w13 if x.bias is not None))
        if self._down_bias is not None:
            torch.stack([x.bias for x in self._w2 if x.bias is not None], out=self._down_bias)
        w13.finish(_gates_then_ups(x.weight for x in self._w13))
        w2.finish(torch.cat([linear.weight for linear in self._w2], dim=1))
        _finish(*self._w13, *self._w2)


class StackedExperts:
    """All experts' weights in two tensors, for kernels that run all experts at once.

    Args:
        spec: The layer's.
        share: What this executor holds.
        hidden_size: D.
        kind: What runs them.
        tool: Its third argument, which all layers share.
        kept_as: How their weights are kept; None dequantises.

    Attributes:
        runner: Runs them, once all weight groups are filled.
    """

    def __init__(
        self,
        spec: MoeSpec,
        share: ExpertShare,
        hidden_size: int,
        kind: NewRunner,
        tool: Any,
        kept_as: KeptAs | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._share = share
        self._sizes = size, hidden = len(share.columns), hidden_size
        count = len(share.experts)
        self._w13: Weight
        self._w2: Weight
        if kept_as is None:
            self._w13 = torch.empty(count, 2 * size, hidden, dtype=dtype, device=device)
            self._w2 = torch.empty(count, hidden, size, dtype=dtype, device=device)
        else:
            size, hidden = kept_as.padded(size), kept_as.padded(hidden)
            self._w13 = KeptWeight.zeros(kept_as, count, 2 * size, hidden, device=device)
            self._w2 = KeptWeight.zeros(kept_as, count, hidden, size, device=device)
        self._biases: ExpertBiases | None = None
        if spec.bias:
            b13 = torch.zeros(count, 2 * size, dtype=dtype, device=device)
            self._biases = ExpertBiases(b13, b13.new_zeros(count, hidden))
        self.runner = kind(self._w13, self._w2, tool, spec.activation, self._biases)

    def weight_groups(self, prefix: str) -> list[WeightGroup]:
        """Returns what the checkpoint must hold, under ``{prefix}{expert}.``."""
        size, hidden = self._sizes
        groups = []
        for i, expert in enumerate(self._share.experts):
            w13, w2 = self._w13[i], self._w2[i]
            gate, up = (_crop(half, size, hidden) for half in self._gate_up(_halves(w13)))
            targets = self._share.targets(prefix, expert, gate, up, _crop(w2, hidden, size))
            if self._biases is not None:
                b13, b2 = (bias[i] for bias in self._biases)
                b_gate, b_up = (half[:size] for half in self._gate_up(b13.chunk(2)))
                targets |= self._share.bias_targets(prefix, expert, b_gate, b_up, b2[:hidden])
            groups.append(WeightGroup(targets, partial(self._arrange, w13, w2)))
        return groups

    def _gate_up(self, halves: Sequence[T]) -> Sequence[T]:
        return halves if self.runner.gate_first else halves[::-1]

    def _arrange(self, w13: Weight, w2: Weight) -> None:
        for weight in (w13, w2):
            if isinstance(weight, KeptWeight):
                self.runner.arrange_kept(weight)
        if isinstance(w13, torch.Tensor):
            w13.copy_(self.runner.arrange(w13))


Experts = PackedExperts | StackedExperts


def _halves(weight: Weight) -> Sequence[Weight]:
    if isinstance(weight, torch.Tensor):
        return weight.chunk(2)
    return weight.split((weight.shape[0] // 2,) * 2)


def _crop(weight: Weight, rows: int, columns: int) -> Weight:
    """Returns a matrix without its padding, which plain ones do not have."""
    return weight.crop(rows, columns) if isinstance(weight, KeptWeight) else weight


def _gates_then_ups(of_experts: Iterable[torch.Tensor]) -> torch.Tensor:
    gates_ups = zip(*(tensor.chunk(2) for tensor in of_experts), strict=True)
    return torch.cat([tensor for part in gates_ups for tensor in part])


def _finish(*linears: Linear) -> None:
    for linear in linears:
        linear.finish()
