"""Formats of weights: numbers of fewer bits, with scales in tensors beside them.

Read in float32 and rounded once, when a parameter takes them, which is as exact as its type allows.
Only the blocks that an executor's part touches are read.

format               tensors of a weight W                              W =
FP8, 128 x 128       W F8_E4M3 [n, k], W_scale_inv [n/128, k/128]       W * scale of its block
FP8, a row           W F8_E4M3 [n, k], W_scale [n, 1]                   W * scale of its row
MXFP4                W_blocks U8 [E, n, k/32, 16], W_scales U8          table[nibble] * 2^(scale - 127),
                     [E, n, k/32]; W is [E, k, n]                       low nibble first
INT4, groups of 32   W_packed I32 [n, k/8], W_scale [n, k/32],          (nibble - 8) * scale,
                     W_shape [2]                                        lowest nibble first
NVFP4                W U8 [n, k/2], W_scale F8_E4M3 [n, k/16],          table[nibble] * scale * scale_2,
                     W_scale_2 F32 [], input_scale unread               low nibble first
NVFP4, packed        W_packed, W_scale, W_global_scale F32 [1],         the same, / global_scale
                     input_global_scale unread

Source: Transformers, integrations/finegrained_fp8.py and mxfp4.py; compressed-tensors,
compressors/quantized_compressors/pack_quantized.py and naive_quantized.py, nvfp4_quantized.py; TensorRT Model
Optimizer, export of NVFP4.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from executor.errors import CheckpointError
from executor.model.weights.checkpoint import Index, Stored
from executor.model.weights.kept import KeptAs

_SCALES = ("F32", "BF16", "F16", "F8_E8M0")
_E4M3_MAX = 448.0  # what would be above it is NaN
_INT4_IN_INT32 = 8


class Format(ABC):
    """How a checkpoint holds weights of fewer bits.

    Attributes:
        title: Its name for people.
        suffixes: Of the names of a weight's tensors, the numbers' first.
        block: Consecutive numbers of a row that share a scale; 1 if the whole row does.
        kept_as: How its weights are kept for kernels that read them so; None: there are none.
    """

    title: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    block: int
    kept_as: ClassVar[KeptAs | None] = None

    def weight_of(self, name: str) -> str:
        """Returns the name of the weight that a tensor belongs to; its own for a plain one."""
        for suffix in filter(None, self.suffixes):
            if name.endswith(suffix):
                return name.removesuffix(suffix)
        return name

    def names_of(self, weight: str, found: Mapping[str, Stored]) -> tuple[str, ...]:
        """Returns the names of a weight's tensors; its own if it is not quantised."""
        names = tuple(weight + suffix for suffix in self.suffixes)
        if all(name not in found for name in names if name != weight):
            return (weight,)
        return names

    def open(self, weight: str, found: Mapping[str, Stored]) -> Stored:
        """Returns a weight, to be dequantised.

        Args:
            weight: Its name; all of ``names_of`` are in the checkpoint.
            found: The checkpoint.

        Raises:
            CheckpointError: Its tensors' types or shapes do not fit one another.
        """
        names = self.names_of(weight, found)
        if len(names) == 1:
            return found[weight]
        parts = [found[name] for name in names]
        problem = self._problem(*parts)
        if problem is not None:
            shown = ", ".join(f"{one.name} {one.dtype} {list(one.shape)}" for one in parts)
            raise CheckpointError(f"{parts[0].file} has {shown}: {problem}")
        return self._open(*parts)

    @abstractmethod
    def _problem(self, *parts: Stored) -> str | None:
        """Returns what the tensors should be, if they are not."""

    @abstractmethod
    def _open(self, *parts: Stored) -> Stored: ...


@dataclass(frozen=True, slots=True)
class Fp8Format(Format):
    """FP8 E4M3 of DeepSeek-V3 and others, with a scale per block of as many rows as columns."""

    block: int = 128
    title: ClassVar[str] = "FP8"
    suffixes: ClassVar[tuple[str, ...]] = ("", "_scale_inv")
    kept_as: ClassVar[KeptAs] = KeptAs(
        suffixes=("", "_scale_inv"),
        types=(torch.float8_e4m3fn, torch.float32),
        stored=(("F8_E4M3",), _SCALES),
        rows=128,
        columns=128,
    )

    def _problem(self, *parts: Stored) -> str | None:
        weight, scale = parts
        if weight.dtype != "F8_E4M3" or scale.dtype not in _SCALES:
            return f"FP8 weights are F8_E4M3, with scales of {', '.join(_SCALES)}"
        shape = tuple(-(-size // self.block) for size in weight.shape)
        if len(shape) != 2 or scale.shape != shape:
            return f"with blocks of {self.block} there are {list(shape)} scales"
        return None

    def _open(self, *parts: Stored) -> Stored:
        weight, scale = parts

        def read(index: Index) -> torch.Tensor:
            rows, row_cover = _blocks(_range(index[0]), self.block)
            columns, column_cover = _blocks(_range(index[1]), self.block)
            scales = scale.read((row_cover, column_cover)).float()
            return _fp8_floats(weight.read(index)).mul_(scales[:, columns][rows])

        return weight.dequantised(weight.shape, read)


@dataclass(frozen=True, slots=True)
class Fp8RowFormat(Format):
    """FP8 E4M3 of compressed-tensors, with a scale per row, as of GLM-4.5."""

    block: int = 1
    title: ClassVar[str] = "FP8 with a scale per row"
    suffixes: ClassVar[tuple[str, ...]] = ("", "_scale")

    def _problem(self, *parts: Stored) -> str | None:
        weight, scale = parts
        if weight.dtype != "F8_E4M3" or scale.dtype not in _SCALES:
            return f"FP8 weights are F8_E4M3, with scales of {', '.join(_SCALES)}"
        if len(weight.shape) != 2 or scale.shape != (weight.shape[0], 1):
            return "each row has one scale"
        return None

    def _open(self, *parts: Stored) -> Stored:
        weight, scale = parts

        def read(index: Index) -> torch.Tensor:
            scales = scale.read((index[0], slice(None))).float()
            return _fp8_floats(weight.read(index)).mul_(scales)

        return weight.dequantised(weight.shape, read)


@dataclass(frozen=True, slots=True)
class Mxfp4Format(Format):
    """MXFP4 of gpt-oss: stacked, outputs first where its weights in bfloat16 have inputs first."""

    block: int = 32
    title: ClassVar[str] = "MXFP4"
    suffixes: ClassVar[tuple[str, ...]] = ("_blocks", "_scales")
    kept_as: ClassVar[KeptAs] = KeptAs(
        suffixes=("_blocks", "_scales"),
        types=(torch.uint8, torch.uint8),
        stored=(("U8",), ("U8",)),
        rows=1,
        columns=32,
        per_byte=2,
        pads=True,
    )

    def _problem(self, *parts: Stored) -> str | None:
        blocks, scales = parts
        if (blocks.dtype, scales.dtype) != ("U8", "U8"):
            return "MXFP4 has U8 for both"
        if len(blocks.shape) != 4 or blocks.shape != (*scales.shape, self.block // 2):
            return f"{self.block // 2} bytes have one scale"
        return None

    def _open(self, *parts: Stored) -> Stored:
        blocks, scales = parts
        count, size, groups, _ = blocks.shape

        def read(index: Index) -> torch.Tensor:
            *expert, inputs, outputs = index
            inside, cover = _inside(_range(inputs), self.block)
            at = (*expert, outputs, cover)
            exponents = scales.read(at).int() - 127
            powers = torch.ldexp(torch.ones(exponents.shape), exponents)
            values = _fp4_floats(blocks.read(at)).mul_(powers[..., None])
            return values.flatten(-2)[..., inside].transpose(-1, -2)

        return blocks.dequantised((count, groups * self.block, size), read)


@dataclass(frozen=True, slots=True)
class Int4Format(Format):
    """INT4 of compressed-tensors, symmetric: eight in an int32, and a scale per group of a row."""

    block: int = 32
    title: ClassVar[str] = "INT4"
    suffixes: ClassVar[tuple[str, ...]] = ("_packed", "_scale", "_shape")

    def _problem(self, *parts: Stored) -> str | None:
        packed, scale, shape = parts
        if packed.dtype != "I32" or scale.dtype not in _SCALES or shape.dtype not in ("I64", "I32"):
            return f"INT4 is packed in I32, with scales of {', '.join(_SCALES)}"
        rows, words = packed.shape if len(packed.shape) == 2 else (0, 0)
        if not words or scale.shape != (rows, -(-words * _INT4_IN_INT32 // self.block)):
            return f"with groups of {self.block} of a row each has one scale"
        return None if shape.shape == (2,) else "the shape has 2 numbers"

    def _open(self, *parts: Stored) -> Stored:
        packed, scale, shape = parts
        whole = (packed.shape[0], packed.shape[1] * _INT4_IN_INT32)

        def read(index: Index) -> torch.Tensor:
            said = shape.read((slice(None),)).tolist()
            if said != list(whole):
                raise CheckpointError(
                    f"{shape.name} in {shape.file} says {said}, not {list(whole)}"
                )
            rows, columns = index
            inside, cover = _inside(_range(columns), self.block)
            words = self.block // _INT4_IN_INT32
            at = slice(cover.start * words, min(cover.stop * words, packed.shape[1]))
            packed_bytes = packed.read((rows, at)).view(torch.uint8)
            nibbles = torch.stack((packed_bytes & 15, packed_bytes >> 4), dim=-1).flatten(-2)
            values = (nibbles.to(torch.int8) - 8).float()
            scales = scale.read((rows, cover)).float().repeat_interleave(self.block, dim=-1)
            return values.mul_(scales[..., : values.shape[-1]])[..., inside]

        return packed.dequantised(whole, read)


@dataclass(frozen=True, slots=True)
class Nvfp4Format(Format):
    """NVFP4 of Model Optimizer: FP8 scales of 16 numbers, and one of all."""

    block: int = 16
    title: ClassVar[str] = "NVFP4"
    suffixes: ClassVar[tuple[str, ...]] = ("", "_scale_2", "_scale")
    unread: ClassVar[tuple[str, ...]] = ("input_scale", "k_scale", "v_scale")  # of activations, KV

    def weight_of(self, name: str) -> str:
        module, _, last = name.rpartition(".")
        return f"{module}.weight" if last in self.unread else Format.weight_of(self, name)

    def _problem(self, *parts: Stored) -> str | None:
        packed, whole, scale = parts
        if (packed.dtype, whole.dtype, scale.dtype) != ("U8", "F32", "F8_E4M3"):
            return "NVFP4 is packed in U8, with scales of F8_E4M3 and one of F32"
        rows, width = packed.shape if len(packed.shape) == 2 else (0, 0)
        half = self.block // 2
        if width % half or scale.shape != (rows, width // half) or sum(whole.shape) > 1:
            return f"each {half} bytes of a row have a scale, and all together one"
        return None

    def _open(self, *parts: Stored) -> Stored:
        packed, whole, scale = parts

        def read(index: Index) -> torch.Tensor:
            rows, columns = index
            inside, cover = _inside(_range(columns), self.block)
            half = self.block // 2
            scales = _fp8_floats(scale.read((rows, cover))).mul_(self._factor(whole.read(())))
            values = _fp4_floats(packed.read((rows, slice(cover.start * half, cover.stop * half))))
            values = values.view(len(values), -1, self.block).mul_(scales[..., None])
            return values.flatten(-2)[..., inside]

        return packed.dequantised((packed.shape[0], packed.shape[1] * 2), read)

    def _factor(self, whole: torch.Tensor) -> torch.Tensor:
        return whole


class Nvfp4PackedFormat(Nvfp4Format):
    """The same as compressed-tensors packs it, with the inverse of the scale of all."""

    suffixes = ("_packed", "_global_scale", "_scale")  # the last is an end of the second
    unread = ("input_global_scale",)

    def _factor(self, whole: torch.Tensor) -> torch.Tensor:
        return 1 / whole


def _fp8_floats(numbers: torch.Tensor) -> torch.Tensor:
    """Returns float32 of FP8 E4M3."""
    values = _floats(numbers.view(torch.int8), shift=7, mask=~(1 << 14), bias=8)
    return values.masked_fill_(values.abs() > _E4M3_MAX, torch.nan)


def _fp4_floats(packed: torch.Tensor) -> torch.Tensor:
    """Returns float32 of FP4 E2M1, two in a byte, the low half first."""
    nibbles = torch.stack((packed << 4, packed & 0xF0), dim=-1).view(torch.int8)
    return _floats(nibbles.flatten(-2), shift=5, mask=~(7 << 12), bias=14)


def _floats(numbers: torch.Tensor, *, shift: int, mask: int, bias: int) -> torch.Tensor:
    """Returns float32 of small floats, through float16, which is five times as fast as casting FP8.

    Args:
        numbers: int8, a sign, an exponent and a mantissa from the top bit on.
        shift: From their exponent's place to float16's, once they have 16 bits.
        mask: Clears what the sign left between its place and the exponent.
        bias: By how much that of float16's exponent is larger.
    """
    bits = numbers.to(torch.int16).bitwise_left_shift_(shift).bitwise_and_(mask)
    return bits.view(torch.float16).float().mul_(2.0**bias)


def _range(at: int | slice) -> range:
    assert isinstance(at, slice), "a matrix is cut by slices"
    return range(at.start, at.stop, at.step or 1)


def _cover(at: range, block: int) -> slice:
    """Returns the blocks that have these indices."""
    return slice(at[0] // block, at[-1] // block + 1)


def _blocks(at: range, block: int) -> tuple[torch.Tensor, slice]:
    """Returns the block of each index, counted from the first, and the blocks."""
    cover = _cover(at, block)
    return torch.arange(at.start, at.stop, at.step) // block - cover.start, cover


def _inside(at: range, block: int) -> tuple[slice, slice]:
    """Returns the indices, counted from the first block's start, and the blocks."""
    cover = _cover(at, block)
    start = cover.start * block
    return slice(at.start - start, at.stop - start, at.step), cover
