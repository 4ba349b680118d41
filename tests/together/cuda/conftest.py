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
