"""Speculative decoding: drafts change no answer, are accepted, and survive a lost executor.

A stack without drafts answers first, in float32. Every draft model must give the same tokens.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from deploy.local.demo import SEED, ask, draw_requests, idle_group
from deploy.local.demo_speculative import DRAFTS, FOLDER, draw_problems, take_turn
from deploy.local.launch import LocalStack
from router.client import Client
from tests.e2e.conftest import FLOAT32_ARGS
from tests.e2e.support.stacks import served
from tests.e2e.support.streams import PROMPT, long_stream

NUM_REQUESTS = 20
LEAST_TOKENS_PER_STEP = 2.5

TREE = ("--draft-topk", "2", "--num-draft-tokens", "8")


@dataclass(frozen=True, slots=True)
class Told:
    """What a stack answered: to problems with long answers at once, to mixed ones, and on and on.

    Attributes:
        tokens_per_step: With drafts, of the long answers.
    """

    long: list[list[int]]
    mixed: list[list[int]]
    endless: list[int]
    tokens_per_step: float = field(compare=False)


async def ask_everything(client: Client) -> Told:
    turn = await take_turn(client, draw_problems(SEED))
    [group] = await client.get_status()
    async with client.many() as many:
        requests = draw_requests(SEED, NUM_REQUESTS)
        answers = await asyncio.gather(*(ask(many, request) for request in requests))
    endless = await long_stream(client)
    mixed = [answer.token_ids for answer in answers]
    return Told(turn.answers, mixed, endless, group.speculation.tokens_per_step)


def drafting(name: str, *more: str) -> Sequence[str]:
    return (*FLOAT32_ARGS, "--draft-model", str(FOLDER / name), *more)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def plain() -> Told:
    async with served(None, dp_size=1, executor_args=FLOAT32_ARGS) as (_, client):
        return await ask_everything(client)


@pytest.mark.parametrize("name", DRAFTS)
async def test_two_ranks_that_draft_answer_as_one_that_does_not_in_fewer_steps(
    name: str, plain: Told, tmp_path: Path
):
    """And a stream outlives an executor, with the draft of a layer of its own."""
    async with served(tmp_path, executor_args=drafting(name)) as (stack, client):
        told = await ask_everything(client)
        assert told == plain
        assert told.tokens_per_step >= LEAST_TOKENS_PER_STEP
        runners = {count.runner for count in (await idle_group(client)).graphs}
        assert "verify" in runners
        if name == "mtp":
            await outlive_an_executor(stack, client, plain.endless)


async def outlive_an_executor(stack: LocalStack, client: Client, expected: list[int]) -> None:
    is_running = asyncio.Event()
    streaming = asyncio.create_task(long_stream(client, is_running))
    await is_running.wait()
    await stack.restart_executor(1)
    assert await streaming == expected
    await client.complete(PROMPT, max_tokens=4)  # by the executor that was started again
    assert (await idle_group(client)).epoch > 1


async def test_trees_on_executors_that_share_a_rank_change_no_token(plain: Told, tmp_path: Path):
    """Those of the other drafts do so without processes: test_speculation_ranks.py."""
    settings = {"attn_tp_size": 2, "executor_args": drafting("eagle", *TREE)}
    async with served(tmp_path, dp_size=1, **settings) as (_, client):
        assert await ask_everything(client) == plain
        [group] = await client.get_status()
        assert group.speculation.num_accepted_drafts > 0
