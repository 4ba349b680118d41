"""Stack under attack, shared by the tests of this folder."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from deploy.local.launch import LocalStack
from deploy.local.ports import held_port
from tests.attack.besieged import guarded_stack, target_of
from tests.attack.hostile_executor import HostileExecutor, hostile_executor
from tests.attack.target import Target
from tests.e2e.support.fork_server import fork_server


@pytest.fixture(scope="package", autouse=True)
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with fork_server(tmp_path_factory.mktemp("forks")):
        yield


@pytest.fixture(scope="package")
def hostile_address() -> Iterator[str]:
    with held_port() as port:
        yield f"127.0.0.1:{port}"


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def stack(
    tmp_path_factory: pytest.TempPathFactory, hostile_address: str
) -> AsyncIterator[LocalStack]:
    """A router, a group of two executors, and one whose address is a hostile executor's."""
    stack = guarded_stack(tmp_path_factory.mktemp("stack"), asks_for_tokens=True)
    stack.router_args = (
        *(*stack.router_args, "--group", hostile_address),
        *("--failover-after-s", "0.1", "--retry-delay-s", "0.1"),
    )
    async with stack:
        yield stack
    assert stack.left_running == []


@pytest.fixture
async def target(stack: LocalStack) -> Target:
    return await target_of(stack, size=0.2, hold_s=0.2)


@pytest.fixture
async def hostile(
    stack: LocalStack, target: Target, hostile_address: str
) -> AsyncIterator[HostileExecutor]:
    honest = stack.executor_addresses[0]
    async with hostile_executor(hostile_address, honest, target.executor_token) as hostile:
        yield hostile
