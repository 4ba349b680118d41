"""Draft models that know nothing. For tests."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def random_draft(source: Path, target: Path, *, seed: int) -> Path:
    """Writes a draft with the shapes of another and random weights. Returns its folder."""
    target.mkdir()
    shutil.copy(source / "config.json", target)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * 0.3
        if tensor.is_floating_point()
        else tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    save_file(weights, target / "model.safetensors")
    return target
