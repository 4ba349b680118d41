"""Targets: which parameters a checkpoint's tensors fill, and with which piece of them.

A family says how its checkpoint holds a matrix or vector of the model (``Source``), a layer which part
of that matrix its executor has (``Part``); neither knows of the other.

    tensor ── index, transposed, first, every, turn ──▶ the model's matrix ── dim, at ──▶ parameter
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import torch

from executor.model.weights.checkpoint import Index
from executor.model.weights.kept import KeptWeight

Weight: TypeAlias = torch.Tensor | KeptWeight
Copy = Callable[[torch.Tensor, torch.Tensor], object]  # to the first, of any device and type


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """How a checkpoint holds one matrix or vector of the model.

    Attributes:
        name: Its tensor; of a quantised one, the name that it would have otherwise.
        index: Its number among matrices stacked along a first dimension; None: the tensor is its own.
        count: How many are stacked.
        transposed: Whether rows and columns of the matrix are columns and rows of the tensor.
        first: Row of the tensor that is the matrix's first.
        every: Rows of the tensor from one of the matrix's to the next; 2 where two matrices alternate.
        spread: Whether the tensor is one row, which all rows of the matrix repeat.
        turn: Reorders the rows of any part that executors cut the matrix into.
    """

    name: str
    index: int | None = None
    count: int = 1
    transposed: bool = False
    first: int = 0
    every: int = 1
    spread: bool = False
    turn: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a matrix fills a parameter; the rest of it is not read.

    Attributes:
        target: The parameter, or the view of one, that it fills.
        dim: Dimension along which the matrix is cut.
        at: Indices along it that this executor holds, as many as ``target`` has there.
        size: All of its indices, which the matrix must have.
    """

    target: Weight
    dim: int
    at: range
    size: int


Target: TypeAlias = Weight | Part
Targets: TypeAlias = Mapping[str, Target] | Mapping[Source, Target] | Mapping[str | Source, Target]


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Matrices that are loaded together and then finished.

    Attributes:
        targets: What the checkpoint holds, by its name where a tensor is the matrix, to the parameter,
            or the view of one, that it fills.
        finish: Called once all of them are filled.
        begin: Called before any of them is read, when few groups are yet to be finished.
    """

    targets: Targets
    finish: Callable[[], None] = field(default=lambda: None)
    begin: Callable[[], object] = field(default=lambda: None)


@dataclass(frozen=True, slots=True)
class Cut:
    """What is read of one tensor, and where it goes.

    Attributes:
        source: Of the matrix.
        target: The parameter; one that is quantised at load is kept.
        shape: The shape that the tensor must have.
        index: What to index it with; None: nothing of it is needed.
        types: That the tensor may have, as safetensors names them, and is read as it is stored; None:
            any that converts to the parameter's, dequantised.
    """

    source: Source
    target: Weight
    shape: tuple[int, ...]
    index: Index | None
    types: tuple[str, ...] | None = None

    @classmethod
    def all_of(cls, source: str | Source, target: Target) -> "list[Cut]":
        """Returns those of one target of a group: two for a weight kept as it is stored, else one."""
        if isinstance(target, torch.Tensor):
            return [cls.of(source, target)]
        if isinstance(target, KeptWeight):
            target = Part(target, 0, range(target.shape[0]), target.shape[0])
        weight, at = target.target, target.at
        if isinstance(weight, torch.Tensor) or weight.kind.is_made_at_load:
            return [cls.of(source, target)]
        if isinstance(source, str):
            source = Source(name=source)
        cuts = []
        for kept in weight.stored():
            step = kept.steps[target.dim]
            part = Part(
                kept.tensor,
                target.dim,
                range(at.start // step, -(-at.stop // step)),
                -(-target.size // step),
            )
            # Scales stay where they are: a turn that is kept leaves each row in its block.
            turn = source.turn if kept.steps[0] == 1 else None
            name = source.name + kept.suffix
            cut = cls.of(replace(source, name=name, transposed=False, turn=turn), part)
            cuts.append(replace(cut, types=kept.types))
        return cuts

    @classmethod
    def of(cls, source: str | Source, target: torch.Tensor | Part) -> "Cut":
        """Returns it for a target that is one tensor."""
        if isinstance(source, str):
            source = Source(name=source)
        parameter = target.target if isinstance(target, Part) else target
        shape = list(parameter.shape)
        at = [range(size) for size in shape]
        if isinstance(target, Part):
            shape[target.dim], at[target.dim] = target.size, target.at
        if source.spread:
            del shape[0], at[0]
        elif source.every > 1:
            shape[0] *= source.every
            at[0] = range(shape[0])[source.first :: source.every][at[0].start : at[0].stop]
        if source.transposed:
            shape[-2:], at[-2:] = shape[:-3:-1], at[:-3:-1]
        index: list[int | slice] = [slice(each.start, each.stop, each.step) for each in at]
        if source.index is not None:
            shape.insert(0, source.count)
            index.insert(0, source.index)
        is_empty = not all(at)
        return cls(source, parameter, tuple(shape), None if is_empty else tuple(index))

    @property
    def takes_floats(self) -> bool:
        """Whether the parameter has floats, or is made of them."""
        return isinstance(self.target, KeptWeight) or self.target.is_floating_point()

    def fill(self, piece: torch.Tensor, copy: Copy = torch.Tensor.copy_) -> None:
        """Copies what was read, a float for a float and an integer for an integer, or quantises it."""
        if self.source.transposed:
            piece = piece.transpose(-1, -2)
        if self.source.turn is not None:
            piece = self.source.turn(piece)
        if isinstance(self.target, KeptWeight):
            self.target.quantise(piece)
        else:
            copy(self.target, piece)


def rope_rows_to_halves(head_dim: int, rotary_dim: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a turn from rope's pairs side by side (x_2i, x_2i+1) to pairs of two halves.

    Args:
        head_dim: Rows of a head; parts are whole heads.
        rotary_dim: Of these the last, which rope turns.
    """
    return partial(_to_halves, head_dim, rotary_dim)


def _to_halves(head_dim: int, rotary_dim: int, rows: torch.Tensor) -> torch.Tensor:
    heads = rows.view(-1, head_dim, *rows.shape[1:])
    kept, turned = heads[:, :-rotary_dim], heads[:, -rotary_dim:]
    return torch.cat((kept, turned[:, 0::2], turned[:, 1::2]), dim=1).flatten(0, 1)
