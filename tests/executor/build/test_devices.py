"""Where a model runs must never be a surprise: what was asked for, or a reason why not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from executor.build import devices
from executor.build.devices import Cpu, open_device, starts_early
from executor.config import ExecutorConfig


def opened(model: Path, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    return open_device(ExecutorConfig(model=model, **settings), dtype)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(opened(tiny_checkpoint), Cpu)
    with pytest.raises(ValueError, match="device=cuda: PyTorch finds no CUDA device here; or set"):
        opened(tiny_checkpoint, device="cuda")


def test_what_a_gpu_cannot_do_runs_on_the_cpu_unless_cuda_was_asked_for(
    tiny_checkpoint: Path, two_gpus: None
):
    assert isinstance(opened(tiny_checkpoint, torch.float32), Cpu)
    problem = "dtype=float32, but the kernels for experts take bfloat16"
    with pytest.raises(ValueError, match=problem):
        opened(tiny_checkpoint, torch.float32, device="cuda")


def test_a_gpu_that_is_not_there_is_refused_by_its_number(tiny_checkpoint: Path, two_gpus: None):
    with pytest.raises(ValueError, match=r"device=cuda:2: .* 2 CUDA devices here: .* cuda:1; or"):
        opened(tiny_checkpoint, device="cuda:2")


def test_an_elastic_executor_is_told_which_of_several_gpus_is_its_own(
    tiny_checkpoint: Path, two_gpus: None
):
    with pytest.raises(ValueError, match=r"device=cuda: .* set device to one of cuda:0 to cuda:1"):
        opened(tiny_checkpoint, device="cuda", max_dp_size=2)


@pytest.mark.parametrize(
    ("device", "place", "number"),
    [
        ("auto", {}, 0),
        ("auto", {"dp_rank": 1, "dp_size": 2}, 1),
        ("cuda", {"dp_rank": 1, "dp_size": 2, "attn_tp_rank": 1, "attn_tp_size": 2}, 1),
        ("cuda", {"dp_rank": 1, "dp_size": 2, "attn_tp_rank": 0, "attn_tp_size": 2}, 0),
        ("cuda:1", {"attn_tp_size": 2}, 1),
    ],
)
def test_executors_of_one_machine_each_run_on_a_gpu_of_their_own(
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    two_gpus: None,
    device: str,
    place: dict[str, int],
    number: int,
):
    made_current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    monkeypatch.setattr(devices, "CudaDevice", lambda device: device)
    monkeypatch.setattr(devices, "CaptureResources", lambda device: device)
    monkeypatch.setattr(devices, "_flashinfer", lambda config, device: None)
    found = opened(tiny_checkpoint, device=device, **place)
    assert [found.torch_device] == made_current == [torch.device("cuda", number)]


def test_kernels_start_early_where_the_gpu_lets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ampere, hopper = torch.device("cuda", 0), torch.device("cuda", 1)
    capabilities = {ampere: (8, 9), hopper: (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
    assert [starts_early("auto", device) for device in (ampere, hopper)] == [False, True]
    assert [starts_early(setting, hopper) for setting in ("on", "off")] == [True, False]
