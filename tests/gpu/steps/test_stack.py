"""The demo model through router and executor. If this fails, a caller gets a wrong answer."""

import asyncio
from typing import Any

import pytest
import torch

from tests.gpu.support.machine import IS_STAND_IN, Machine
from tests.gpu.support.production import PRODUCTION

KV_CACHE_BYTES = 128 << 20
READY_TIMEOUT_S = 120.0
NUM_REQUESTS = 12 if IS_STAND_IN else 300
# A GPU for each rank: NCCL refuses two on one.
DP_SIZES = [1, 2][: max(1, torch.cuda.device_count())]


async def ask_for_everything(device: str, dp_size: int) -> tuple[list[Any], Any, list[str]]:
    """Returns all answers, the group's status, and the processes that did not end."""
    from deploy.local.demo import SEED, ask, draw_requests, idle_group
    from deploy.local.launch import LocalStack

    stack = LocalStack(
        dp_size=dp_size,
        executor_args=(
            *("--device", device, "--kv-cache-bytes", str(KV_CACHE_BYTES)),
            *(f"--{name.replace('_', '-')}={value}" for name, value in PRODUCTION.items()),
        ),
        ready_timeout_s=READY_TIMEOUT_S,
    )
    async with stack, stack.client() as client, client.many() as many:
        requests = draw_requests(SEED, NUM_REQUESTS)
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(ask(many if request.on_stream else client, request))
                for request in requests
            ]
        answers = [task.result() for task in asked]
        group = await idle_group(client)
    return answers, group, stack.left_running


@pytest.mark.parametrize("dp_size", DP_SIZES)
def test_every_answer_of_the_demo_is_right(machine: Machine, dp_size: int) -> None:
    device = machine.device.type
    answers, group, left_running = asyncio.run(ask_for_everything(device, dp_size))
    wrong = [
        f"{answer.request.problem.prompt.strip()}{answer.text.strip()}"
        for answer in answers
        if not answer.is_right
    ]
    assert not wrong, f"{len(wrong)} of {len(answers)}"
    assert left_running == []
    replayed = {count.runner.partition("_")[0] for count in group.graphs if count.num_steps}
    assert replayed >= {"decode", "prefill"}, "steps ran without graphs"
