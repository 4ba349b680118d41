"""Payloads: hidden states on their way to their experts' ranks.

                 what is sent of a row of D numbers                         bytes
off              the numbers                                                2D in bfloat16
mxfp8            float8_e4m3fn, and a scale 2^(s - 127) of each 32          D + D / 32
nvfp4            float4_e2m1, two in a byte, low half first, and a          D / 2 + D / 16
                 float8_e4m3fn scale of each 16

Experts read what was rounded once: products with these scales are exact in bfloat16. All of it is
PyTorch's, a dozen launches on the way and half as many on arrival, so it runs on any GPU; the host reads
nothing of it, so graphs capture it.
"""

from collections.abc import Sequence

import torch

_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three of four bits
_MANTISSA_BITS = 23  # of float32


class Payload:
    """Rows as they are.

    Args:
        dtype: Of rows.
        device: Where they are.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype

    def pack(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns what is sent of each row: matrices of T rows, by descending size of elements."""
        return (x_TD,)

    def unpack(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns [R, D], of what arrived of R rows."""
        return parts[0]


class Mxfp8Payload(Payload):
    """FP8, scaled by the least power of two with which nothing is too large."""

    def pack(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        blocks = _blocks(x_TD.float(), 32)
        largest = blocks.abs().amax(dim=-1, keepdim=True) / _E4M3_MAX
        # The exponent of the next power of two, as float32 stores it, and that of its inverse.
        up = (1 << _MANTISSA_BITS) - 1
        scales = ((largest.view(torch.int32) + up) >> _MANTISSA_BITS).clamp_(1, 253)
        values = (blocks * _power(254 - scales)).to(torch.float8_e4m3fn)
        return values.flatten(-2), scales.to(torch.uint8).flatten(-2)

    def unpack(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        values, scales = parts
        blocks = _blocks(values.to(self._dtype), 32)
        return blocks.mul_(_power(scales.int()).to(self._dtype).unsqueeze(-1)).flatten(-2)


class Nvfp4Payload(Payload):
    """FP4. A block's largest number is 2688 at most, and fine from 0.1 on: no scale is for all rows."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        magnitudes = torch.tensor(_E2M1)
        values, codes = torch.cat((magnitudes, -magnitudes)), torch.arange(256)
        self._pairs = torch.stack((values[codes & 15], values[codes >> 4]), 1).to(device, dtype)
        self._halfway = ((magnitudes[1:] + magnitudes[:-1]) / 2).to(device)

    def pack(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        blocks = _blocks(x_TD.float(), 16)
        largest = blocks.abs().amax(dim=-1, keepdim=True) / _E2M1_MAX
        scales = largest.clamp_(max=_E4M3_MAX).to(torch.float8_e4m3fn)
        scaled = (blocks / scales.float()).nan_to_num_(0)  # of a block of zeros
        codes = torch.bucketize(scaled.abs(), self._halfway, out_int32=True)
        codes = codes.to(torch.uint8) | ((scaled < 0).to(torch.uint8) << 3)
        low, high = _blocks(codes.flatten(-2), 2).unbind(-1)
        return low | (high << 4), scales.flatten(-2)

    def unpack(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        packed, scales = parts
        pairs = self._pairs.index_select(0, packed.flatten().int())
        values = pairs.view(*scales.shape, 16)
        return values.mul_(scales.to(self._dtype).unsqueeze(-1)).flatten(-2)


PAYLOADS = {"off": Payload, "mxfp8": Mxfp8Payload, "nvfp4": Nvfp4Payload}


def _blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.reshape(len(x), x.shape[1] // size, size)


def _power(stored: torch.Tensor) -> torch.Tensor:
    """Returns float32 with such exponents, int32, 1 to 254, as float32 stores them."""
    return (stored << _MANTISSA_BITS).view(torch.float32)
