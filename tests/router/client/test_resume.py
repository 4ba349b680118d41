"""If these fail, callers of the library feel that a router died, or that it never answers."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest

from protos.serving.v1 import serving_pb2 as pb
from protos.transport.error_details import ErrorDetails
from router.api.generate import GenerationServicer
from router.client import (
    CallFailed,
    Client,
    Completion,
    Delta,
    Interrupted,
    Many,
    Overloaded,
    TimedOut,
    Unavailable,
    resume,
)
from router.client.resume import Attempts, Resumption
from router.errors import (
    ExecutorFailed,
    InvalidRequest,
    Moved,
    QueueFull,
    ResumeMismatch,
    ShuttingDown,
)
from router.requests.request import Request
from tests.router.support.fake_engines import FakeEngines, front_of, generation, listening, serve

Asker = Client | Many
LOST = ShuttingDown("this router dies")


@asynccontextmanager
async def asking(
    engines: FakeEngines, kind: str, **settings: Any
) -> AsyncIterator[tuple[Client, Asker]]:
    """A client of fake engines, and what asks: itself, or its stream of many."""
    async with serve(engines) as target, Client(target, **settings) as client:
        if kind == "client":
            yield client, client
            return
        try:
            async with client.many() as many:
                yield client, many
        finally:
            engines.cancel_all()


def serving(engines: FakeEngines, port: int = 0) -> AbstractAsyncContextManager[str]:
    """Serves engines, whose calls end with the block."""
    servicer = GenerationServicer(engines, None, version="1")  # type: ignore[arg-type]
    return listening(generation(servicer), port=port, **front_of(servicer, engines))


async def begin(asker: Asker, engines: FakeEngines, **options: Any) -> tuple[Any, Request]:
    asking = asyncio.create_task(asker.complete_all([5, 6], **options))
    return asking, await engines.arrivals.get()


def give(engines: FakeEngines, request: Request, *tokens: int) -> None:
    for sequence in request.sequences:
        engines.give(sequence, tokens)


def finish(engines: FakeEngines, request: Request) -> None:
    for sequence in request.sequences:
        engines.finish(sequence)


async def tokens_came(asking: Any, request: Request) -> None:
    """Returns when the router has sent what there is."""
    while any(s.num_taken < len(s.tokens) for s in request.sequences) and not asking.done():
        await asyncio.sleep(0)


async def all_of(deltas: AsyncGenerator[Delta, None]) -> list[Delta]:
    return [delta async for delta in deltas]


@pytest.fixture(params=["client", "many"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("options", [{}, {"logprobs": False, "n": 3}, {"temperature": 1.0}])
async def test_a_caller_gets_every_token_once_over_any_number_of_losses(
    kind: str, options: dict[str, Any]
):
    engines = FakeEngines()
    async with asking(engines, kind) as (_, asker):
        task, request = await begin(asker, engines, **options)
        seeds = {request.sampling.seed}
        for attempt in (1, 2, 3, 4):
            give(engines, request, 10 * attempt, 10 * attempt + 1)
            await tokens_came(task, request)
            engines.cancel(request, LOST)
            request = await engines.arrivals.get()
            seeds.add(request.sampling.seed)
            assert request.attempt == attempt
            assert {s.num_resumed for s in request.sequences} == {2 * attempt}
        give(engines, request, 50)
        finish(engines, request)
        answers: list[Completion] = await task
        expected = [10, 11, 20, 21, 30, 31, 40, 41, 50]
        assert [answer.token_ids for answer in answers] == [expected] * options.get("n", 1)
        assert {answer.num_resumes for answer in answers} == {4}
        assert {answer.finish.attempt for answer in answers} == {4}
        assert {answer.finish.num_resumed_tokens for answer in answers} == {8}
        assert len(seeds) == 1 or "temperature" not in options


async def test_continuations_that_have_ended_are_not_run_again(kind: str):
    engines = FakeEngines()
    async with asking(engines, kind) as (_, asker):
        task, request = await begin(asker, engines, n=3)
        give(engines, request, 9)
        engines.finish(request.sequences[1])
        await tokens_came(task, request)
        engines.cancel(request, LOST)
        request = await engines.arrivals.get()
        assert [s.index for s in request.sequences] == [0, 2]
        give(engines, request, 8)
        finish(engines, request)
        assert [answer.token_ids for answer in await task] == [[9, 8], [9], [9, 8]]


async def test_deltas_show_a_pause_and_nothing_else(kind: str):
    engines = FakeEngines()
    async with asking(engines, kind) as (_, asker):
        async with aclosing(asker.generate([5, 6], request_id="mine")) as deltas:
            coming = asyncio.create_task(anext(deltas))
            request = await engines.arrivals.get()
            give(engines, request, 7)
            came = [await coming]
            coming = asyncio.create_task(anext(deltas))
            engines.cancel(request, LOST)
            request = await engines.arrivals.get()
            assert request.request_id == "mine"
            give(engines, request, 8)
            came.append(await coming)
            finish(engines, request)
            came.append(await anext(deltas))
        assert [delta.token_ids for delta in came] == [[7], [8], []]
        assert came[-1].finish is not None


async def test_a_request_that_takes_routers_down_is_given_up(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Attempts, "_time_apart_s", lambda _: 0.0)
    engines = FakeEngines()
    async with asking(engines, kind) as (_, asker):
        task, request = await begin(asker, engines)
        give(engines, request, 7)
        for num_stalled in range(5):
            await tokens_came(task, request)
            engines.cancel(request, Moved())
            request = await engines.arrivals.get()
            assert [s.suspicion is not None for s in request.sequences] == [num_stalled > 0]
        await asyncio.sleep(0)
        engines.cancel(request, Moved())
        with pytest.raises(Unavailable, match="the last 5 brought no token"):
            await task
        assert engines.arrivals.empty()


def test_what_is_lost_with_one_that_takes_routers_down_goes_on(monkeypatch: pytest.MonkeyPatch):
    """A router is back after 1 s, has a first token after 0.1 s, and dies 20 ms behind the one's arrival."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(resume, "random", random.Random(1))
    begun = pb.GenerateResponse(request_id="a", begin=pb.Begin(seed=1), token_ids=[5])
    death = Unavailable(grpc.StatusCode.UNAVAILABLE, "Socket closed", ErrorDetails())
    poison, *others = [Attempts(pb.GenerateRequest(), None, Resumption(60.0)) for _ in range(65)]
    for attempts in (poison, *others):
        attempts.next_request()
        attempts.take(begun)
    back_times = dict.fromkeys((poison, *others), 0.0)  # of those that were not given up
    num_deaths, up_time = 0, 0.0
    while poison in back_times:
        now = max(back_times[poison], up_time) + 0.02
        num_deaths += 1
        for attempts, back_time in list(back_times.items()):
            if (start := max(back_time, up_time)) < now:
                if attempts is not poison and start + 0.1 < now:
                    attempts.take(begun)
                elif num_deaths > 1:
                    attempts.take(pb.GenerateResponse(request_id="a", begin=pb.Begin(seed=1)))
                try:
                    back_times[attempts] = now + attempts.pause_after(death)
                except Unavailable:
                    del back_times[attempts]
                attempts.next_request()
        up_time = now + 1.0
    assert num_deaths == 1 + resume.MAX_STALLED
    assert len(back_times) >= 62
    assert now < 30


def test_routers_that_were_told_to_stop_are_no_reason_to_give_a_request_up():
    attempts = Attempts(pb.GenerateRequest(), None, Resumption(60.0))
    end = Unavailable(grpc.StatusCode.UNAVAILABLE, str(LOST), ErrorDetails(LOST.reason))
    for _ in range(4 * resume.MAX_STALLED):
        attempts.next_request()
        attempts.take(pb.GenerateResponse(request_id="a", begin=pb.Begin(seed=1)))
        assert attempts.pause_after(end) <= 1.2 * resume.MAX_PAUSE_S
    assert attempts.next_request().resume.num_stalled == 0


@pytest.mark.parametrize("request_id", ["", "the caller's"])
def test_what_a_proxy_sent_again_waits_until_the_router_has_noticed(request_id: str):
    """Only an id that the library drew can be in use by nothing else."""
    request = pb.GenerateRequest(request_id=request_id)
    attempts = Attempts(request, None, Resumption(60.0, has_answered=True))
    assert attempts.next_request().request_id
    code = grpc.StatusCode.ALREADY_EXISTS
    failure = CallFailed(code, "it is in use", ErrorDetails("REQUEST_EXISTS"))
    if request_id:
        with pytest.raises(CallFailed, match="in use"):
            attempts.pause_after(failure)
    else:
        attempts.pause_after(failure)
        assert attempts.next_request().request_id == request.request_id


@pytest.mark.parametrize(
    ("reason", "code", "num_calls"),
    [
        ("", grpc.StatusCode.UNAVAILABLE, resume.MAX_UNANSWERED),
        ("", grpc.StatusCode.INTERNAL, resume.MAX_UNANSWERED),
        ("NOT_READY", grpc.StatusCode.UNAVAILABLE, 40),
    ],
)
def test_one_that_takes_routers_down_before_it_is_taken_is_given_up(
    reason: str, code: grpc.StatusCode, num_calls: int
):
    """But not one that routers refuse, for as long as they do."""
    attempts = Attempts(pb.GenerateRequest(), None, Resumption(60.0, has_answered=True))
    failure = Unavailable(code, "it broke", ErrorDetails(reason))
    for _ in range(num_calls - 1):
        attempts.next_request()
        attempts.pause_after(failure)
    if num_calls == resume.MAX_UNANSWERED:
        attempts.next_request()
        with pytest.raises(Unavailable, match="the last 3 brought no token"):
            attempts.pause_after(failure)


@pytest.mark.parametrize(
    "error",
    [ExecutorFailed("it kills executors"), InvalidRequest("n", "wrong")],
)
async def test_what_is_no_loss_is_not_sent_again(kind: str, error: Any):
    engines = FakeEngines()
    async with asking(engines, kind) as (_, asker):
        task, request = await begin(asker, engines)
        give(engines, request, 7)
        await tokens_came(task, request)
        engines.cancel(request, error)
        with pytest.raises(CallFailed) as caught:
            await task
        assert caught.value.reason == error.reason
        assert engines.arrivals.empty()


async def test_resumption_can_be_turned_off(kind: str):
    engines = FakeEngines()
    async with asking(engines, kind, resume=False) as (_, asker):
        task, request = await begin(asker, engines)
        give(engines, request, 7)
        await tokens_came(task, request)
        engines.cancel(request, LOST)
        with pytest.raises(Unavailable):
            await task
        assert engines.arrivals.empty()


async def test_an_output_that_cannot_go_on_is_handed_over_as_far_as_it_came(kind: str):
    engines = FakeEngines()
    async with asking(engines, kind) as (_, asker):
        task, request = await begin(asker, engines, logprobs=False)
        give(engines, request, 7, 8)
        await tokens_came(task, request)
        engines.refusal = ResumeMismatch("fingerprint", "f00d", "other")
        engines.cancel(request, LOST)
        with pytest.raises(Interrupted) as caught:
            await task
        assert [delta.token_ids for delta in caught.value.so_far] == [[7, 8]]
        assert caught.value.reason == "RESUME_MISMATCH"


async def test_a_full_router_is_asked_again_when_it_says_so(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(QueueFull, "retry_delay_s", 0.01)
    engines = FakeEngines()
    async with asking(engines, kind) as (_, asker):
        task, request = await begin(asker, engines)
        give(engines, request, 7)
        await tokens_came(task, request)
        engines.refusal = QueueFull("too many resumed tokens wait")
        engines.cancel(request, LOST)
        while not engines.measures.refused["QUEUE_FULL"]:
            await asyncio.sleep(0)
        engines.refusal = None
        request = await engines.arrivals.get()
        give(engines, request, 8)
        finish(engines, request)
        assert [answer.token_ids for answer in await task] == [[7, 8]]
        engines.refusal = QueueFull("too much waits")
        with pytest.raises(Overloaded):  # one that never had a token is its caller's
            await asker.complete([5])
        engines.refusal = None


async def test_a_router_that_lets_no_call_in_is_asked_again_when_it_says_so(
    kind: str, monkeypatch: pytest.MonkeyPatch
):
    """Such as one that still counts the calls which broke off."""
    monkeypatch.setattr(QueueFull, "retry_delay_s", 0.01)
    first, second = FakeEngines(), FakeEngines()
    async with AsyncExitStack() as router:
        target = await router.enter_async_context(serving(first))
        async with Client(target) as client, client.many() as many:
            asker: Asker = client if kind == "client" else many
            deltas = asker.generate([5, 6])
            coming = asyncio.create_task(anext(deltas))
            give(first, await first.arrivals.get(), 7)
            came = [await coming]
            await router.aclose()
            counted = [second.listeners.open() for _ in range(second.listeners.num_free)]
            async with serving(second, int(target.rsplit(":", 1)[1])):
                going_on = asyncio.create_task(all_of(deltas))
                while not second.measures.refused["QUEUE_FULL"]:
                    await asyncio.sleep(0)
                with pytest.raises(Overloaded):  # one that never had a token is its caller's
                    await asker.complete([8])
                second.echoes = True
                for listener in counted:
                    second.listeners.close(listener)
                came += await going_on
    assert [token for delta in came for token in delta.token_ids] == [7, 5, 6]


async def test_a_router_that_is_started_again_is_waited_for(kind: str):
    """Also by requests of which nothing came; but not one that never answered anything."""
    first, second = FakeEngines(), FakeEngines()
    first.echoes = True
    async with AsyncExitStack() as router:
        target = await router.enter_async_context(serving(first))
        async with Client(target) as client, client.many() as many:
            asker: Asker = client if kind == "client" else many
            assert (await asker.complete([5])).token_ids == [5]
            await first.arrivals.get()
            first.echoes = False
            deltas = asker.generate([5, 6])
            coming = asyncio.create_task(anext(deltas))
            request = await first.arrivals.get()
            waiting, _ = await begin(asker, first)
            give(first, request, 7)
            came = [await coming]  # what is still on its way when a call ends may be lost
            await router.aclose()
            port = int(target.rsplit(":", 1)[1])
            async with serving(second, port):
                going_on = asyncio.create_task(all_of(deltas))
                for request in [await second.arrivals.get() for _ in range(2)]:
                    give(second, request, 8)
                    finish(second, request)
                came += await going_on
                [answer] = await waiting
    assert [token for delta in came for token in delta.token_ids] == [7, 8]
    assert came[-1].finish is not None
    assert came[-1].finish.attempt > 0
    assert answer.token_ids == [8]


async def test_a_router_that_takes_its_time_is_waited_for(kind: str):
    """Longer than for a router that is not there."""
    first, second = FakeEngines(), FakeEngines()
    first.echoes = True
    async with AsyncExitStack() as router:
        target = await router.enter_async_context(serving(first))
        async with Client(target, resume_for_s=1.0) as client, client.many() as many:
            asker: Asker = client if kind == "client" else many
            await asker.complete([5])
            await first.arrivals.get()
            first.echoes = False
            waiting, _ = await begin(asker, first)
            await router.aclose()
            async with serving(second, int(target.rsplit(":", 1)[1])):
                request = await second.arrivals.get()
                await asyncio.wait((waiting,), timeout=1.2)
                give(second, request, 8)
                finish(second, request)
                assert [answer.token_ids for answer in await waiting] == [[8]]


async def test_a_timeout_holds_while_no_router_is_there(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resume, "ANSWER_GRACE_S", 0.05)
    engines = FakeEngines()
    async with AsyncExitStack() as router:
        target = await router.enter_async_context(serving(engines))
        async with Client(target) as client, client.many() as many:
            asker: Asker = client if kind == "client" else many
            task, request = await begin(asker, engines, timeout_s=0.5)
            give(engines, request, 7)
            await tokens_came(task, request)
            await router.aclose()
            async with asyncio.timeout(10):
                with pytest.raises((TimedOut, Unavailable)):
                    await task


async def test_an_answer_without_a_stream_is_asked_for_again():
    first, second = FakeEngines(), FakeEngines()
    first.echoes = True
    async with AsyncExitStack() as router:
        target = await router.enter_async_context(serving(first))
        async with Client(target) as client:
            await client.complete_unary([5])
            await first.arrivals.get()
            first.echoes = False
            asking = asyncio.create_task(client.complete_unary([5], n=2, temperature=1.0))
            lost = await first.arrivals.get()
            give(first, lost, 6, 7)
            await router.aclose()
            async with serving(second, int(target.rsplit(":", 1)[1])):
                request = await second.arrivals.get()
                assert request.sampling.seed == lost.sampling.seed
                give(second, request, 8)
                finish(second, request)
                answers = await asking
    assert [answer.token_ids for answer in answers] == [[8], [8]]


async def test_a_router_that_never_answered_is_not_waited_for():
    async with Client("127.0.0.1:1") as client, client.many() as many:
        for asker in (client, many):
            with pytest.raises(Unavailable):
                await asker.complete([5])
