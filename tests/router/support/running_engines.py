"""Engines of one group that steps, over fake executors."""

import asyncio
import random
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from router.engine.engine import Engine
from router.engine.engines import Engines, Observer
from router.engine.executors import Executors
from router.engine.settings import EngineSettings
from router.requests.request import Listeners, Request
from router.requests.waiting_queue import WaitingQueue
from router.scheduling.step_cost import KNOWN_STEPS, StepCosts
from tests.router.support.fake_executors import FakeExecutors
from tests.router.support.requests import make_request
from tests.router.support.stepper import make_shape


class KnownCosts(StepCosts):
    """Step times that a router goes by from its first step on."""

    def begin_epoch(self, kind: Hashable) -> None:
        super().begin_epoch(kind)
        self.plain.num_steps = [KNOWN_STEPS, KNOWN_STEPS]


def drive_group(
    engines: Engines, executors: Executors, waiting: WaitingQueue, **settings: Any
) -> Engine:
    """Gives engines their only group, with defaults for what a test does not care about."""
    defaults = {"pipeline_depth": 2, "min_chunk_tokens": 1, "retry_delay_s": 0.1}
    listeners, settings = engines.listeners, {**defaults, **settings}
    engine = Engine(
        0, executors, waiting, listeners, EngineSettings(**settings), on_end=engines.on_end
    )
    engines.drive([engine])
    return engine


@asynccontextmanager
async def stepping(engine: Engine) -> AsyncIterator[None]:
    """Runs an engine, whose group has formed."""
    task = asyncio.create_task(engine.run())
    try:
        while not engine.is_ready:
            await asyncio.sleep(0.01)
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def running(
    dp_size: int = 2,
    observers: Sequence[Observer] = (),
    sizes: dict[str, Any] | None = None,
    **faults: float,
) -> AsyncIterator[Engines]:
    """Engines whose only group steps over executors that take 1 ms, and may have faults."""
    engines = Engines(Listeners(max_listeners=50), observers=observers)
    shape = make_shape(dp_size=dp_size, **(sizes or {}))
    executors = FakeExecutors(shape, random.Random(0), step_s=0.001, **faults)
    engine = drive_group(engines, executors, WaitingQueue(max_sequences=4, max_tokens=1000))
    async with stepping(engine):
        yield engines


async def complete(
    engines: Engines, name: str, prompt: list[int], max_tokens: int, **fields: Any
) -> Request:
    request = make_request(prompt, engines.listeners.open(), max_tokens, request_id=name, **fields)
    engines.submit(request)
    while request.is_live:
        await request.listener.wait()
    engines.listeners.close(request.listener)
    return request


@asynccontextmanager
async def two_groups(
    *groups: Executors, retry_delay_s: float = 0.01
) -> AsyncIterator[tuple[Engines, list[Engine]]]:
    """Engines that run, whose requests go to another group at once when theirs is lost."""
    engines = Engines(Listeners(max_listeners=50), failover_after_s=0)
    settings = EngineSettings(retry_delay_s=retry_delay_s, min_chunk_tokens=1)
    by_group = [
        Engine(
            number,
            group,
            WaitingQueue(max_sequences=50, max_tokens=1000),
            engines.listeners,
            settings,
            on_end=engines.on_end,
        )
        for number, group in enumerate(groups)
    ]
    engines.drive(by_group)
    tasks = [asyncio.create_task(engine.run()) for engine in by_group]
    try:
        yield engines, by_group
        assert not any(task.done() for task in tasks), "the router would have ended"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
