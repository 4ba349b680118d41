"""Resumed requests: a router that is killed and started again costs callers a pause, and no more."""

import asyncio
from pathlib import Path
from typing import Any

from deploy.local.demo_tasks import token_ids
from router.client import Client, Completion, Many
from tests.e2e.conftest import FLOAT32_ARGS
from tests.e2e.support.stacks import served

NUM_KILLS = 1
LONG: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}
ASKS: list[tuple[Any, dict[str, Any]]] = [
    (token_ids("\n17+25="), LONG),
    (token_ids("\n17+25="), LONG | {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.3}),
    (token_ids("\n17+25="), LONG | {"n": 3, "temperature": 1.5, "seed": 6, "logprobs": True}),
    ("\nrev lockstep=", LONG | {"echo": True, "stop_strings": ["never\n"]}),
    (token_ids("\n1="), {"max_tokens": 160, "regex": r"(\{[a-z]{3,9}:[0-9]+\}){9,}"}),
]


def told(answers: list[Completion]) -> list[Any]:
    return [
        (
            answer.token_ids,
            answer.text,
            answer.finish.reason,
            answer.prompt_text,
            [one.token_id for one in answer.logprobs],
        )
        for answer in answers
    ]


async def test_a_router_is_killed_under_streams_and_no_caller_fails(tmp_path: Path):
    is_over, num_resumes = asyncio.Event(), 0

    async def ask_on(asker: Client | Many, place: int, expected: list[Any]) -> None:
        nonlocal num_resumes
        prompt, options = ASKS[place]
        while not is_over.is_set():
            answers = await asker.complete_all(prompt, **options)
            assert told(answers) == expected
            num_resumes += answers[0].num_resumes

    async with served(tmp_path, executor_args=FLOAT32_ARGS) as (stack, client):
        wholes = [told(await client.complete_all(prompt, **options)) for prompt, options in ASKS]
        async with client.many() as many, asyncio.TaskGroup() as tasks:
            for place, whole in enumerate(wholes):
                tasks.create_task(ask_on(client, place, whole))
                tasks.create_task(ask_on(many, place, whole))
            for _ in range(NUM_KILLS):
                await asyncio.sleep(0.3)
                await stack.kill_router()
            await asyncio.sleep(0.3)
            is_over.set()
    assert num_resumes >= NUM_KILLS
