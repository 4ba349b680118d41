"""If these fail, a block outlives an epoch whose positions were not all computed, or one that was is lost."""

import math
import random
from typing import Any

import numpy as np
import pytest

from router.requests.request import Request, Suspicion
from router.scheduling.kv.prefix_cache import NO_PREFIX, WINDOW, PrefixCache, part_name
from router.scheduling.prompts import binding, planner
from router.scheduling.prompts.common_parts import SHARED_TOKENS
from router.scheduling.prompts.lookup import PrefixLookup
from router.scheduling.sequence_table import RowStatus
from router.scheduling.step import BatchMode, CapturedSizes
from router.scheduling.step_budget import Budget, open_budget
from tests.router.support.running_engines import KnownCosts
from tests.router.support.stepper import (
    CHAIN,
    Stepper,
    assert_right,
    draft_stepper,
    finish,
    make_shape,
    token_counts,
)

PROMPT = list(range(1, 18))  # four blocks of four tokens, and one token more


def named(world: Stepper) -> int:
    """Blocks that a sequence could find, but for those of running prompts that nobody asked for."""
    return sum(cache.num_named for cache in world.scheduler.caches)


def name_prompts(world: Stepper) -> None:
    """Names the blocks of all that runs, as others that begin alike would."""
    for row in world.scheduler.table.live_rows().tolist():
        world.scheduler._blocks.name(row)


def test_what_committed_steps_computed_is_found_and_the_rest_runs_again() -> None:
    world = Stepper(make_shape())
    request = world.submit(PROMPT, max_tokens=20)
    for _ in range(8):
        world.step()
    world.plan()
    world.lose()
    [sequence] = request.sequences
    assert (sequence.num_output_tokens, sequence.progress.num_computed_tokens) == (8, 24)
    assert named(world) == 6
    assert [b.tolist() for b in [world.step().batches[0].token_ids]] == [
        sequence.tokens[24:25].tolist()
    ]
    finish(world, request)
    assert world.measures.kept_kv.num_found == 24
    assert world.measures.kept_kv.num_again == {"kept": 0, "lost": 0}


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize(("num_committed", "num_named"), [(0, 0), (1, 2), (2, 4)])
def test_of_a_prompt_in_chunks_those_that_were_answered_are_found(
    num_committed: int, num_named: int, *, is_named: bool
) -> None:
    world = Stepper(make_shape(max_num_batched_tokens=8))
    request = world.submit(PROMPT)
    for number in range(2):
        world.plan()
        if number < num_committed:
            world.commit()
    assert named(world) == 0
    if is_named:
        name_prompts(world)
        assert named(world) == 4
    world.lose()
    assert named(world) == num_named
    assert request.sequences[0].progress.num_computed_tokens == 4 * num_named
    finish(world, request)


def test_what_was_built_on_a_lost_step_is_lost_with_it() -> None:
    """One finds blocks of another while the step that computes them is in flight."""
    world = Stepper(make_shape(max_num_batched_tokens=8))
    first = world.submit(PROMPT)
    world.step()
    world.plan()
    other = world.submit([*PROMPT, 1, 2, 3])
    world.plan()
    assert other.sequences[0].table is not None
    assert named(world) == 5
    world.lose()
    assert named(world) == 2
    assert [s.progress.num_computed_tokens for r in (first, other) for s in r.sequences] == [8, 8]
    finish(world, first, other)


def test_what_a_lost_step_wrote_for_windowed_layers_is_lost_though_the_rest_was_there_before() -> (
    None
):
    """One finds blocks of an ended sequence, and of a step in flight those for windowed layers."""
    world = Stepper(make_shape(kv_window=5))
    prompt, [cache] = PROMPT[:6], world.scheduler.caches
    finish(world, world.submit(prompt))
    [window_block] = [cache._block_of[name] for name in cache._block_of if name.endswith(WINDOW)][
        :1
    ]
    evicted = np.array([window_block], dtype=np.int32)
    cache.pool.discard(evicted)
    cache._forget(evicted)
    first = world.submit(prompt, max_tokens=20)
    world.plan()
    other = world.submit(prompt, max_tokens=20)
    world.plan()
    rows = [request.sequences[0].row for request in (first, other)]
    full, windows = world.table.block_table[rows, 0], world.table.window_block_table[rows, 0]
    assert (full[0] == full[1], windows[0] == windows[1]) == (False, True)
    world.lose()
    assert [s.progress.num_computed_tokens for r in (first, other) for s in r.sequences] == [0, 0]
    finish(world, first, other)
    assert_right(first, other)


def test_a_block_that_was_computed_gets_the_name_that_a_lost_one_had() -> None:
    """A prompt is named as another asks for it, an output behind that only as it ends."""
    world = Stepper(make_shape())
    first = world.submit(PROMPT, max_tokens=20)
    world.step()
    name_prompts(world)
    for _ in range(8):
        world.step()
    assert named(world) == 4
    other = world.submit(first.sequences[0].tokens[: first.sequences[0].num_tokens].tolist())
    world.plan()
    assert named(world) == 6
    assert other.sequences[0].table is not None
    world.lose()
    assert [s.progress.num_computed_tokens for r in (first, other) for s in r.sequences] == [25, 16]
    assert named(world) == 6 + 1  # and the block that holds one token
    finish(world, first, other)


def test_a_sequence_that_has_ended_keeps_what_was_committed_of_it() -> None:
    world = Stepper(make_shape())
    request = world.submit(PROMPT, max_tokens=8)
    for _ in range(4):
        world.plan()
        if len(world.in_flight) == 2:
            world.commit()
    world.scheduler.fail(request.sequences[0], ValueError())  # type: ignore[arg-type]
    assert world.in_flight
    world.lose()
    assert named(world) == (17 + 3 - 1) // 4
    world.check_idle()


def test_drafts_that_are_not_answered_name_nothing() -> None:
    world = draft_stepper()
    request = world.submit(PROMPT, max_tokens=20)
    for _ in range(3):
        world.step()
    num_tokens = request.sequences[0].num_tokens
    assert num_tokens > 20
    for _ in range(2):
        world.plan()
    world.lose()
    assert request.sequences[0].progress.num_computed_tokens == num_tokens - 1
    assert (num_tokens - 1) % 4
    assert named(world) == (num_tokens - 1) // 4 + 1
    finish(world, request)


@pytest.mark.parametrize(
    ("num_steps", "is_drafting"), [(5, False), (6, False), (7, False), (1, True), (2, True)]
)
def test_a_sequence_goes_on_in_the_middle_of_a_block(num_steps: int, is_drafting: bool) -> None:
    world = draft_stepper() if is_drafting else Stepper(make_shape())
    request = world.submit(PROMPT, max_tokens=25)
    for _ in range(2):  # twice: what was written behind a block's computed part is kept as well
        for _ in range(num_steps):
            world.step()
        world.plan()
        world.lose()
        num_computed = request.sequences[0].progress.num_computed_tokens
        assert num_computed == request.sequences[0].num_tokens - 1
        assert world.step().batches[0].num_computed_tokens.tolist() == [num_computed]
        assert world.measures.kept_kv.num_again == {"kept": 0, "lost": 0}
        world.check()
    finish(world, request)


@pytest.mark.parametrize("others", [[], [[1]], [[1, 2]]])
def test_a_sequence_that_has_kept_all_but_its_last_token_goes_on_as_a_decode(
    others: list[list[int]],
) -> None:
    """It replays a graph, unless others run more of a prompt in the same step."""
    world = Stepper(make_shape(graph_sizes=CapturedSizes(decode=(1, 2, 4))))
    request = world.submit(PROMPT, max_tokens=20)
    for _ in range(4):
        world.step()
    world.lose()
    requests = [request, *(world.submit(prompt, max_tokens=20) for prompt in others)]
    plan = world.step()
    [batch] = plan.batches
    has_prompt = any(len(prompt) > 1 for prompt in others)
    assert batch.mode is (BatchMode.EXTEND if has_prompt else BatchMode.DECODE)
    assert plan.agreement.has_extend == has_prompt
    assert plan.agreement.graph_size == (None if has_prompt else len(batch.rows))
    assert [start.row for start in batch.starts] == batch.rows.tolist()
    assert request.sequences[0].num_output_tokens == 5
    finish(world, *requests)


def test_a_block_that_is_not_full_is_one_users_alone() -> None:
    cache = PrefixCache(num_blocks=8)
    tokens = np.arange(2, dtype=np.int32)
    name = part_name(b"salt", tokens, (1.5, 7, 0))
    for number in range(2):
        part = cache.pool.acquire(1)
        cache.insert([name], part)
        cache.pool.release(part)
        assert (cache.pool.num_cached, cache.pool.num_free) == (1, 6), number
    prefix = cache.add_part(NO_PREFIX, name, 2)
    assert prefix.num_tokens(block_size=4) == 2
    cache.use(prefix)
    assert (cache.pool.num_used, cache.pool.num_cached, cache.num_named) == (1, 0, 0)
    assert cache.add_part(NO_PREFIX, name, 2) is NO_PREFIX
    cache.pool.release(prefix.blocks)  # with what its user has written behind
    assert cache.pool.num_free == 7
    others = [
        part_name(b"salt", tokens[:1], (1.5, 7, 0)),
        part_name(b"sal", tokens, (1.5, 7, 0)),
        part_name(b"salt", tokens, (1.5, 7, 1)),
    ]
    assert len({name, *others}) == 4


def test_sequences_that_have_the_same_tokens_go_on_in_the_middle_of_blocks_of_their_own() -> None:
    world = Stepper(make_shape())
    requests = [world.submit(PROMPT, max_tokens=25) for _ in range(3)]
    for _ in range(6):
        world.step()
    world.lose()
    world.step()
    assert world.measures.kept_kv.num_again == {"kept": 0, "lost": 0}
    finish(world, *requests)
    assert_right(*requests)


def test_a_block_that_is_not_full_is_gone_on_with_only_where_the_blocks_found_before_it_end() -> (
    None
):
    world = Stepper(make_shape(max_num_batched_tokens=20))
    requests = [world.submit(PROMPT, max_tokens=25) for _ in range(2)]
    world.step()
    world.lose()
    progress = [request.sequences[0].progress.num_computed_tokens for request in requests]
    assert progress == [17, 3], "the second finds more of the first than it has computed itself"
    finish(world, *requests)


def test_a_block_that_is_not_full_may_be_given_to_others_before_its_sequence_is_back() -> None:
    world = Stepper(make_shape())
    request = world.submit(PROMPT, max_tokens=20)
    for _ in range(6):
        world.step()
    world.lose()
    assert world.scheduler.caches[0].pool.evict_all() == 6
    assert world.step().batches[0].num_computed_tokens.tolist() == [0]
    finish(world, request)


@pytest.mark.parametrize(
    ("block_size", "max_num_batched_tokens"), [(4, 32), (4, 512), (SHARED_TOKENS + 8, 512)]
)
def test_what_interrupted_sequences_begin_with_alike_is_computed_once(
    block_size: int, max_num_batched_tokens: int
) -> None:
    sizes = {"max_num_batched_tokens": max_num_batched_tokens, "max_model_len": 256}
    world = Stepper(make_shape(num_blocks=240, block_size=block_size, **sizes))
    alike = [world.submit([*range(1, 161)], max_tokens=30) for _ in range(3)]
    while not all(request.sequences[0].num_output_tokens for request in alike):
        world.step()
    world.lose()
    world.scheduler.caches[0].pool.evict_all()
    num_extend = 0
    while len(world.admission) or any(world.table.status == RowStatus.EXTEND):
        [num_tokens] = token_counts(world.step())
        num_extend += num_tokens
        world.check()
    # What little is left of it need not be waited for.
    assert 160 < num_extend < 160 + 2 * max(SHARED_TOKENS, block_size) + 3 * 12
    finish(world, *alike)


def test_what_interrupted_sequences_begin_with_alike_is_computed_once_on_each_rank_that_takes_some() -> (
    None
):
    sizes = {"max_num_batched_tokens": 1000, "max_model_len": 256}
    shape = make_shape(dp_size=2, rows_per_rank=4, num_blocks=300, **sizes)
    world = Stepper(shape, target_token_gap_ms=0.0)
    alike = [world.submit([*range(1, 161)], max_tokens=60) for _ in range(8)]
    while not all(request.sequences[0].num_output_tokens for request in alike):
        world.step()
    world.lose()
    for cache in world.scheduler.caches:
        cache.pool.evict_all()
    num_extend = [0, 0]
    while len(world.admission) or any(world.table.status == RowStatus.EXTEND):
        plan = world.step()
        for rank, batch in plan.chunks.items():
            num_extend[rank] += len(batch.token_ids)
        world.check()
    assert sorted(world.table.num_bound_rows.tolist()) == [4, 4]
    assert max(num_extend) < 160 + 4 * (SHARED_TOKENS + 30)
    finish(world, *alike)


@pytest.mark.parametrize("max_lookups", [3, 512])
def test_of_many_interrupted_sequences_that_begin_alike_few_are_looked_up(
    max_lookups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "MAX_LOOKUPS", max_lookups)
    sizes = {"rows_per_rank": 20, "max_num_logits": 40, "max_model_len": 256}
    world = Stepper(make_shape(num_blocks=900, **sizes))
    alike = [world.submit([*range(1, 161)], max_tokens=30) for _ in range(20)]
    while not all(request.sequences[0].num_output_tokens for request in alike):
        world.step()
    world.lose()
    world.scheduler.caches[0].pool.evict_all()
    world.step()  # the first of an epoch looks for what ranks have of each
    looked_up: list[object] = []
    find = PrefixLookup.find
    monkeypatch.setattr(
        PrefixLookup, "find", lambda self, each: looked_up.append(each) or find(self, each)
    )
    world.step()
    assert len(looked_up) <= 2
    finish(world, *alike)
    assert_right(*alike)


def test_who_begins_otherwise_does_not_wait_behind_many_interrupted_sequences_that_begin_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(binding, "MAX_LOOKUPS", 3)
    sizes = {"max_num_batched_tokens": 100, "max_num_logits": 40, "max_model_len": 256}
    shape = make_shape(dp_size=2, rows_per_rank=20, num_blocks=900, **sizes)
    world = Stepper(shape, target_token_gap_ms=0.0)
    alike = [world.submit([*range(1, 161)], max_tokens=30) for _ in range(12)]
    other = world.submit([*range(200, 360)], max_tokens=30)
    while not all(request.sequences[0].num_output_tokens for request in (*alike, other)):
        world.step()
    world.lose()
    for cache in world.scheduler.caches:
        cache.pool.evict_all()
    world.step()
    assert len(world.admission) > 3
    assert other.sequences[0].table is not None
    finish(world, *alike, other)


def test_new_prompts_that_begin_alike_run_at_once() -> None:
    world = Stepper(make_shape(num_blocks=240, max_num_batched_tokens=512, max_model_len=128))
    alike = [world.submit([*range(1, 81)]) for _ in range(3)]
    assert token_counts(world.step()) == (3 * 80,)
    finish(world, *alike)


def test_who_gave_way_does_not_hurry_and_who_was_interrupted_does() -> None:
    world = Stepper(make_shape())
    [sequence] = world.submit(PROMPT).sequences
    assert not sequence.is_interrupted
    world.step()
    assert sequence.is_interrupted
    world.scheduler.preempt(sequence.row)
    assert not sequence.is_interrupted
    world.step()
    world.step()
    world.lose()  # in the middle of an answer that had gone on
    assert sequence.is_interrupted


@pytest.mark.parametrize("is_bound", [False, True])
@pytest.mark.parametrize(("priority", "hurries"), [(1, True), (0, True), (-1, False)])
def test_steps_may_be_long_until_interrupted_answers_go_on_but_not_for_batch_work(
    monkeypatch: pytest.MonkeyPatch, priority: int, hurries: bool, is_bound: bool
) -> None:
    backlogs: list[float] = []

    def note(*args: Any) -> Budget:
        backlogs.append(args[4])
        return open_budget(*args)

    monkeypatch.setattr(planner, "open_budget", note)
    world = Stepper(make_shape(num_blocks=80, max_model_len=128, max_num_batched_tokens=16))
    world.measures.costs = KnownCosts()
    world.measures.costs.begin_epoch("any")
    world.begin_epoch(world.scheduler.caches)
    request = world.submit([*range(1, 61)], max_tokens=20, priority=priority)
    while not request.sequences[0].num_output_tokens:
        world.step()
    assert backlogs
    assert math.inf not in backlogs, "its first token came as any other's"
    world.scheduler.abandon()
    for rank in world.ranks:
        rank.begin_epoch()
    world.begin_epoch(PrefixCache.of_group(world.shape))  # nothing is kept
    for _ in range(1 + is_bound):  # in the first step it waits, later it has a row
        backlogs.clear()
        world.step()
    assert (math.inf in backlogs) == hurries
    finish(world, request)


def test_who_has_kv_on_a_rank_goes_on_there_before_others_take_its_place() -> None:
    world = Stepper(make_shape(dp_size=2, rows_per_rank=2, max_num_batched_tokens=8))
    requests = [world.submit([number, *PROMPT], max_tokens=20) for number in range(1, 5)]
    while any(request.sequences[0].num_output_tokens < 2 for request in requests):
        world.step()
    sequences = [request.sequences[0] for request in requests]
    ranks = [sequence.dp_rank for sequence in sequences]
    assert sorted(ranks) == [0, 0, 1, 1]
    gone = ranks[0]  # whose sequences are first in the line
    world.lose()
    world.scheduler.caches[gone].pool.evict_all()
    world.step()
    for sequence, rank in zip(sequences, ranks, strict=True):
        assert rank == gone or (sequence.table is not None and sequence.dp_rank == rank)
    finish(world, *requests)
    assert_right(*requests)


def test_who_is_about_to_be_taken_for_the_cause_of_losses_is_computed_anew() -> None:
    world = Stepper(make_shape())
    request = world.submit(PROMPT, max_tokens=8)
    world.step()
    world.lose()
    request.sequences[0].suspicion = Suspicion(num_losses=1, num_losses_alone=1)
    assert world.step().batches[0].num_computed_tokens.tolist() == [0]
    finish(world, request)
    assert world.measures.kept_kv.num_again == {"kept": 17, "lost": 0}


@pytest.mark.parametrize("kv_window", [0, 5, 9])
@pytest.mark.parametrize("is_drafting", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_losses_at_any_moment_change_no_token(seed: int, is_drafting: bool, kv_window: int) -> None:
    rng = random.Random(seed)
    speculation = CHAIN if is_drafting else None
    shape = make_shape(dp_size=2, num_blocks=45, kv_window=kv_window, speculation=speculation)
    world = Stepper(shape, acceptance=0.6, min_tokens_per_draft_step=1)
    shared = [rng.randint(1, 49) for _ in range(12)]
    requests: list[Request] = []
    for _ in range(150):
        match rng.choice(["submit", "plan", "plan", "plan", "commit", "commit", "lose"]):
            case "submit" if len(requests) < 24:
                prompt = [*shared[: rng.randint(1, 12)], rng.randint(1, 49)]
                requests.append(world.submit(prompt, max_tokens=rng.randint(1, 24)))
            case "plan" if len(world.in_flight) < 3:
                world.plan()
            case "commit" if world.in_flight:
                world.commit()
            case "lose" if rng.random() < 0.3:
                world.lose()
        world.check()
    finish(world, *requests)
    assert_right(*requests)
    assert world.measures.kept_kv.num_found > 0
