"""A cell whose one group really steps, over fake executors. For tests."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from router.engine.engine import Engine
from router.engine.engines import Cell, Observer
from router.requests.listeners import Readers
from router.requests.request import OutputOptions, Request, SamplingParams, StopConditions
from router.requests.waiting_queue import Admission
from tests.router.support.stepper import make_shape
from tests.sim.fake_executors import FakeExecutors


@asynccontextmanager
async def running(
    dp_size: int = 2,
    observer: Observer | None = None,
    sizes: dict[str, Any] | None = None,
    **faults: float,
) -> AsyncIterator[Cell]:
    """A cell whose group steps over executors that take 1 ms, and may have faults."""
    cell = Cell(Readers(max_readers=50), observer=observer)
    shape = make_shape(dp_size=dp_size, **(sizes or {}))
    executors = FakeExecutors(shape, random.Random(0), step_s=0.001, **faults)
    engine = Engine(
        0,
        executors,
        Admission(max_sequences=4, max_tokens=1000),
        cell.readers,
        pipeline_depth=2,
        min_chunk_tokens=1,
        retry_delay_s=0.1,
        on_end=cell.on_end,
    )
    cell.drive([engine])
    stepping = asyncio.create_task(engine.run())
    while cell.model is None:
        await asyncio.sleep(0.01)
    yield cell
    stepping.cancel()


async def complete(cell: Cell, name: str, prompt: list[int], max_tokens: int) -> Request:
    request = Request(
        request_id=name,
        prompt=np.array(prompt, np.int32),
        sampling=SamplingParams(),
        stop=StopConditions(max_tokens=max_tokens),
        output=OutputOptions(),
        reader=cell.readers.open(),
        arrival_time=asyncio.get_running_loop().time(),
    )
    cell.submit(request)
    while request.is_live:
        await request.reader.wait()
    cell.readers.close(request.reader)
    return request
