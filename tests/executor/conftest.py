"""What the executor's tests share: one torch thread, patience, a checkpoint, and a server."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from executor.parallel import process_groups as parallel
from protos.executor.v1 import executor_pb2 as pb
from tests.executor.support.checkpoints import save_qwen3_moe
from tests.executor.support.fake_worker import FakeWorker
from tests.executor.support.ranks.ranks import be_patient
from tests.executor.support.servers import Client, serving


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tests share their cores with others; more threads would wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def patience() -> Iterator[None]:
    """Groups in this process form however late a thread of it runs."""
    before = parallel.FORM_TIMEOUT_S
    be_patient()
    yield
    parallel.FORM_TIMEOUT_S = before


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a random Qwen3-MoE model in float32."""
    path = tmp_path_factory.mktemp("tiny-qwen3-moe")
    save_qwen3_moe(path, "wide")
    return path


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FakeWorker, Client]]:
    worker = FakeWorker()
    async with serving(lambda: (worker, pb.DescribeResponse())) as (worker.servicer, client):
        yield worker, client
        worker.gate.set()
        worker.deferred_gate.set()
