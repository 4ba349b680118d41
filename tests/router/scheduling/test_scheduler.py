"""If these fail, a client waits too long, gets a wrong token, or blocks of the KV cache leak."""

import random
from dataclasses import replace

import numpy as np
import pytest

from protos.transport.errors import RpcError
from router.errors import Cancelled, ConstraintFailed
from router.requests.request import FinishReason, OutputOptions, Request
from router.scheduling.kv.block_pool import NO_BLOCKS, BlockPools
from router.scheduling.kv.prefix_cache import CachedPrefix
from router.scheduling.prompts.planner import PromptPlanner
from router.scheduling.prompts.rank_choice import RankLoads, fill_level
from router.scheduling.sequence_table import RowStatus
from router.scheduling.step import PaddingMode, RowFailure, sequence_capacity
from router.scheduling.step_budget import Prices, Prompt, Why
from tests.router.support.block_checks import kept_blocks
from tests.router.support.fake_rank import EOS, expected_output
from tests.router.support.requests import make_request
from tests.router.support.stepper import (
    Stepper,
    assert_right,
    finish,
    make_shape,
    output_of,
    token_counts,
)

# ---- prompts


def test_a_long_prompt_runs_in_chunks_of_the_token_budget() -> None:
    world = Stepper(make_shape(max_num_batched_tokens=10))
    request = world.submit(list(range(1, 28)), max_tokens=2)
    plans = world.run()
    assert [token_counts(plan) for plan in plans] == [(10,), (10,), (7,), (1,)]
    assert [sum(plan.num_sampled) for plan in plans] == [0, 0, 1, 1]
    assert_right(request)


def test_no_step_over_the_budget_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executors would refuse it, and their epoch would end for all requests."""
    world = Stepper(make_shape(max_num_batched_tokens=10))
    world.submit(list(range(1, 28)))
    monkeypatch.setattr(
        "router.scheduling.prompts.planner.fill_level", lambda *counts, **limits: 11
    )
    with pytest.raises(AssertionError, match="planned 11 tokens on a rank; the budget is 10"):
        world.plan()

    other = Stepper(make_shape())
    other.submit([1, 2, 3])
    agreement = replace(other.step().agreement, global_num_tokens_for_logprob=(17,))
    with pytest.raises(AssertionError, match=r"planned 17 rows of logits on a rank; .* is 16"):
        make_shape().check(agreement)


def test_padding_is_planned_for_the_shards_of_the_groups_attention_tp() -> None:
    modes = []
    for attn_tp_size in (1, 2):
        world = Stepper(make_shape(dp_size=3, attn_tp_size=attn_tp_size))
        # Sequences go to the ranks in turn: of three on each, 3, 1 and 0 have a second token.
        for max_tokens in (2, 2, 1, 2, 1, 1, 2, 1, 1):
            world.submit([1, 2, 3], max_tokens, min_tokens=max_tokens)
        world.step()
        plan = world.step()
        assert token_counts(plan) == (3, 1, 0)
        modes.append(plan.agreement.padding_mode)
    # Half of 3 x 3 rows is more than 4; of 3 x 4 rows, 6 are held.
    assert modes == [PaddingMode.SUM_LEN, PaddingMode.MAX_LEN]


def test_prompts_that_fit_one_step_start_together() -> None:
    world = Stepper(make_shape())
    for n in (1, 2, 3):
        world.submit([n] * 6)
    assert token_counts(world.step()) == (18,)


def test_a_decode_never_waits_for_a_prompt() -> None:
    world = Stepper(make_shape(max_num_batched_tokens=8))
    world.submit([1, 2], max_tokens=10)
    world.step()
    world.submit(list(range(1, 31)), max_tokens=1)
    for _ in range(4):
        plan = world.step()
        assert plan.batches[0].num_tokens is not None
        assert plan.batches[0].num_tokens.tolist() == [1, 7]


def test_ranks_with_prompts_left_carry_the_same_number_of_tokens() -> None:
    world = Stepper(make_shape(dp_size=3, rows_per_rank=4))
    for length in (20, 17, 12, 9, 9, 9):
        world.submit(list(range(1, length + 1)), max_tokens=8)
    plan = world.step()
    assert len(set(token_counts(plan))) == 1
    assert sum(token_counts(world.step())) < sum(token_counts(plan))


def test_a_short_prompt_does_not_hold_up_a_long_one_below_the_floor() -> None:
    world = Stepper(make_shape(dp_size=2), min_chunk_tokens=16)
    world.submit([1, 2, 3])
    world.submit(list(range(1, 31)))
    assert sorted(token_counts(world.step())) == [3, 16]


def test_beside_decodes_the_floor_counts_tokens_of_prompts() -> None:
    world = Stepper(make_shape(dp_size=2, rows_per_rank=5), min_chunk_tokens=4)
    for _ in range(8):
        world.submit([1, 2, 3], max_tokens=9)
    world.step()
    world.submit([4, 5])
    world.submit(list(range(1, 31)))
    assert sorted(token_counts(world.step())) == [4 + 2, 4 + 4]


def test_a_rank_is_chosen_only_when_it_can_run_the_sequence() -> None:
    """Bound on arrival, a sequence would wait behind its rank's queue while another idles."""
    world = Stepper(make_shape(dp_size=2, rows_per_rank=1))
    running = [world.submit([1, 2, 3], max_tokens=n) for n in (2, 20)]
    late = world.submit([4, 5, 6], max_tokens=2)
    world.step()
    assert [r.sequences[0].dp_rank for r in running] == [0, 1]
    assert world.admission.peek() is late.sequences[0]
    world.step()
    assert running[0].sequences[0].is_ended
    world.step()
    assert (late.sequences[0].table, late.sequences[0].dp_rank) == (world.table, 0)


def test_before_a_new_prompt_is_what_bound_ones_have_left_and_of_its_own_what_is_not_cached() -> (
    None
):
    world = Stepper(make_shape(dp_size=2, max_num_batched_tokens=8))
    finish(world, world.submit([*range(1, 10)]))
    decoding = world.submit([1, 2, 3], max_tokens=20)
    world.step()
    long = world.submit([*range(20, 40)])
    world.step()
    assert world.table.status[long.sequences[0].row] == RowStatus.EXTEND
    new = make_request([*range(1, 12)], world.listener, 4).sequences[0]
    assert world.scheduler.num_left_tokens(new) == (20 - 8) + (11 - 8)
    finish(world, decoding, long)


# ---- the prefix cache


def test_a_repeated_prompt_is_computed_from_where_it_differs() -> None:
    world = Stepper(make_shape())
    prompt = list(range(1, 15))
    world.submit(prompt)
    world.run()
    again = world.submit([*prompt[:10], 49, 48])
    plan = world.plan()
    assert plan is not None
    assert plan.batches[0].num_computed_tokens.tolist() == [8]
    assert again.sequences[0].progress.num_cached_tokens == 8
    world.commit()
    finish(world, again)


@pytest.mark.parametrize("num_steps", [0, 1, 6])
def test_a_prompt_has_names_once_another_begins_alike_while_it_runs(num_steps: int) -> None:
    world = Stepper(make_shape())
    [cache] = world.scheduler.caches
    first = world.submit([*range(9)], max_tokens=20)
    world.submit([9, *range(8)], max_tokens=20)
    world.plan()
    for _ in range(num_steps):
        world.step()
    assert cache.num_named == 0
    other = world.submit([*range(8), 20, 21], max_tokens=20)
    world.plan()
    assert cache.num_named >= 2
    assert other.sequences[0].progress.num_cached_tokens == 8
    world.check()
    finish(world, first, other)


def test_of_two_prompts_that_begin_together_one_has_its_blocks_kept() -> None:
    world = Stepper(make_shape())
    requests = [world.submit([*range(9)]) for _ in range(2)]
    finish(world, *requests)
    [cache] = world.scheduler.caches
    assert len(kept_blocks(cache.pool)) == cache.num_named == 3
    world.check_idle()


def test_the_last_token_of_a_cached_prompt_is_computed_all_the_same() -> None:
    """Without it there would be no logits to sample from."""
    world = Stepper(make_shape())
    prompt = list(range(1, 13))
    world.submit(prompt)
    world.run()
    again = world.submit(prompt)
    assert token_counts(world.step()) == (4,)
    finish(world, again)


def test_the_next_turn_of_a_chat_finds_the_answer_of_the_one_before() -> None:
    world = Stepper(make_shape())
    first = world.submit([1, 2, 3, 4, 5], max_tokens=12)
    world.run()
    world.submit([1, 2, 3, 4, 5, *output_of(first)[0], 7, 8])
    assert world.step().batches[0].num_computed_tokens.tolist() == [16]


def test_a_sequence_goes_to_the_rank_that_has_its_prefix() -> None:
    world = Stepper(make_shape(dp_size=3))
    prompts = [[rank] * 12 for rank in (1, 2, 3)]
    first = [world.submit(prompt, max_tokens=1) for prompt in prompts]
    world.run()
    ranks = [request.sequences[0].dp_rank for request in first]
    assert sorted(ranks) == [0, 1, 2]
    again = [world.submit(prompt, max_tokens=1) for prompt in reversed(prompts)]
    world.run()
    assert [request.sequences[0].dp_rank for request in again] == ranks[::-1]


def test_continuations_share_the_blocks_of_their_prompt() -> None:
    world = Stepper(make_shape())
    request = world.submit(list(range(1, 18)), max_tokens=6, n=3)
    assert token_counts(world.step()) == (17,)  # the first alone runs it
    world.plan()
    rows = [sequence.row for sequence in request.sequences]
    shared = world.table.block_table[rows, :4]
    assert (shared == shared[0]).all()
    assert world.scheduler.caches[0].pool.num_used == 4 + 3
    world.check()
    world.commit()
    finish(world, request)


def test_prompt_logprobs_are_computed_past_the_prefix_cache() -> None:
    world = Stepper(make_shape())
    prompt = list(range(1, 14))
    world.submit(prompt)
    world.run()
    scored = world.submit(prompt, output=OutputOptions(prompt_logprobs=True), max_tokens=3)
    plan = world.step()
    assert token_counts(plan) == (13,)
    assert plan.agreement.global_num_tokens_for_logprob == (13,)
    world.run()
    assert [t.token_id for t in scored.sequences[0].prompt_logprobs] == prompt[1:]


def test_a_step_never_scores_more_prompt_tokens_than_the_logits_budget() -> None:
    world = Stepper(make_shape(max_num_logits=9))
    prompt = list(range(1, 31))
    scored = world.submit(prompt, output=OutputOptions(prompt_logprobs=True), max_tokens=5)
    world.submit([40, 41], max_tokens=12)
    plans = world.run(depth=2)
    assert max(max(plan.agreement.global_num_tokens_for_logprob) for plan in plans) <= 9
    assert [t.token_id for t in scored.sequences[0].prompt_logprobs] == prompt[1:]
    assert_right(scored)


# ---- ends


@pytest.mark.parametrize("others", [(), (1000,), tuple(range(100, 110))])
@pytest.mark.parametrize("others_before", [(), (1000,)])
def test_a_stop_token_ends_a_sequence_and_is_named(
    others: tuple[int, ...], others_before: tuple[int, ...]
) -> None:
    """However many there are, and whatever the row's last sequence had."""
    world = Stepper(make_shape())
    world.submit([4, 5], max_tokens=3, stop_token_ids=others_before)
    world.run()
    tokens = expected_output([1, 2, 3], 20, ())
    request = world.submit([1, 2, 3], max_tokens=20, stop_token_ids=(*others, tokens[4]))
    world.run()
    [sequence] = request.sequences
    assert (sequence.finish_reason, sequence.stop_token_id) == (FinishReason.STOP, tokens[4])
    assert output_of(request) == [tokens[:5]]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9])
def test_no_step_is_spent_past_the_length_limit(depth: int, max_tokens: int) -> None:
    world = Stepper(make_shape())
    request = world.submit([1, 2, 3], max_tokens=max_tokens)
    plans = world.run(depth)
    assert len(plans) == max_tokens
    assert request.sequences[0].finish_reason is FinishReason.LENGTH
    assert_right(request)


def test_the_token_of_a_step_sent_before_a_stop_was_seen_is_dropped() -> None:
    world = Stepper(make_shape())
    tokens = expected_output([1, 2, 3], 10, ())
    request = world.submit([1, 2, 3], max_tokens=10, stop_token_ids=(tokens[2],))
    for _ in range(3):
        world.plan()
    world.plan()
    assert world.in_flight[-1].batches[0].token_ids is None
    for _ in range(3):
        world.commit()
    assert request.sequences[0].is_ended
    assert world.scheduler.caches[0].pool.num_used > 0  # the fourth step still writes there
    world.check()
    world.commit()
    assert output_of(request) == [tokens[:3]]
    world.check_idle()


def test_a_sequence_that_cannot_keep_to_its_grammar_ends_with_the_tokens_before() -> None:
    world = Stepper(make_shape(dp_size=2))
    broken, other = (world.submit([1, 2, 3], grammar=grammar) for grammar in ("a", ""))
    world.step()
    world.plan()
    world.plan()
    sequences = [broken.sequences[0], other.sequences[0]]  # of which one has no grammar to break
    rows = [(each.dp_rank, each.row % world.shape.rows_per_rank) for each in sequences]
    failures = [RowFailure(*row, "too complex") for row in rows]
    for place, result in enumerate(world.results):  # also in the step that was sent before
        world.results[place] = result._replace(failures=failures)
    world.commit()
    [ended] = world.ended
    assert ended.request is broken
    assert isinstance(ended.error, ConstraintFailed)
    assert "too complex" in str(ended.error)
    world.run()
    assert output_of(broken) == [expected_output([1, 2, 3], 4, ())[:1]]
    assert_right(other)
    world.check_idle()


def test_who_is_told_of_an_end_sees_that_all_that_end_with_it_have_let_go() -> None:
    """A request of several sequences is logged at the first of them if they end together."""
    world = Stepper(make_shape())
    requests = [world.submit([1, 2, 3], 2, min_tokens=2) for _ in range(3)]
    bound: list[int] = []
    world.scheduler._on_end = lambda _: bound.append(
        sum(request.sequences[0].table is not None for request in requests)
    )
    world.run()
    assert bound == [0, 0, 0]


def test_a_cancelled_sequence_frees_its_blocks_when_no_step_runs_it() -> None:
    world = Stepper(make_shape())
    request = world.submit(list(range(1, 10)), max_tokens=20)
    world.plan()
    world.plan()
    world.scheduler.fail(request.sequences[0], Cancelled("not needed any more"))
    assert world.ended == request.sequences
    for _ in range(2):
        assert world.scheduler.caches[0].pool.num_used > 0
        assert world.plan() is None
        world.commit()
    world.check_idle()


def test_the_listener_is_woken_when_there_are_tokens_and_not_before() -> None:
    world = Stepper(make_shape(max_num_batched_tokens=8))
    world.submit(list(range(1, 11)), max_tokens=2)
    world.step()
    assert not world.listener._has_news
    world.step()
    assert world.listener._has_news


def test_times_are_those_of_the_first_binding_and_the_first_token() -> None:
    world = Stepper(make_shape(max_num_batched_tokens=8))
    request = world.submit(list(range(1, 11)), max_tokens=3)
    for world.now in (1.0, 2.0, 3.0, 4.0):
        world.step()
    progress = request.sequences[0].progress
    assert (progress.start_time, progress.first_token_time) == (1.0, 2.0)


# ---- preemption


def full_world() -> Stepper:
    """10 blocks of 4 tokens: two sequences of 20 tokens fill it."""
    return Stepper(make_shape(num_blocks=11, max_model_len=40))


@pytest.mark.parametrize(("priorities", "preempted"), [((0, 0), [0, 1]), ((1, 2), [1, 0])])
def test_the_least_important_or_else_the_youngest_gives_way_and_continues_where_it_was(
    priorities: tuple[int, int], preempted: list[int]
) -> None:
    world = full_world()
    requests = [
        world.submit([n] * 12, max_tokens=20, priority=p) for n, p in enumerate(priorities, start=1)
    ]
    world.run(depth=2)
    assert [r.sequences[0].progress.num_preemptions for r in requests] == preempted
    assert_right(*requests)
    world.check_idle()


@pytest.mark.parametrize("priority", [1, 0])
def test_only_a_more_important_request_takes_the_place_of_a_running_one(priority: int) -> None:
    world = Stepper(make_shape(rows_per_rank=1))
    first = world.submit([1, 2, 3], max_tokens=20)
    world.step()
    second = world.submit([4, 5, 6], max_tokens=5, priority=priority)
    world.run(depth=2)
    order = [second, first] if priority else [first, second]
    assert world.ended == [request.sequences[0] for request in order]
    assert_right(first, second)
    assert first.sequences[0].progress.num_preemptions == priority


@pytest.mark.parametrize("caller", ["flood", "other"])
def test_a_callers_first_request_takes_the_place_of_anothers_second(caller: str) -> None:
    world = Stepper(make_shape(rows_per_rank=2))
    first, second = [world.submit([n] * 3, max_tokens=20, caller=("flood",)) for n in (1, 2)]
    world.step()
    late = world.submit([4, 5, 6], max_tokens=5, caller=(caller,))
    world.run(depth=2)
    assert_right(first, second, late)
    preemptions = [r.sequences[0].progress.num_preemptions for r in (first, second)]
    assert preemptions == [0, int(caller == "other")]


def test_a_row_stays_free_beside_a_flood_for_a_caller_that_has_none() -> None:
    shape = make_shape(
        dp_size=2, rows_per_rank=64, num_blocks=600, max_num_batched_tokens=256, max_num_logits=64
    )
    world = Stepper(shape)
    flood = [world.submit([1, 2], max_tokens=20, caller=("flood",)) for _ in range(140)]
    world.step()
    assert world.table.num_bound_rows.sum() == 128  # nobody else was ever seen
    others = [world.submit([3, 4], max_tokens=4, caller=("other",)) for _ in range(2)]
    world.run(depth=2)
    flood += [world.submit([1, 2], max_tokens=20, caller=("flood",)) for _ in range(140)]
    world.plan()
    assert world.table.num_bound_rows.sum() == 127
    others.append(world.submit([3, 4], max_tokens=4, caller=("other",)))
    num_preemptions = sum(world.scheduler.num_preemptions)
    world.plan()
    assert world.table.num_bound_rows.sum() == 128
    world.run(depth=2)
    assert sum(world.scheduler.num_preemptions) == num_preemptions
    assert_right(*flood, *others)


def test_a_listener_gets_each_token_once_across_a_preemption() -> None:
    world = full_world()
    requests = [world.submit([n] * 12, max_tokens=20) for n in (1, 2)]
    got: list[list[int]] = [[], []]
    for _ in range(100):
        if world.plan() is None:
            break
        world.commit()
        for tokens, request in zip(got, requests, strict=True):
            tokens += request.sequences[0].take_tokens().tolist()
    assert got == [output_of(request)[0] for request in requests]


def test_a_group_that_is_lost_leaves_its_sequences_waiting_with_their_tokens() -> None:
    world = Stepper(make_shape())
    requests = [world.submit([n] * 6, max_tokens=9) for n in (1, 2)]
    for _ in range(3):
        world.step()
    world.plan()
    world.scheduler.abandon()
    sequences = [request.sequences[0] for request in requests]
    assert [sequence.num_output_tokens for sequence in sequences] == [3, 3]
    assert world.admission.num_tokens == 18

    after = Stepper(make_shape())
    for sequence in sequences:
        after.admission.push(sequence)
    finish(after, *requests)


# ---- everything at once


@pytest.mark.parametrize("seed", range(60))
def test_invariants_hold_after_every_call(seed: int) -> None:
    """A world in which every step collides: few rows, few blocks, few different tokens."""
    rng = random.Random(seed)
    kv_window = rng.choice([0, 0, 3, 9])
    least = next(n for n in range(20) if sequence_capacity(n, 4, kv_window) >= 32)
    shape = make_shape(
        dp_size=rng.randint(1, 3),
        num_blocks=rng.randint(least, least + 11),
        kv_window=kv_window,
        rows_per_rank=rng.randint(1, 5),
        max_num_batched_tokens=rng.choice([5, 8, 30]),
        max_num_logits=rng.choice([5, 12]),
        max_model_len=32,
    )
    world = Stepper(shape, min_chunk_tokens=rng.choice([1, 6]))
    depth = rng.randint(1, 3)
    requests: list[Request] = []
    for _ in range(250):
        match rng.choice(["submit", "plan", "plan", "commit", "commit", "cancel"]):
            case "submit" if len(requests) < 40:
                prompt = rng.choices([1, 2], k=rng.randint(1, 16))
                requests.append(
                    world.submit(
                        prompt,
                        max_tokens=rng.randint(1, 16),
                        n=rng.choice([1, 1, 2]),
                        priority=rng.choice([0, 0, 1]),
                        min_tokens=rng.choice([0, 4]),
                        stop_token_ids=rng.choice([(), (EOS,), (EOS, 3, 5, 7, 11, 13)]),
                        output=OutputOptions(
                            logprobs=rng.random() < 0.3, prompt_logprobs=rng.random() < 0.3
                        ),
                    )
                )
            case "plan" if len(world.in_flight) < depth:
                world.plan()
            case "commit" if world.in_flight:
                world.commit()
            case "cancel" if rng.random() < 0.1 and requests:
                cancel(world, rng.choice(requests))
        world.check()
    world.run(depth)
    world.check_idle()
    for request in requests:
        assert not request.is_live
        if all(sequence.error is None for sequence in request.sequences):
            assert_right(request)
            check_logprobs(request)


def cancel(world: Stepper, request: Request) -> None:
    error: RpcError = Cancelled("the client left")
    for sequence in request.sequences:
        if sequence.is_ended:
            continue
        if sequence.table is not None:
            world.scheduler.fail(sequence, error)
        else:
            world.admission.discard(sequence)
            sequence.error = error


def check_logprobs(request: Request) -> None:
    for sequence, tokens in zip(request.sequences, output_of(request), strict=True):
        scored = [entry.token_id for entry in sequence.logprobs]
        assert scored == (tokens if request.output.logprobs else [])
        wants_prompt = request.output.prompt_logprobs and sequence.index == 0
        prompt = [entry.token_id for entry in sequence.prompt_logprobs]
        assert np.array_equal(prompt, request.prompt[1:] if wants_prompt else [])


# ---- balance of the ranks


def fill(num_decodes: list[int], num_prompts: list[int], level: int) -> list[int]:
    """Tokens of each rank when it fills up to a level."""
    return [
        decodes + min(prompt, max(0, level - decodes))
        for decodes, prompt in zip(num_decodes, num_prompts, strict=True)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_a_level_is_within_budget_and_even(seed: int) -> None:
    rng = random.Random(seed)
    dp_size, max_tokens = rng.randint(1, 6), rng.randint(8, 64)
    num_decodes = [rng.randint(0, 8) for _ in range(dp_size)]
    num_prompts = [rng.choice([0, rng.randint(1, 100)]) for _ in range(dp_size)]
    floor = rng.choice([1, 16, 1000])
    level = fill_level(num_decodes, num_prompts, max_tokens=max_tokens, floor=floor)
    tokens = fill(num_decodes, num_prompts, level)

    assert max(tokens) <= max_tokens
    if not any(num_prompts):
        assert level == 0
        return
    assert sum(tokens) > sum(num_decodes) or level == max(num_decodes)
    if level > max(min(floor, max_tokens), *num_decodes):
        # Above the floor, no rank does more than the least busy one can, or does anyway.
        busy = [t for t, prompt in zip(tokens, num_prompts, strict=True) if prompt]
        assert set(busy) == {level}


@pytest.mark.parametrize("seed", range(40))
def test_prompts_get_on_at_every_step(seed: int) -> None:
    """Where no rank is full of decodes, some prompt advances."""
    rng = random.Random(seed)
    dp_size = rng.randint(1, 5)
    num_decodes = [rng.randint(0, 20) for _ in range(dp_size)]
    num_prompts = [rng.randint(0, 50) for _ in range(dp_size)]
    num_prompts[rng.randrange(dp_size)] += 1
    level = fill_level(num_decodes, num_prompts, max_tokens=32, floor=21)
    assert sum(fill(num_decodes, num_prompts, level)) > sum(num_decodes)


def test_the_floor_bounds_how_long_a_short_prompt_holds_up_a_long_one() -> None:
    assert fill_level([0, 0], [3, 500], max_tokens=1000, floor=100) == 100
    assert fill_level([0, 0], [300, 500], max_tokens=1000, floor=100) == 300
    assert fill_level([0, 0], [300, 500], max_tokens=50, floor=100) == 50


def test_a_rank_full_of_decodes_lets_the_others_catch_up() -> None:
    assert fill_level([200, 0], [0, 500], max_tokens=1000, floor=10) == 500
    assert fill_level([200, 0, 0], [0, 500, 1], max_tokens=1000, floor=10) == 200


def _loads(
    num_used: int, prices: Prices, prompts: list[list[Prompt]] | None = None, chunk: int = 1000
) -> RankLoads:
    """Two ranks, without prompts if none are given; the first has so many blocks of 4 tokens in use."""
    world = Stepper(make_shape(dp_size=2))
    pools = BlockPools([cache.pool for cache in world.scheduler.caches])
    pools[0].acquire(num_used)
    own = prompts or [[], []]
    return RankLoads(make_shape(dp_size=2), world.table, pools, own, [0, 0], chunk, prices)


@pytest.mark.parametrize("token_s", [1e-5, 1e-12])
def test_a_cached_prefix_that_others_use_is_not_computed_on_another_rank(token_s: float) -> None:
    """However little a token is learnt to take: what they read weighs less than running it anew."""
    loads = _loads(8, Prices(1e-2, 0.0, token_s, 0.0, 1e-6, 0.0))
    own = CachedPrefix(np.arange(1, 7, dtype=np.int32), NO_BLOCKS)
    assert loads.pick((0.0, 0.0, 0, 0), 30, {0: own}) == 0
    assert loads.pick((0.0, 0.0, 0, 0), 30, {}) == 1


def test_what_an_interrupted_answer_has_cached_or_waits_for_weighs_more_than_the_kv_of_others() -> (
    None
):
    loads, turn = _loads(10, Prices(1e-2, 0.0, 1e-5, 0.0, 1e-6, 0.0)), (0.0, 0.0, 0, 0)
    cached = {0: CachedPrefix(np.arange(1, 5, dtype=np.int32), NO_BLOCKS)}
    assert loads.pick(turn, 30, cached) == 1
    assert loads.pick(turn, 30, cached, is_interrupted=True) == 0
    assert loads.pick(turn, 30, {}, is_interrupted=True) == 1
    loads.add(1, Prompt(turn, 12, 0, 8))
    behind = (1.0, 0.0, 0, 0)
    assert loads.pick(behind, 30, {}) == 1
    assert loads.pick(behind, 30, {}, is_interrupted=True) == 0


def test_a_prompt_goes_beside_much_kv_rather_than_behind_one_that_takes_up_the_whole_step() -> None:
    prices, turn = Prices(1e-2, 0.0, 1e-5, 0.0, 1e-6, 0.0), (0.0, 0.0, 0, 0)
    behind = (1.0, 0.0, 0, 0)
    for left, best in ((11, 1), (12, 0)):
        loads = _loads(30, prices, [[], [Prompt(turn, left, 0, 8)]], chunk=12)
        assert loads.pick(behind, 4, {}) == best


def test_a_sequence_goes_on_where_its_kv_is_whatever_else_that_rank_has_to_do() -> None:
    loads = _loads(30, Prices(1e-2, 0.0, 1e-5, 0.0, 1e-6, 0.0))
    cached = {0: CachedPrefix(np.arange(1, 5, dtype=np.int32), NO_BLOCKS)}
    assert loads.pick((0.0, 0.0, 0, 0), 30, cached) == 1
    assert loads.pick((0.0, 0.0, 0, 0), 30, cached, home=0) == 0


@pytest.mark.parametrize("first_token_ms", [3.0, 1000.0])
def test_a_prompt_is_held_for_as_long_as_if_every_step_laid_it_out_anew(
    first_token_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is due after 3 ms, or has cost enough by waiting, the sooner as another comes to wait."""
    kept = _steps_of_held_prompts(first_token_ms)
    monkeypatch.setattr(PromptPlanner, "_take_held", lambda *_: None)
    assert kept == _steps_of_held_prompts(first_token_ms)
    assert kept.index(True) >= 2


def _steps_of_held_prompts(first_token_ms: float) -> list[bool]:
    """Whether each step runs prompts, of which one comes to six decodes and one later."""
    settings = {"target_first_token_ms": first_token_ms, "first_token_weight": 1.0}
    world = Stepper(make_shape(dp_size=2), **settings)
    world.measures.costs.plain.num_steps = [64, 64]
    for _ in range(6):
        world.submit([1, 2, 3], max_tokens=40)
    while (world.table.status == RowStatus.DECODE).sum() < 6:
        world.now += 0.001
        world.step()
    world.submit([4, 5, 6], max_tokens=2)
    runs: list[bool] = []
    for step in range(8):
        if step == 1:
            world.submit([7, 8, 9], max_tokens=2)
        world.now += 0.001
        runs.append(world.step().agreement.has_extend)
    assert world.measures.decisions[Why.HELD] >= runs.index(True)
    return runs


@pytest.mark.parametrize(("num_ends", "is_laid_out_again"), [(0, False), (1, False), (9, True)])
def test_a_prompt_that_is_held_is_laid_out_again_when_more_than_a_few_decodes_have_ended(
    num_ends: int, is_laid_out_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"max_num_batched_tokens": 400, "max_num_logits": 160, "num_blocks": 900}
    shape = make_shape(rows_per_rank=80, **sizes)
    world = Stepper(shape, target_first_token_ms=1000.0, first_token_weight=1.0)
    world.measures.costs.plain.num_steps = [64, 64]
    decodes = [world.submit([1, 2, 3], max_tokens=40) for _ in range(70)]
    while (world.table.status == RowStatus.DECODE).sum() < 70:
        world.now += 0.001
        world.step()
    world.submit([4, 5, 6], max_tokens=2)
    world.step()
    assert world.measures.decisions[Why.HELD] == 1
    layouts: list[object] = []
    fill = PromptPlanner._fill
    monkeypatch.setattr(PromptPlanner, "_fill", lambda *args: layouts.append(args) or fill(*args))
    for request in decodes[:num_ends]:
        world.scheduler.fail(request.sequences[0], Cancelled("gone"))
    world.step()
    assert world.measures.decisions[Why.HELD] == 2
    assert bool(layouts) == is_laid_out_again


def _world_that_holds_a_prompt(
    *others: list[int], rows_per_rank: int = 4, num_blocks: int = 40, **settings: float
) -> tuple[Stepper, Request]:
    """Two ranks with six decodes, and a prompt that is held; others come with it."""
    shape = make_shape(dp_size=2, rows_per_rank=rows_per_rank, num_blocks=num_blocks)
    world = Stepper(shape, first_token_weight=1.0, **settings)
    world.measures.costs.plain.num_steps = [64, 64]
    for _ in range(6):
        world.submit([1, 2, 3], max_tokens=40)
    while (world.table.status == RowStatus.DECODE).sum() < 6:
        world.step()
    held, *_ = [world.submit(prompt, max_tokens=2) for prompt in ([4, 5, 6], *others)]
    assert not world.step().agreement.has_extend
    assert world.measures.decisions[Why.HELD] == 1
    return world, held


def test_who_comes_while_a_prompt_is_held_has_a_rank_when_both_run() -> None:
    world, held = _world_that_holds_a_prompt(rows_per_rank=8)
    later = []
    for num_held in (2, 3):
        world.now += 0.001
        later.append(world.submit([7, 8, 9], max_tokens=2))
        assert not world.step().agreement.has_extend
        assert all(request.sequences[0].table is None for request in later)
        assert world.measures.decisions[Why.HELD] == num_held
    world.now += 1.0  # the first one is due
    assert sum(token_counts(world.step())) == 6 + 3 + 3 + 3
    for request in later:  # else what does not run at once would wait as long again
        assert request.sequences[0].progress.start_time == request.arrival_time
    finish(world, held, *later)
    for request in (held, *later):
        assert_right(request)


def test_one_that_is_let_in_is_bound_at_once_in_place_of_as_long_a_one_that_was_cancelled() -> None:
    world, _ = _world_that_holds_a_prompt()
    cancelled = world.submit([7, 8, 9], max_tokens=2)
    world.step()
    world.admission.discard(cancelled.sequences[0])
    resumed = world.submit([7, 8, 9], max_tokens=2, attempt=1)
    world.step()
    assert resumed.sequences[0].table is not None


@pytest.mark.parametrize(
    ("later", "attempt", "max_waiting", "max_unbound"),
    [
        ([[7] * 20], 0, 1000, 64),
        ([[7, 8, 9]], 1, 1000, 64),
        ([[7, 8, 9]] * 2, 0, 1000, 64),
        ([[7, 8, 9]], 0, 1, 64),
        ([[7, 8, 9]], 0, 1000, 0),
    ],
    ids=["would fill the step", "ran elsewhere", "more than rows", "fill the queue", "many"],
)
def test_who_could_change_what_is_held_has_a_rank_at_once(
    later: list[list[int]],
    attempt: int,
    max_waiting: int,
    max_unbound: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.scheduling.prompts.planner.MAX_UNBOUND", max_unbound)
    world, _ = _world_that_holds_a_prompt(target_token_gap_ms=11.5)
    requests = [world.submit(prompt, max_tokens=2, attempt=attempt) for prompt in later]
    monkeypatch.setattr(world.admission, "_max_sequences", max_waiting)
    world.step()
    assert requests[0].sequences[0].table is not None


def test_of_several_that_come_while_a_prompt_is_held_each_could_change_that() -> None:
    world, _ = _world_that_holds_a_prompt(rows_per_rank=8, target_token_gap_ms=11.5)
    for prompt, num_waiting in (([7, 8, 9], 1), ([7] * 20, 0)):
        world.submit(prompt, max_tokens=2)
        world.step()
        assert len(world.waiting) == num_waiting


def test_while_one_waits_for_blocks_what_is_held_is_laid_out_in_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How many wait for blocks says when prompts run, and each step may give some back."""
    world, _ = _world_that_holds_a_prompt([7] * 40, rows_per_rank=8, num_blocks=13)
    layouts: list[object] = []
    fill = PromptPlanner._fill
    monkeypatch.setattr(PromptPlanner, "_fill", lambda *args: layouts.append(args) or fill(*args))
    for num_layouts in (1, 2):
        world.step()
        assert (len(world.waiting), len(layouts)) == (1, num_layouts)


def test_those_that_come_while_a_prompt_is_held_count_as_if_they_had_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What they wait is a debt, too: beside one more, prompts run sooner."""
    kept = [_steps_until_prompts(num_later) for num_later in range(3)]
    monkeypatch.setattr(PromptPlanner, "_take_held", lambda *_: None)
    assert kept == [_steps_until_prompts(num_later) for num_later in range(3)]
    assert kept[1] < kept[0]


def _steps_until_prompts(num_later: int) -> int:
    """Steps of 0.1 ms in which a prompt is held, and others that come after it."""
    world, _ = _world_that_holds_a_prompt()
    for _ in range(num_later):
        world.submit([7, 8, 9], max_tokens=2)
    num_steps = 0
    while not world.step().agreement.has_extend:
        world.now += 0.0001
        num_steps += 1
    return num_steps


def test_a_held_prompt_leaves_room_for_a_decode_that_could_not_run_when_it_was_laid_out() -> None:
    """For want of a block, which one of its rank gave back as one of the other rank ended."""
    shape = make_shape(dp_size=2, num_blocks=13, rows_per_rank=4, max_num_batched_tokens=8)
    world = Stepper(shape, target_first_token_ms=500.0, first_token_weight=1.0)
    world.measures.costs.plain.num_steps = [64, 64]
    prompts, lens = [[1] * 4, [2] * 3, [3] * 2, [4] * 3, [6]], [40, 22, 40, 40, 3]
    full, ends, _, goes, _ = [world.submit(*pair) for pair in zip(prompts, lens, strict=True)]
    world.step()
    held = world.submit([5] * 20)
    while full.sequences[0].num_tokens < 24:
        world.step()
    sequences = [request.sequences[0] for request in (full, goes, held, ends)]
    assert [sequence.dp_rank for sequence in sequences] == [0, 0, 0, 1]
    world.plan()
    world.scheduler.fail(sequences[1], Cancelled("gone"))
    plan = world.plan()
    assert plan is not None
    assert token_counts(plan) == (0, 2), "one lacks a block, and the prompt is held"
    world.commit()
    world.now += 1.0  # the prompt is due
    plan = world.plan()
    assert plan is not None
    assert token_counts(plan) == (8, 1)
    finish(world, full, held, ends)
