"""KV outlives a killed executor on the ranks of the others."""

import asyncio
from pathlib import Path

from deploy.local.demo_tasks import solved_lines
from tests.e2e.conftest import PATIENT, SAME_ANSWERS
from tests.e2e.support.logs import logged, scraped
from tests.e2e.support.stacks import served
from tests.e2e.support.streams import long_stream

NUM_STREAMS = 6
# Each rank has time for all prompts in one step, so that none goes to a rank that has time sooner.
EXECUTOR_ARGS = ("--num-kv-blocks", "400", "--max-num-batched-tokens", "4096", *SAME_ANSWERS)
ROUTER_ARGS = (
    *PATIENT,
    *("--metrics-listen", "127.0.0.1:0", "--target-token-gap-ms", "0", "--verify-kept-kv", "1"),
)
CHECKS = "lockstep_router_kept_kv_checks_total"


async def test_who_ran_beside_a_killed_executor_has_next_to_nothing_computed_again(tmp_path: Path):
    args = {"executor_args": EXECUTOR_ARGS, "router_args": ROUTER_ARGS}
    prompts = [solved_lines(number, 700) + "\n17+25=" for number in range(NUM_STREAMS)]
    async with served(tmp_path, **args) as (stack, client):
        expected = await asyncio.gather(*[long_stream(client, prompt=p) for p in prompts])
        begun = [asyncio.Event() for _ in prompts]
        streams = [
            asyncio.create_task(long_stream(client, event, prompt=prompt))
            for prompt, event in zip(prompts, begun, strict=True)
        ]
        await asyncio.gather(*[event.wait() for event in begun])
        await stack.restart_executor(1)
        assert await asyncio.gather(*streams) == expected

        [_, formed] = await logged(stack.router, "group_ready", 2)
        assert formed["kept_tokens"] > 1000
        assert formed["lost_tokens"] > 1000
        counts = await scraped(stack.router)
        assert counts["lockstep_router_kept_tokens_total"]["0",] >= 0.97 * formed["kept_tokens"]
        again = counts["lockstep_router_recomputed_tokens_total"]
        assert again["kept", "0"] <= 0.03 * formed["kept_tokens"]
        assert 0 < again["lost", "0"] <= formed["lost_tokens"]
        async with asyncio.timeout(60):
            while not (checks := (await scraped(stack.router))[CHECKS])["0", "equal"]:
                await asyncio.sleep(0.1)
        assert checks["0", "differs"] == 0
