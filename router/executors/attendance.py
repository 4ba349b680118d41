"""Attend calls to a group's executors: beats both ways, and the clock by which silence is judged."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable

import grpc
import structlog
from google.protobuf.message import DecodeError

from protos.executor.beats import BEAT_S
from protos.executor.v1 import executor_pb2 as pb
from router.executors.description_bounds import MAX_INSTANCE_ID_LEN
from router.executors.suspicion import Beat, Suspicion

log = structlog.stdlib.get_logger(__name__)

ATTEND = f"/{pb.DESCRIPTOR.services_by_name['ExecutorService'].full_name}/Attend"
MAX_BEAT_BYTES = 1024
TICK_S = 0.05  # between looks at who is silent
LATE_S = 0.01  # by which every busy event loop is late
RETRY_S = 0.05  # until an executor that is not there is called again
REFUSED_RETRY_S = 1.0  # one that is there, and takes no such call now
FLOOD_GAP_S = 0.01  # between beats; of an executor that sends more, few are read

ROUTER_ID = secrets.token_bytes(16)


class Attendance:
    """Beats of the executors at some addresses.

    Args:
        suspicion: Gets the beats, by address.
        epoch: Returns the group's epoch; 0 while it forms.
        on_tick: Called with the time, on the event loop's clock, when silences are to be judged.
        on_news: Called when an executor beats that did not before.

    Attributes:
        without_beats: Addresses of executors that have no such call: they are of an older release.
    """

    def __init__(
        self,
        suspicion: Suspicion,
        *,
        epoch: Callable[[], int],
        on_tick: Callable[[float], None],
        on_news: Callable[[], None],
    ) -> None:
        self._suspicion = suspicion
        self._epoch = epoch
        self._on_tick = on_tick
        self._on_news = on_news
        self._clock = asyncio.get_running_loop().time
        self._tasks: dict[str, tuple[grpc.aio.Channel, asyncio.Task[None]]] = {}
        self._ticking: asyncio.Task[None] | None = None
        self.without_beats: set[str] = set()

    def attend(self, address: str, channel: grpc.aio.Channel) -> None:
        """Sees to it that an executor is attended over this channel, until `leave` or `close`."""
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick(), name="judge silences")
        attended = self._tasks.get(address)
        if attended is not None:
            if attended[0] is channel and not attended[1].done():
                return
            attended[1].cancel()
            self._suspicion.note_end(address)
        task = asyncio.create_task(self._attend(address, channel), name=f"attend {address}")
        self._tasks[address] = channel, task

    def leave(self, address: str) -> None:
        """Attends an executor no more, and forgets it."""
        attended = self._tasks.pop(address, None)
        if attended is not None:
            attended[1].cancel()
        self.without_beats.discard(address)
        self._suspicion.forget(address)

    def close(self) -> None:
        """Attends nobody any more."""
        for address in list(self._tasks):
            self.leave(address)
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    async def _tick(self) -> None:
        while True:
            due = self._clock() + TICK_S
            await asyncio.sleep(TICK_S)
            now = self._clock()
            if now - due > LATE_S:
                self._suspicion.excuse(now - due)
            self._on_tick(now)

    async def _attend(self, address: str, channel: grpc.aio.Channel) -> None:
        # Beats come as bytes: what is none of ours shall have an error, and not end in gRPC's log.
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            ATTEND, request_serializer=None, response_deserializer=None
        )
        while True:
            code = await self._listen(address, method(self._beats()))
            self._suspicion.note_end(address)
            if code is grpc.StatusCode.UNIMPLEMENTED:
                if address not in self.without_beats:
                    log.warning("executor_without_beats", executor=address)
                self.without_beats.add(address)
                return
            is_away = code is grpc.StatusCode.UNAVAILABLE
            await asyncio.sleep(RETRY_S if is_away else REFUSED_RETRY_S)

    async def _beats(self) -> AsyncIterator[bytes]:
        while True:
            yield pb.AttendRequest(router_id=ROUTER_ID, epoch=self._epoch()).SerializeToString()
            await asyncio.sleep(BEAT_S)

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
        if self._suspicion.note_beat(address, now, beat):
            self._on_news()
