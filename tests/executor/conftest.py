"""Fixtures of the executor's tests: one torch thread, patience, a checkpoint, FlashInfer and a server."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.graph.input_buffers import fresh_input_buffer_pool
from executor.model.flashinfer.operators import FlashInferOps
from executor.parallel import process_groups as parallel
from protos.executor.v1 import executor_pb2 as pb
from tests.executor.support.checkpoints import save_qwen3_moe
from tests.executor.support.fake_worker import FakeWorker
from tests.executor.support.flashinfer.cpu_flashinfer import CpuFlashInfer, real_flashinfer
from tests.executor.support.ranks.ranks import be_patient
from tests.executor.support.servers import Client, serving

# Files that start processes, or that compare for seconds.
SLOW = (
    "runners/",
    "budget/test_budget_in_worker.py",
    "budget/test_token_budget.py",
    "graph/test_backends.py",
    "graph/test_recording_backend.py",
    "model/flashinfer/test_flashinfer_bootstrap.py",
    "model/moe/test_dispatchers.py",
    "model/test_hf_parity.py",
    "parallel/test_attention_tp.py",
    "parallel/test_communicators.py",
    "server/test_server_models.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(tuple(f"tests/executor/{name}" for name in SLOW)):
            item.add_marker(pytest.mark.slow)


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


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns FlashInfer as it is installed."""
    return real_flashinfer(tmp_path_factory)


@pytest.fixture
def library(real: Any) -> Iterator[CpuFlashInfer]:
    """FlashInfer's stand-in, in its place, with input buffers of the test's own."""
    library = CpuFlashInfer(real)
    with library.installed(), fresh_input_buffer_pool():
        yield library


@pytest.fixture
def ops(library: CpuFlashInfer) -> FlashInferOps:
    return FlashInferOps(enable_pdl=True)


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FakeWorker, Client]]:
    worker = FakeWorker()
    async with serving(lambda: (worker, pb.DescribeResponse())) as (worker.servicer, client):
        yield worker, client
        worker.gate.set()
        worker.deferred_gate.set()


@pytest.fixture
async def member(fake: Any) -> tuple[FakeWorker, Client]:
    """An executor that has peers and is in epoch 1."""
    worker, client = fake
    worker.has_peers = True
    await client.join(1)
    return worker, client
