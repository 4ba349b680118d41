"""What the executor's tests share: one torch thread, and a checkpoint to serve."""

from pathlib import Path

import pytest
import torch

from tests.executor.checkpoints import save_qwen3_moe


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tests share their cores with others; more threads would wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a random Qwen3-MoE model in float32."""
    path = tmp_path_factory.mktemp("tiny-qwen3-moe")
    save_qwen3_moe(path, "wide")
    return path
