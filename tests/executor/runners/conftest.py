"""Input buffers of each test, and the checkpoints of the target that runners are tested with."""

from pathlib import Path

import pytest

from tests.executor.support.checkpoints import save_qwen3_moe
from tests.executor.support.recording.fixtures import own_buffers, world
from tests.executor.support.runner_cases import DTYPES

__all__ = ["own_buffers", "world"]


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
