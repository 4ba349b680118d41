"""Weights in formats of fewer bits, and what they stand for, computed in the plainest way.

A function takes a weight and returns its tensors, by the suffix of their names, and the weight that
these stand for, which is near it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Quantised = tuple[dict[str, torch.Tensor], torch.Tensor]

_FP4 = torch.tensor([sign * x for sign in (1, -1) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])


def fp8(weight: torch.Tensor, scale_type: torch.dtype = torch.float32) -> Quantised:
    """Takes [n, k]; a scale is for a block of 128 x 128."""
    rows, columns = weight.shape
    scale = (torch.rand(-(-rows // 128), -(-columns // 128)) / 100 + 0.01).to(scale_type)
    blocks = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    numbers = (weight / blocks).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"": numbers, "_scale_inv": scale}, numbers.float() * blocks


def fp8_rows(weight: torch.Tensor) -> Quantised:
    """Takes [n, k]; a scale is for a row."""
    scale = (torch.rand(len(weight), 1) / 100 + 0.01).bfloat16()
    numbers = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"": numbers, "_scale": scale}, numbers.float() * scale.float()


def mxfp4(weight: torch.Tensor) -> Quantised:
    """Takes [E, k, n]; a scale is for 32 of the k inputs of an output."""
    inputs = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = torch.randint(-6, -2, inputs.shape[:-1])
    scales = 2.0 ** exponents[..., None]
    nibbles = (inputs[..., None] / scales[..., None] - _FP4).abs().argmin(-1)
    blocks = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    tensors = {"_blocks": blocks.to(torch.uint8), "_scales": (exponents + 127).to(torch.uint8)}
    return tensors, (_FP4[nibbles] * scales).flatten(-2).transpose(1, 2)


def int4(weight: torch.Tensor) -> Quantised:
    """Takes [n, k], k a multiple of 8; a scale is for 32 of a row, or for the rest at its end."""
    rows, columns = weight.shape
    scale = (torch.rand(rows, -(-columns // 32)) / 10 + 0.02).bfloat16()
    spread = scale.float().repeat_interleave(32, 1)[:, :columns]
    numbers = (weight / spread).round().clamp(-8, 7).long()
    packed = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for i in range(8):
        packed |= (numbers[:, i::8] + 8) << 4 * i
    tensors = {
        "_packed": packed.where(packed < 2**31, packed - 2**32).int(),
        "_scale": scale,
        "_shape": torch.tensor([rows, columns]),
    }
    return tensors, numbers * spread


def nvfp4(weight: torch.Tensor, *, packed: bool = False) -> Quantised:
    """Takes [n, k]; a scale is for 16 of a row, and one for all; packed as compressed-tensors does."""
    blocks = weight.unflatten(-1, (-1, 16))
    whole = torch.tensor(0.125)
    scales = (blocks.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    spread = (scales.float() * whole)[..., None]
    nibbles = (blocks[..., None] / spread[..., None] - _FP4).abs().argmin(-1)
    numbers = (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).to(torch.uint8).flatten(-2)
    names = ("_packed", "_global_scale") if packed else ("", "_scale_2")
    of_all = (1 / whole).view(1) if packed else whole
    twin = (_FP4[nibbles] * spread).flatten(-2)
    return {names[0]: numbers, "_scale": scales, names[1]: of_all}, twin


def save_twins(
    model: Path,
    quantised: Path,
    plain: Path,
    *,
    quantise: Callable[[torch.Tensor], Quantised],
    ending: str | tuple[str, ...],
    config: dict[str, Any],
) -> None:
    """Saves a model with some weights in a format, and what these stand for.

    Args:
        model: It, as saved by Transformers.
        quantised: Folder to make.
        plain: Folder to make.
        quantise: The format.
        ending: Of the names of the weights.
        config: The quantization_config.
    """
    torch.manual_seed(0)
    fields = json.loads((model / "config.json").read_text())
    tensors = load_file(model / "model.safetensors")
    parts, twins = {}, {}
    for name in [name for name in tensors if name.endswith(ending)]:
        of_weight, twin = quantise(tensors.pop(name).float())
        parts |= {name + suffix: part.contiguous() for suffix, part in of_weight.items()}
        twins[name] = twin.contiguous()
    for folder, saved, extra in (
        (quantised, tensors | parts, {"quantization_config": config}),
        (plain, tensors | twins, {}),
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(fields | extra))
        save_file(saved, folder / "model.safetensors")
