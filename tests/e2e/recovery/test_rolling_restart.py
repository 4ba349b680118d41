"""Rolling restart: an update of all routers, one after the other, costs no request."""

import asyncio
import itertools
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from deploy.local.demo import OPTIONS, SEED, draw_requests
from deploy.local.demo_tasks import text_of, token_ids
from deploy.local.launch import LocalStack
from deploy.local.processes import ROOT
from protos.serving.v1 import serving_pb2 as pb
from protos.serving.v1 import serving_pb2_grpc
from router.client import Client, Many
from tests.e2e.conftest import EXECUTOR_ARGS, PATIENT
from tests.e2e.support.envoy import envoy_before

NUM_ROUTERS = 2
NUM_CALLERS = 2  # of each kind
STREAM_TOKENS = 150
STREAM_PROMPT = token_ids("\n17+25=")
# Envoy asks every second; and no stream takes so long that its grace is over.
ROUTER_ARGS = ("--shutdown-delay-s", "2.5", "--shutdown-grace-s", "300", *PATIENT)
RESTART_S = 360.0
README = (ROOT / "protos" / "README.md").read_text()

Ask = Callable[[list[int], int, tuple[int, ...]], Awaitable[list[int]]]


@dataclass
class Tally:
    """What became of one kind of request."""

    num_right: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass
class Outcome:
    """What a rolling restart left behind.

    Attributes:
        tallies: By client and kind of request.
        exit_codes: Of the routers that were told to stop.
        live_requests: Of each router when it was told to stop.
    """

    tallies: dict[str, Tally] = field(default_factory=dict)
    exit_codes: list[int] = field(default_factory=list)
    live_requests: list[int] = field(default_factory=list)


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


async def short_answers(ask: Ask, tally: Tally, is_over: asyncio.Event) -> None:
    """Asks one problem after the other."""
    for request in itertools.cycle(draw_requests(SEED, 200)):
        if is_over.is_set():
            return
        try:
            ids = await ask(token_ids(request.text), OPTIONS["max_tokens"], STOP_IDS)
            if request.problem.is_answered_by(text_of(ids)):
                tally.num_right += 1
            else:
                tally.failures.append(f"{request.text!r} was answered with {text_of(ids)!r}")
        except Exception as error:
            tally.failures.append(repr(error))


async def long_streams(ask: Ask, tally: Tally, is_over: asyncio.Event, expected: list[int]) -> None:
    while not is_over.is_set():
        try:
            ids = await ask(STREAM_PROMPT, STREAM_TOKENS, ())
            if ids == expected:
                tally.num_right += 1
            else:
                tally.failures.append(f"{len(ids)} tokens, not those of an undisturbed stream")
        except Exception as error:
            tally.failures.append(repr(error))


STOP_IDS = tuple(OPTIONS["stop_token_ids"])


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def outcome(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Outcome]:
    """Restarts every router in turn while clients of two kinds ask for short and long answers."""
    folder, outcome, is_over = tmp_path_factory.mktemp("rolling"), Outcome(), asyncio.Event()
    async with AsyncExitStack() as exits:
        stacks = [stack_in(folder / f"stack-{number}") for number in range(NUM_ROUTERS)]
        await asyncio.gather(*[exits.enter_async_context(stack) for stack in stacks])
        envoy = envoy_before([stack.address for stack in stacks], folder)
        address = await exits.enter_async_context(envoy)
        client = await exits.enter_async_context(Client(address))
        options = [
            ("grpc.service_config", published_policy()),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
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
                outcome.tallies |= {f"{name}, short": short, f"{name}, long": long}
                for _ in range(NUM_CALLERS):
                    tasks.create_task(short_answers(ask, short, is_over))
                    tasks.create_task(long_streams(ask, long, is_over, expected))
            try:
                for stack in stacks:
                    await until_answered(outcome)
                    await restart_at_work(stack, outcome)
                await until_answered(outcome)
            finally:
                is_over.set()
        print(outcome)
    yield outcome


async def restart_at_work(stack: LocalStack, outcome: Outcome) -> None:
    """Restarts a router that has requests, which its executor ends no sooner than it is told to."""
    [executor], router = stack.executors, stack.router
    async with stack.client() as client:
        while True:
            executor.pause()
            [group] = await client.get_status()
            if any(rank.num_running for rank in group.ranks):
                break
            executor.resume()
            await asyncio.sleep(0.05)
    restarting = asyncio.create_task(stack.restart_router(RESTART_S))
    draining = await router.event("draining")
    executor.resume()
    outcome.live_requests.append(draining["live_requests"])
    outcome.exit_codes.append(await restarting)


def stack_in(folder: Path) -> LocalStack:
    return LocalStack(
        dp_size=1, executor_args=EXECUTOR_ARGS, router_args=ROUTER_ARGS, log_dir=folder
    )


def published_policy() -> str:
    [policy] = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    return policy


async def until_answered(outcome: Outcome) -> None:
    """Returns when callers of each kind have had an answer more."""
    before = {kind: tally.num_right for kind, tally in outcome.tallies.items()}
    async with asyncio.timeout(240):
        while any(tally.num_right == before[kind] for kind, tally in outcome.tallies.items()):
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("length", ["short", "long"])
@pytest.mark.parametrize("client", ["library", "many", "plain", "direct"])
async def test_a_rolling_restart_loses_no_request(outcome: Outcome, client: str, length: str):
    """Of clients behind Envoy, and of one that watches the routers' health itself."""
    tally = outcome.tallies[f"{client}, {length}"]
    assert tally.failures == []
    assert tally.num_right > 0


async def test_every_router_was_at_work_when_it_was_told_to_stop_and_ended_well(outcome: Outcome):
    assert len(outcome.live_requests) == NUM_ROUTERS
    assert all(outcome.live_requests)
    assert outcome.exit_codes == [0] * NUM_ROUTERS
