"""Input buffers of each test, and the checkpoints of the target that runners are tested with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.graph.input_buffers import fresh_input_buffer_pool
from tests.executor.support.checkpoints import save_qwen3_moe
from tests.executor.support.recording.recording_backend import known_world
from tests.executor.support.runner_cases import DTYPES


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    """Spares each capture the million objects that a run has imported."""
    with known_world():
        yield


@pytest.fixture(autouse=True)
def own_buffers() -> Iterator[None]:
    with fresh_input_buffer_pool():
        yield


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns a checkpoint of each type."""
    found = {name: tmp_path_factory.mktemp(name) for name in DTYPES}
    for name, path in found.items():
        save_qwen3_moe(path, "wide", dtype=DTYPES[name], rope_theta=10000.0)
    return found


@pytest.fixture(scope="session")
def target(targets: dict[str, Path]) -> Path:
    return targets["float32"]
