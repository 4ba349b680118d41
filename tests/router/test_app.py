"""A router that is told to stop must lose nobody's request, and must stop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from protos.serving.v1 import serving_pb2 as pb
from protos.serving.v1 import serving_pb2_grpc
from protos.transport.error_details import error_details
from router.api import constraints
from router.api.health import Health
from router.app import DRAIN_POLL_S, FLUSH_S, StopSignals, drain, server_options, warm_up
from router.client import Client, Many, Unavailable
from router.config import RouterConfig
from tests.router.support.calls import prompt
from tests.router.support.fake_engines import MODEL, FakeEngines, generation, listening, serve
from tests.support.virtual_clock import on_virtual_clock

LONG_S = 3600.0  # longer than any test here takes
GROUPS = (("127.0.0.1:1",),)


class Router:
    """A served FakeEngines, its client and the signals that stop it."""

    def __init__(self, engines: FakeEngines, health: Health, client: Client, stub: Any) -> None:
        self.engines, self.health, self.client, self.stub = engines, health, client, stub
        self.signals = StopSignals()

    def drain(self, *, delay_s: float = 0.0, grace_s: float = LONG_S) -> asyncio.Task[None]:
        draining = drain(
            self.engines,  # type: ignore[arg-type]
            self.health,
            delay_s=delay_s,
            grace_s=grace_s,
            at_once=self.signals.at_once,
        )
        return asyncio.create_task(draining)

    async def start_call(self) -> tuple[Any, Any]:
        """Returns a Generate call that has its first token, and the sequence that it runs."""
        call = self.stub.Generate(prompt())
        [sequence] = (await self.engines.arrivals.get()).sequences
        self.engines.give(sequence, [10])
        assert list((await call.read()).token_ids) == [10]
        return call, sequence

    async def start_many(self) -> tuple[Any, Any]:
        """The same for a GenerateMany stream, whose request has tag 7."""
        call = self.stub.GenerateMany()
        await call.write(pb.GenerateManyRequest(tag=7, start=prompt()))
        [sequence] = (await self.engines.arrivals.get()).sequences
        self.engines.give(sequence, [10])
        await call.read()
        return call, sequence


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    engines, health = FakeEngines(), Health()
    health.set_ready(True)
    async with (
        serve(engines, health=health) as target,
        Client(target, resume=False) as client,
        grpc.aio.insecure_channel(target, [("grpc.enable_retries", 0)]) as channel,
    ):
        yield Router(engines, health, client, serving_pb2_grpc.GenerationServiceStub(channel))


async def rest_of(call: Any) -> tuple[list[Any], grpc.StatusCode, str]:
    """Returns the messages that are left, and how the call ended: code and reason."""
    messages = []
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
    except grpc.aio.AioRpcError as error:
        return messages, error.code(), error_details(error).reason
    return messages, grpc.StatusCode.OK, ""


async def until_not_ready(router: Router) -> None:
    while await router.client.health("readiness"):
        pass


async def until_refusing(router: Router) -> None:
    while not router.engines.is_shutting_down:
        await asyncio.sleep(0)


@pytest.mark.parametrize("supports_constraints", [False, True])
def test_a_router_that_stands_by_starts_the_processes_that_its_requests_may_need(
    supports_constraints: bool, monkeypatch: pytest.MonkeyPatch
):
    started: list[str] = []
    monkeypatch.setattr(constraints, "warm_up", lambda: started.append("grammars"))
    chat: Any = SimpleNamespace(warm_up=lambda: started.append("chats"))
    model = replace(MODEL, supports_constraints=supports_constraints)
    tokenizer: Any = SimpleNamespace(chat=chat)
    engines: Any = SimpleNamespace(model=None)
    warm_up(engines, None)
    assert not started  # of a model that is not known yet, and without templates
    engines.model = model
    warm_up(engines, tokenizer)
    assert started == ["grammars"] * supports_constraints + ["chats"]


async def test_load_balancers_are_told_before_any_request_is_refused(router: Router):
    router.engines.echoes = True
    draining = router.drain(delay_s=LONG_S)
    await until_not_ready(router)

    assert (await router.client.complete([5])).token_ids == [5]
    assert await router.client.health("liveness")
    draining.cancel()


async def test_after_the_delay_new_requests_are_refused_so_that_they_are_sent_elsewhere(
    router: Router,
):
    _, sequence = await router.start_call()
    draining = router.drain()
    await until_refusing(router)

    refused = router.stub.Generate(prompt())
    assert await rest_of(refused) == ([], grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
    router.engines.finish(sequence)
    await draining


async def test_what_runs_is_finished(router: Router):
    call, one = await router.start_call()
    stream, other = await router.start_many()
    draining = router.drain()
    await until_refusing(router)
    assert not draining.done()

    for sequence in (one, other):
        router.engines.give(sequence, [11, 12])
        router.engines.finish(sequence)
    [last], code, _ = await rest_of(call)
    assert (list(last.token_ids), last.HasField("finish")) == ([11, 12], True)
    assert code is grpc.StatusCode.OK
    [message], code, reason = await rest_of(stream)
    assert list(message.responses[0].response.token_ids) == [11, 12]
    assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
    await draining


async def test_a_stream_on_which_nothing_runs_is_ended(router: Router):
    stream = router.stub.GenerateMany()
    await stream.write(pb.GenerateManyRequest(tag=1, cancel=pb.CancelTag()))
    while not router.engines.listeners.num_open:
        await asyncio.sleep(0)

    await router.drain()

    assert await rest_of(stream) == ([], grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")


async def test_what_is_left_at_the_end_of_the_grace_ends_with_its_tokens_so_far(router: Router):
    call, sequence = await router.start_call()
    draining = router.drain(grace_s=0.0)
    router.engines.give(sequence, [11, 12])
    await draining

    [last], code, reason = await rest_of(call)
    assert (list(last.token_ids), last.HasField("finish")) == ([11, 12], False)
    assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")


async def test_on_a_stream_of_many_they_are_told_under_their_tag(router: Router):
    stream, sequence = await router.start_many()
    draining = router.drain(grace_s=0.0)
    router.engines.give(sequence, [11, 12])
    await draining

    messages, code, reason = await rest_of(stream)
    tokens, errors = [], []
    for message in messages:
        tokens += [t for tagged in message.responses for t in tagged.response.token_ids]
        tokens += memoryview(message.token_ids).cast("i").tolist()
        errors += [(error.tag, error.reason) for error in message.errors]
    assert (tokens, errors) == ([11, 12], [(7, "SHUTTING_DOWN")])
    assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")


@pytest.mark.parametrize("on_stream", [False, True])
async def test_the_client_library_yields_the_tokens_before_the_failure(
    router: Router, on_stream: bool
):
    """Where it does not resume."""
    token_ids: list[int] = []

    async def read(source: Client | Many) -> None:
        async for delta in source.generate([5]):
            token_ids.extend(delta.token_ids)

    async with router.client.many() if on_stream else nullcontext(router.client) as source:
        reading = asyncio.create_task(read(source))
        [sequence] = (await router.engines.arrivals.get()).sequences
        router.engines.give(sequence, [10, 11])
        router.engines.cancel_all()
        with pytest.raises(Unavailable):
            await reading
    assert token_ids == [10, 11]


@pytest.mark.parametrize("delay_s", [0.0, LONG_S])
async def test_a_second_signal_ends_what_runs_at_once(router: Router, delay_s: float):
    call, _ = await router.start_call()
    draining = router.drain(delay_s=delay_s)
    await (until_not_ready if delay_s else until_refusing)(router)
    router.signals.receive()
    assert router.signals.asked.is_set()
    assert not draining.done()

    router.signals.receive()
    await draining

    assert await rest_of(call) == ([], grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")


@on_virtual_clock
async def test_groups_that_are_not_left_in_time_make_a_stop_no_longer():
    """What takes longer than delay and grace is killed, and its calls end without a reason."""
    loop = asyncio.get_running_loop()
    engines = Mock(listeners=Mock(num_open=1), num_live=1)
    engines.hand_over = partial(asyncio.sleep, LONG_S)
    begin = loop.time()
    await drain(engines, Mock(), delay_s=5.0, grace_s=60.0, at_once=asyncio.Event())
    engines.cancel_all.assert_called_once_with()
    assert loop.time() - begin <= 5.0 + 60.0 + FLUSH_S + 2 * DRAIN_POLL_S


async def test_a_second_signal_ends_the_wait_for_steps_before_groups_are_left(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaving = asyncio.Event()

    async def hand_over() -> bool:
        leaving.set()
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(router.engines, "hand_over", hand_over)
    call, _ = await router.start_call()
    draining = router.drain()
    await leaving.wait()
    router.signals.at_once.set()
    async with asyncio.timeout(60):
        await draining
    assert await rest_of(call) == ([], grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")


@asynccontextmanager
async def slow_server(**settings: Any) -> AsyncIterator[tuple[Any, set[str], asyncio.Event]]:
    """Yields a stub and the peers that called, behind the options that settings make.

    Of a call with a priority, the tokens behind the first one wait for the event.
    """
    peers, may_go_on = set[str](), asyncio.Event()

    class Servicer(serving_pb2_grpc.GenerationServiceServicer):
        async def Generate(self, request: Any, context: Any) -> None:
            peers.add(context.peer())
            for token in range(1 + request.priority):
                await context.write(pb.GenerateResponse(token_ids=[token]))
                if request.priority:
                    await may_go_on.wait()

        GenerateMany = Cancel = GetModel = GetStatus = None  # type: ignore[assignment]

    options = server_options(RouterConfig(groups=GROUPS, **settings))
    async with (
        listening(generation(Servicer()), options=options) as target,
        grpc.aio.insecure_channel(target) as channel,
    ):
        yield serving_pb2_grpc.GenerationServiceStub(channel), peers, may_go_on


async def tokens_of(call: Any) -> list[int]:
    return [token async for message in call for token in message.token_ids]


async def test_an_old_connection_is_replaced_and_its_streams_go_on():
    async with slow_server(max_connection_age_s=0.2) as (stub, peers, may_go_on):
        stream = asyncio.create_task(tokens_of(stub.Generate(pb.GenerateRequest(priority=59))))
        while len(peers) < 3:  # each is another connection
            await tokens_of(stub.Generate(pb.GenerateRequest()))
        may_go_on.set()
        assert await stream == list(range(60))


async def test_a_connection_may_grow_older_than_grpc_can_count():
    grpc.aio.server(options=server_options(RouterConfig(groups=GROUPS, max_connection_age_s=1e7)))


async def test_a_client_may_ping_every_ten_seconds():
    options = dict(server_options(RouterConfig(groups=GROUPS)))
    assert options["grpc.http2.min_ping_interval_without_data_ms"] <= 1_000
    assert "grpc.http2.min_recv_ping_interval_without_data_ms" not in options  # ignored by gRPC
