"""Rolling restart: an update of all routers, one after the other, costs no request."""

import asyncio
import itertools
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc

from deploy.local.demo import OPTIONS, SEED, DemoRequest, draw_requests
from deploy.local.demo_tasks import text_of, token_ids
from deploy.local.launch import LocalStack
from deploy.local.processes import ROOT
from protos.serving.v1 import serving_pb2 as pb
from protos.serving.v1 import serving_pb2_grpc
from router.client import Client, Many
from tests.e2e.conftest import EXECUTOR_ARGS, PATIENT
from tests.e2e.support.envoy import envoy_before
from tests.e2e.support.stacks import is_paused_at_work, resume

NUM_ROUTERS = 2
NUM_CALLERS = 1  # of each kind, for short and for long answers
STREAM_TOKENS = 60
STREAM_PROMPT = token_ids("\n17+25=")
# Envoy asks every second; and no stream takes so long that its grace is over.
ROUTER_ARGS = ("--shutdown-delay-s", "2.5", "--shutdown-grace-s", "300", *PATIENT)
RESTART_S = 360.0
README = (ROOT / "protos" / "README.md").read_text()

Ask = Callable[[list[int], int, tuple[int, ...]], Awaitable[list[int]]]


@dataclass
class Tally:
    """Outcome of one kind of request."""

    num_right: int = 0
    failures: list[str] = field(default_factory=list)


def asks_library(client: Client | Many) -> Ask:
    async def ask(prompt: list[int], max_tokens: int, stop_ids: tuple[int, ...]) -> list[int]:
        completion = await client.complete(
            prompt, max_tokens=max_tokens, stop_token_ids=stop_ids, ignore_eos=not stop_ids
        )
        return completion.token_ids

    return ask


def asks_plainly(channel: grpc.aio.Channel) -> Ask:
    """What a client in any language has: generated code, and the policy out of the README."""
    stub = serving_pb2_grpc.GenerationServiceStub(channel)

    async def ask(prompt: list[int], max_tokens: int, stop_ids: tuple[int, ...]) -> list[int]:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=prompt),
            stop=pb.StopConditions(
                max_tokens=max_tokens, stop_token_ids=stop_ids, ignore_eos=not stop_ids
            ),
        )
        return [id_ async for message in stub.Generate(request) for id_ in message.token_ids]

    return ask


async def ask_on(tally: Tally, is_over: asyncio.Event, asks: Iterator[Awaitable[str]]) -> None:
    """Asks one request after the other; each returns what is wrong with its answer."""
    while not is_over.is_set():
        try:
            wrong = await next(asks)
        except Exception as error:
            wrong = repr(error)
        if wrong:
            tally.failures.append(wrong)
        else:
            tally.num_right += 1


def short_answers(ask: Ask) -> Iterator[Awaitable[str]]:
    async def wrong_with(request: DemoRequest) -> str:
        text = text_of(await ask(token_ids(request.text), OPTIONS["max_tokens"], STOP_IDS))
        is_right = request.problem.is_answered_by(text)
        return "" if is_right else f"{request.text!r} was answered with {text!r}"

    return map(wrong_with, itertools.cycle(draw_requests(SEED, 200)))


def long_streams(ask: Ask, expected: list[int]) -> Iterator[Awaitable[str]]:
    async def wrong_with(prompt: list[int]) -> str:
        ids = await ask(prompt, STREAM_TOKENS, ())
        return "" if ids == expected else f"{len(ids)} tokens, not those of an undisturbed stream"

    return map(wrong_with, itertools.repeat(STREAM_PROMPT))


STOP_IDS = tuple(OPTIONS["stop_token_ids"])


async def test_a_rolling_restart_loses_no_request(tmp_path: Path):
    """Of clients behind Envoy, and of one that watches the routers' health itself.

    Every router is restarted in turn, in the middle of its work, while clients of two kinds ask for
    short and long answers.
    """
    tallies: dict[str, Tally] = {}
    is_over = asyncio.Event()
    async with AsyncExitStack() as exits:
        one = partial(LocalStack, dp_size=1, executor_args=EXECUTOR_ARGS, router_args=ROUTER_ARGS)
        stacks = [one(log_dir=tmp_path / f"stack-{number}") for number in range(NUM_ROUTERS)]
        await asyncio.gather(*[exits.enter_async_context(stack) for stack in stacks])
        envoy = envoy_before([stack.address for stack in stacks], tmp_path)
        address = (await exits.enter_async_context(envoy)).address
        client = await exits.enter_async_context(Client(address))
        [policy] = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
        options = [("grpc.service_config", policy), ("grpc.max_reconnect_backoff_ms", 1000)]
        channel = await exits.enter_async_context(grpc.aio.insecure_channel(address, options))
        both = "ipv4:" + ",".join(stack.address for stack in stacks)
        direct = await exits.enter_async_context(Client(both, watches_health=True))
        many = await exits.enter_async_context(client.many())
        asks = {
            "many": asks_library(many),
            "library": asks_library(client),
            "plain": asks_plainly(channel),
            "direct": asks_library(direct),
        }
        expected = await asks_library(client)(STREAM_PROMPT, STREAM_TOKENS, ())

        async with asyncio.TaskGroup() as tasks:
            for name, ask in asks.items():
                short, long = Tally(), Tally()
                tallies |= {f"{name}, short": short, f"{name}, long": long}
                for _ in range(NUM_CALLERS):
                    tasks.create_task(ask_on(short, is_over, short_answers(ask)))
                    tasks.create_task(ask_on(long, is_over, long_streams(ask, expected)))
            try:
                for stack in stacks:
                    await until_answered(tallies)
                    await restart_at_work(stack)
                await until_answered(tallies)
            finally:
                is_over.set()
    print(tallies)
    assert {kind: tally.failures for kind, tally in tallies.items() if tally.failures} == {}
    assert all(tally.num_right for tally in tallies.values())


async def restart_at_work(stack: LocalStack) -> None:
    """Restarts a router that has requests, which its executor ends no sooner than it is told to."""
    router = stack.router
    async with stack.client() as client:
        while not await is_paused_at_work(stack, client):
            await asyncio.sleep(0.05)
    restarting = asyncio.create_task(stack.restart_router(RESTART_S))
    draining = await router.event("draining")
    resume(stack)
    assert draining["live_requests"] > 0, "it was not at work"
    assert await restarting == 0, "it did not end well"


async def until_answered(tallies: dict[str, Tally]) -> None:
    """Returns when callers of each kind have had an answer more."""
    before = {kind: tally.num_right for kind, tally in tallies.items()}
    while any(tally.num_right == before[kind] for kind, tally in tallies.items()):
        await asyncio.sleep(0.1)
