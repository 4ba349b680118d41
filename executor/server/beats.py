"""Beats of an executor: one to each router that attends it, unless an answer of a step says as much."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog

from executor.parallel.lease import Lease
from protos.executor.beats import BEAT_S
from protos.executor.v1 import executor_pb2 as pb
from protos.telemetry.metrics import Histogram

log = structlog.stdlib.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class Beats:
    """Beats of this process on every open Attend call, from when it has loaded until it stops.

    A call that comes before waits: its first beat says at once that the executor is there. The router that
    drives the epoch takes answers of steps for beats, so it gets none while it gets them.

    Args:
        beat: Returns what to say now; how late it is, is filled in, and who drives and stands by.
        lease: Gets the beats of routers.
        late_s: Gets how late each was.
    """

    def __init__(
        self, beat: Callable[[], pb.AttendResponse], lease: Lease, late_s: Histogram
    ) -> None:
        self._beat = beat
        self._lease = lease
        self._late_s = late_s
        self._routers: list[_Router] = []  # one for each call
        self._answered_epoch, self._answer_time = 0, 0.0
        self._has_begun = self._has_ended = False

    def begin(self) -> None:
        """Lets beats go out."""
        self._has_begun = True
        self.beat_now()

    async def attend(self, requests: AsyncIterator[pb.AttendRequest], context: Context) -> None:
        """Beats until the router ends the call, or until `end`."""
        loop, router = asyncio.get_running_loop(), _Router()
        reader = asyncio.create_task(self._read(requests, router, context))
        reader.add_done_callback(lambda _: router.wake_up())
        self._routers.append(router)
        try:
            while not (self._has_begun or self._has_ended or reader.done()):
                await router.wait_for_news()
            due = loop.time()
            while not (self._has_ended or reader.done()):
                router.has_news = False
                late_s = max(0.0, loop.time() - due)
                self._late_s.observe(late_s)
                beat = self._beat()
                beat.late_ms = round(1000 * late_s)
                beat.num_standbys = self._lease.num_standbys
                driver = self._lease.driver
                if driver is not None and driver.router_id != router.id:
                    beat.driver.CopyFrom(pb.Driver(**driver._asdict()))
                await context.write(beat)
                due = loop.time() + BEAT_S
                await router.wait_until(due)
                while self._answers_until(router) > due and not self._has_news(router, beat):
                    due = self._answers_until(router)
                    await router.wait_until(due)
            if reader.done():
                reader.result()
        finally:
            self._routers.remove(router)
            reader.cancel()
            if router.id is not None:
                self._lease.leave(router.id, was_driver=router.is_driver)

    def note_answer(self, epoch: int) -> None:
        """Notes that the router that drives this epoch is sent an answer now."""
        self._answered_epoch = epoch
        self._answer_time = asyncio.get_running_loop().time()

    def _answers_until(self, router: "_Router") -> float:
        """Returns until when the answers that a router was sent need no beat."""
        is_told = router.epoch == self._answered_epoch
        return self._answer_time + BEAT_S if is_told else 0.0

    def _has_news(self, router: "_Router", told: pb.AttendResponse) -> bool:
        """Whether there is what no answer of a step tells a router, and its last beat has not told it."""
        return router.has_news or self._lease.num_standbys != told.num_standbys

    def beat_now(self, but_to: bytes | None = None) -> None:
        """Has the next beat go out at once, on all calls but those of one router."""
        for router in self._routers:
            if but_to is None or router.id != but_to:
                router.wake_up()

    def end(self) -> None:
        """Ends all calls."""
        self._has_ended = True
        self.beat_now()

    async def _read(
        self, requests: AsyncIterator[pb.AttendRequest], router: "_Router", context: Context
    ) -> None:
        """Returns when no more beats come."""
        async for request in requests:
            if router.id is None:
                router.id = request.router_id
                self._lease.attend(router.id)
                log.info("attended", router_id=router.id.hex(), peer=context.peer())
            router.epoch = request.epoch
            was_driver, router.is_driver = router.is_driver, request.is_driver
            self._lease.note_beat(router.id, is_driver=request.is_driver, was_driver=was_driver)


@dataclass(slots=True)
class _Router:
    """Who attends in one call."""

    id: bytes | None = None  # until its first beat
    is_driver: bool = False  # as its last beat said
    epoch: int = 0  # that it drives, likewise
    has_news: bool = False  # that no answer of a step tells: a beat is due at once
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def wake_up(self) -> None:
        """Has the next beat go out at once."""
        self.has_news = True
        self._wake.set()

    async def wait_for_news(self) -> None:
        """Waits until it is woken up."""
        await self._wake.wait()
        self._wake.clear()

    async def wait_until(self, time_s: float) -> None:
        """Waits until a time on the event loop's clock, or until there is news."""
        timer = asyncio.get_running_loop().call_at(time_s, self._wake.set)
        await self.wait_for_news()
        timer.cancel()
