"""Recovery from an executor's death: it costs a KV cache and a pause, and no token."""

import asyncio
from pathlib import Path

from deploy.local.demo import SEED, ask, draw_requests, idle_group
from deploy.local.demo_tasks import token_ids
from deploy.local.launch import LocalStack
from router.client import Client
from tests.e2e.conftest import EXECUTOR_ARGS, PATIENT

LONG_TOKENS = 300


async def long_stream(client: Client, is_running: asyncio.Event) -> list[int]:
    """Returns many greedy tokens; sets the event at the first."""
    ids: list[int] = []
    async for delta in client.generate(
        token_ids("\n17+25="), max_tokens=LONG_TOKENS, ignore_eos=True
    ):
        ids += delta.token_ids
        is_running.set()
    return ids


async def test_answers_stay_right_when_an_executor_is_killed_and_started_again(tmp_path: Path):
    stack = LocalStack(
        dp_size=2, executor_args=EXECUTOR_ARGS, router_args=PATIENT, log_dir=tmp_path
    )
    async with stack, stack.client() as client:
        undisturbed = await long_stream(client, asyncio.Event())

        is_running = asyncio.Event()
        disturbed = asyncio.create_task(long_stream(client, is_running))
        asked = [asyncio.create_task(ask(client, r)) for r in draw_requests(SEED, 100)]
        await is_running.wait()
        await stack.restart_executor(1)

        answers = await asyncio.gather(*asked)
        assert all(answer.is_right for answer in answers)
        assert await disturbed == undisturbed
        await client.complete("\n17+25=", max_tokens=4)  # by the executor that was started again
        group = await idle_group(client)
        assert group.epoch > 1
        assert group.problem == ""
    assert stack.left_running == []
