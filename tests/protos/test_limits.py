"""A port without limits is taken by who asks for most: memory, calls and time of all others."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2_grpc

from protos.transport import admission as admission_module
from protos.transport.admission import MAX_READS, Admission, FirstMessageLate, Refusals
from protos.transport.error_details import error_details
from protos.transport.health import HealthServicer
from protos.transport.limits import PortLimits
from protos.transport.port import ServiceConfig
from tests.support.echo_server import (
    ANY,
    ECHO,
    NOT_CONNECTED,
    STREAM,
    Refused,
    ask,
    calling,
    exchange,
    refusal,
    serving,
)


async def end_of(call: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        await call.read()
    return caught.value


async def test_calls_that_send_nothing_count_and_an_eighth_is_for_each_method():
    refused = Counter[str]()
    async with serving(refused, max_calls=16) as address, calling(address) as channel:
        calls = [channel.stream_stream(STREAM)() for _ in range(3)]
        ends = [asyncio.create_task(end_of(call)) for call in calls]
        [first], _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        ended = await first
        assert ended.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error_details(ended).reason == "TOO_MANY_CALLS"
        assert error_details(ended).retry_delay_s == 1.0
        assert "2 of /test.Echo/Many, 16 of all methods" in ended.details()
        assert await ask(channel) == b"hello"
        assert refused == {"TOO_MANY_CALLS": 1}

        for end, call in zip(ends, calls, strict=True):
            end.cancel()
            call.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        await exchange(channel.stream_stream(STREAM)(), b"2")
        assert refused == {"TOO_MANY_CALLS": 1}


def test_all_methods_together_have_no_more_than_all_calls():
    admission = Admission(PortLimits(max_calls=16), ("main",), Refusals())
    for _ in range(15):
        admission.enter("main", _Context())
    admission.enter("other", _Context())
    for method in ("main", "other", "third"):
        with pytest.raises(admission_module.TooManyCalls):
            admission.enter(method, _Context())
    admission.leave("other")
    admission.enter("main", _Context())


@pytest.mark.parametrize("method", [ECHO, STREAM])
async def test_a_first_message_that_does_not_come_ends_the_call(method: str):
    refused = Counter[str]()
    async with (
        serving(refused, first_message_timeout_s=0.05) as address,
        calling(address) as channel,
    ):
        ended = await end_of(channel.stream_stream(method)())
        assert ended.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert error_details(ended).reason == "FIRST_MESSAGE_LATE"
        assert refused == {"FIRST_MESSAGE_LATE": 1}


async def test_later_messages_of_a_stream_may_come_at_any_time():
    async with serving(first_message_timeout_s=0.05) as address, calling(address) as channel:
        call = channel.stream_stream(STREAM)()
        await exchange(call, b"1")
        await asyncio.sleep(0.15)
        await exchange(call, b"2")


class _Context:
    def __init__(self, peer: str = "ipv4:10.0.0.1:1") -> None:
        self._peer = peer

    def peer(self) -> str:
        return self._peer


class _Caller:
    """A call whose first message comes when it is told to."""

    def __init__(self, admission: Admission, peer: str = "ipv4:10.0.0.1:1") -> None:
        self.is_read = False
        self.sends = asyncio.Event()
        self.reading = asyncio.create_task(admission.first(self._messages(), _Context(peer)))

    async def _messages(self) -> AsyncIterator[bytes]:
        self.is_read = True
        await self.sends.wait()
        yield b"message"


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_few_first_messages_are_read_at_once_on_a_connection_and_the_newest_is_next():
    admission = Admission(PortLimits(), (), Refusals())
    first = [_Caller(admission) for _ in range(MAX_READS)]
    older, newer = _Caller(admission), _Caller(admission)
    other = _Caller(admission, "ipv4:10.0.0.2:1")
    await settle()
    assert all(caller.is_read for caller in (*first, other))
    assert not older.is_read
    assert not newer.is_read

    first[3].sends.set()
    assert await first[3].reading == b"message"
    await settle()
    assert (older.is_read, newer.is_read) == (False, True)
    for caller in (*first, older, newer, other):
        caller.sends.set()
        assert await caller.reading == b"message"


async def test_a_call_that_leaves_while_it_waits_takes_no_turn():
    admission = Admission(PortLimits(), (), Refusals())
    first = [_Caller(admission) for _ in range(MAX_READS)]
    staying, leaving = _Caller(admission), _Caller(admission)
    await settle()
    leaving.reading.cancel()
    first[0].reading.cancel()
    await settle()
    assert staying.is_read
    also_leaving = _Caller(admission)
    await settle()
    first[1].sends.set()
    await settle()
    also_leaving.reading.cancel()  # in its turn
    last = _Caller(admission)
    await settle()
    assert last.is_read
    for caller in (*first, staying, last):
        caller.reading.cancel()
    await settle()
    assert not admission._reads


async def test_calls_that_leave_before_their_turn_leave_nothing_behind():
    admission = Admission(PortLimits(), (), Refusals())
    first = [_Caller(admission) for _ in range(MAX_READS)]
    leaving = [_Caller(admission) for _ in range(20)]
    await settle()
    for caller in leaving:
        caller.reading.cancel()
    newest = _Caller(admission)
    await settle()
    [reads] = admission._reads.values()
    assert len(reads._waiting) == 1
    for caller in (*first, newest):
        caller.reading.cancel()
    await settle()


async def test_while_others_wait_a_call_that_sends_nothing_has_less_time(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(admission_module, "HURRIED_S", 0.02)
    refused = Counter[str]()
    refusals = Refusals(lambda reason: refused.update([reason]))
    admission = Admission(PortLimits(first_message_timeout_s=3600.0), (), refusals)
    silent = [_Caller(admission) for _ in range(MAX_READS)]
    await settle()
    honest = _Caller(admission)
    honest.sends.set()
    assert await honest.reading == b"message"
    with pytest.raises(FirstMessageLate):
        await silent[0].reading
    assert not any(caller.reading.done() for caller in silent[1:])
    assert refused == {"FIRST_MESSAGE_LATE": 1}
    for caller in silent[1:]:
        caller.reading.cancel()


async def test_messages_and_metadata_have_a_longest():
    limits = {"max_message_bytes": 2048, "max_metadata_bytes": 1024}
    async with serving(**limits) as address, calling(address) as channel:
        echo = channel.unary_unary(ECHO)
        assert await echo(b"x" * 2048) == b"x" * 2048
        for call in (echo(b"x" * 2049), echo(b"", metadata=(("x-long", "v" * 1024),))):
            with pytest.raises(Refused) as caught:
                await call
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await ask(channel) == b"hello"


async def test_connections_beyond_the_bound_are_closed():
    async with serving(max_connections=1) as address, calling(address) as channel:
        assert await ask(channel) == b"hello"
        async with calling(address) as another:
            assert (await refusal(another)).code() in NOT_CONNECTED
        assert await ask(channel) == b"hello"


async def test_a_connection_without_calls_is_closed_and_the_next_call_opens_another():
    async with serving(max_connection_idle_s=0.1) as address, calling(address) as channel:
        assert await ask(channel) == b"hello"
        while channel.get_state() is not grpc.ChannelConnectivity.IDLE:
            await asyncio.sleep(0.02)
        assert await ask(channel) == b"hello"


async def test_the_port_for_probes_has_limits_too():
    refused, health = Counter[str](), HealthServicer()
    refusals = Refusals(lambda reason: refused.update([reason]))

    def add_to(server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(health, server)

    with structlog.testing.capture_logs() as lines:
        server = await ServiceConfig(health_listen=ANY, max_calls=8).serve_health(add_to, refusals)
    assert server is not None
    async with grpc.aio.insecure_channel(lines[0]["address"]) as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
        first = watch(b"")
        await first.read()
        assert (await end_of(watch(b""))).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    await server.stop(None)
    assert refused == {"TOO_MANY_CALLS": 1}


async def test_a_limit_beyond_what_grpc_can_count_is_none():
    limits = {
        "max_message_bytes": 1 << 40,
        "max_calls": 1 << 40,
        "max_connections": 1 << 40,
        "max_connection_idle_s": 1e9,
        "first_message_timeout_s": 1e9,
    }
    async with serving(**limits) as address, calling(address) as channel:
        assert await ask(channel) == b"hello"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("protos.transport.admission.time.monotonic", lambda: now[0])
    return now


def test_refusals_are_logged_once_a_minute_with_a_caller(clock: list[float]):
    refused = Counter[str]()
    refusals = Refusals(lambda reason: refused.update([reason]))
    with structlog.testing.capture_logs() as lines:
        for second in range(61):
            clock[0] = float(second)
            refusals.add("UNAUTHENTICATED", _Context(f"ipv4:10.0.0.{second}:1"))
    refusals.add("TOO_MANY_CALLS", _Context())
    assert refused == {"UNAUTHENTICATED": 61, "TOO_MANY_CALLS": 1}
    assert [(line["event"], line["peer"], line["calls"]) for line in lines] == [
        ("calls_refused", "ipv4:10.0.0.0:1", 1),
        ("calls_refused", "ipv4:10.0.0.60:1", 60),
    ]
