"""Stacks of the demo model that a test has to itself."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from deploy.local.launch import DEMO_MODEL, LocalStack
from deploy.local.processes import Process
from router.client import Client, GroupStatus
from tests.e2e.conftest import EXECUTOR_ARGS, PATIENT
from tests.e2e.support.logs import logged


def demo_model_with(folder: Path, **config: Any) -> Path:
    """Returns a copy of the demo model, of another configuration."""
    model = folder / "model"
    shutil.copytree(DEMO_MODEL, model)
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return model


class PoisonedStack(LocalStack):
    """Its executors die of the poison (poisoned_executor.py)."""

    def _start_process(self, name: str, args: Sequence[str]) -> Process:
        modules = {"executor": "tests.e2e.support.poisoned_executor"}
        return super()._start_process(name, [modules.get(arg, arg) for arg in args])


@asynccontextmanager
async def served(
    log_dir: Path | None, kind: type[LocalStack] = LocalStack, **settings: Any
) -> AsyncIterator[tuple[LocalStack, Client]]:
    """Runs a stack, two executors if not told otherwise, and a client; none is left running.

    Args:
        log_dir: Gets the processes' logs.
        kind: Class of the stack.
        settings: Of `LocalStack`.
    """
    usual: dict[str, Any] = {"executor_args": EXECUTOR_ARGS, "router_args": PATIENT}
    stack = kind(log_dir=log_dir, **usual | settings)
    async with stack, stack.client() as client:
        yield stack, client
    assert stack.left_running == []


@asynccontextmanager
async def supervised(stack: LocalStack) -> AsyncIterator[None]:
    """Executors that end are started again until the end of the block."""
    supervising = asyncio.create_task(stack.supervise_executors())
    try:
        yield
    finally:
        supervising.cancel()
        with suppress(asyncio.CancelledError):
            await supervising


async def first_member(stack: LocalStack, num_formings: int = 1) -> Process:
    """Returns the executor that has DP rank 0 of an elastic group, once it has formed so often.

    It is any of them: the group begins with those that start first, and the others are its spares.
    """
    *_, placed = await logged(stack.router, "group_placed", num_formings)
    return stack.executors[stack.executor_addresses.index(placed["executors"][0])]


async def serving_pid(executor: Process, number: int = 1) -> int:
    """Returns the pid of the first process that an executor's supervisor forked, or of a later one."""
    await executor.event("ready_to_join")  # from when on there is a log
    pid: int = (await logged(executor, "ready_to_join", number))[number - 1]["pid"]
    return pid


def pause(stack: LocalStack) -> None:
    for executor in stack.executors:
        executor.pause()


def resume(stack: LocalStack) -> None:
    for executor in stack.executors:
        executor.resume()


@contextmanager
def paused(stack: LocalStack) -> Iterator[None]:
    """Executors stand still until the end of the block."""
    pause(stack)
    try:
        yield
    finally:
        resume(stack)


async def is_paused_at_work(stack: LocalStack, client: Client) -> bool:
    """Pauses the executors. Lets them go on, and returns False, if nothing runs."""
    pause(stack)
    [group] = await client.get_status()
    if any(rank.num_running for rank in group.ranks):
        return True
    resume(stack)
    return False


async def group_with_problem(client: Client, word: str) -> GroupStatus:
    """Returns the group's status when its problem names the word."""
    while word not in (group := (await client.get_status())[0]).problem:
        await asyncio.sleep(0.05)
    return group
