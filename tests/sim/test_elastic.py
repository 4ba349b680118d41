"""If these fail, a group that shrinks or grows mixes up its ranks, and somebody gets wrong text.

Each forming is of other ranks: some are gone, those that stay have other numbers, and new ones have
nothing. Executors are lost at random, and epochs end between steps, as where a group grows.
"""

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from router.engine.caches import GroupCaches
from router.scheduling.kv.block_pool import BlockPool
from router.scheduling.kv.prefix_cache import PrefixCache
from router.scheduling.step import GroupInfo
from tests.sim.world import World, break_at_random, check_blame, num_caught
from tests.support.virtual_clock import on_virtual_clock

NUM_SEEDS = int(os.environ.get("LOCKSTEP_SIM_SEEDS", "12"))
NUM_MUTATED = max(16, min(NUM_SEEDS, 200))
MIN_SHARE = 0.2  # of them that see a mutation

Mutate = Callable[[pytest.MonkeyPatch], None]


async def reshape_at_random(world: World) -> None:
    """Ends epochs between two steps, again and again."""
    while True:
        await asyncio.sleep(world.rng.uniform(0.0, 1.0))
        world.rng.choice(world.groups).executors.end_at_border()


@on_virtual_clock
async def change_at_random(seed: int) -> World:
    """Runs many clients of few prompts in one group or two whose ranks are others each time."""
    rng = random.Random(9000 + seed)
    world = World(rng, num_groups=rng.choice([1, 1, 2]), is_elastic=True)
    clients = [world.client(number) for number in range(30)]
    clients.append(world.stream(100, 5))
    async with asyncio.TaskGroup() as tasks:
        reshaping = tasks.create_task(reshape_at_random(world))
        await world.run_clients(clients, break_at_random(world))
        reshaping.cancel()
    check_blame(world)
    return world


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_who_runs_in_a_group_whose_ranks_change_gets_the_right_tokens(seed: int) -> None:
    world = change_at_random(seed)
    assert world.num_right > 0


def test_groups_of_many_sizes_form_and_kv_is_kept() -> None:
    worlds = [change_at_random(seed) for seed in range(4)]
    groups = [group for world in worlds for group in world.groups]
    sizes = {len(plan.batches) for group in groups for plan in group.executors.plans}
    assert sizes == {1, 2, 3}
    assert sum(group.engine.measures.kept_kv.num_found for group in groups) > 30


def renumber(
    patch: pytest.MonkeyPatch, kv_ids: Callable[[GroupInfo, GroupCaches], tuple[str, ...]]
) -> None:
    """Has the caches go to other ranks than those whose executors hold what they say."""
    begin = GroupCaches.begin_epoch

    def begin_otherwise(caches: GroupCaches, info: GroupInfo) -> list[PrefixCache]:
        return begin(caches, replace(info, kv_ids=kv_ids(info, caches)))

    patch.setattr(GroupCaches, "begin_epoch", begin_otherwise)


def keep_caches_by_number(patch: pytest.MonkeyPatch) -> None:
    def kv_ids(info: GroupInfo, caches: GroupCaches) -> tuple[str, ...]:
        return (*caches._kv_ids, *info.kv_ids[len(caches._kv_ids) :])[: info.shape.dp_size]

    renumber(patch, kv_ids)


def number_ranks_backwards(patch: pytest.MonkeyPatch) -> None:
    numbers = iter(range(1 << 30))
    renumber(patch, lambda info, _: info.kv_ids[:: 1 if next(numbers) % 2 else -1])


def leave_newcomers_what_their_numbers_had(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "evict_all", lambda pool: 0)


@pytest.mark.parametrize(
    "mutate",
    [keep_caches_by_number, number_ranks_backwards, leave_newcomers_what_their_numbers_had],
)
def test_the_simulation_catches_ranks_that_are_mixed_up(
    mutate: Mutate, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    assert num_caught(change_at_random, NUM_MUTATED) >= MIN_SHARE * NUM_MUTATED
