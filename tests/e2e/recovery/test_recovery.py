"""Recovery from an executor's death: it costs a KV cache and a pause, and no token."""

import asyncio
from pathlib import Path

from deploy.local.demo import SEED, ask, draw_requests, idle_group
from tests.e2e.support.stacks import served
from tests.e2e.support.streams import long_stream


async def test_answers_stay_right_when_an_executor_is_killed_and_started_again(tmp_path: Path):
    async with served(tmp_path) as (stack, client):
        undisturbed = await long_stream(client)

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
