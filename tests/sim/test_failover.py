"""If these fail, requests wait for a group that is down though another one could run them."""

import asyncio
import random

import pytest

from router.requests.request import Request, StopConditions
from router.requests.waiting_queue import PARTS
from tests.router.support.stepper import make_shape
from tests.sim.world import World
from tests.support.virtual_clock import on_virtual_clock

FAILOVER_AFTER_S = 5.0


async def submitted(world: World, count: int, max_tokens: int) -> list[Request]:
    """Sends equal requests, and lets as many begin as can."""
    stop = StopConditions(max_tokens=max_tokens)
    fields = {"stop": stop, "n": 1, "priority": 0, "deadline": None}
    requests = []
    for number in range(count):
        requests.append(world.make_request(number, prompt=world.tokens(8), **fields))
        world.engines.submit(requests[-1])
    await asyncio.sleep(0.1)
    return requests


def groups_of(requests: list[Request]) -> set[int]:
    return {request.sequences[0].group for request in requests if request.is_live}


@pytest.mark.parametrize("first_is_down_s", [20.0, 1.0])
@on_virtual_clock
async def test_what_waits_goes_to_another_group_at_once_and_what_ran_if_its_own_is_not_back_soon(
    first_is_down_s: float,
) -> None:
    world = World(random.Random(1), num_groups=2)
    world.engines._failover_after_s = FAILOVER_AFTER_S
    first, second = world.groups
    second.executors.kill(down_s=1.0)  # so that the first one gets everything

    async def client() -> None:
        loop = asyncio.get_running_loop()
        requests = await submitted(world, 50, max_tokens=40)
        assert {request.sequences[0].group for request in requests} == {0}
        assert {request.has_begun for request in requests} == {True, False}
        while not second.engine.is_ready:
            await asyncio.sleep(0.01)
        lost_time = loop.time()
        begun = [request for request in requests if request.has_begun]
        waiting = [request for request in requests if not request.has_begun]
        first.executors.kill(first_is_down_s)
        await asyncio.sleep(0.02)
        assert groups_of(waiting) == {1}
        assert groups_of(begun) == {0}

        await asyncio.sleep(lost_time + FAILOVER_AFTER_S - 0.02 - loop.time())
        assert groups_of(begun) <= {0}
        await asyncio.sleep(0.04)
        assert groups_of(begun) <= ({1} if first_is_down_s > FAILOVER_AFTER_S else {0})
        while not first.engine.is_ready:
            await asyncio.sleep(0.1)
        requests.append(world.make_request(100, n=1, deadline=None))
        world.engines.submit(requests[-1])
        assert groups_of(requests[-1:]) == {0}, "it has least to do"
        while any(request.is_live for request in requests):
            await asyncio.sleep(0.1)
        for request in requests:
            [sequence] = request.sequences
            world.check_outcome(sequence, sequence.tokens[len(request.prompt) :].tolist())
            world.engines.listeners.close(request.listener)

    await world.run_clients([client()])
    assert world.failed == []
    assert world.num_right == 51


@on_virtual_clock
async def test_a_prompt_goes_where_it_is_cached_unless_more_waits_there_than_that_saves() -> None:
    world = World(random.Random(1), num_groups=2, shape=make_shape())
    long, other = world.tokens(40), world.tokens(8)

    async def groups_for(*prompts: list[int]) -> list[int]:
        requests = []
        for prompt in prompts:
            fields = {"stop": StopConditions(max_tokens=1), "n": 1, "deadline": None}
            requests.append(world.make_request(len(requests), prompt=prompt, **fields))
            world.engines.submit(requests[-1])
        while any(request.is_live for request in requests):
            await requests[0].listener.wait()
            await asyncio.sleep(0.01)
        for request in requests:
            world.engines.listeners.close(request.listener)
        return [request.sequences[0].group for request in requests]

    async def client() -> None:
        assert await groups_for(other, long) == [0, 1]
        assert await groups_for(long) == [1]
        # 40 tokens wait at either, and 4 of the long one are to run at 1; then 80 wait there.
        assert await groups_for(world.tokens(40), world.tokens(40), long, long) == [0, 1, 1, 0]

    await world.run_clients([client()])


@on_virtual_clock
async def test_sequences_that_ran_in_a_second_loss_begin_again_in_parts() -> None:
    sizes = {"num_blocks": 300, "rows_per_rank": 16, "max_num_batched_tokens": 1000}
    world = World(random.Random(1), shape=make_shape(max_num_logits=100, **sizes))
    [group] = world.groups

    async def client() -> None:
        requests = await submitted(world, 16, max_tokens=30)
        assert group.engine.num_running == 16
        plans = group.executors.plans
        for num_begun in (16, 16 // PARTS):
            num_plans = len(plans)
            group.executors.kill(down_s=0.0)
            while len(plans) == num_plans:
                await asyncio.sleep(0.001)
            assert len(plans[num_plans].batches[0].rows) == num_begun
        while world.engines.num_live:
            await asyncio.sleep(0.1)
        assert max(len(plan.batches[0].rows) for plan in plans[num_plans:]) > 16 // PARTS
        for request in requests:
            world.engines.listeners.close(request.listener)

    await world.run_clients([client()])
