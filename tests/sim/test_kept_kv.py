"""If these fail, somebody may read KV that was never computed, and get wrong text without a word.

Executors are lost at random. In the fakes, what lost steps wrote is rubbish, and the rank whose executor
died has nothing; each position depends on all before it, so one stale block changes the output.
"""

import dataclasses
import os
import random
from collections import Counter
from collections.abc import Callable

import pytest

from router.engine.caches import GroupCaches
from router.scheduling.kv import salvage
from router.scheduling.kv.prefix_cache import PrefixCache
from router.scheduling.step import GroupInfo
from tests.sim.world import World, break_at_random, check_blame, num_caught
from tests.support.virtual_clock import on_virtual_clock

NUM_SEEDS = int(os.environ.get("LOCKSTEP_SIM_SEEDS", "8"))
AT_ONCE = 40  # of these in a test
NUM_MUTATED = max(24, min(NUM_SEEDS, 200))
MIN_SHARE = 0.15 if NUM_MUTATED > 100 else 0.06  # that see it: few may be unlucky ones

Mutate = Callable[[pytest.MonkeyPatch], None]


@on_virtual_clock
async def lose_at_random(seed: int, **settings: float) -> World:
    """Runs many clients of few prompts in one group whose executors are lost now and then."""
    rng = random.Random(7000 + seed)
    world = World(rng, **settings)
    clients = [world.client(number) for number in range(30)]
    await world.run_clients(clients, break_at_random(world))
    check_blame(world)
    return world


def keep_what_lost_steps_named(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "unname", lambda cache, is_void: None)


def keep_a_dead_ranks_cache(patch: pytest.MonkeyPatch) -> None:
    begin = GroupCaches.begin_epoch

    def begin_as_before(caches: GroupCaches, info: GroupInfo) -> list[PrefixCache]:
        return begin(caches, dataclasses.replace(info, kv_ids=tuple("abc"[: info.shape.dp_size])))

    patch.setattr(GroupCaches, "begin_epoch", begin_as_before)


def count_a_lost_step_as_committed(patch: pytest.MonkeyPatch) -> None:
    count = salvage.num_committed
    patch.setattr(salvage, "num_committed", lambda table, lost: count(table, lost[1:]))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, AT_ONCE))
def test_losses_change_no_token_and_hardly_any_that_is_kept_is_computed_again(first: int) -> None:
    """Nor would the mutations below be seen if nothing were kept."""
    worlds = [lose_at_random(seed) for seed in range(first, min(first + AT_ONCE, NUM_SEEDS))]
    counts = [group.engine.measures.kept_kv for world in worlds for group in world.groups]
    num_found = sum(kept.num_found for kept in counts)
    num_again = sum((Counter(kept.num_again) for kept in counts), Counter[str]())
    assert num_again["lost"] > 0
    assert num_found > 3 * num_again["kept"]  # small pools, and windows: others take some


@pytest.mark.parametrize(
    "mutate",
    [keep_what_lost_steps_named, keep_a_dead_ranks_cache, count_a_lost_step_as_committed],
)
def test_the_simulation_catches_a_rule_that_is_broken(
    mutate: Mutate, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    assert num_caught(lose_at_random, NUM_MUTATED) >= MIN_SHARE * NUM_MUTATED


def test_a_check_of_what_was_kept_finds_nothing_where_it_is_right() -> None:
    worlds = [lose_at_random(seed, verify_kept_kv=1.0) for seed in range(6)]
    checks = [group.engine.measures.kept_kv.checks for world in worlds for group in world.groups]
    assert sum(each["equal"] for each in checks) > 0
    assert sum(each["differs"] for each in checks) == 0
