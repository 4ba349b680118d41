"""When a group counts as serving, and what a planned leave costs: on a virtual clock."""

import asyncio
import random

import pytest

from router.engine.engines import Engines
from router.errors import ExecutorLeft
from router.requests.request import Listeners, Request
from router.requests.waiting_queue import WaitingQueue
from router.scheduling.step import InFlight, StepResult
from tests.router.support.fake_executors import FakeExecutors
from tests.router.support.fake_rank import expected_output
from tests.router.support.requests import make_request
from tests.router.support.running_engines import drive_group
from tests.router.support.stepper import make_shape
from tests.support.virtual_clock import on_virtual_clock

OVERDUE_S = 60.0
PROMPT = [7, 3, 9]
MAX_TOKENS = 12


class Executors(FakeExecutors):
    """Steps take `step_s`, and executors leave in the steps whose numbers are given."""

    def __init__(self, step_s: float, leaves_at: tuple[int, ...] = ()) -> None:
        super().__init__(make_shape(rows_per_rank=4), random.Random(1))
        self.step_s = step_s
        self.leaves_at = leaves_at
        self.num_received = 0

    async def receive(self, step: InFlight) -> StepResult:
        self.num_received += 1
        if self.num_received in self.leaves_at:
            raise ExecutorLeft("SHUTTING_DOWN: this executor was told to stop")
        await asyncio.sleep(self.step_s)
        return await super().receive(step)


class World:
    """An engine that runs until its clock ends, and one request at a time."""

    def __init__(self, executors: Executors) -> None:
        self.engines = Engines(Listeners(max_listeners=8))
        self.engine = drive_group(
            self.engines,
            executors,
            WaitingQueue(max_sequences=8, max_tokens=1000),
            pipeline_depth=1,
            min_chunk_tokens=8,
            step_timeout_s=OVERDUE_S,
        )
        self.running = asyncio.create_task(self.engine.run())

    async def formed(self) -> None:
        while not self.engine.is_ready:
            await asyncio.sleep(0.1)

    def submit(self) -> Request:
        request = make_request(PROMPT, self.engines.listeners.open(), MAX_TOKENS)
        self.engines.submit(request)
        return request

    async def serving_until_done(self, request: Request) -> list[bool]:
        """Returns what readiness was, every second until the request has ended."""
        seen = []
        while request.is_live:
            seen.append(self.engines.is_ready)
            await asyncio.sleep(1.0)
        return seen


@on_virtual_clock
async def test_an_idle_night_changes_nothing_nor_does_the_request_that_ends_it():
    world = World(Executors(step_s=0.01))
    await world.formed()
    for _ in range(10 * 60):
        await asyncio.sleep(60.0)
        assert world.engines.is_ready
    request = world.submit()
    assert world.engines.is_ready  # though the last step is ten hours old
    assert all(await world.serving_until_done(request))


@pytest.mark.parametrize("step_s", [30.0, 59.0])
@on_virtual_clock
async def test_a_group_whose_steps_are_long_serves_all_along(step_s: float):
    world = World(Executors(step_s))
    await world.formed()
    seen = await world.serving_until_done(world.submit())
    assert len(seen) > step_s * MAX_TOKENS * 0.9
    assert all(seen)


@on_virtual_clock
async def test_a_group_that_has_work_and_makes_no_progress_does_not_serve():
    executors = Executors(step_s=0.01)
    world = World(executors)
    await world.formed()
    await asyncio.sleep(3600.0)
    executors.step_s = 1e6
    request = world.submit()
    await asyncio.sleep(OVERDUE_S - 1)
    assert world.engines.is_ready
    await asyncio.sleep(2)
    assert not world.engines.is_ready
    world.engines.cancel(request)


@on_virtual_clock
async def test_each_change_of_readiness_is_told_when_it_comes():
    """When a group has formed, is lost, makes no progress, or does again."""
    executors = Executors(step_s=0.01)
    world, now = World(executors), asyncio.get_running_loop().time
    seen: list[tuple[bool, float]] = []
    world.engines.watch_readiness(lambda is_ready: seen.append((is_ready, now())))
    await world.formed()
    assert [is_ready for is_ready, _ in seen] == [True]
    await asyncio.sleep(3600.0)
    executors.step_s = 3 * OVERDUE_S
    started = now()
    request = world.submit()
    await asyncio.sleep(4 * OVERDUE_S)
    executors.step_s = 0.01
    while request.is_live:
        await asyncio.sleep(1.0)
    executors.kill(down_s=5.0)
    await asyncio.sleep(60.0)
    assert [is_ready for is_ready, _ in seen] == [True, *[False, True] * (len(seen) // 2)]
    assert len(seen) >= 5
    assert seen[1][1] - started == pytest.approx(OVERDUE_S, abs=0.1)
    world.engines.watch_readiness(None)
    assert len(seen) % 2 == 1


@on_virtual_clock
async def test_a_request_outlives_any_number_of_executors_that_are_told_to_stop():
    """Lost executors would have it failed as their cause: it ran alone each time."""
    world = World(Executors(step_s=0.01, leaves_at=(2, 4, 6, 8, 10)))
    await world.formed()
    request = world.submit()
    while request.is_live:
        await asyncio.sleep(1.0)
    [sequence] = request.sequences
    assert sequence.error is None
    assert sequence.take_tokens().tolist() == expected_output(PROMPT, MAX_TOKENS, ())
    assert world.engine.status().epoch == 6
