"""A router without a public API in front of one simulated executor, in this process."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from router.engine.engines import Engines
from router.executors.group import GroupSettings
from router.requests.request import Listeners
from router.requests.waiting_queue import WaitingQueue
from router.scheduling.scheduler import Scheduler, SchedulerSettings
from router.scheduling.step import GroupShape
from tests.router.support.peers import NEVER_LATE, group_of
from tests.router.support.requests import make_request
from tests.router.support.running_engines import drive_group, stepping


@asynccontextmanager
async def python_module(name: str, *options: str) -> AsyncIterator[asyncio.StreamReader]:
    """Runs a module in a process of its own. Yields what it prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", name, *options), stdout=asyncio.subprocess.PIPE, limit=1 << 24
    )
    try:
        assert process.stdout is not None
        yield process.stdout
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def simulated_executor(
    step_ms: float, num_rows: int, launch_ms: float = 0.0
) -> AsyncIterator[tuple[str, int, asyncio.StreamReader]]:
    """Yields the address and the process of a simulated executor, and the reports that it prints."""
    options = (f"--step-ms={step_ms}", f"--launch-ms={launch_ms}", f"--rows={num_rows}")
    async with python_module("tests.bench.support.simulated_executor", *options) as lines:
        address, pid = (await lines.readline()).decode().split()
        yield address, int(pid), lines


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
async def running_engines(
    address: str, depth: int, settings: GroupSettings = NEVER_LATE
) -> AsyncIterator[Engines]:
    """Engines whose one group has formed and steps."""
    group = group_of([address], settings)
    engines = Engines(Listeners(max_listeners=4096))
    engine = drive_group(
        engines,
        group,
        WaitingQueue(max_sequences=100_000, max_tokens=100_000_000),
        pipeline_depth=depth,
        min_chunk_tokens=512,
    )
    try:
        async with stepping(engine):
            yield engines
    finally:
        await group.close()
