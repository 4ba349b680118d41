"""If these fail, some client got another's tokens, waits for ever, or a block is lost for good.

Seeds beyond those of an ordinary run: LOCKSTEP_SIM_SEEDS=1000 python -m pytest tests/sim
"""

import asyncio
import os
import random

import pytest

from tests.sim import virtual_clock
from tests.sim.fake_executors import Poison
from tests.sim.world import World

NUM_CHAOS_SEEDS = int(os.environ.get("LOCKSTEP_SIM_SEEDS", "150"))


@pytest.mark.parametrize("seed", range(60))
def test_every_request_ends_and_every_block_comes_back(seed: int) -> None:
    world = simulate(random.Random(seed))
    assert world.failed == []


@pytest.mark.parametrize("seed", range(20))
def test_slow_ranks_and_lost_executors_change_no_output(seed: int) -> None:
    simulate(random.Random(1000 + seed), loss_rate=0.004, slow_rate=0.02)


def simulate(rng: random.Random, **faults: float) -> World:
    async def main() -> World:
        world = World(rng, **faults)
        await world.run(num_clients=40)
        assert world.num_right > 0
        return world

    return virtual_clock.run(main())


@pytest.mark.parametrize("seed", range(NUM_CHAOS_SEEDS))
def test_chaos_loses_and_doubles_nothing(seed: int) -> None:
    """One group or two; kills, hangs, poison, cancels and deadlines at random."""
    virtual_clock.run(chaos(random.Random(2000 + seed)))


async def chaos(rng: random.Random) -> None:
    poison = {
        f"r{number}": Poison(rng.choice([None, 0, rng.randint(0, 20)]))
        for number in rng.sample(range(20), rng.choice([0, 0, 1, 2]))
    }
    world = World(rng, num_groups=rng.choice([1, 2]), poison=poison, slow_rate=0.002)
    clients = [world.client(number) for number in range(20)]
    clients += [world.stream(first, 6) for first in (20, 26)]
    await world.run_clients(clients, break_at_random(world))
    check_blame(world)


async def break_at_random(world: World) -> None:
    """Ten times, an executor of some group dies or stands still."""
    rng = world.rng
    for _ in range(10):
        await asyncio.sleep(rng.expovariate(2.0))
        executors = rng.choice(world.groups).executors
        down_s = rng.choice([0.0, rng.uniform(0, 5)])
        if rng.random() < 0.6:
            executors.kill(down_s)
        else:
            executors.hang(1.0, down_s)


def check_blame(world: World) -> None:
    """Who was failed kills, or was alone by accident each time that somebody else's fault struck."""
    for request in world.failed:
        num_alone = max(
            group.executors.num_lost_alone[sequence] + other.executors.num_lost_alone[sequence]
            for group in world.groups[:1]
            for other in world.groups[-1:]
            for sequence in request.sequences
        )
        assert request.request_id in world.poison or num_alone >= 2


@pytest.mark.parametrize("position", [None, 0, 7])
@pytest.mark.parametrize("num_poisons", [1, 2])
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_only_the_requests_that_kill_are_failed(
    seed: int, num_groups: int, num_poisons: int, position: int | None
) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        poison = {f"r{number}": Poison(position) for number in rng.sample(range(21), num_poisons)}
        world = World(rng, num_groups=num_groups, poison=poison)
        await world.run_clients([world.patient_client(number) for number in range(21)])
        assert {request.request_id for request in world.failed} == set(poison)
        assert world.num_right == 21 - num_poisons
        assert all(s.error is not None for request in world.failed for s in request.sequences)
        num_losses = sum(group.executors.num_losses for group in world.groups)
        assert num_losses <= 8 * num_poisons

    virtual_clock.run(main())
