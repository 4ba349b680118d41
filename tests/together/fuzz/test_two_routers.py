"""If these fail, two routers step one group, or a caller gets tokens twice, wrong, or never.

Whole routers on a virtual clock, over one set of fake executors with the lease of real ones. Routers die,
stand still and are told to stop at random; clients go on at another one, as the client library does.
"""

import asyncio
import os
import random
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest

from executor.errors import Held
from executor.parallel.lease import Lease
from protos.transport.errors import RpcError
from router.engine.engines import Engines
from router.errors import GroupHeld, Moved, NotReady, QueueFull
from router.requests.request import Listeners
from router.requests.resume import Resume, take_up
from router.requests.waiting_queue import WaitingQueue
from router.scheduling.step import GroupInfo, GroupShape, InFlight, StepResult
from tests.router.support.fake_executors import FakeExecutors
from tests.router.support.fake_rank import VOCAB_SIZE, expected_output
from tests.router.support.requests import make_request
from tests.router.support.running_engines import drive_group
from tests.router.support.stepper import make_shape
from tests.support.virtual_clock import on_virtual_clock

NUM_SEEDS = int(os.environ.get("LOCKSTEP_SIM_SEEDS", "8"))
NUM_CLIENTS, NUM_FAULTS = 12, 6
MAX_TOKENS = 30
BEAT_S = 0.1


class Group:
    """Executors that several routers know.

    Attributes:
        driver: Who has taken them.
        epoch: Of theirs.
        news: Called when the driver may be gone.
    """

    def __init__(self) -> None:
        self.shape: GroupShape = make_shape(dp_size=2)
        self.lease = Lease(asyncio.get_running_loop().time, self._tell)
        self.driver: Seat | None = None
        self.epoch = 0
        self.num_drivers = 0
        self.news: list[Callable[[], None]] = []

    def _tell(self, _: bytes | None) -> None:
        for tell in self.news:
            tell()

    def take(self, seat: "Seat") -> None:
        """Takes them for a router. Raises GroupHeld."""
        try:
            self.lease.check(seat.router_id)
        except Held as error:
            raise GroupHeld("another router drives its executors") from error
        self.epoch += 1
        if self.driver is not seat:
            self.num_drivers += 1
            if self.driver is not None:
                self.driver.lose_to_another()
            self.driver = seat
        self.lease.take(seat.router_id)


class Seat(FakeExecutors):
    """A router's way to a group."""

    def __init__(self, group: Group, number: int, rng: random.Random) -> None:
        super().__init__(group.shape, rng, step_s=0.005)
        self.group = group
        self.router_id = number.to_bytes(2)
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.is_driver = self.has_beaten = self.has_steps = False
        self._news = asyncio.Event()
        self.num_standbys = 1
        group.news.append(self._news.set)
        group.lease.attend(self.router_id)
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            await self.may_go_on.wait()
            was_driver, self.has_beaten = self.has_beaten, self.is_driver
            lease = self.group.lease
            lease.note_beat(self.router_id, is_driver=self.is_driver, was_driver=was_driver)
            await asyncio.sleep(BEAT_S)

    async def form(self) -> GroupInfo:
        await self.may_go_on.wait()
        self._end_steps()
        self._news.clear()
        try:
            self.group.take(self)
        except GroupHeld:
            self.is_driver = False
            raise
        self.is_driver = True
        info = await super().form()
        self.held_model = info.model
        await self.may_go_on.wait()
        if self.group.driver is not self:
            self.is_driver = False
            raise GroupHeld("it was taken as it formed")
        self.has_steps = True
        self.group.lease.note_steps(is_open=True)
        return info

    def lose_to_another(self) -> None:
        """Ends its streams: executors have joined another router's epoch."""
        self._dead = set(range(self.shape.dp_size))  # of what they had, it knows nothing any more
        self.has_steps = False
        if self._loss is not None and not self._loss.done():
            self._loss.set_exception(GroupHeld("STALE_EPOCH"))
            self._loss.exception()

    def _end_steps(self) -> None:
        if self.has_steps and self.group.driver is self:
            self.group.lease.note_steps(is_open=False)
        self.has_steps = False

    def send(self, step: InFlight) -> None:
        assert self._loss is not None
        if self.group.driver is self:
            assert not self._loss.done() or not isinstance(self._loss.exception(), GroupHeld)
            self.group.lease.note_step()
        super().send(step)

    async def receive(self, step: InFlight) -> StepResult:
        await self.may_go_on.wait()
        assert self._loss is not None
        if self._loss.done():
            self._loss.result()
        result = await super().receive(step)
        assert self.group.driver is self, "a step was answered to a router that drives no more"
        return result

    async def news(self) -> None:
        await self._news.wait()

    async def close(self) -> None:
        """Ends all of its streams."""
        self.is_driver = False
        self._beating.cancel()
        self._end_steps()
        with suppress(ValueError):
            self.group.news.remove(self._news.set)
            self.group.lease.leave(self.router_id, was_driver=self.has_beaten)


class Router:
    """A router, from its start to its end."""

    def __init__(self, group: Group, number: int, rng: random.Random) -> None:
        self.is_dead = False
        self.engines = Engines(Listeners(max_listeners=500))
        self.seat = Seat(group, number, rng)
        waiting = WaitingQueue(max_sequences=100, max_tokens=10_000)
        self.engine = drive_group(self.engines, self.seat, waiting)
        self._running = asyncio.create_task(self.engine.run())

    async def kill(self) -> None:
        self.is_dead = True
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self.seat.close()

    async def stop(self) -> None:
        if not await self.engines.hand_over():
            self.engines.cancel_all()
        await asyncio.sleep(0)
        await self.kill()


class World:
    """Two routers over one group, and clients that resume.

    Attributes:
        num_right: Requests that ended as they should.
        num_resumes: How often they were sent again.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.group = rng, Group()
        self._num_started = 0
        self.routers = [self._start(), self._start()]
        self.num_right = self.num_resumes = 0

    def _start(self) -> Router:
        self._num_started += 1
        return Router(self.group, self._num_started, self.rng)

    async def break_at_random(self) -> None:
        rng = self.rng
        for _ in range(NUM_FAULTS):
            await asyncio.sleep(rng.uniform(0.2, 1.5))
            number = rng.randrange(2)
            router = self.routers[number]
            fault = rng.choice(["kill", "kill", "pause", "stop"])
            if fault == "pause":
                router.seat.may_go_on.clear()
                await asyncio.sleep(rng.uniform(0.1, 2.0))
                router.seat.may_go_on.set()
                continue
            await (router.kill() if fault == "kill" else router.stop())
            await asyncio.sleep(rng.choice([0.0, rng.uniform(0, 1.0)]))
            self.routers[number] = self._start()

    async def client(self, number: int) -> None:
        """Sends requests, each until it has all of its tokens, wherever they come from."""
        rng = self.rng
        prompt = [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 12))]
        for round_number in range(3):
            output: list[int] = []
            attempt = 0
            while True:
                router = rng.choice(self.routers)
                name = f"{number}-{round_number}"
                is_over = await self._attempt(router, name, prompt, output, attempt)
                if is_over:
                    break
                attempt += 1
                await asyncio.sleep(rng.uniform(0.0, 0.1))
            assert output == expected_output(prompt, MAX_TOKENS, ())
            self.num_right += 1
            self.num_resumes += attempt
            await asyncio.sleep(rng.uniform(0.0, 0.5))

    async def _attempt(
        self, router: Router, name: str, prompt: list[int], output: list[int], attempt: int
    ) -> bool:
        """Takes what one router gives of a request. Returns whether that was the rest."""
        listener = router.engines.listeners.open()
        request = make_request(prompt, listener, MAX_TOKENS, request_id=name)
        if attempt:
            outputs = {0: np.array(output, np.int32)} if output else {}
            take_up(request, Resume(attempt=attempt, outputs=outputs, fields={0: "resume"}))
        try:
            router.engines.submit(request)
        except (Moved, NotReady, QueueFull):
            return False
        [sequence] = request.sequences
        while not router.is_dead:
            output += sequence.take_tokens().tolist()
            if sequence.is_ended:
                error: RpcError | None = sequence.error
                assert error is None or error.code.name == "UNAVAILABLE", error
                return error is None
            await asyncio.sleep(0.01)
        return False  # what it had not sent is lost with it


@on_virtual_clock
async def run_world(seed: int) -> World:
    world = World(random.Random(seed))
    async with asyncio.timeout(600), asyncio.TaskGroup() as tasks:
        tasks.create_task(world.break_at_random())
        for number in range(NUM_CLIENTS):
            tasks.create_task(world.client(number))
    await asyncio.sleep(2.0)
    drivers = [router.seat for router in world.routers if router.engine.is_ready]
    assert drivers == [world.group.driver], "two drive, or nobody does"
    for router in world.routers:
        assert router.engines.num_live == 0
        await router.kill()
    return world


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 8))
def test_every_caller_gets_every_token_once_whatever_happens_to_routers(first: int) -> None:
    worlds = [run_world(seed) for seed in range(first, first + 8)]
    assert all(world.num_right == 3 * NUM_CLIENTS for world in worlds)
    assert sum(world.num_resumes for world in worlds) > NUM_CLIENTS
    assert sum(world.group.num_drivers for world in worlds) > 2 * len(worlds)
