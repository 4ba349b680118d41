"""Overload: a busy router reads nothing that it refuses, and keeps nothing that nobody fetches."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from protos.serving.v1 import serving_pb2 as pb
from protos.transport.error_details import error_details
from protos.transport.errors import MAX_MESSAGE_BYTES
from protos.transport.interceptors import Caller
from router.api import constraints, generate_many
from router.api.generate_many import (
    MAX_ENDS,
    MAX_PREPARING,
    MAX_UNPREPARED_BYTES,
    MIN_UNPREPARED_BYTES,
    ManyCall,
)
from router.errors import QueueFull
from tests.router.support.calls import connected, prompt
from tests.router.support.fake_engines import FakeEngines, serve

SERVICE = "/lockstep.serving.v1.GenerationService"
FULL = QueueFull("too much waits", retry_delay_s=1.0)
NO_UTF8 = b"\x0a\x02\xff\xfe"  # field 1, two bytes


async def outcome(target: str, method: str, *messages: bytes) -> tuple[str, str, str]:
    """Sends bytes as they are. Returns the call's code, reason and message.

    With a thread: gRPC's client for asyncio has an end of its own where it still wrote when the call
    ended.
    """

    def call() -> tuple[str, str, str]:
        with grpc.insecure_channel(target) as channel:
            method_of = channel.stream_stream(f"{SERVICE}/{method}")
            try:
                list(method_of(iter(messages), timeout=120))
            except grpc.RpcError as error:
                ended: Any = error
                return ended.code().name, error_details(ended).reason, ended.details() or ""
        return "OK", "", ""

    return await asyncio.to_thread(call)


async def test_a_full_router_does_not_read_what_it_refuses():
    engines = FakeEngines()
    engines.refusal = FULL
    wrong = prompt(n=1000).SerializeToString()
    async with serve(engines) as target:
        code, reason, _ = await outcome(target, "Generate", wrong)
        assert (code, reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
    async with connected(engines) as stub:
        start = pb.GenerateManyRequest(tag=1, start=prompt(n=1000))
        call = stub.GenerateMany(iter([start]))
        [error] = [error async for message in call for error in message.errors]
        assert (error.tag, error.reason) == (1, "QUEUE_FULL")
        assert error.retry_delay.ToMilliseconds() == 1000
    assert engines.measures.refused["QUEUE_FULL"] == 2


async def test_requests_whose_ends_nobody_fetches_hold_up_their_own_stream():
    engines = FakeEngines()
    engines.echoes = True
    num_sent, may_write, sent = 0, asyncio.Event(), []

    async def starts() -> AsyncIterator[pb.GenerateManyRequest]:
        nonlocal num_sent
        for tag in range(4 * MAX_ENDS):
            num_sent += 1
            yield pb.GenerateManyRequest(tag=tag, start=prompt())

    async def write(message: pb.GenerateManyResponse) -> None:
        await may_write.wait()
        sent.append(message)

    listener = engines.listeners.open()
    running = asyncio.create_task(ManyCall(engines, None, listener).run(starts(), write))  # type: ignore[arg-type]
    while len(listener.ended) < MAX_ENDS:
        await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(listener.ended) == MAX_ENDS
    assert num_sent <= 2 * MAX_ENDS + 2  # with those in the message that cannot be written
    may_write.set()
    await running
    tags = [entry.tag for message in sent for entry in message.responses]
    assert sorted(tags) == list(range(4 * MAX_ENDS))


async def test_a_request_whose_tag_was_another_ones_too_early_ends_with_its_stream(
    monkeypatch: pytest.MonkeyPatch,
):
    """The first request has ended, but not all of its ends were written: a message takes one."""
    monkeypatch.setattr(generate_many, "FULL_BYTES", 1)
    engines, num_written, may_write = FakeEngines(), 0, asyncio.Semaphore(0)

    async def starts() -> AsyncIterator[pb.GenerateManyRequest]:
        yield pb.GenerateManyRequest(tag=1, start=prompt(n=2))
        while not num_written:
            await asyncio.sleep(0)
        yield pb.GenerateManyRequest(tag=1, start=prompt())

    async def write(message: pb.GenerateManyResponse) -> None:
        nonlocal num_written
        num_written += 1
        await may_write.acquire()

    listener = engines.listeners.open()
    running = asyncio.create_task(ManyCall(engines, None, listener).run(starts(), write))  # type: ignore[arg-type]
    for sequence in (await engines.arrivals.get()).sequences:
        engines.finish(sequence)
    second = await engines.arrivals.get()
    may_write.release()
    while num_written < 2:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert not second.is_live


async def test_a_stream_is_read_on_while_more_of_its_grammars_wait_than_are_built_at_once(
    monkeypatch: pytest.MonkeyPatch,
):
    engines = FakeEngines()
    engines.echoes = True
    num_building, are_built, ended = 0, asyncio.Event(), asyncio.Event()
    last, plain = 3 * MAX_PREPARING, 3 * MAX_PREPARING + 1
    ends: dict[int, str] = {}

    async def grammar_of(kind: str, text: str, caller: Caller) -> str:
        nonlocal num_building
        num_building += 1
        await are_built.wait()
        return text

    async def actions() -> AsyncIterator[pb.GenerateManyRequest]:
        for tag in range(last + 1):
            start = prompt(constraint=pb.Constraint(regex="a"))
            yield pb.GenerateManyRequest(tag=tag, start=start)
        yield pb.GenerateManyRequest(tag=plain, start=prompt())
        yield pb.GenerateManyRequest(tag=last, cancel=pb.CancelTag())
        await ended.wait()
        assert ends == {plain: "", last: "CANCELLED"}
        assert num_building == MAX_PREPARING
        are_built.set()

    async def write(message: pb.GenerateManyResponse) -> None:
        ends.update({entry.tag: "" for entry in message.responses})
        ends.update({error.tag: error.reason for error in message.errors})
        if {plain, last} <= ends.keys():
            ended.set()

    monkeypatch.setattr(constraints._kept, "grammar_of", grammar_of)
    call = ManyCall(engines, None, engines.listeners.open())  # type: ignore[arg-type]
    await asyncio.wait_for(call.run(actions(), write), 60)
    assert ends == dict.fromkeys(range(last), "") | {last: "CANCELLED", plain: ""}


async def test_a_stream_whose_grammars_that_wait_take_their_share_is_read_on_once_one_is_built(
    monkeypatch: pytest.MonkeyPatch,
):
    engines = FakeEngines()
    engines.echoes = True
    may_build = asyncio.Semaphore(0)
    num_let_in = MAX_UNPREPARED_BYTES // MIN_UNPREPARED_BYTES
    num_read, ends = 0, list[int]()

    async def grammar_of(kind: str, text: str, caller: Caller) -> str:
        await may_build.acquire()
        return text

    async def starts() -> AsyncIterator[pb.GenerateManyRequest]:
        nonlocal num_read
        for num_read in range(1, num_let_in + 3):
            start = prompt(constraint=pb.Constraint(regex="a"))
            yield pb.GenerateManyRequest(tag=num_read, start=start)

    async def write(message: pb.GenerateManyResponse) -> None:
        assert not message.errors
        ends.extend(entry.tag for entry in message.responses)

    monkeypatch.setattr(constraints._kept, "grammar_of", grammar_of)
    call = ManyCall(engines, None, engines.listeners.open())  # type: ignore[arg-type]
    running = asyncio.create_task(call.run(starts(), write))
    for num_more in (1, 2):
        while num_read < num_let_in + num_more:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert num_read == num_let_in + num_more
        may_build.release()
    for _ in range(num_let_in):
        may_build.release()
    await asyncio.wait_for(running, 60)
    assert sorted(ends) == list(range(1, num_let_in + 3))


async def test_a_request_that_waits_for_its_grammar_has_arrived_before(
    monkeypatch: pytest.MonkeyPatch,
):
    engines = FakeEngines()
    engines.echoes = True
    are_read, read_time = asyncio.Event(), 0.0

    async def grammar_of(kind: str, text: str, caller: Caller) -> str:
        await are_read.wait()
        return text

    async def starts() -> AsyncIterator[pb.GenerateManyRequest]:
        nonlocal read_time
        for tag in range(MAX_PREPARING + 1):
            start = prompt(constraint=pb.Constraint(regex="a"))
            yield pb.GenerateManyRequest(tag=tag, start=start)
        read_time = asyncio.get_running_loop().time()
        are_read.set()

    async def write(message: pb.GenerateManyResponse) -> None:
        assert not message.errors

    monkeypatch.setattr(constraints._kept, "grammar_of", grammar_of)
    call = ManyCall(engines, None, engines.listeners.open())  # type: ignore[arg-type]
    await asyncio.wait_for(call.run(starts(), write), 60)
    arrivals = [engines.arrivals.get_nowait() for _ in range(MAX_PREPARING + 1)]
    assert max(request.arrival_time for request in arrivals) <= read_time


@pytest.mark.parametrize(
    "number", [0, MAX_PREPARING]
)  # its grammar is being built; it waits for that
async def test_a_request_whose_time_is_over_ends_while_its_grammar_is_not_built(
    number: int, monkeypatch: pytest.MonkeyPatch
):
    engines = FakeEngines()
    engines.echoes = True
    has_ended = asyncio.Event()
    errors: list[pb.TaggedError] = []

    async def grammar_of(kind: str, text: str, caller: Caller) -> str:
        await has_ended.wait()
        return text

    async def starts() -> AsyncIterator[pb.GenerateManyRequest]:
        for tag in range(MAX_PREPARING + 1):
            start = prompt(constraint=pb.Constraint(regex="a"))
            if tag == number:
                start.timeout.FromMilliseconds(1)
            yield pb.GenerateManyRequest(tag=tag, start=start)

    async def write(message: pb.GenerateManyResponse) -> None:
        if message.errors:
            errors.extend(message.errors)
            has_ended.set()

    monkeypatch.setattr(constraints._kept, "grammar_of", grammar_of)
    call = ManyCall(engines, None, engines.listeners.open())  # type: ignore[arg-type]
    await asyncio.wait_for(call.run(starts(), write), 60)
    assert [(error.tag, error.reason) for error in errors] == [(number, "DEADLINE_EXCEEDED")]
    assert errors[0].message == "the request had not been taken 0.001 s after its arrival"
    assert engines.measures.refused["DEADLINE_EXCEEDED"] == 1
    assert engines.arrivals.qsize() == MAX_PREPARING


@pytest.mark.parametrize("fails", ["request", "stream"])
async def test_what_fails_while_a_message_is_written_ends_the_stream(
    fails: str, monkeypatch: pytest.MonkeyPatch
):
    engines = FakeEngines()
    engines.echoes = True
    is_writing = asyncio.Event()

    async def grammar_of(kind: str, text: str, caller: Caller) -> str:
        await is_writing.wait()
        raise RuntimeError("unexpected")

    async def starts() -> AsyncIterator[pb.GenerateManyRequest]:
        yield pb.GenerateManyRequest(tag=1, start=prompt())
        if fails == "request":
            start = prompt(constraint=pb.Constraint(regex="a"))
            yield pb.GenerateManyRequest(tag=2, start=start)
        else:
            await is_writing.wait()
            raise RuntimeError("unexpected")

    async def write(message: pb.GenerateManyResponse) -> None:
        assert [entry.tag for entry in message.responses] == [1]
        is_writing.set()
        while asyncio.all_tasks() - others:
            await asyncio.sleep(0)

    monkeypatch.setattr(constraints._kept, "grammar_of", grammar_of)
    call = ManyCall(engines, None, engines.listeners.open())  # type: ignore[arg-type]
    others = asyncio.all_tasks()
    with pytest.raises(RuntimeError, match="unexpected"):
        await call.run(starts(), write)


@pytest.mark.parametrize(
    ("method", "messages"),
    [
        ("Generate", [b"\xff\xff"]),
        ("Generate", [NO_UTF8]),
        ("Generate", []),
        ("GenerateMany", [b"\xff\xff"]),
        ("Cancel", [NO_UTF8]),
        ("GetModel", [b"\xff\xff"]),
        ("GetStatus", []),
    ],
)
async def test_bytes_that_are_no_message_are_refused_as_such(method: str, messages: list[bytes]):
    engines = FakeEngines()
    async with serve(engines) as target:
        code, reason, _ = await outcome(target, method, *messages)
        assert (code, reason) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE")
        assert await outcome(target, "GetModel", b"") == ("OK", "", "")
    assert +engines.measures.refused == {"MALFORMED_MESSAGE": 1}


async def test_no_answer_repeats_more_of_a_request_than_a_client_takes():
    """gRPC drops a call whose metadata is longer than 16 KiB, and with it the reason."""
    async with serve(FakeEngines()) as target:
        long = pb.CancelRequest(request_id="\N{ROCKET}" * 100_000).SerializeToString()
        code, reason, message = await outcome(target, "Cancel", long)
        assert (code, reason) == ("NOT_FOUND", "REQUEST_NOT_FOUND")
        assert "(100000 characters)" in message
        other_model = prompt(model="m" * 100_000).SerializeToString()
        code, reason, message = await outcome(target, "Generate", other_model)
        assert (code, reason) == ("NOT_FOUND", "MODEL_NOT_FOUND")
        assert message.endswith("Leave the field empty to take it")


async def test_a_message_of_any_kind_is_cut_to_what_a_client_takes():
    engines = FakeEngines()
    engines.refusal = QueueFull("\N{ROCKET}" * MAX_MESSAGE_BYTES)
    async with serve(engines) as target:
        code, reason, message = await outcome(target, "Generate", prompt().SerializeToString())
        assert (code, reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        assert message.endswith(f"... ({MAX_MESSAGE_BYTES} characters)")
        assert message.startswith("\N{ROCKET}" * 100)
