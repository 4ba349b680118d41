"""Expert weights of one layer on one executor, as the device that runs them reads them.

Executors that hold the same experts (``moe_tp_size`` of them) have a share of the hidden columns of
each: rows of gate and up, columns of down. What they compute adds up to the experts' results, which
is what ``combine`` does. Dimensions as in ``layer.py``; F is what this executor holds of an expert.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from executor.model.moe.layer import ExpertBiases, StackedMoERunner
from executor.model.spec import ActivationSpec, MoeSpec
from executor.model.weights import KeptAs, KeptWeight, Part, Target, Weight, WeightGroup
from executor.parallel.layout import Capacity, Topology, share_of
from protos.executor.placement import GHOST

T = TypeVar("T")

# Takes w13 [L, 2F, D], w2 [L, D, F], both kept or both plain, a kernel for silu(gate) * up, scratch
# memory or the CPU's kernels, what takes the place of that activation, and biases.
NewRunner = Callable[[Any, Any, Any, ActivationSpec, ExpertBiases | None], StackedMoERunner]


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """What one executor holds of a layer's experts.

    Attributes:
        slots: The expert in each of its slots, or GHOST.
        columns: Which hidden columns it holds of each.
        intermediate_size: All hidden columns of an expert.
    """

    slots: tuple[int, ...]
    columns: range
    intermediate_size: int

    @classmethod
    def of(
        cls, topology: Topology, spec: MoeSpec, capacity: Capacity | None = None
    ) -> "ExpertShare":
        """Returns the share of one executor.

        Args:
            topology: Its place in the group.
            spec: Of the layer.
            capacity: What it is built for; for such a place only if None.

        Raises:
            ValueError: Columns do not divide. Says which sizes there could be.
        """
        columns = share_of(
            "moe_intermediate_size",
            spec.intermediate_size,
            topology.moe_tp_rank,
            topology.moe_tp_size,
        )
        slots = (capacity or topology.capacity).slots_at_start(topology, spec.num_experts)
        return cls(slots, columns, spec.intermediate_size)

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


class ExpertSlots:
    """Weights of all slots in two tensors, which what runs them arranges for itself.

    A ghost's are whatever was in that memory, and are not read. Slots may be filled anew, where they
    are, while no step uses them.

    Args:
        spec: The layer's.
        share: What this executor holds.
        hidden_size: D.
        kind: What runs them.
        tool: Its third argument, which all layers share.
        kept_as: How their weights are kept; None dequantises.
        multiple: Columns of an expert are filled up with zeros to a multiple of it, if it is not kept.

    Attributes:
        runner: Runs them, once all weight groups are filled.
        resident: The expert that each slot holds; GHOST where it holds none, or one in part.
    """

    def __init__(
        self,
        spec: MoeSpec,
        share: ExpertShare,
        hidden_size: int,
        kind: NewRunner,
        tool: Any,
        kept_as: KeptAs | None = None,
        multiple: int = 1,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._share = share
        self.resident = [GHOST] * len(share.slots)
        self._begun: set[int] = set()  # slots that have ever been filled, if only in part
        self._sizes = size, hidden = len(share.columns), hidden_size
        count = len(share.slots)
        self._w13: Weight
        self._w2: Weight
        if kept_as is None:
            new = torch.zeros if size % multiple else torch.empty
            size = -(-size // multiple) * multiple
            self._w13 = new(count, 2 * size, hidden, dtype=dtype, device=device)
            self._w2 = new(count, hidden, size, dtype=dtype, device=device)
        else:
            size, hidden = kept_as.padded(size), kept_as.padded(hidden)
            self._w13 = KeptWeight.zeros(kept_as, count, 2 * size, hidden, device=device)
            self._w2 = KeptWeight.zeros(kept_as, count, hidden, size, device=device)
        self._biases: ExpertBiases | None = None
        if spec.bias:
            b13 = torch.zeros(count, 2 * size, dtype=dtype, device=device)
            self._biases = ExpertBiases(b13, b13.new_zeros(count, hidden))
        self.runner = kind(self._w13, self._w2, tool, spec.activation, self._biases)

    @property
    def bytes_per_slot(self) -> int:
        """What a slot takes."""
        return sum(tensor[0].nbytes for tensor in self.tensors)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What all slots are in, ghosts among them."""
        weights = [self._w13, self._w2, *(self._biases or ())]
        return [part for weight in weights for part in _parts(weight)]

    def weight_groups(self, prefix: str) -> list[WeightGroup]:
        """Returns what the checkpoint must hold of the share, under ``{prefix}{expert}.``."""
        return self._groups(prefix, [*enumerate(self._share.slots)])

    def missing_groups(self, prefix: str, slots: Sequence[int]) -> list[WeightGroup]:
        """Returns the same of experts that are not in their slots yet.

        Args:
            prefix: Of their names.
            slots: The expert wanted in each, or GHOST, where anything may be.
        """
        wanted = enumerate(zip(slots, self.resident, strict=True))
        return self._groups(prefix, [(slot, want) for slot, (want, now) in wanted if want != now])

    def _groups(self, prefix: str, experts: Sequence[tuple[int, int]]) -> list[WeightGroup]:
        return [self._group(prefix, *each) for each in experts if each[1] != GHOST]

    def _group(self, prefix: str, slot: int, expert: int) -> WeightGroup:
        size, hidden = self._sizes
        w13, w2 = self._w13[slot], self._w2[slot]
        gate, up = (_crop(half, size, hidden) for half in self._gate_up(_halves(w13)))
        targets = self._share.targets(prefix, expert, gate, up, _crop(w2, hidden, size))
        if self._biases is not None:
            b13, b2 = (bias[slot] for bias in self._biases)
            b_gate, b_up = (half[:size] for half in self._gate_up(b13.chunk(2)))
            targets |= self._share.bias_targets(prefix, expert, b_gate, b_up, b2[:hidden])

        def begin() -> None:
            if slot in self._begun:  # its padding may have been arranged
                for part in (*_parts(w13), *_parts(w2)):
                    part.zero_()
            self._begun.add(slot)
            self.resident[slot] = GHOST

        def finish() -> None:
            self._arrange(w13, w2)
            self.runner.refresh()
            self.resident[slot] = expert

        return WeightGroup(targets, finish, begin)

    def _gate_up(self, halves: Sequence[T]) -> Sequence[T]:
        return halves if self.runner.gate_first else halves[::-1]

    def _arrange(self, w13: Weight, w2: Weight) -> None:
        if isinstance(w13, KeptWeight) and isinstance(w2, KeptWeight):
            self.runner.arrange_kept(w13, w2)
        elif isinstance(w13, torch.Tensor) and isinstance(w2, torch.Tensor):
            w13.copy_(self.runner.arrange(w13))
            w2.copy_(self.runner.arrange_down(w2))


def _parts(weight: Weight) -> tuple[torch.Tensor, ...]:
    return (weight.numbers, weight.scales) if isinstance(weight, KeptWeight) else (weight,)


def _halves(weight: Weight) -> Sequence[Weight]:
    if isinstance(weight, torch.Tensor):
        return weight.chunk(2)
    return weight.split((weight.shape[0] // 2,) * 2)


def _crop(weight: Weight, rows: int, columns: int) -> Weight:
    """Returns a matrix without its padding."""
    if isinstance(weight, KeptWeight):
        return weight.crop(rows, columns)
    return weight[:rows, :columns]
