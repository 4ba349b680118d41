"""Attend calls to a group's executors: beats both ways, and the clock by which silence is judged.

A step that is sent, or its answer, says as well as a beat that who sent it is alive. So each side beats
only when it has sent the other nothing for the time between beats: none travels while steps do. Nor does
a timer run out then, which costs more than a step's part in it: what is due is done beside a step. Answers
that follow one another at once are not even noted one by one: when the last came is looked up when it matters.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

import grpc
import structlog
from google.protobuf.message import DecodeError

from protos.executor.beats import BEAT_S
from protos.executor.lease import is_held
from protos.executor.v1 import executor_pb2 as pb
from router.executors.description_bounds import MAX_INSTANCE_ID_LEN
from router.executors.suspicion import Beat, Suspicion

log = structlog.stdlib.get_logger(__name__)

ATTEND = f"/{pb.DESCRIPTOR.services_by_name['ExecutorService'].full_name}/Attend"
MAX_BEAT_BYTES = 1024
TICK_S = 0.05  # between looks at who is silent
LATE_S = 0.01  # by which every busy event loop is late
RETRY_S = 0.05  # until an executor that is not there is called again
LONG_AWAY_S = 30.0  # for which one is called so often, as an address may be gone for good
REFUSED_RETRY_S = 1.0  # one that is there, and takes no such call now; or was away for so long
FLOOD_GAP_S = 0.01  # between beats; of an executor that sends more, few are read

ROUTER_ID_BYTES = 16


def new_router_id() -> bytes:
    """Returns what executors know a router by, until it ends."""
    return secrets.token_bytes(ROUTER_ID_BYTES)


@dataclass(slots=True)
class _Attended:
    """An executor that is attended.

    Attributes:
        told: The last beat to it: the epoch, and whether this router drives the group.
        due: Set when a beat is due on the present call.
    """

    channel: grpc.aio.Channel
    task: asyncio.Task[None] | None = None
    told: tuple[int, bool] = (-1, False)
    due: asyncio.Event = field(default_factory=asyncio.Event)


class Attendance:
    """Beats of the executors at some addresses.

    Args:
        suspicion: Gets the beats, by address.
        router_id: Of this router.
        epoch: Returns the epoch in which the executor at an address is sent steps; 0: in none.
        is_driver: Returns whether this router drives the group, or is about to.
        answers: Returns when the executors that are sent steps last answered, by address.
        on_tick: Called with the time, on the event loop's clock, when there may be silences to judge.
        on_news: Called when an executor beats that did not before, or another router drives it no more.

    Attributes:
        held: Addresses of executors that beat and that another router drives.
        num_standbys: By address, how many routers attend it that do not drive it.
        without_beats: Addresses of executors that have no such call: they are of an older release.
    """

    def __init__(
        self,
        suspicion: Suspicion,
        *,
        router_id: bytes,
        epoch: Callable[[str], int],
        is_driver: Callable[[], bool],
        answers: Callable[[], Iterable[tuple[str, float]]],
        on_tick: Callable[[float], None],
        on_news: Callable[[], None],
    ) -> None:
        self._suspicion = suspicion
        self._router_id = router_id
        self._epoch = epoch
        self._is_driver = is_driver
        self._answers = answers
        self._on_tick = on_tick
        self._on_news = on_news
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._attended: dict[str, _Attended] = {}
        self._timer: asyncio.TimerHandle | None = None  # of the next tick
        self._due_time = float("inf")  # its
        self._tick_time = self._beat_time = self._step_time = self._excused_time = -BEAT_S
        self.without_beats: set[str] = set()
        self.num_standbys: dict[str, int] = {}
        self.held: set[str] = set()

    def attend(self, address: str, channel: grpc.aio.Channel) -> None:
        """Sees to it that an executor is attended over this channel, until `leave` or `close`.

        Over another one than before, its silence goes on to be judged as before.
        """
        if self._timer is None:
            self._beat_time = self._clock()
            self._tick_in(TICK_S)
        attended = self._attended.get(address)
        if attended is not None and attended.task is not None:
            if attended.channel is channel and not attended.task.done():
                return
            attended.task.cancel()
        self._attended[address] = attended = _Attended(channel)
        attended.task = asyncio.create_task(
            self._attend(address, attended), name=f"attend {address}"
        )

    def leave(self, address: str) -> None:
        """Attends an executor no more, and forgets it."""
        attended = self._attended.pop(address, None)
        if attended is not None and attended.task is not None:
            attended.task.cancel()
        self.without_beats.discard(address)
        self.num_standbys.pop(address, None)
        self.held.discard(address)
        self._suspicion.forget(address)

    def close(self) -> None:
        """Attends nobody any more."""
        for address in list(self._attended):
            self.leave(address)
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._due_time = None, float("inf")

    def note_step(self) -> None:
        """Notes that all members of the epoch are sent a step now."""
        self._step_time = self._clock()
        if self._timer is not None and self._step_time - self._tick_time >= BEAT_S:
            self._tick()

    def note_late_answer(self, address: str, now: float) -> None:
        """Notes the answer of a step that was long in coming, which says as much as a beat."""
        self._catch_up(now)
        self._suspicion.note_answer(address, now)

    def note_answers(self) -> None:
        """Notes the answers that came and were not looked up yet."""
        self._catch_up(self._clock())

    def _tick(self) -> None:
        """Judges silences, and sends the beats that are due."""
        now = self._clock()
        self._tick_time = now
        if now - self._due_time > LATE_S or self._suspicion.has_silence(now):
            self._catch_up(now)
            self._on_tick(now)
        has_steps = now - self._step_time < BEAT_S
        if now - self._beat_time > BEAT_S - TICK_S / 2:
            self._beat_time = now
            for address, attended in self._attended.items():
                is_stepped = has_steps and self._epoch(address)
                if not is_stepped or self._word_to(address) != attended.told:
                    attended.due.set()
        if self._timer is not None:
            self._timer.cancel()
            wait_s = BEAT_S + TICK_S if has_steps else TICK_S
            # Not at once, however long this took.
            self._tick_in(max(now + wait_s - self._clock(), LATE_S))

    def _tick_in(self, wait_s: float) -> None:
        self._due_time = self._clock() + wait_s
        self._timer = self._loop.call_later(wait_s, self._tick)

    def _catch_up(self, now: float) -> None:
        """Notes answers, and takes off all silences what this event loop is late for its tick, once.

        Call it before anything is noted that came meanwhile: what waited here to be read was not late.
        """
        since = max(self._due_time, self._excused_time)
        is_late = now - since > LATE_S
        if is_late:
            for address, time in self._answers():
                if time <= since:
                    self._suspicion.note_quick_answers(address, time)
            self._suspicion.excuse(now - since)
            self._excused_time = now
        for address, time in self._answers():
            self._suspicion.note_quick_answers(address, time)

    async def _attend(self, address: str, attended: _Attended) -> None:
        # Beats come as bytes: what is none of ours shall have an error, and not end in gRPC's log.
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = attended.channel.stream_stream(
            ATTEND, request_serializer=None, response_deserializer=None
        )
        begun = self._clock()
        while True:
            attended.due = due = asyncio.Event()
            try:
                code = await self._listen(address, method(self._beats(address, attended, due)))
            finally:
                attended.due = asyncio.Event()
                due.set()  # or gRPC's task would wait for it for ever
            self._suspicion.note_end(address)
            self.num_standbys.pop(address, None)
            self.held.discard(address)
            if code is grpc.StatusCode.UNIMPLEMENTED:
                if address not in self.without_beats:
                    log.warning("executor_without_beats", executor=address)
                self.without_beats.add(address)
                return
            last = self._suspicion.last_beat(address)
            is_lately = self._clock() - max(begun, last[0] if last else begun) < LONG_AWAY_S
            is_soon = code is grpc.StatusCode.UNAVAILABLE and is_lately
            await asyncio.sleep(RETRY_S if is_soon else REFUSED_RETRY_S)

    async def _beats(
        self, address: str, attended: _Attended, due: asyncio.Event
    ) -> AsyncIterator[bytes]:
        while attended.due is due:
            due.clear()
            attended.told = epoch, is_driver = self._word_to(address)
            beat = pb.AttendRequest(router_id=self._router_id, epoch=epoch, is_driver=is_driver)
            yield beat.SerializeToString()
            await due.wait()

    def _word_to(self, address: str) -> tuple[int, bool]:
        """Returns what a beat says: the epoch, and whether this router drives the group."""
        return self._epoch(address), self._is_driver()

    async def _listen(
        self, address: str, call: grpc.aio.StreamStreamCall[bytes, bytes]
    ) -> grpc.StatusCode:
        """Takes an executor's beats. Returns how the call ended."""
        last = 0.0
        try:
            async for data in call:
                now = self._clock()
                self._note(address, now, data)
                if now - last < FLOOD_GAP_S:
                    await asyncio.sleep(BEAT_S / 2)
                last = now
        except grpc.aio.AioRpcError as error:
            return error.code()
        except DecodeError:
            return grpc.StatusCode.INTERNAL
        finally:
            call.cancel()
        return await call.code()

    def _note(self, address: str, now: float, data: bytes) -> None:
        told = pb.AttendResponse.FromString(data)
        beat = Beat(
            instance_id=told.instance_id[:MAX_INSTANCE_ID_LEN],
            epoch=told.epoch,
            step_id=told.step_id,
            waits_for_peers=told.waits_for_peers,
            late_s=told.late_ms / 1000,
            quiet_s=told.quiet_ms / 1000,
        )
        self.without_beats.discard(address)
        self.num_standbys[address] = told.num_standbys
        was_held = address in self.held
        if is_held(told.driver.silent_ms, has_stream=told.driver.has_stream):
            self.held.add(address)
        else:
            self.held.discard(address)
        self._catch_up(now)
        is_there = self._suspicion.note_beat(address, now, beat)
        if is_there or (was_held and address not in self.held):
            self._on_news()
