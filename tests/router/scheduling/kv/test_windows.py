"""If these fail, windowed layers read other sequences' keys, or keep what nobody reads any more."""

from typing import Any

import numpy as np
import pytest

from router.requests.request import Request
from router.scheduling.kv.prefix_cache import NO_PREFIX, WINDOW, PrefixCache
from router.scheduling.step import StepPlan, sequence_capacity, window_reach
from tests.router.support.block_checks import check_cache
from tests.router.support.stepper import (
    Stepper,
    assert_right,
    finish,
    make_shape,
    output_of,
    speculation,
)

BLOCK_SIZE = 4
WINDOWS = (1, 2, 4, 5, 6, 9, 13, 48)  # of which none, one or several blocks lie before a token's


def stepper(kv_window: int, **sizes: Any) -> Stepper:
    return Stepper(make_shape(kv_window=kv_window, **sizes))


def new_window_blocks(plan: StepPlan) -> list[int]:
    ids = plan.batches[0].new_window_block_ids
    assert ids is not None
    return ids.tolist()


def held_for_windows(world: Stepper, request: Request) -> int:
    return len(world.table.window_blocks_of(request.sequences[0].row))


@pytest.mark.parametrize("kv_window", WINDOWS)
@pytest.mark.parametrize("depth", [1, 2])
def test_at_any_length_a_row_holds_the_blocks_of_its_window_and_those_in_flight(
    depth: int, kv_window: int
) -> None:
    world = stepper(kv_window, num_blocks=400, max_model_len=400, max_num_batched_tokens=500)
    request = world.submit([1, 2, 3], 300)
    most = window_reach(kv_window, BLOCK_SIZE) + depth
    while request.is_live:
        while len(world.in_flight) < depth and world.plan() is not None:
            pass
        if world.in_flight:
            world.commit()
        world.check()
        if request.is_live:
            num_full = int(world.table.num_blocks[0])
            assert held_for_windows(world, request) <= min(most, num_full)
            assert world.scheduler.caches[0].pool.num_used <= num_full + most
    finish(world, request)


@pytest.mark.parametrize("kv_window", WINDOWS)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_prompt", [1, 30, 47])
def test_a_sequence_as_long_as_the_pool_allows_runs_to_its_end(
    num_prompt: int, depth: int, kv_window: int
) -> None:
    """Chunks are as long as there is room, and where a step in flight gives blocks back, it waits."""
    num_blocks = next(n for n in range(100) if sequence_capacity(n, BLOCK_SIZE, kv_window) == 48)
    world = stepper(kv_window, num_blocks=num_blocks)
    request = world.submit([1] * num_prompt, 48 - num_prompt)
    finish(world, request, depth=depth)
    assert request.sequences[0].progress.num_preemptions == 0


@pytest.mark.parametrize("kv_window", WINDOWS)
def test_a_sequence_alone_waits_for_its_drafts_and_is_not_preempted(kv_window: int) -> None:
    """Before they are answered, its length and what it gives back are known by their bounds only."""
    num_blocks = next(n for n in range(100) if sequence_capacity(n, BLOCK_SIZE, kv_window) == 48)
    shape = make_shape(kv_window=kv_window, num_blocks=num_blocks, speculation=speculation())
    world = Stepper(shape)
    request = world.submit([1] * 4, 44)
    finish(world, request, depth=3)
    assert request.sequences[0].progress.num_preemptions == 0


@pytest.mark.parametrize("kv_window", [0, *WINDOWS])
def test_a_pool_below_a_sequences_capacity_is_refused(kv_window: int) -> None:
    with pytest.raises(ValueError, match=r"max_model_len=48: the smallest KV pool holds 44 tokens"):
        make_shape(
            kv_window=kv_window,
            num_blocks=next(
                n for n in range(100) if sequence_capacity(n, BLOCK_SIZE, kv_window) == 44
            ),
        )


@pytest.mark.parametrize("num_spare", [19, 20])
def test_a_sequence_is_bound_where_both_of_its_lists_fit(num_spare: int) -> None:
    world = stepper(5, num_blocks=1 + 2 + num_spare)
    world.submit([1] * 4, 40)
    world.step()
    assert world.scheduler.caches[0].pool.num_available == num_spare
    world.submit([2] * 30)
    world.step()
    # 8 columns of its own, and two of the sequence before it: this step's and, later, another
    assert world.table.num_bound(0) == (2 if num_spare == 2 * (8 + 2) else 1)


def test_all_of_a_chunk_has_blocks_and_comes_back_when_it_is_answered() -> None:
    world = stepper(5)
    request = world.submit([1] * 30, 4)
    plan = world.plan()
    assert plan is not None
    assert 0 not in new_window_blocks(plan)
    assert held_for_windows(world, request) == 8
    world.commit()
    assert held_for_windows(world, request) == 2  # the block that is written, and one before it
    finish(world, request)


def test_of_a_cached_prefix_a_row_gets_the_blocks_of_its_window_only() -> None:
    world = stepper(6)
    world.submit([1] * 30, 1)
    world.run()
    again = world.submit([1] * 30, 4)
    plan = world.plan()
    assert plan is not None
    assert plan.batches[0].num_computed_tokens.tolist() == [28]
    ids = new_window_blocks(plan)
    assert len(ids) == 8
    assert [column for column, block in enumerate(ids) if block == 0] == [0, 1, 2, 3, 4]
    assert world.scheduler.caches[0].pool.num_used == 8 + 3
    world.commit()
    finish(world, again)


@pytest.mark.parametrize("kv_window", WINDOWS)
@pytest.mark.parametrize("num_output", [9, 10, 11, 12])
def test_the_next_turn_of_a_chat_finds_the_answer_of_the_one_before(
    num_output: int, kv_window: int
) -> None:
    world = stepper(kv_window)
    first = world.submit([1, 2, 3, 4, 5], num_output)
    world.run(depth=2)
    second = world.submit([1, 2, 3, 4, 5, *output_of(first)[0], 7, 8])
    [num_computed] = world.step().batches[0].num_computed_tokens.tolist()
    assert num_computed == (5 + num_output - 1) // BLOCK_SIZE * BLOCK_SIZE  # the last has no KV
    finish(world, second)


@pytest.mark.parametrize("kv_window", WINDOWS)
def test_rows_that_share_blocks_give_each_back_once_for_all(kv_window: int) -> None:
    """Continuations run in step with each other, so that several leave a block in one step."""
    world = stepper(kv_window)
    request = world.submit(list(range(1, 18)), 20, n=3)
    other = world.submit(list(range(1, 14)), 28)
    for _ in range(60):
        if world.plan() is not None:
            world.commit()
        world.check()
    assert_right(request, other)
    world.check_idle()


# ---- the prefix cache


def named(cache: PrefixCache, names: list[bytes]) -> list[int]:
    blocks = cache.pool.acquire(len(names))
    cache.insert(names, blocks)
    return blocks.tolist()


@pytest.mark.parametrize(
    ("reach", "has_window", "num_found"),
    [
        (0, "------", 6),
        (2, "++++++", 6),
        (2, "----++", 6),
        (2, "---+-+", 0),
        (2, "-++++-", 5),
        (2, "+-----", 1),
        (2, "++-+-+", 2),
        (3, "+++-++", 3),
        (9, "++++-+", 4),
        (9, "++++++", 6),
        (9, "-+++++", 0),
    ],
)
def test_a_prefix_counts_as_far_as_the_window_at_its_end_is_there(
    reach: int, has_window: str, num_found: int
) -> None:
    cache = PrefixCache(20, window_reach=reach)
    names = [bytes([number]) * 16 for number in range(6)]
    blocks = named(cache, names)
    columns = [column for column, mark in enumerate(has_window) if mark == "+"]
    ids = dict(zip(columns, named(cache, [names[c] + WINDOW for c in columns]), strict=True))
    found = cache.match(names)
    assert found.blocks.tolist() == blocks[:num_found]
    needed = range(max(0, num_found - reach), num_found)
    assert found.window_blocks.tolist() == [ids[column] for column in needed]
    assert cache.match([b"x" * 16]) is NO_PREFIX
    check_cache(cache)


def test_a_block_that_several_rows_leave_at_once_is_free_when_the_last_has_left() -> None:
    pool = PrefixCache(10).pool
    shared, other, kept = (pool.acquire(1) for _ in range(3))
    pool.share(shared)
    pool.share(shared)
    pool.keep(kept)
    pool.release_each(np.concatenate((shared, other, shared, kept)))
    assert (pool.num_used, pool.num_cached) == (1, 1)
    pool.release_each(shared)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 1, 8)
