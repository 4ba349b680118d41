"""Where a model runs must never be a surprise: what was asked for, or a reason why not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from executor.config import ExecutorConfig
from executor.devices import Cpu, open_device


def config(model: Path, **settings: Any) -> ExecutorConfig:
    return ExecutorConfig(model=model, **settings)


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(open_device(config(tiny_checkpoint), torch.bfloat16), Cpu)
    with pytest.raises(ValueError, match="device=cuda: PyTorch finds no CUDA device here; or set"):
        open_device(config(tiny_checkpoint, device="cuda"), torch.bfloat16)


@pytest.mark.parametrize(
    ("settings", "dtype", "problem"),
    [
        ({"dp_size": 2}, torch.bfloat16, "dp_size=2, but executors on GPUs cannot exchange"),
        ({}, torch.float32, "dtype=float32, but the kernels for experts take bfloat16"),
    ],
)
def test_what_a_gpu_cannot_do_yet_runs_on_the_cpu_unless_cuda_was_asked_for(
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    dtype: torch.dtype,
    problem: str,
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(open_device(config(tiny_checkpoint, **settings), dtype), Cpu)
    with pytest.raises(ValueError, match=problem):
        open_device(config(tiny_checkpoint, device="cuda", **settings), dtype)
