"""The demo model with random weights, which has never seen a text."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.paths import DEMO_MODEL


def save_random_model(folder: Path) -> Path:
    """Writes it to a new folder. Returns the folder."""
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (folder / name).write_bytes((DEMO_MODEL / name).read_bytes())
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(DEMO_MODEL / "model.safetensors")
    for name, tensor in tensors.items():
        if not name.endswith("norm.weight"):
            std = tensor.shape[-1] ** -0.5
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)
    save_file(tensors, folder / "model.safetensors")
    return folder
