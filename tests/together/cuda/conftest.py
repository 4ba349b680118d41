"""A fake GPU for each test, with FlashInfer's compiled modules replaced and nothing loaded from files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executor.build import executor as build
from executor.model import families
from executor.model.drafts import draft
from tests.executor.support.flashinfer.cpu_flashinfer import real_flashinfer
from tests.support.paths import DEMO_MODEL
from tests.together.cuda.support import fake_flashinfer, fake_gpu
from tests.together.cuda.support.fake_cell import joining
from tests.together.cuda.support.fake_gpu import FakeGpu

SIZES = {  # of Qwen3-235B-A22B; all else of its configuration is the demo model's
    "num_hidden_layers": 2,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 1536,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}


@pytest.fixture(scope="session")
def flashinfer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return real_flashinfer(tmp_path_factory)


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the demo model's folder, with two of its four layers and without its weights."""
    folder = tmp_path_factory.mktemp("two-layers")
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    return folder


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Returns the folder of a 235B model's configuration, with two of its layers."""
    demo = json.loads((DEMO_MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(demo | SIZES))
    return tmp_path


@pytest.fixture
def gpu(flashinfer: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    gpu = FakeGpu()
    fake_flashinfer.forget_modules()
    operators = fake_gpu.install(gpu, monkeypatch)
    fake_flashinfer.install(gpu, monkeypatch)
    monkeypatch.setattr(build, "join_group", joining(gpu))
    for module in (families, draft):
        monkeypatch.setattr(module, "load_weights", lambda *args, **kwargs: None)
    with operators:
        yield gpu
    fake_flashinfer.forget_modules()
