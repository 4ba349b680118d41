"""Constrained answers over the wire: valid, whatever serves them, and the same with the same seeds.

LOCKSTEP_CONSTRAINTS says how many random requests each way to serve them gets. From 100 on there are ways
of several executors, drafts and models, and executors are killed under the requests. Prints counts.
"""

import asyncio
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from deploy.local.launch import LocalStack
from router.api.grammar_worker import try_build
from router.client import Client, Completion, Many, Options
from tests.e2e.chaos import ROUTER_ARGS, groups_ready
from tests.e2e.conftest import EXECUTOR_ARGS
from tests.e2e.support.stacks import served, supervised
from tests.support.constraints import Constraint, is_beginning, random_constraint
from tests.support.paths import DEMO_DRAFTS, DEMO_MODEL
from tests.support.random_model import save_random_model

NUM_ASKS = int(os.environ.get("LOCKSTEP_CONSTRAINTS", "16"))
IS_LARGE = NUM_ASKS >= 100
NUM_AT_ONCE = 48
MAX_TOKENS, NEWLINE = 40, 13
PAUSE_S = (1.0, 3.0)  # between two kills

TP2: dict[str, Any] = {"dp_size": 1, "attn_tp_size": 2}
WAYS: dict[str, dict[str, Any]] = {"dp2": {}, "tp2": TP2}
DRAFTS = (*EXECUTOR_ARGS, "--draft-model", str(DEMO_DRAFTS / "mtp"))


class Ask(NamedTuple):
    """A constraint, the grammar that is made of it, and how its answer is sampled."""

    constraint: Constraint
    grammar: str
    prompt: str
    options: Options

    @property
    def all_options(self) -> Options:
        kind, text = self.constraint
        value: Any = json.loads(text) if kind == "choices" else text
        return {**self.options, kind: value}  # type: ignore[misc]


def random_asks(seed: int) -> list[Ask]:
    rng, asks = random.Random(seed), list[Ask]()
    while len(asks) < NUM_ASKS:
        constraint = random_constraint(rng)
        grammar, problem = try_build(*constraint)
        if problem:
            continue
        options: Options = {
            "max_tokens": MAX_TOKENS,
            "seed": rng.randrange(1 << 40),
            "temperature": rng.choice([0.0, 1.0, 2.5]),
            "text": True,
        }
        prompt = f"\n{rng.randrange(100)}+{rng.randrange(100)}="
        asks.append(Ask(constraint, grammar, prompt, options))
    return asks


def check(ask: Ask, answer: Completion) -> str:
    """Returns how an answer ended, which is right for its constraint."""
    if answer.finish.reason == "stop":
        is_text = answer.token_ids[-1] == NEWLINE  # which ends answers of the demo model, too
        text = answer.text.removesuffix("\n") if is_text else answer.text
        assert ask.constraint.fits(text), (ask, answer.text)
    else:
        assert len(answer.token_ids) == MAX_TOKENS
        assert is_beginning(ask.grammar, answer.token_ids), (ask, answer.text)
    return answer.finish.reason


async def answers_of(client: Client, asks: list[Ask]) -> list[Completion]:
    """Asks everything, some at a time: half by calls of their own and half on one stream."""
    places = asyncio.Semaphore(NUM_AT_ONCE)

    async def ask_one(asker: Client | Many, ask: Ask) -> Completion:
        async with places:
            return await asker.complete(ask.prompt, **ask.all_options)

    async with client.many() as many:
        askers = [many if number % 2 else client for number in range(len(asks))]
        return list(await asyncio.gather(*map(ask_one, askers, asks)))


async def expect(client: Client, asks: list[Ask], expected: list[str] | None) -> list[str]:
    answers = await answers_of(client, asks)
    texts = [answer.text for answer in answers]
    ends = Counter(check(*pair) for pair in zip(asks, answers, strict=True))
    kinds = Counter(ask.constraint.kind for ask in asks)
    drafts = sum(answer.finish.num_accepted_drafts for answer in answers)
    print(f"{len(asks)} requests, {dict(kinds)}, ended by {dict(ends)}, {drafts} drafts accepted")
    assert expected is None or texts == expected
    assert ends["stop"] > len(asks) / 3
    return texts


async def test_constrained_answers_are_valid_and_the_same_twice(client: Client):
    asks = random_asks(3)
    texts = await expect(client, asks, None)
    assert [text.text for text in (await answers_of(client, asks[::-1]))[::-1]] == texts


async def kill_executors(
    stack: LocalStack, client: Client, is_over: asyncio.Event, kills: list[str]
) -> None:
    """Lets requests run between kills: one that is always lost when it runs alone is not tried again."""
    rng = random.Random(5)
    while not is_over.is_set():
        await groups_ready(client)
        await asyncio.sleep(rng.uniform(*PAUSE_S))
        process = rng.choice(stack.executors)
        await process.kill()
        kills.append(process.name)


@pytest.mark.skipif(not IS_LARGE, reason="takes minutes: LOCKSTEP_CONSTRAINTS=1000")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_random", [False, True])
async def test_kills_and_drafts_change_no_constrained_answer(
    way: str, is_random: bool, tmp_path: Path
):
    model = save_random_model(tmp_path / "model") if is_random else DEMO_MODEL
    asks, kills = random_asks(7), list[str]()
    settings: dict[str, Any] = {"model": model, **WAYS[way]}
    async with served(None, **settings) as (_, client):
        texts = await expect(client, asks, None)
    for executor_args in (EXECUTOR_ARGS, DRAFTS):
        settings |= {"executor_args": executor_args, "router_args": ROUTER_ARGS}
        async with served(None, **settings) as (stack, client), supervised(stack):
            is_over = asyncio.Event()
            killing = asyncio.create_task(kill_executors(stack, client, is_over, kills))
            await expect(client, asks, texts)
            is_over.set()
            await killing
    print(f"{way}: {len(kills)} kills")
    assert kills
