"""If these fail, requests wait for a group that is down though another one could run them."""

import asyncio
import random

from router.engine.quarantine import PARTS
from router.requests.request import Request, StopConditions
from router.scheduling.step import GroupShape
from tests.router.support import virtual_clock
from tests.sim.world import World

FAILOVER_AFTER_S = 5.0


async def begun_and_waiting(world: World) -> tuple[list[Request], list[Request]]:
    """Sends requests to the first group, more than it can run. Returns those that run, and others."""
    requests = []
    for number in range(50):
        request = world.make_request(
            number,
            prompt=world.tokens(8),
            stop=StopConditions(max_tokens=40),
            n=1,
            priority=0,
            deadline=None,
        )
        world.engines.submit(request)
        requests.append(request)
    await asyncio.sleep(0.1)
    assert {request.sequences[0].group for request in requests} == {0}
    begun = [request for request in requests if request.has_begun]
    return begun, [request for request in requests if not request.has_begun]


def groups_of(requests: list[Request]) -> set[int]:
    return {request.sequences[0].group for request in requests if request.is_live}


def run_failover(first_is_down_s: float) -> None:
    async def main() -> None:
        world = World(random.Random(1), num_groups=2)
        world.engines._failover_after_s = FAILOVER_AFTER_S
        first, second = world.groups
        second.executors.kill(down_s=1.0)  # so that the first one gets everything

        async def client() -> None:
            loop = asyncio.get_running_loop()
            begun, waiting = await begun_and_waiting(world)
            assert begun
            assert waiting
            while not second.engine.is_ready:
                await asyncio.sleep(0.01)
            lost_time = loop.time()
            begun += [request for request in waiting if request.has_begun]
            waiting = [request for request in waiting if not request.has_begun]
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
            new = world.make_request(100, n=1, deadline=None)
            world.engines.submit(new)
            assert groups_of([new]) == {0}, "it has least to do"
            requests = [*begun, *waiting, new]
            while any(request.is_live for request in requests):
                await asyncio.sleep(0.1)
            for request in requests:
                [sequence] = request.sequences
                world.check_outcome(sequence, sequence.tokens[len(request.prompt) :].tolist())
                world.engines.listeners.close(request.listener)

        await world.run_clients([client()])
        assert world.failed == []
        assert world.num_right == 51

    virtual_clock.run(main())


def test_what_waits_goes_to_another_group_at_once_and_what_ran_after_a_while() -> None:
    run_failover(first_is_down_s=20.0)


def test_what_ran_stays_with_a_group_that_is_back_soon() -> None:
    run_failover(first_is_down_s=1.0)


def test_after_a_loss_whoever_ran_begins_again_in_parts() -> None:
    shape = GroupShape(
        dp_size=1,
        num_blocks=(300,),
        block_size=4,
        rows_per_rank=16,
        max_num_batched_tokens=1000,
        max_num_logits=100,
        max_model_len=48,
    )

    async def main() -> None:
        world = World(random.Random(1), shape=shape)
        [group] = world.groups

        async def client() -> None:
            requests = []
            for number in range(16):
                stop = StopConditions(max_tokens=30)
                request = world.make_request(
                    number, prompt=world.tokens(8), stop=stop, n=1, deadline=None, priority=0
                )
                world.engines.submit(request)
                requests.append(request)
            await asyncio.sleep(0.1)
            assert group.engine.num_running == 16
            num_plans = len(group.executors.plans)
            group.executors.kill(down_s=0.0)
            while world.engines.num_live:
                await asyncio.sleep(0.1)
            numbers = [len(plan.batches[0].rows) for plan in group.executors.plans[num_plans:]]
            assert numbers[0] == 16 // PARTS
            assert max(numbers) > 16 // PARTS
            for request in requests:
                world.engines.listeners.close(request.listener)

        await world.run_clients([client()])

    virtual_clock.run(main())
