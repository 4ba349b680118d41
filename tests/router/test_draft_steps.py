"""If these fail, a client gets a draft that was not accepted, or a sequence pays for drafts with
its place."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from router.errors import Cancelled
from router.request import FinishReason, OutputOptions, Request, SamplingParams
from router.sequence_table import NUM_STOP_IDS
from router.speculation import PAUSE_STEPS, PROBE_STEPS, DraftSettings
from router.step import StepPlan
from router.step_builder import GraphSizes
from tests.router.stepper import Stepper, make_shape
from tests.router.test_scheduler import output_of
from tests.router.test_speculation import speculation
from tests.sim.fake_rank import VOCAB_SIZE, expected_output

CHAIN = speculation()
PROMPT = [1, 2, 3]
ALWAYS = DraftSettings(min_tokens_per_step=1)


def stepper(acceptance: float = 1.0, drafts: DraftSettings = ALWAYS, **sizes: object) -> Stepper:
    shape = make_shape(**{"speculation": CHAIN, **sizes})
    return Stepper(shape, acceptance=acceptance, drafts=drafts)


def plain(request: Request) -> list[int]:
    """What a request's first sequence gives without drafts."""
    stop = request.stop
    return expected_output(
        request.prompt.tolist(),
        stop.max_tokens,
        stop.stop_token_ids,
        request.sequences[0].seed,
        stop.min_tokens,
    )


def assert_plain(*requests: Request) -> None:
    for request in requests:
        assert request.sequences[0].error is None
        assert output_of(request)[0] == plain(request)


def widths(plans: list[StepPlan]) -> list[int]:
    return [plan.agreement.num_draft_tokens for plan in plans]


def limits(plan: StepPlan) -> list[int]:
    assert plan.limits is not None
    return plan.limits.tolist()


# ---- which steps draft, and what all ranks agree on


def test_a_step_of_decodes_drafts_and_one_with_a_prompt_does_not() -> None:
    world = stepper()
    first = world.submit(PROMPT, 9)
    assert widths([world.step(), world.step()]) == [0, 4]
    second = world.submit([4, 5], 2)
    mixed = world.step()
    assert widths([mixed]) == [0]
    assert mixed.batches[0].num_tokens is not None
    assert mixed.batches[0].num_tokens.tolist() == [1, 2]
    assert widths(world.run()) == [4]
    assert_plain(first, second)
    world.check_idle()


def test_a_chunk_on_one_rank_keeps_all_ranks_from_drafting() -> None:
    world = stepper(dp_size=2, max_num_batched_tokens=32)
    for number in (1, 2):
        world.submit([number] * 3, 20)
    world.step()
    world.submit([3] * 30, 2)
    plans = [world.step(), world.step(), world.step()]
    modes = [[batch.mode.name for batch in plan.batches] for plan in plans]
    assert sorted(modes[0]) == ["DECODE", "EXTEND"]
    assert widths(plans) == [0, 4, 4]


def test_every_rank_counts_the_width_for_each_of_its_sequences() -> None:
    world = stepper(dp_size=3, graph_sizes=GraphSizes(decode=(1, 2, 4)))
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
    world = stepper(max_num_batched_tokens=32, dp_size=2)
    world.submit([1] * 40, 4)
    first, second = world.step(), world.step()
    agreements = [first.agreement, second.agreement]
    assert [sorted(a.global_num_tokens_for_draft) for a in agreements] == [[0, 32], [0, 8 + 1]]
    assert [sorted(a.global_num_sampled) for a in agreements] == [[0, 0], [0, 1]]
    frozen = stepper(speculation=speculation(extends=False))
    frozen.submit(PROMPT)
    assert frozen.step().agreement.global_num_tokens_for_draft == ()


def test_a_group_without_a_draft_model_is_planned_as_ever() -> None:
    world = Stepper(make_shape())
    request = world.submit(PROMPT, 6)
    plans = world.run()
    assert len(plans) == 6
    assert not any(widths(plans))
    assert all(plan.agreement.global_num_tokens_for_draft == () for plan in plans)
    assert_plain(request)


def test_told_not_to_a_group_runs_its_draft_model_along_and_never_drafts() -> None:
    world = stepper(drafts=DraftSettings(is_on=False), speculation=speculation(kv_lookahead=4))
    request = world.submit(PROMPT, 6)
    plans = world.run()
    assert not any(widths(plans))
    assert [plan.agreement.global_num_tokens_for_draft for plan in plans] == [(4,)] + 5 * [(1,)]
    assert_plain(request)


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": SamplingParams(presence_penalty=0.5)},
        {"sampling": SamplingParams(repetition_penalty=1.1)},
        {"output": OutputOptions(logprobs=True)},
    ],
)
def test_rows_that_need_more_than_a_length_gain_one_token_beside_those_that_draft(
    fields: dict[str, object],
) -> None:
    world = stepper()
    careful = world.submit([7, 8], 6, **fields)  # type: ignore[arg-type]
    assert not any(widths([world.step(), world.step()]))  # nobody else is there: no drafts
    free = world.submit(PROMPT, 9)
    world.step()
    plan = world.step()
    assert plan.agreement.num_draft_tokens == 4
    assert limits(plan) == [1, 4]
    world.run()
    assert_plain(careful, free)
    if careful.output.logprobs:
        assert [score.token_id for score in careful.sequences[0].logprobs] == plain(careful)


def test_scores_go_to_their_tokens_behind_a_run_of_another_row() -> None:
    """The place of a token among all that came is not the place of its row any more."""
    world = stepper()
    free = world.submit(PROMPT, 20)
    careful = world.submit([7, 8], 9, output=OutputOptions(logprobs=True))
    world.run(depth=2)
    assert_plain(free, careful)
    assert [score.token_id for score in careful.sequences[0].logprobs] == plain(careful)


# ---- lengths that are not known yet


def test_a_row_is_planned_from_its_upper_bound_and_what_it_did_not_gain_is_taken_back() -> None:
    world = stepper(acceptance=0.0)
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
    world.run(depth=2)
    assert_plain(request)


def test_the_limit_falls_to_what_is_left_and_a_row_at_its_bound_waits() -> None:
    world = stepper(acceptance=0.0)
    request = world.submit(PROMPT, 8)
    world.step()
    assert [limits(plan) for plan in (world.plan(), world.plan()) if plan] == [[4], [3]]
    assert world.plan() is None  # 1 + 4 + 3 tokens may be all
    world.commit()
    plan = world.plan()
    assert plan is not None
    assert limits(plan) == [3]
    world.run(depth=2)
    assert_plain(request)
    world.check_idle()


def test_a_last_token_alone_is_not_worth_a_draft() -> None:
    world = stepper()
    request = world.submit(PROMPT, 6)
    assert widths(world.run()) == [0, 4, 0]
    assert_plain(request)


def test_the_budget_of_a_speculative_step_is_its_width_for_every_row() -> None:
    """Executors have room for it beside the budget, which bounds prompts."""
    world = stepper(rows_per_rank=8, max_num_batched_tokens=8, max_num_logits=8)
    requests = [world.submit([number], 20) for number in range(1, 9)]
    plans = world.run(depth=2)
    assert max(max(plan.agreement.global_num_tokens) for plan in plans) == 8 * 4
    assert_plain(*requests)
    step = next(plan.agreement for plan in plans if plan.limits is not None)
    with pytest.raises(AssertionError, match="planned 33 tokens on a rank; the budget is 32"):
        world.shape.check(replace(step, global_num_tokens=(33,)))


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_output_is_that_of_plain_steps_at_any_depth(depth: int, acceptance: float) -> None:
    world = stepper(acceptance, speculation=speculation(num_reserved_tokens=9, kv_lookahead=1))
    requests = [world.submit([n, 2 * n, 5], 5 + 6 * n) for n in (1, 2, 3, 4)]
    plans = world.run(depth)
    assert 4 in widths(plans)
    assert_plain(*requests)
    world.check_idle()


def test_accepted_drafts_save_steps() -> None:
    world = stepper()
    world.submit(PROMPT, 41)
    assert len(world.run()) == 1 + 10


def test_a_sequence_knows_what_was_offered_to_it_and_accepted() -> None:
    world = stepper()
    request = world.submit(PROMPT, 9)
    world.run()
    progress = request.sequences[0].progress
    assert (progress.num_drafts, progress.num_accepted_drafts) == (6, 6)

    refusing = stepper(0.0)
    request = refusing.submit(PROMPT, 4)
    refusing.run()
    progress = request.sequences[0].progress
    assert (progress.num_drafts, progress.num_accepted_drafts) == (2 + 1, 0)


def test_tokens_that_come_together_have_no_time_between_them() -> None:
    world = stepper()
    world.submit(PROMPT, 9)
    for now in (1.0, 2.0, 5.0):
        world.now = now
        world.step()
    gaps = world.measures.inter_token_s
    assert sum(gaps.counts) == 8
    assert gaps.total == 4.0


# ---- stops inside a run


def stop_at(place: int, prompt: list[int] = PROMPT) -> int:
    """A token that an output has at this place and not before, so that it can be a stop token."""
    output = expected_output(prompt, 40, ())
    assert output[place] not in output[:place]
    return output[place]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("place", range(7))
def test_a_stop_token_ends_the_output_wherever_in_a_run_it_stands(place: int, depth: int) -> None:
    world = stepper()
    request = world.submit(PROMPT, 30, stop_token_ids=(stop_at(place),))
    other = world.submit([9, 9, 4], 25)
    world.run(depth)
    assert output_of(request)[0] == expected_output(PROMPT, 1 + place, ())
    assert request.sequences[0].finish_reason is FinishReason.STOP
    assert request.sequences[0].stop_token_id == stop_at(place)
    assert_plain(other)
    world.check_idle()


def test_of_two_stop_tokens_in_a_run_the_first_counts() -> None:
    world = stepper()
    request = world.submit(PROMPT, 30, stop_token_ids=(stop_at(4), stop_at(2)))
    world.run()
    assert request.sequences[0].stop_token_id == stop_at(2)
    assert len(output_of(request)[0]) == 3


def test_below_its_least_length_a_sequence_gains_one_token_at_a_time() -> None:
    """Which stop tokens are suppressed changes within a run, and drafts do not know it."""
    world = stepper()
    request = world.submit(PROMPT, 30, min_tokens=3)
    other = world.submit([5, 5], 30)
    world.step()
    assert [limits(world.step()) for _ in range(3)] == [[1, 4], [1, 4], [4, 4]]
    world.run()
    assert_plain(request, other)


@pytest.mark.parametrize("min_tokens", [3, 4, 5])
def test_no_stop_token_counts_below_the_least_length_also_inside_a_run(min_tokens: int) -> None:
    world = stepper()
    output = expected_output(PROMPT, 40, ())
    stops = (output[2], output[3], output[4])
    request = world.submit(PROMPT, 30, stop_token_ids=stops, min_tokens=min_tokens)
    world.run()
    assert len(output_of(request)[0]) == min_tokens
    assert_plain(request)


def test_many_stop_tokens_cut_a_run_as_few_do() -> None:
    world = stepper()
    unseen = tuple(range(VOCAB_SIZE, VOCAB_SIZE + NUM_STOP_IDS))
    request = world.submit(PROMPT, 30, stop_token_ids=(*unseen, stop_at(3)))
    world.run()
    assert output_of(request)[0] == expected_output(PROMPT, 4, ())
    assert request.sequences[0].stop_token_id == stop_at(3)


class Text:
    """A TextStream that is fed token by token, and stops at the tokens given."""

    def __init__(self, *stops: int) -> None:
        self.fed: list[int] = []
        self._stops = stops

    def feed(self, token_ids: np.ndarray, *, may_stop: bool) -> str | None:
        self.fed += token_ids.tolist()
        return f"<{self.fed[-1]}>" if may_stop and self.fed[-1] in self._stops else None


def test_a_stop_string_cuts_a_run_and_sees_nothing_of_what_follows() -> None:
    world = stepper()
    request = world.submit(PROMPT, 30, has_stop_strings=True)
    text = request.sequences[0].text = Text(stop_at(6))
    world.run(depth=2)
    assert output_of(request)[0] == text.fed == expected_output(PROMPT, 7, ())
    assert request.sequences[0].stop_string == f"<{stop_at(6)}>"
    world.check_idle()


def test_a_reader_gets_each_run_whole_and_nothing_behind_a_stop() -> None:
    world = stepper()
    stopping = world.submit(PROMPT, 30, stop_token_ids=(stop_at(6),), is_columnar=True)
    going_on = world.submit([9, 9, 4], 9, is_columnar=True)
    got: dict[int, list[int]] = {stopping.tag: [], going_on.tag: []}
    sizes = []
    for _ in range(3):
        world.step()
        columns = world.table.take_columns(world.reader.index)
        sizes.append(columns.num_tokens.tolist())
        tokens = iter(columns.token_ids.tolist())
        for tag, count in zip(columns.tags.tolist(), columns.num_tokens.tolist(), strict=True):
            got[tag] += itertools.islice(tokens, count)
    assert sizes == [[1, 1], [4, 4], []]  # both end in the third: the rest comes with the end
    for request in (stopping, going_on):
        got[request.tag] += request.sequences[0].take_tokens().tolist()
        assert got[request.tag] == output_of(request)[0] == plain(request)


def test_a_cancelled_sequence_gets_nothing_of_a_run_that_comes_later() -> None:
    world = stepper()
    request = world.submit(PROMPT, 30)
    other = world.submit([4, 4], 12)
    world.step()
    world.plan()
    world.scheduler.fail(request.sequences[0], Cancelled("enough"))
    assert len(output_of(request)[0]) == 1
    world.commit()
    assert len(output_of(request)[0]) == 1
    world.run(depth=2)
    assert_plain(other)
    world.check_idle()


# ---- KV


def test_a_speculative_step_has_blocks_for_all_that_it_writes() -> None:
    world = stepper(speculation=speculation(num_reserved_tokens=11))
    world.submit(PROMPT, 40)
    world.step()
    assert world.table.num_blocks[0] == 1
    world.plan()
    assert world.table.num_blocks[0] == -(-(3 + 11) // 4)
    world.plan()
    assert world.table.num_blocks[0] == -(-(7 + 11) // 4)  # by the upper bound


def test_blocks_for_drafts_end_where_the_sequence_must() -> None:
    world = stepper(speculation=speculation(num_reserved_tokens=40))
    world.submit(PROMPT, 8)
    world.step()
    world.plan()
    assert world.table.num_blocks[0] == -(-(3 + 8) // 4)


@pytest.mark.parametrize("lookahead", [0, 1, 6])
def test_a_plain_step_has_blocks_as_far_as_the_draft_model_looks_ahead(lookahead: int) -> None:
    world = stepper(speculation=speculation(kv_lookahead=lookahead))
    world.submit([1] * 8, 30)
    plan = world.step()
    assert plan.limits is None
    assert world.table.num_blocks[0] == -(-(8 + lookahead) // 4)


def test_a_chunk_that_does_not_sample_looks_at_nothing_ahead() -> None:
    world = stepper(speculation=speculation(kv_lookahead=6))
    world.submit([1] * 40, 4)
    world.step()
    assert world.table.num_blocks[0] == 32 // 4


def test_short_of_blocks_a_row_drafts_less_and_nobody_loses_a_place() -> None:
    """Two rows of 2 blocks each and 1 spare: neither may take it for drafts."""
    world = stepper(num_blocks=1 + 5, max_model_len=20)
    requests = [world.submit([number] * 6, 6) for number in (1, 2)]
    world.step()
    plan = world.step()
    assert limits(plan) == [2, 2]  # up to the end of the blocks that they have
    assert world.table.num_blocks[:2].tolist() == [2, 2]
    assert sum(world.scheduler.num_preemptions) == 0
    world.run(depth=2)
    assert_plain(*requests)
    world.check_idle()


def test_only_a_missing_block_for_a_first_token_preempts() -> None:
    world = stepper(num_blocks=1 + 7, max_model_len=28)
    requests = [world.submit([number] * 8, 12) for number in (1, 2, 3)]
    plans = world.run(depth=2)
    assert 4 in widths(plans)
    assert sum(world.scheduler.num_preemptions) > 0
    assert_plain(*requests)
    world.check_idle()


def test_the_last_blocks_are_left_for_the_next_tokens_of_all() -> None:
    """What one row could take for drafts, another needs before long."""
    world = stepper(num_blocks=1 + 8, max_model_len=32, speculation=speculation())
    first, second = world.submit([1] * 7, 9), world.submit([2] * 7, 9)
    world.step()  # 2 blocks each, and 4 are left
    world.plan()
    assert world.table.num_blocks[:8].tolist() == [3, 3, 0, 0, 0, 0, 0, 0]
    world.run(depth=2)
    assert sum(world.scheduler.num_preemptions) == 0
    assert_plain(first, second)


def test_what_a_stop_left_behind_is_never_found_in_the_prefix_cache() -> None:
    """A run was computed past the stop: its blocks are full, but not of the sequence's tokens."""
    world = stepper()
    place = 6
    request = world.submit(PROMPT, 30, stop_token_ids=(stop_at(place),))
    world.run(depth=2)
    kept = [*PROMPT, *output_of(request)[0]]
    assert len(kept) == 10
    for tail in ([], [11, 12, 13, 14, 15], [plain(world.submit(PROMPT, 12))[7], 1, 1, 1]):
        follower = world.submit([*kept, *tail], 9)
        world.run(depth=2)
        assert follower.sequences[0].progress.num_cached_tokens == 8
        assert_plain(follower)
    world.check_idle()


def test_blocks_that_a_row_may_have_filled_with_drafts_are_not_in_the_prefix_cache() -> None:
    """By the upper bound of its length they would be full, of tokens that nobody knows."""
    world = stepper(0.0)
    request = world.submit(PROMPT, 30)
    world.step()
    world.plan()
    world.plan()
    assert world.table.num_computed[0] == 11
    known = [*PROMPT, *output_of(request)[0]]
    unknown = world.table.tokens[0, 4:8].tolist()
    world.scheduler.fail(request.sequences[0], Cancelled("enough"))
    world.run(depth=2)
    follower = world.submit([*known, *unknown, 5, 6], 9)
    world.run(depth=2)
    assert follower.sequences[0].progress.num_cached_tokens == 4
    assert_plain(follower)


def test_a_preempted_sequence_goes_on_from_what_it_really_gained() -> None:
    world = stepper(acceptance=0.5, num_blocks=1 + 9, max_model_len=36)
    requests = [world.submit([number] * 5, 25, priority=number) for number in (1, 2, 3)]
    world.run(depth=2)
    assert sum(request.sequences[0].progress.num_preemptions for request in requests) > 0
    assert_plain(*requests)
    for request in requests:
        progress = request.sequences[0].progress
        assert 0 < progress.num_accepted_drafts < progress.num_drafts
    world.check_idle()


# ---- whether drafts pay


def test_a_group_whose_drafts_fail_runs_plain_steps_and_tries_again() -> None:
    sizes = {"max_model_len": 1000, "num_blocks": 300}
    world = stepper(0.0, DraftSettings(min_tokens_per_step=1.5), **sizes)
    request = world.submit(PROMPT, 990)
    runs = [(key, len(list(run))) for key, run in itertools.groupby(widths(world.run()))]
    assert runs[:5] == [(0, 1), (4, PROBE_STEPS), (0, PAUSE_STEPS), (4, PROBE_STEPS), (0, 445)]
    assert_plain(request)


def test_a_group_whose_drafts_are_accepted_goes_on_drafting() -> None:
    sizes = {"max_model_len": 1000, "num_blocks": 300}
    world = stepper(1.0, DraftSettings(min_tokens_per_step=1.5), **sizes)
    world.submit(PROMPT, 990)
    assert set(widths(world.run())[1:-1]) == {4}


# ---- at random


@pytest.mark.parametrize("seed", range(40))
def test_nothing_breaks_between_any_two_calls(seed: int) -> None:
    rng = random.Random(seed)
    num_steps = rng.choice([1, 3])
    width = 1 + num_steps * rng.choice([1, 2])
    world = stepper(
        rng.choice([0.0, 0.4, 0.8, 1.0]),
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
    world.run(depth)
    assert_plain(*requests)
    world.check_idle()
