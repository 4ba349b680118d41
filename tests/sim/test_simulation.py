"""If these fail, some client got another's tokens, waits for ever, or a block is lost for good.

Seeds beyond those of an ordinary run: LOCKSTEP_SIM_SEEDS=1000 python -m pytest tests/sim
"""

import asyncio
import os
import random
from typing import Any

import pytest

from router.scheduling.speculation import DraftCounts
from tests.router.support.fake_executors import Poison
from tests.router.support.stepper import make_shape
from tests.sim.world import World, break_at_random, check_blame
from tests.support.virtual_clock import on_virtual_clock

NUM_CHAOS_SEEDS = int(os.environ.get("LOCKSTEP_SIM_SEEDS", "150"))
NUM_WINDOW_SEEDS = int(os.environ.get("LOCKSTEP_SIM_SEEDS", "20"))


@pytest.mark.parametrize("seed", range(60))
def test_every_request_ends_and_every_block_comes_back(seed: int) -> None:
    world = simulate(random.Random(seed))
    assert world.failed == []


@pytest.mark.parametrize("seed", range(20))
def test_slow_ranks_and_lost_executors_change_no_output(seed: int) -> None:
    simulate(random.Random(1000 + seed), loss_rate=0.004, slow_rate=0.02)


def test_about_half_of_the_groups_draft_and_drafts_are_accepted_and_refused() -> None:
    """Or what the others see would say nothing of drafts."""
    worlds = [simulate(random.Random(seed)) for seed in range(12)]
    groups = [group for world in worlds for group in world.groups]
    drafts = sum((group.engine.measures.totals().drafts for group in groups), start=DraftCounts())
    assert 3 <= sum(group.shape.speculation is not None for group in groups) <= 9
    assert drafts.num_steps > 100
    assert 0.2 * drafts.num_drafts < drafts.num_accepted < 0.8 * drafts.num_drafts


@on_virtual_clock
async def simulate(rng: random.Random, **faults: float) -> World:
    world = World(rng, **faults)
    await world.run_clients([world.client(number) for number in range(40)])
    assert world.num_right > 0
    return world


@pytest.mark.parametrize("seed", range(NUM_CHAOS_SEEDS))
@on_virtual_clock
async def test_chaos_loses_and_doubles_nothing(seed: int) -> None:
    """One group or two; kills, hangs, poison, cancels and deadlines at random."""
    rng = random.Random(2000 + seed)
    poison = {
        f"r{number}": Poison(rng.choice([None, 0, rng.randint(0, 20)]))
        for number in rng.sample(range(20), rng.choice([0, 0, 1, 2]))
    }
    world = World(rng, num_groups=rng.choice([1, 2]), poison=poison, slow_rate=0.002)
    clients = [world.client(number) for number in range(20)]
    clients += [world.stream(first, 6) for first in (20, 26)]
    await world.run_clients(clients, break_at_random(world))
    check_blame(world)


@pytest.mark.parametrize("seed", range(NUM_WINDOW_SEEDS))
@on_virtual_clock
async def test_no_block_of_a_window_is_read_after_it_was_given_back(seed: int) -> None:
    """The fake executors look at all that each step reads, when it is sent and when it is answered."""
    rng = random.Random(3000 + seed)
    world = World(rng, windows=(1, 2, 4, 5, 8, 9, 14, 50), slow_rate=0.002)
    clients = [world.client(number) for number in range(16)]
    clients += [world.stream(first, 6) for first in (16, 22)]
    await world.run_clients(clients, break_at_random(world) if seed % 2 else None)
    check_blame(world)


@pytest.mark.parametrize("position", [None, 0, 7])
@pytest.mark.parametrize("num_poisons", [1, 2])
@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("seed", range(4))
@on_virtual_clock
async def test_only_the_requests_that_kill_are_failed(
    seed: int, num_groups: int, num_poisons: int, position: int | None
) -> None:
    rng = random.Random(seed)
    poison = {f"r{number}": Poison(position) for number in rng.sample(range(21), num_poisons)}
    world = World(rng, num_groups=num_groups, poison=poison)
    await world.run_clients([world.patient_client(number) for number in range(21)])
    assert {request.request_id for request in world.failed} == set(poison)
    assert world.num_right == 21 - num_poisons
    assert all(s.error is not None for request in world.failed for s in request.sequences)
    num_losses = sum(group.executors.num_losses for group in world.groups)
    assert num_losses <= 8 * num_poisons


LONG_TOKENS = 400
SIZES = {"rows_per_rank": 16, "max_num_batched_tokens": 500, "max_num_logits": 40}
LONG_SHAPE = make_shape(dp_size=2, num_blocks=1200, max_model_len=LONG_TOKENS + 20, **SIZES)
LONG: dict[str, Any] = {"prompt_lens": (8, 8), "max_tokens": LONG_TOKENS}


@pytest.mark.parametrize("period", [2, 6, 20])
@pytest.mark.parametrize("num_others", [0, 20])
@pytest.mark.parametrize("seed", range(3))
@on_virtual_clock
async def test_a_request_that_kills_every_few_tokens_is_failed_in_the_end(
    seed: int, num_others: int, period: int
) -> None:
    """Each time it gets farther, so that it seems to have proven itself."""
    world = World(random.Random(seed), poison={"r0": Poison(None, period)}, shape=LONG_SHAPE)
    await world.run_clients(
        [world.patient_client(number, **LONG) for number in range(1 + num_others)]
    )
    assert [request.request_id for request in world.failed] == ["r0"]
    assert world.num_right == num_others
    assert world.groups[0].executors.num_losses <= 20


def test_hardly_any_request_is_failed_for_executors_that_die_by_themselves() -> None:
    """Chance alone can look like a cause: of 48 runs, a third fail a request. If losses without a
    request said nothing in its favour, three in each run would be failed."""

    @on_virtual_clock
    async def lose_some(seed: int) -> World:
        world = World(random.Random(seed), shape=LONG_SHAPE, step_s=0.05)
        clients = [world.patient_client(number, **LONG) for number in range(12)]
        await world.run_clients(clients, kill_regularly(world))
        check_blame(world)
        return world

    worlds = [lose_some(seed) for seed in range(8)]
    assert sum(world.groups[0].executors.num_losses for world in worlds) > 80
    assert sum(len(world.failed) for world in worlds) < len(worlds)


async def kill_regularly(world: World) -> None:
    """Kills executors every few seconds, of which a sequence needs 20 without it."""
    [group] = world.groups
    for _ in range(20):
        await asyncio.sleep(world.rng.uniform(1.5, 3.0))
        group.executors.kill(down_s=0.0)
