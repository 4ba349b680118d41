"""A router without a public API in front of one simulated executor, in this process."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np

from router.engine.engines import Engines
from router.executors.discovery import find_addresses
from router.executors.group import ExecutorGroup, GroupSettings
from router.requests.request import Listeners
from router.requests.waiting_queue import WaitingQueue
from router.scheduling.scheduler import Scheduler, SchedulerSettings
from router.scheduling.step import GroupShape
from tests.router.support.requests import make_request
from tests.router.support.running_engines import drive_group


class ExecutorProcess:
    """A simulated executor; see simulated_executor.py."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.address = address
        self._process = process

    async def report(self) -> str:
        """Returns the line that it prints when its stream ends."""
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode()


@asynccontextmanager
async def simulated_executor(step_ms: float, num_rows: int) -> AsyncIterator[ExecutorProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.bench.support.simulated_executor"),
        *(f"--step-ms={step_ms}", f"--rows={num_rows}"),
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )
    try:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        yield ExecutorProcess(process, address)
    finally:
        process.kill()
        await process.wait()


def group_of(addresses: Sequence[str]) -> ExecutorGroup:
    """Returns a group whose executors are never overdue."""
    settings = GroupSettings(step_timeout_s=120, min_step_deadline_s=120)
    return ExecutorGroup(find_addresses(addresses), settings)


def scheduler_of(shape: GroupShape, max_tokens: int, num_requests: int) -> Scheduler:
    """Returns a scheduler with requests that differ in their prompts, of 8 tokens."""
    listeners = Listeners(max_listeners=1)
    listener = listeners.open()
    waiting = WaitingQueue(max_sequences=num_requests, max_tokens=8 * num_requests)
    for number in range(num_requests):
        request_id, prompt = str(number), np.full(8, 3 + number)
        waiting.submit(make_request(prompt, listener, max_tokens, request_id=request_id))
    settings = SchedulerSettings(min_chunk_tokens=1)
    clock = time.monotonic
    return Scheduler(shape, waiting, listeners, settings, clock=clock, on_end=lambda sequence: None)


@asynccontextmanager
async def running_engines(address: str, depth: int) -> AsyncIterator[Engines]:
    """Engines whose one group has formed and steps."""
    group = group_of([address])
    engines = Engines(Listeners(max_listeners=4096))
    engine = drive_group(
        engines,
        group,
        WaitingQueue(max_sequences=100_000, max_tokens=100_000_000),
        pipeline_depth=depth,
        min_chunk_tokens=512,
    )
    running = asyncio.create_task(engine.run())
    try:
        while not engines.is_ready:
            await asyncio.sleep(0.01)
        yield engines
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await group.close()
