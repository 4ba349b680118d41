"""Engines: every group of this router, and every request that is live in one of them."""

import asyncio
import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from math import inf
from typing import Protocol

import numpy as np

from protos.serving.v1 import serving_pb2 as pb
from protos.transport.errors import RpcError
from protos.transport.interceptors import Caller
from router.engine.engine import Engine
from router.engine.recent import SAMPLE_S, Events
from router.errors import (
    Cancelled,
    DeadlineExceeded,
    Moved,
    MovedAsPlanned,
    NotReady,
    QueueFull,
    RequestExists,
    ShuttingDown,
)
from router.requests.request import Columns, Listener, Listeners, Request, Sequence
from router.scheduling.counters import GroupTotals, RequestMeasures
from router.scheduling.kv.block_log import BlockLog
from router.scheduling.step import ServedModel


class Observer(Protocol):
    """Observer of every request."""

    def on_submit(self, request: Request) -> None:
        """It was taken, by the call whose task this runs in."""
        ...

    def on_end(self, request: Request) -> None:
        """Its last sequence has ended."""
        ...


class Engines:
    """Groups and live requests, as the front of the router sees them.

    Args:
        listeners: Where a call opens its listener, and closes it when its sequences have ended.
        failover_after_s: A group that is down for longer gives what it ran to another one.
        observers: Told of every request that is taken, in this order.
        router_id: Of this router.

    Attributes:
        measures: What became of requests, so far.
        events: What last happened to this router as a whole.
        is_draining: Whether this router was told to stop.
        is_shutting_down: Whether new requests are refused, because this router is about to stop.
        on_standby: Called when other routers drive all groups, each time that more is known of these; not
            while this one stops.
    """

    def __init__(
        self,
        listeners: Listeners,
        *,
        failover_after_s: float = 10.0,
        observers: SequenceOf[Observer] = (),
        router_id: str = "",
    ) -> None:
        self.router_id = router_id
        self.listeners = listeners
        self.measures = RequestMeasures()
        self._failover_after_s = failover_after_s
        self._observers = observers
        self._engines: SequenceOf[Engine] = ()
        self._live: dict[tuple[Caller, str], Request] = {}
        self.is_draining = self.is_shutting_down = False
        self.events = Events(asyncio.get_running_loop().time)
        self.on_standby: Callable[[], None] = lambda: None
        self._on_readiness: Callable[[bool], None] | None = None
        self._was_ready = False
        self._readiness_timer: asyncio.TimerHandle | None = None
        self._failover_timer: asyncio.TimerHandle | None = None

    def drive(self, engines: SequenceOf[Engine]) -> None:
        """Says which engines there are; they report to `on_end`. Called once."""
        self._engines = engines
        for engine in engines:
            engine.on_change = self._on_change

    @property
    def model(self) -> ServedModel | None:
        """The model served; None until a group has formed."""
        return next((engine.model for engine in self._engines if engine.model), None)

    @property
    def is_ready(self) -> bool:
        """Whether some group can step, and this router was not told to stop."""
        return not self.is_draining and any(engine.is_serving for engine in self._engines)

    def watch_readiness(self, on_change: Callable[[bool], None] | None) -> None:
        """Has a function called with each change of `is_ready` from False on; None: no longer."""
        self._on_readiness, self._was_ready = on_change, False
        self._check_readiness()

    def _on_change(self) -> None:
        self._move_waiting()
        if self.is_standby:
            self.listeners.wake_all()  # streams on which nothing runs end
            if not self.is_draining:
                self.on_standby()
        self._check_readiness()

    def _check_readiness(self) -> None:
        """Reports a change, and sets the timer for the next one that no engine reports."""
        if self._readiness_timer is not None:
            self._readiness_timer.cancel()
        if self._on_readiness is None:
            return
        if self.is_ready != self._was_ready:
            self._was_ready = self.is_ready
            self._on_readiness(self._was_ready)
        wait_s = min(engine.until_overdue_s for engine in self._engines)
        loop = asyncio.get_running_loop()
        self._readiness_timer = loop.call_later(wait_s, self._check_readiness)

    @property
    def is_standby(self) -> bool:
        """Whether other routers drive all groups, as far as this one knows."""
        return bool(self._engines) and all(engine.is_standby for engine in self._engines)

    async def hand_over(self) -> bool:
        """Leaves all groups to other routers, if those would take them. Returns whether it did."""
        groups = [engine for engine in self._engines if not engine.is_standby]
        if not groups or not all(engine.can_leave for engine in groups):
            return False
        async with asyncio.TaskGroup() as tasks:
            for engine in groups:
                tasks.create_task(engine.leave())
        return True

    @property
    def num_live(self) -> int:
        return len(self._live)

    def check_open(self) -> None:
        """Refuses what another router may take.

        Raises:
            NotReady, Moved, ShuttingDown: No request is taken here at present.
        """
        if self.is_shutting_down:
            raise ShuttingDown("this router is shutting down: send the request to another one")
        if self.is_standby:
            raise Moved
        if self.model is None:
            raise NotReady("no group of executors has formed yet: try again")

    def check_room(self, *, is_resumed: bool = False) -> None:
        """Refuses what no request could change, before anybody reads one: overload stays cheap.

        Args:
            is_resumed: Whether it is for resumed requests, which a full queue does not keep out.

        Raises:
            QueueFull, NotReady, Moved, ShuttingDown: No request is taken at present.
        """
        self.check_open()
        if not is_resumed and not any(engine.waiting.has_room for engine in self._engines):
            raise QueueFull("too much waits already: try again in a second")

    def submit(self, request: Request) -> None:
        """Gives a request to the group that has least to do.

        One that is resumed takes the place of the attempt before it, which may not know yet that its
        connection broke.

        Raises:
            QueueFull, RequestExists, NotReady, Moved, ShuttingDown: It is not taken.
            DeadlineExceeded: Its time was over before it was read.
        """
        self.check_room(is_resumed=request.attempt > 0)
        key = request.caller, request.request_id
        before = self._live.get(key)
        if before is not None and before.attempt >= request.attempt:
            raise RequestExists(request.request_id)
        now = asyncio.get_running_loop().time()
        if request.deadline is not None and now >= request.deadline:
            raise _overdue(request, "been taken")
        if request.is_live:
            engine = self._pick_engine(self._engines, request)
            engine.submit(request)
            request.served = engine.model
        request.served = request.served or self.model
        if before is not None:
            self.cancel(before, Cancelled(f"the request goes on in attempt {request.attempt}"))
        self._live[key] = request
        for observer in self._observers:
            observer.on_submit(request)
        self.measures.add_resumed(request)
        had_ended = [sequence for sequence in request.sequences if sequence.is_ended]
        for sequence in had_ended:  # its last token came, and nothing of how it ended
            self.on_end(sequence)
        if request.deadline is not None and request.is_live:
            loop = asyncio.get_running_loop()
            request.expiry = loop.call_at(request.deadline, self._expire, request)

    def _pick_engine(self, engines: SequenceOf[Engine], request: Request) -> Engine:
        """Returns the engine that has least to run first, of those that can step if there are any.

        That is what waits there, and what of the prompt its caches do not have.
        """
        if len(engines) == 1:
            return engines[0]
        return min(
            engines,
            key=lambda e: (
                e.is_standby,
                not self._fits(e, request),
                not e.is_ready,
                not e.waiting.has_room,
                e.num_tokens_with(request),
                e.num_running,
                e.group,
            ),
        )

    def _fits(self, engine: Engine, request: Request) -> bool:
        """Whether a group runs the model that the request was made for, and is large enough."""
        served, own = self.model, engine.model
        if served is None or own is None:
            return False
        num_tokens = len(request.prompt) + request.stop.max_tokens
        can_constrain = own.supports_constraints or not request.grammar
        is_same = own.fingerprint == served.fingerprint
        return is_same and can_constrain and num_tokens <= own.max_model_len

    def _move_waiting(self) -> None:
        """Moves what waits for a group that is down to groups that can step.

        What has not begun goes at once. What has begun stays for a while: the group that comes back
        may have most of it computed, and any other has to compute all of it. What waits for a group that
        another router drives goes there, if none of this router's can run it.
        """
        loop = asyncio.get_running_loop()
        if self._failover_timer is not None:
            self._failover_timer.cancel()
            self._failover_timer = None
        next_time = inf
        for engine in self._engines:
            if engine.is_ready:
                continue
            failover_time = engine.lost_time + self._failover_after_s
            is_late = loop.time() >= failover_time
            num_moved = 0
            for request in engine.waiting_requests():
                if is_late or engine.is_standby or not request.has_begun:
                    is_moved = self._move(request, engine)
                    num_moved += is_moved
                    if engine.is_standby and not is_moved:
                        self.cancel(request, MovedAsPlanned() if self.is_draining else Moved())
            if num_moved:
                ids = engine.ids()
                engine.events.note(logging.INFO, "requests_moved", **ids, requests=num_moved)
            if not is_late:
                next_time = min(next_time, failover_time)
        if next_time < inf:
            self._failover_timer = loop.call_at(next_time, self._move_waiting)

    def _move(self, request: Request, engine: Engine) -> bool:
        """Gives a request to another group. Returns False if none can run it now."""
        ready = [e for e in self._engines if e.is_ready and self._fits(e, request)]
        if ready:
            engine.hand_over(request, self._pick_engine(ready, request))
        return bool(ready)

    def find(self, caller: Caller, request_id: str) -> Request | None:
        """Returns a caller's live request."""
        return self._live.get((caller, request_id))

    def cancel(self, request: Request, error: RpcError | None = None) -> None:
        """Ends what is live of a request; its blocks are free when no step runs them."""
        for sequence in request.sequences:
            if not sequence.is_ended:
                engine = self._engines[sequence.group]
                engine.fail(sequence, error or Cancelled("the request was cancelled"))

    def take_columns(self, listener: Listener) -> Columns:
        """Returns a listener's new tokens of its columnar requests, whichever group they run in."""
        parts = [engine.take_columns(listener) for engine in self._engines]
        if len(parts) == 1:
            return parts[0]
        return Columns(*map(np.concatenate, zip(*parts, strict=True)))

    def status(self) -> list[pb.GroupStatus]:
        return [engine.status() for engine in self._engines]

    def block_logs(self) -> list[BlockLog | None]:
        """Returns what the prefix cache of each rank holds; None for a group that has not formed."""
        return [log for engine in self._engines for log in engine.block_logs]

    def flush_cache(self) -> tuple[int, int]:
        """Drops cached blocks of all groups; see Engine.flush_cache."""
        num_dropped, num_left = zip(*[e.flush_cache() for e in self._engines], strict=True)
        return sum(num_dropped), sum(num_left)

    def totals(self) -> list[GroupTotals]:
        """Returns what each group's epochs amounted to, so far."""
        return [engine.measures.totals() for engine in self._engines]

    def overview(self, version: str) -> pb.GetStatusResponse:
        """Returns GetStatus' answer, as operators get it."""
        owners = [self.events, *[engine.events for engine in self._engines]]
        events = [event for owner in owners for event in owner.messages()]
        return pb.GetStatusResponse(
            groups=[engine.full_status() for engine in self._engines],
            version=version,
            router_id=self.router_id,
            model="" if self.model is None else self.model.name,
            is_ready=self.is_ready,
            is_draining=self.is_draining,
            num_live_requests=self.num_live,
            num_resumed_requests=self.measures.resumed.total(),
            events=sorted(events, key=lambda e: e.age.ToNanoseconds()),
        )

    async def keep_history(self) -> None:
        """Has each group take its samples, for ever."""
        while True:
            for engine in self._engines:
                engine.take_sample()
            await asyncio.sleep(SAMPLE_S)

    def begin_drain(self, *, delay_s: float, grace_s: float) -> None:
        """Is not ready from now on, but takes requests."""
        self.is_draining = True
        self.events.note(
            logging.INFO,
            "draining",
            live_requests=self.num_live,
            delay_s=delay_s,
            grace_s=grace_s,
        )

    def shut_down(self) -> None:
        """Refuses new requests from now on; streams on which nothing runs may end."""
        self.is_draining = self.is_shutting_down = True
        self.events.note(
            logging.INFO,
            "refusing_requests",
            live_requests=self.num_live,
            open_calls=self.listeners.num_open,
        )
        self.listeners.wake_all()

    def cancel_all(self) -> None:
        """Ends every live request; the router is about to stop."""
        error = ShuttingDown("this router shut down before the request had ended: send it again")
        for request in list(self._live.values()):
            self.cancel(request, error)

    def on_end(self, sequence: Sequence) -> None:
        """Tells the listener, and forgets the request when its last sequence ends."""
        request = sequence.request
        sequence.progress.end_time = asyncio.get_running_loop().time()
        self.measures.add_end(sequence)
        request.listener.ended.append(sequence)
        request.listener.wake()
        key = request.caller, request.request_id
        if not request.is_live and self._live.get(key) is request:
            del self._live[key]
            for observer in self._observers:
                observer.on_end(request)
            if request.expiry is not None:
                request.expiry.cancel()

    def _expire(self, request: Request) -> None:
        self.cancel(request, _overdue(request, "ended"))


def _overdue(request: Request, missed: str) -> DeadlineExceeded:
    assert request.deadline is not None
    return DeadlineExceeded(missed, request.deadline - request.arrival_time)
