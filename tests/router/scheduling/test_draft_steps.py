"""If these fail, a client gets a draft that was not accepted, or ranks disagree on a step."""

import itertools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from router.requests.request import OutputOptions, SamplingParams
from router.scheduling.speculation import PAUSE_STEPS, PROBE_STEPS
from router.scheduling.step import CapturedSizes, SpeculationShape
from tests.router.support.stepper import (
    ALWAYS,
    PROMPT,
    assert_right,
    draft_stepper,
    drafting,
    finish,
    limits,
    right_output,
    speculation,
    stop_at,
    widths,
)

# ---- which steps draft, and what all ranks agree on


def test_a_step_of_decodes_drafts_and_one_with_a_prompt_does_not() -> None:
    world = draft_stepper()
    first = world.submit(PROMPT, 9)
    assert widths([world.step(), world.step()]) == [0, 4]
    second = world.submit([4, 5], 2)
    mixed = world.step()
    assert widths([mixed]) == [0]
    assert mixed.batches[0].num_tokens is not None
    assert mixed.batches[0].num_tokens.tolist() == [1, 2]
    assert widths(world.run()) == [4]
    assert_right(first, second)
    world.check_idle()


def test_a_chunk_on_one_rank_keeps_all_ranks_from_drafting() -> None:
    world = draft_stepper(dp_size=2, max_num_batched_tokens=32)
    for number in (1, 2):
        world.submit([number] * 3, 20)
    world.step()
    world.submit([3] * 30, 2)
    plans = [world.step(), world.step(), world.step()]
    modes = [[batch.mode.name for batch in plan.batches] for plan in plans]
    assert sorted(modes[0]) == ["DECODE", "EXTEND"]
    assert widths(plans) == [0, 4, 4]


def test_every_rank_counts_the_width_for_each_of_its_sequences() -> None:
    world = draft_stepper(dp_size=3, graph_sizes=CapturedSizes(decode=(1, 2, 4)))
    for number in range(5):
        world.submit([1 + number] * 3, 20)
    world.step()
    world.step()
    agreement = world.step().agreement
    assert agreement.num_draft_tokens == 4
    assert sorted(agreement.global_num_tokens) == [4, 8, 8]
    assert agreement.global_num_tokens_for_logprob == agreement.global_num_tokens
    assert agreement.global_num_tokens_for_draft == ()
    assert agreement.graph_size == 2  # sequences
    assert not agreement.has_extend


def test_the_draft_model_runs_a_row_for_each_token_and_for_each_prompt_that_ends() -> None:
    world = draft_stepper(max_num_batched_tokens=32, dp_size=2)
    world.submit([1] * 40, 4)
    first, second = world.step(), world.step()
    agreements = [first.agreement, second.agreement]
    assert [sorted(a.global_num_tokens_for_draft) for a in agreements] == [[0, 32], [0, 8 + 1]]
    assert [sorted(a.global_num_sampled) for a in agreements] == [[0, 0], [0, 1]]
    frozen = draft_stepper(speculation=speculation(extends=False))
    frozen.submit(PROMPT)
    assert frozen.step().agreement.global_num_tokens_for_draft == ()


@pytest.mark.parametrize(
    ("drafts", "draft_model"),
    [(ALWAYS, None), (drafting(is_on=False), speculation(kv_lookahead=4))],
)
def test_a_group_that_does_not_draft_neither_runs_a_draft_model_nor_has_blocks_for_it(
    drafts: dict[str, Any], draft_model: SpeculationShape | None
) -> None:
    """It has none, or was told not to."""
    world = draft_stepper(drafts=drafts, speculation=draft_model)
    request = world.submit([1] * 4, 6)
    first = world.step()
    assert world.table.num_blocks[0] == 1
    plans = [first, *world.run()]
    assert len(plans) == 6
    assert not any(widths(plans))
    assert all(plan.agreement.global_num_tokens_for_draft == () for plan in plans)
    assert all(plan.agreement.global_num_sampled == () for plan in plans)
    assert_right(request)


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": SamplingParams({"presence_penalty": 0.5})},
        {"sampling": SamplingParams({"repetition_penalty": 1.1})},
        {"output": OutputOptions(logprobs=True)},
    ],
)
def test_rows_that_need_more_than_a_length_gain_one_token_beside_those_that_draft(
    fields: dict[str, object],
) -> None:
    world = draft_stepper()
    careful = world.submit([7, 8], 6, **fields)  # type: ignore[arg-type]
    assert not any(widths([world.step(), world.step()]))  # nobody else is there: no drafts
    free = world.submit(PROMPT, 9)
    world.step()
    plan = world.step()
    assert plan.agreement.num_draft_tokens == 4
    assert limits(plan) == [1, 4]
    finish(world, careful, free)
    if careful.output.logprobs:
        scores = careful.sequences[0].logprobs
        assert [score.token_id for score in scores] == right_output(careful)[0]


def test_scores_go_to_their_tokens_behind_a_run_of_another_row() -> None:
    """The place of a token among all that came is not the place of its row any more."""
    world = draft_stepper()
    free = world.submit(PROMPT, 20)
    careful = world.submit([7, 8], 9, output=OutputOptions(logprobs=True))
    finish(world, free, careful)
    assert [score.token_id for score in careful.sequences[0].logprobs] == right_output(careful)[0]


@pytest.mark.parametrize("is_on", [True, False])
def test_a_flow_is_charged_for_each_token_that_it_is_given(*, is_on: bool) -> None:
    """Drafts that were accepted, too, and no token behind a stop."""
    world = draft_stepper(0.7, drafting(is_on=is_on))
    for caller in ("one", "other"):
        for number in range(1, 5):
            fields = {"caller": (caller,), "stop_token_ids": (7, 8, 9)}
            world.submit([number] * 3, 40, **fields)
    world.run(2)
    given = Counter[str]()
    for sequence in world.ended:
        given[sequence.request.caller[0]] += sequence.num_tokens
    counts = world.admission.line.counts()
    assert {name: flow.num_served_tokens for name, flow in counts.items()} == given


# ---- lengths that are not known yet


def test_a_row_is_planned_from_its_upper_bound_and_what_it_did_not_gain_is_taken_back() -> None:
    world = draft_stepper(acceptance=0.0)
    request = world.submit(PROMPT, 20)
    world.step()
    first, second = world.plan(), world.plan()
    assert first is not None
    assert second is not None
    bounds = [int(plan.batches[0].num_computed_tokens[0]) for plan in (first, second)]
    assert bounds == [3, 7]  # as if all four had been accepted
    world.commit()
    world.check()
    assert world.table.num_computed[0] == 3 + 1 + 4
    world.commit()
    world.check()
    assert world.table.num_computed[0] == 3 + 2
    finish(world, request)


def test_the_limit_falls_to_what_is_left_and_a_row_at_its_bound_waits() -> None:
    world = draft_stepper(acceptance=0.0)
    request = world.submit(PROMPT, 8)
    world.step()
    assert [limits(plan) for plan in (world.plan(), world.plan()) if plan] == [[4], [3]]
    assert world.plan() is None  # 1 + 4 + 3 tokens may be all
    world.commit()
    plan = world.plan()
    assert plan is not None
    assert limits(plan) == [3]
    finish(world, request)


def test_a_last_token_alone_is_not_worth_a_draft() -> None:
    world = draft_stepper()
    request = world.submit(PROMPT, 6)
    assert widths(world.run()) == [0, 4, 0]
    assert_right(request)


def test_the_budget_of_a_speculative_step_is_its_width_for_every_row() -> None:
    """Executors have room for it beside the budget, which bounds prompts."""
    world = draft_stepper(rows_per_rank=8, max_num_batched_tokens=8, max_num_logits=8)
    requests = [world.submit([number], 20) for number in range(1, 9)]
    plans = world.run(depth=2)
    assert max(max(plan.agreement.global_num_tokens) for plan in plans) == 8 * 4
    assert_right(*requests)
    step = next(plan.agreement for plan in plans if plan.limits is not None)
    with pytest.raises(AssertionError, match="planned 33 tokens on a rank; the budget is 32"):
        world.shape.check(replace(step, global_num_tokens=(33,)))


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_output_is_that_of_plain_steps_at_any_depth(depth: int, acceptance: float) -> None:
    world = draft_stepper(
        acceptance, speculation=speculation(num_reserved_tokens=9, kv_lookahead=1)
    )
    requests = [world.submit([n, 2 * n, 5], 5 + 6 * n) for n in (1, 2, 3, 4)]
    plans = world.run(depth)
    assert 4 in widths(plans)
    assert_right(*requests)
    world.check_idle()


@pytest.mark.parametrize(
    ("acceptance", "max_tokens", "counts"), [(1.0, 9, (6, 6)), (0.0, 4, (2 + 1, 0))]
)
def test_a_sequence_knows_what_was_offered_to_it_and_accepted(
    acceptance: float, max_tokens: int, counts: tuple[int, int]
) -> None:
    world = draft_stepper(acceptance)
    request = world.submit(PROMPT, max_tokens)
    world.run()
    progress = request.sequences[0].progress
    assert (progress.num_drafts, progress.num_accepted_drafts) == counts


def test_tokens_that_come_together_have_no_time_between_them() -> None:
    world = draft_stepper()
    world.submit(PROMPT, 9)
    for now in (1.0, 2.0, 5.0):
        world.now = now
        world.step()
    gaps = world.measures.inter_token_s
    assert sum(gaps.counts) == 8
    assert gaps.total == 4.0


# ---- whether drafts pay

LONG = {"max_model_len": 1000, "num_blocks": 300}


def test_a_group_whose_drafts_fail_runs_plain_steps_and_tries_again() -> None:
    world = draft_stepper(0.0, drafting(min_tokens=1.5), **LONG)
    request = world.submit(PROMPT, 990)
    runs = [(key, len(list(run))) for key, run in itertools.groupby(widths(world.run()))]
    assert runs[:5] == [(0, 1), (4, PROBE_STEPS), (0, PAUSE_STEPS), (4, PROBE_STEPS), (0, 445)]
    assert_right(request)


def test_a_group_whose_drafts_are_accepted_goes_on_drafting() -> None:
    world = draft_stepper(1.0, drafting(min_tokens=1.5), **LONG)
    world.submit(PROMPT, 990)
    assert set(widths(world.run())[1:-1]) == {4}


@pytest.mark.parametrize("depth", [1, 2])
def test_what_comes_behind_a_stop_is_no_gain(depth: int) -> None:
    """Of the first run of four, the third token stops; the step behind it runs for nobody."""
    world = draft_stepper()
    request = world.submit(PROMPT, 30, stop_token_ids=(stop_at(3),))
    world.run(depth)
    assert request.sequences[0].num_output_tokens == 4
    assert world.scheduler.gate.tokens_per_step == 3.0


def test_rows_without_a_stop_gain_all_that_they_are_given() -> None:
    world = draft_stepper()
    world.submit(PROMPT, 1 + 2 * speculation().max_gain)
    world.run(2)
    assert world.scheduler.gate.tokens_per_step == speculation().max_gain


# ---- at random


@pytest.mark.parametrize("seed", range(40))
def test_nothing_breaks_between_any_two_calls(seed: int) -> None:
    rng = random.Random(seed)
    num_steps = rng.choice([1, 3])
    width = 1 + num_steps * rng.choice([1, 2])
    world = draft_stepper(
        rng.choice([0.0, 0.4, 0.8, 1.0]),
        drafting(min_tokens=1, between=rng.choice([1, 2])),
        dp_size=rng.choice([1, 2]),
        num_blocks=rng.randint(13, 30),
        speculation=speculation(
            num_draft_tokens=width,
            num_draft_steps=num_steps,
            num_reserved_tokens=width + rng.choice([0, 5]),
            kv_lookahead=rng.choice([0, 1]),
        ),
    )
    depth = rng.choice([1, 2, 3])
    requests = []
    for _ in range(300):
        action = rng.random()
        if action < 0.1 and len(requests) < 30:
            prompt = [rng.randint(1, 3) for _ in range(rng.randint(1, 20))]
            stops = rng.choice([(), (0,), (0, 5, 9), tuple(range(0, 50, 7))])
            requests.append(
                world.submit(
                    prompt,
                    rng.randint(1, 28),
                    stop_token_ids=stops,
                    min_tokens=rng.choice([0, 1]),
                    priority=rng.choice([0, 0, 3]),
                )
            )
        elif action < 0.55 and len(world.in_flight) < depth:
            world.plan()
        elif world.in_flight:
            world.commit()
        world.check()
    finish(world, *requests, depth=depth)
