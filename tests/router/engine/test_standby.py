"""If these fail, callers wait at a router that another one has taken the executors from."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from unittest.mock import Mock

import pytest

from protos.serving.v1 import serving_pb2 as pb
from router.engine.engine import Engine
from router.engine.engines import Engines
from router.errors import GroupHeld, Moved, ShuttingDown
from router.requests.request import Listeners, Request
from router.requests.waiting_queue import WaitingQueue
from router.scheduling.step import GroupInfo, ServedModel
from tests.router.support.fake_executors import FakeExecutors
from tests.router.support.requests import make_request
from tests.router.support.running_engines import complete, drive_group, two_groups
from tests.router.support.stepper import make_shape
from tests.support.virtual_clock import on_virtual_clock


class Contested(FakeExecutors):
    """Executors that another router may have.

    Attributes:
        is_held: Whether it has.
        is_closed: Whether this router has left them.
    """

    def __init__(self, *, is_held: bool = False) -> None:
        super().__init__(make_shape(dp_size=2), random.Random(0), step_s=0.01)
        self.is_held = is_held
        self.is_closed = False

    async def form(self) -> GroupInfo:
        self.is_driver = not self.is_held
        if self.is_driver:
            info = await super().form()
            self.held_model = info.model
        self.is_driver = not self.is_held
        if self.is_held:
            raise GroupHeld("router 0 drives its executors")
        return info

    def take(self) -> None:
        """Another router takes them."""
        self.is_held = True
        self.is_driver = False
        assert self._loss is not None
        self._loss.set_exception(GroupHeld("STALE_EPOCH"))

    async def close(self) -> None:
        self.is_driver = False
        self.is_closed = True


@asynccontextmanager
async def one_group(
    executors: Contested,
) -> AsyncIterator[tuple[Engines, Engine, asyncio.Task[None]]]:
    engines = Engines(Listeners(max_listeners=50))
    engine = drive_group(engines, executors, WaitingQueue(max_sequences=4, max_tokens=1000))
    task = asyncio.create_task(engine.run())
    await asyncio.sleep(1)
    yield engines, engine, task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def begun(engines: Engines, name: str) -> Request:
    """Returns a request that has tokens."""
    request = make_request([1, 2, 3], engines.listeners.open(), 30, request_id=name)
    engines.submit(request)
    while len(request.sequences[0].tokens) < 6:
        await asyncio.sleep(0.001)
    return request


@on_virtual_clock
async def test_a_router_that_is_refused_stands_by_takes_nothing_and_takes_over() -> None:
    executors = Contested(is_held=True)
    async with one_group(executors) as (engines, engine, _):
        assert engine.status().state == pb.GROUP_STATE_STANDBY
        assert "router 0" in engine.status().problem
        assert not engines.is_ready
        with pytest.raises(Moved):
            engines.check_room()
        executors.is_held = False
        await asyncio.sleep(1)
        assert engines.is_ready
        assert engine.measures.totals().num_takeovers == 1
        assert not (await complete(engines, "a", [1, 2], 4)).is_live


@on_virtual_clock
@pytest.mark.parametrize("is_lost_to_a_third", [False, True])
async def test_requests_that_come_while_a_router_takes_over_wait_for_what_comes_of_it(
    is_lost_to_a_third: bool,
) -> None:
    executors = Contested()
    async with one_group(executors) as (engines, engine, _):
        executors.take()
        await asyncio.sleep(1)
        assert engines.is_standby
        executors.is_held = False
        while not executors.is_driver:
            await asyncio.sleep(0.001)
        request = make_request([1, 2], engines.listeners.open(), 4, request_id="early")
        engines.submit(request)
        assert not engine.is_ready
        executors.is_held = is_lost_to_a_third
        while request.is_live:
            await request.listener.wait()
        assert isinstance(request.sequences[0].error, Moved if is_lost_to_a_third else type(None))


@on_virtual_clock
async def test_what_a_router_that_stands_by_takes_is_for_the_model_of_the_one_that_drives() -> None:
    executors = Contested(is_held=True)
    async with one_group(executors) as (engines, _, _task):
        known: list[ServedModel | None] = []
        engines.on_standby = lambda: known.append(engines.model)
        assert engines.model is None
        executors.held_model = (await Contested().form()).model
        await asyncio.sleep(1)
        assert engines.model == executors.held_model
        assert known[-1] == executors.held_model
        with pytest.raises(Moved):
            engines.check_room()


@on_virtual_clock
async def test_a_router_that_has_only_seen_a_model_serves_another_one() -> None:
    executors = Contested(is_held=True)
    async with one_group(executors) as (engines, engine, _):
        model = (await Contested().form()).model
        executors.held_model = replace(model, max_model_len=2 * model.max_model_len)
        await asyncio.sleep(1)
        assert engines.model == executors.held_model
        executors.is_held = False
        await asyncio.sleep(1)
        assert engine.is_ready
        assert engines.model == model


@on_virtual_clock
async def test_requests_of_a_router_whose_group_was_taken_are_told_to_go_on_elsewhere() -> None:
    executors = Contested()
    async with one_group(executors) as (engines, engine, _):
        running = await begun(engines, "running")
        executors.take()
        await asyncio.sleep(0.1)
        assert isinstance(running.sequences[0].error, Moved)
        assert engines.num_live == 0
        assert engine.measures.totals().losses == {"lost": 0, "left": 1}
        with pytest.raises(Moved):
            engines.submit(make_request([1], engines.listeners.open(), 3, request_id="new"))


@on_virtual_clock
async def test_they_go_to_another_group_of_the_router_where_there_is_one() -> None:
    first, second = Contested(), Contested()
    async with two_groups(first, second) as (engines, by_group):
        while not all(engine.is_ready for engine in by_group):
            await asyncio.sleep(0.01)
        request = await begun(engines, "one")
        (first, second)[request.sequences[0].group].take()
        while request.is_live:
            await request.listener.wait()
        assert request.sequences[0].error is None
        assert engines.is_ready


@on_virtual_clock
async def test_a_router_that_is_told_to_stop_commits_what_is_in_flight_and_leaves_the_group() -> (
    None
):
    executors = Contested()
    async with one_group(executors) as (engines, engine, task):
        request = await begun(engines, "running")
        assert not await engines.hand_over()  # to nobody
        executors.num_standbys = 1
        num_sent = len(executors.plans)
        engines.begin_drain(delay_s=0.0, grace_s=1.0)
        engines.on_standby = Mock()
        assert await engines.hand_over()
        assert engines.is_standby
        assert not engines.on_standby.called  # it starts nothing for requests that go elsewhere
        assert executors.is_closed
        assert len(executors.plans) == num_sent
        assert not executors._pending
        assert isinstance(request.sequences[0].error, ShuttingDown)
        assert +engines.measures.ended == {"MOVED": 1}  # it was not cut
        assert engine.measures.totals().losses == {"lost": 0, "left": 1}
        await task


@on_virtual_clock
async def test_a_group_whose_executors_are_lost_as_it_is_left_is_left_all_the_same() -> None:
    executors = Contested()
    async with one_group(executors) as (engines, _, task):
        request = await begun(engines, "running")
        executors.num_standbys = 1
        executors.kill(down_s=10)
        engines.begin_drain(delay_s=0.0, grace_s=1.0)
        assert await engines.hand_over()
        assert isinstance(request.sequences[0].error, ShuttingDown)
        await task


@on_virtual_clock
async def test_a_group_that_is_lost_just_before_it_is_left_is_left_at_once_all_the_same() -> None:
    executors = Contested()
    async with one_group(executors) as (engines, engine, task):
        request = await begun(engines, "running")
        engines.begin_drain(delay_s=0.0, grace_s=1.0)
        executors.num_standbys = 1
        assert engine.can_leave
        executors.kill(down_s=10)
        while engine.is_ready:
            await asyncio.sleep(0)
        lost_time = asyncio.get_running_loop().time()
        await engine.leave()
        assert asyncio.get_running_loop().time() == lost_time
        assert executors.is_closed
        assert engines.is_standby
        assert isinstance(request.sequences[0].error, ShuttingDown)
        await task


@on_virtual_clock
async def test_what_stands_by_is_no_groups_to_leave() -> None:
    executors = Contested(is_held=True)
    async with one_group(executors) as (engines, _, _task):
        executors.num_standbys = 1
        assert not await engines.hand_over()
