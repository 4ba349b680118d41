"""Stack of the demo model, as real processes, shared by the tests of this folder."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import torch  # noqa: F401  kernels are loaded behind its OpenMP

from deploy.local.launch import LocalStack
from executor.model.cpu_kernels.library import load
from router.client import Client
from tests.e2e.support.fork_server import fork_server

# Where there are no kernels for bfloat16, answers do not depend on one another in float32.
SAME_ANSWERS = () if load() else ("--dtype", "float32")
# The KV pool is small enough for blocks to be evicted, and a long prompt takes several steps.
EXECUTOR_ARGS = ("--num-kv-blocks", "400", "--max-num-batched-tokens", "192", *SAME_ANSWERS)
# For answers that are compared with those of another number of executors, which share other sums.
FLOAT32_ARGS = (*EXECUTOR_ARGS, "--dtype", "float32")

# A process that stands still for some seconds, as it may on a busy machine, is not taken for one
# that hangs. For tests that count losses, or want none; the first, for those of beats.
PATIENT_STEPS = ("--step-timeout-s", "120", "--min-step-deadline-s", "120")
PATIENT = (*PATIENT_STEPS, "--silent-after-ms", "0")


@pytest.fixture(scope="session", autouse=True)
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes of this folder's tests are forked, unless a test says otherwise."""
    with fork_server(tmp_path_factory.mktemp("forks")):
        yield


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory, forks: None) -> AsyncIterator[LocalStack]:
    """A router and two executors. Tests leave it as they found it: ready, and idle."""
    log_dir = tmp_path_factory.mktemp("stack")
    async with LocalStack(
        dp_size=2,
        executor_args=EXECUTOR_ARGS,
        router_args=("--vllm-engine", "on", "--metrics-listen", "127.0.0.1:0", *PATIENT),
        log_dir=log_dir,
    ) as stack:
        yield stack
    assert stack.left_running == []


@pytest.fixture
async def client(stack: LocalStack) -> AsyncIterator[Client]:
    async with stack.client() as client:
        yield client
