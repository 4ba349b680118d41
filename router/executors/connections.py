"""Connections to the executors of a group: a channel to each, and how calls over it fail."""

import asyncio
import json
from collections.abc import Awaitable, Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

import grpc

from protos.executor.v1 import executor_pb2 as pb
from protos.executor.v1.executor_pb2_grpc import ExecutorServiceStub
from protos.transport.channel import ChannelOpener
from protos.transport.error_details import error_details
from router.errors import ExecutorLeft, ExecutorLost, ExecutorUnfit, GroupHeld
from router.executors.attendance import ATTEND, MAX_BEAT_BYTES, Attendance

if TYPE_CHECKING:  # the type of the stub on an aio channel, only in the stub file
    from protos.executor.v1.executor_pb2_grpc import ExecutorServiceAsyncStub

T = TypeVar("T")

# Describe is answered at once, also while a model loads or a step runs.
DESCRIBE = f"/{pb.DESCRIPTOR.services_by_name['ExecutorService'].full_name}/Describe"
MAX_DESCRIPTION_BYTES = 1 << 20
MAX_ANSWER_BYTES = 32 << 20  # 131,072 rows of logits with 20 alternatives each take 21 MB

# Longer ones are not even received.
MAX_BYTES = {DESCRIBE: MAX_DESCRIPTION_BYTES, ATTEND: MAX_BEAT_BYTES}
SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [dict(zip(("service", "method"), method.split("/")[1:], strict=True))],
            "maxResponseMessageBytes": max_bytes,
        }
        for method, max_bytes in MAX_BYTES.items()
    ]
}
CHANNEL_OPTIONS = (
    ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
    ("grpc.max_send_message_length", 256 << 20),
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    # Everybody waits for an executor that restarts: look for it often.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 100),
)
# Pings: behind beats; and where there are none, of executors that take more of them for an attack.
PINGS = (("grpc.keepalive_time_ms", 2000), ("grpc.keepalive_timeout_ms", 2000))
RARE_PINGS = (("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 10_000))


LOSSES = {  # by the reason of a call's failure; others may be anybody's fault
    "INVALID_PLACEMENT": ExecutorUnfit,
    "NOT_PLACED": ExecutorUnfit,
    "LOAD_FAILED": ExecutorUnfit,
    "SHUTTING_DOWN": ExecutorLeft,
}
SILENT_CODES = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


class Connections:
    """A channel to each executor of a group, on which it is attended.

    Args:
        opener: Opens channels.
        attendance: Attends executors.
        has_beats: Whether it does.

    Attributes:
        channels: By address.
        stubs: Likewise.
    """

    def __init__(self, opener: ChannelOpener, attendance: Attendance, *, has_beats: bool) -> None:
        self._opener = opener
        self._attendance = attendance
        self._has_beats = has_beats
        self._rarely_pinged: set[str] = set()  # addresses
        self.channels: dict[str, grpc.aio.Channel] = {}
        self.stubs: dict[str, ExecutorServiceAsyncStub] = {}

    async def renew(self, addresses: Collection[str]) -> None:
        """Does what `keep` does, and opens anew what has old files or pings too often."""
        await self._leave_others(addresses)
        often_pinged = self.channels.keys() - self._rarely_pinged
        is_old = self._opener.has_changed()
        await self._disconnect(
            list(self.channels) if is_old else often_pinged & self._attendance.without_beats
        )
        self._open_all(addresses)

    async def keep(self, addresses: Collection[str]) -> None:
        """Has one channel to each address, and closes those to others."""
        await self._leave_others(addresses)
        self._open_all(addresses)

    async def close(self) -> None:
        """Closes all."""
        for channel in self.channels.values():
            await channel.close()

    def describe(self, address: str, timeout_s: float) -> Awaitable[bytes]:
        """Calls Describe. Not through the stub, which has no error for what is no message."""
        method: grpc.aio.UnaryUnaryMultiCallable[pb.DescribeRequest, bytes] = self.channels[
            address
        ].unary_unary(DESCRIBE, pb.DescribeRequest.SerializeToString, None)
        return method(pb.DescribeRequest(), timeout=timeout_s)

    async def _leave_others(self, addresses: Collection[str]) -> None:
        gone = self.channels.keys() - set(addresses)
        for address in gone:
            self._attendance.leave(address)
        await self._disconnect(gone)

    def _open_all(self, addresses: Collection[str]) -> None:
        """Opens the channels that are not there, and attends all of these executors."""
        for address in addresses:
            if address not in self.channels:
                self._open(address)
            if self._has_beats:
                self._attendance.attend(address, self.channels[address])

    def _open(self, address: str) -> None:
        pings = PINGS
        if address in self._attendance.without_beats or not self._has_beats:
            pings = RARE_PINGS
            self._rarely_pinged.add(address)
        channel = self._opener.open(address, (*CHANNEL_OPTIONS, *pings))
        self.channels[address], self.stubs[address] = channel, ExecutorServiceStub(channel)

    async def _disconnect(self, addresses: Collection[str]) -> None:
        for address in addresses:
            del self.stubs[address]
            self._rarely_pinged.discard(address)
            await self.channels.pop(address).close()


def held_by(router_id: str) -> GroupHeld:
    """Returns the error of executors that another router drives, by its id in hexadecimal."""
    name = f"router {router_id[:8]}" if router_id else "a router of an older release"
    return GroupHeld(f"{name} drives its executors")


async def answer_of(call: Awaitable[T], name: str) -> T:
    """Returns the answer of a call.

    Args:
        call: It.
        name: Of the call, for people.

    Raises:
        GroupHeld: Another router drives the executor.
        ExecutorUnfit: The executor could not join where it was placed.
        ExecutorLeft: It was told to stop.
        ExecutorLost: It failed otherwise.
    """
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        details = error_details(error)
        reason = details.reason or error.code().name
        if reason == "HELD":
            raise held_by(details.metadata.get("router_id", "")) from error
        raise LOSSES.get(reason, ExecutorLost)(
            f"{name} failed: {reason}: {error.details()}"
        ) from error
    if answer is None:  # as gRPC has it of bytes that are no message
        raise ExecutorLost(f"{name} failed: the answer is no such message")
    return answer


async def all_of(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """Awaits all; at the first failure, cancels the rest and raises it."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
