"""Poison requests: one whose step kills executors fails, and the service goes on.

Beside others it is a line of ``make nothing-stops`` (test_nothing_stops.py).
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from deploy.local.demo import idle_group
from deploy.local.demo_tasks import token_ids
from executor.server.supervisor import STUCK
from router.client import CallFailed, Client, Options, Prompt
from tests.e2e.conftest import EXECUTOR_ARGS, PATIENT
from tests.e2e.support.logs import logged, records
from tests.e2e.support.poisoned_executor import POISON, SNARE
from tests.e2e.support.stacks import PoisonedStack, supervised

POISON_PROMPT = token_ids(f"\n{POISON}=")
SNARE_PROMPT = token_ids(f"\n{SNARE}=")
GREEDY: Options = {"max_tokens": 80, "ignore_eos": True}


@asynccontextmanager
async def poisoned(
    log_dir: Path, executor_args: Sequence[str] = (), router_args: Sequence[str] = PATIENT
) -> AsyncIterator[tuple[PoisonedStack, Client]]:
    stack = PoisonedStack(
        executor_args=(*EXECUTOR_ARGS, *executor_args), router_args=router_args, log_dir=log_dir
    )
    async with stack, stack.client() as client, supervised(stack):
        yield stack, client


async def failure_of(client: Client, prompt: Prompt = POISON_PROMPT) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        await client.complete(prompt, **{**GREEDY, "request_id": "poison"})
    return caught.value


async def test_a_request_that_kills_an_executor_twice_is_not_tried_a_third_time(tmp_path: Path):
    async with poisoned(tmp_path) as (stack, client):
        failure = await failure_of(client)
        assert (failure.code, failure.reason) == (grpc.StatusCode.INTERNAL, "EXECUTOR_FAILED")
        await logged(stack.router, "request_failed")
        assert len(records(stack.router.log_path, "group_lost")) == 2
        assert (await client.complete("\n17+25=", max_tokens=8)).text.strip() == "42"
        assert len(await logged(stack.router, "group_ready", 3)) == 3
        assert len(records(stack.router.log_path, "group_lost")) == 2
        assert (await idle_group(client)).num_waiting == 0
    assert stack.left_running == []


async def test_an_executor_whose_step_never_ends_is_started_again(tmp_path: Path):
    """Its event loop turns, so that nobody but itself can know that it is of no use any more."""
    executor_args = ("--peer-timeout-s", "8")
    router_args = ("--step-timeout-s", "3", "--min-step-deadline-s", "2")
    async with poisoned(tmp_path, executor_args, router_args) as (stack, client):
        first = set(stack.executors)
        failure = await failure_of(client, SNARE_PROMPT)
        assert failure.code is grpc.StatusCode.INTERNAL
        assert (await client.complete("\n17+25=", max_tokens=8)).text.strip() == "42"
        ended = [process for process in first if process.has_ended]
        assert ended
        assert [await process.exited() for process in ended] == [STUCK] * len(ended)
        # Unless the router stood still for so long that a peer noticed first, and said so.
        lost = await logged(stack.router, "group_lost", 2)
        assert any("answer other calls" in record["problem"] for record in lost)
