"""Weights of fewer bits in memory: numbers, and the scales that belong to them.

A parameter of this kind is cut like a plain one, by rows, by columns and by number in a stack. The loader
reads both of its tensors as a checkpoint stores them, this executor's part of each; int8 it makes of
this executor's part of any weight.

format           numbers of [n, k]                          scales
FP8, 128 x 128   float8_e4m3fn [n, k]                       float32 [ceil(n / 128), k / 128]
MXFP4            uint8 [n, k / 2], low half of a byte first  uint8 [n, k / 32], 2^(scale - 127)
int8             int8 [n, k], -127 to 127                   float32 [n, 1]
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptAs:
    """How a format's weights are kept.

    Attributes:
        suffixes: Of the names of numbers and scales.
        types: Of numbers and of scales in memory.
        stored: The same in a checkpoint, as safetensors names them; scales are converted. Empty: the
            loader makes them of floats.
        rows: Of a matrix, as many as share a scale.
        columns: Likewise.
        per_byte: Numbers of a row in a byte. If several, a checkpoint has a dimension for the bytes of
            each scale.
        multiple: What the kernels want sizes of experts to be a multiple of.
        pads: Whether sizes that are none are padded with zeros.
    """

    suffixes: tuple[str, str] = ("", "")
    types: tuple[torch.dtype, torch.dtype]
    stored: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    rows: int
    columns: int
    per_byte: int = 1
    multiple: int = 128
    pads: bool = False

    @property
    def is_made_at_load(self) -> bool:
        """Whether a checkpoint holds something else."""
        return not self.stored[0]

    def padded(self, size: int) -> int:
        """Returns how long a side of an expert's matrix is kept."""
        return -(-size // self.multiple) * self.multiple if self.pads else size


# For the CPU's kernels; an expert's columns are filled up to panels.
INT8 = KeptAs(types=(torch.int8, torch.float32), rows=1, columns=1 << 31, multiple=16, pads=True)


class Keeping(NamedTuple):
    """What of a model is quantised in memory: by kind of layer how, None where it is not."""

    experts: KeptAs | None = None
    linears: KeptAs | None = None


DEQUANTISED, IN_INT8 = Keeping(), Keeping(INT8, INT8)


@dataclass(frozen=True, slots=True)
class Kept:
    """One of the two tensors of a weight.

    Attributes:
        suffix: Of its name.
        tensor: What is filled, shaped as in the checkpoint.
        steps: Rows and columns of the weight for an index of it.
        types: That it may have in the checkpoint.
    """

    suffix: str
    tensor: torch.Tensor
    steps: tuple[int, int]
    types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeptWeight:
    """A matrix, or a stack of matrices, of numbers and scales.

    Attributes:
        kind: How it is kept.
        numbers: [.., n, k / per_byte].
        scales: [.., ceil(n / rows), ceil(k / columns)].
    """

    kind: KeptAs
    numbers: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def zeros(cls, kind: KeptAs, *shape: int, device: torch.device) -> "KeptWeight":
        """Returns one of this shape, [.., n, k]."""
        *stack, n, k = shape
        scales = (*stack, -(-n // kind.rows), -(-k // kind.columns))
        return cls(
            kind,
            torch.zeros(*stack, n, k // kind.per_byte, dtype=kind.types[0], device=device),
            torch.zeros(scales, dtype=kind.types[1], device=device),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight, [.., n, k]."""
        return (*self.numbers.shape[:-1], self.numbers.shape[-1] * self.kind.per_byte)

    @property
    def is_meta(self) -> bool:
        """Whether it only has sizes."""
        return self.numbers.is_meta

    def quantise(self, weight: torch.Tensor) -> None:
        """Fills it with the int8 of floats [n, k]: the largest of each row becomes 127 or -127.

        Some rows at a time: all of a head at once would take eight times its bytes.
        """
        for start in range(0, len(weight), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            floats = weight[rows].float()
            scales = floats.abs().amax(dim=-1, keepdim=True) / 127
            self.numbers[rows].copy_((floats / scales.clamp(min=1e-30)).round_())
            self.scales[rows].copy_(scales)

    def __getitem__(self, number: int) -> "KeptWeight":
        """Returns one of a stack."""
        return replace(self, numbers=self.numbers[number], scales=self.scales[number])

    def split(self, sizes: Sequence[int]) -> list["KeptWeight"]:
        """Returns runs of rows; each begins where a scale does."""
        ends = list(accumulate(sizes))
        assert all(end % self.kind.rows == 0 for end in ends[:-1]), f"{sizes} rows cut a scale"
        starts = (end - size for end, size in zip(ends, sizes, strict=True))
        return [self._rows(start, size) for start, size in zip(starts, sizes, strict=True)]

    def crop(self, rows: int, columns: int) -> "KeptWeight":
        """Returns the first rows and columns, whole scales of them."""
        cropped = self._rows(0, rows)
        width, scales = columns // self.kind.per_byte, -(-columns // self.kind.columns)
        return replace(
            cropped, numbers=cropped.numbers[..., :width], scales=cropped.scales[..., :scales]
        )

    def _rows(self, start: int, size: int) -> "KeptWeight":
        step = self.kind.rows
        return replace(
            self,
            numbers=self.numbers[..., start : start + size, :],
            scales=self.scales[..., start // step : -(-(start + size) // step), :],
        )

    def stored(self) -> tuple[Kept, Kept]:
        """Returns a matrix's numbers and scales, as a checkpoint has them."""
        kind, numbers, steps = self.kind, self.numbers, (1, 1)
        if kind.per_byte > 1:
            width = kind.columns // kind.per_byte
            numbers = numbers.view(*numbers.shape[:-1], -1, width)
            steps = (1, kind.columns)
        return (
            Kept(kind.suffixes[0], numbers, steps, kind.stored[0]),
            Kept(kind.suffixes[1], self.scales, (kind.rows, kind.columns), kind.stored[1]),
        )
