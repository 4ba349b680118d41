"""If these fail, answers stand still for longer than they may, or prompts wait while there is time."""

import math
import random
from itertools import pairwise

import pytest

from router.scheduling.step_budget import (
    Budget,
    BudgetSettings,
    Hold,
    Offer,
    Prices,
    Prompt,
    Why,
    fill,
    gap_range,
    open_budget,
    seconds_of,
)

PRICES = Prices(8e-3, 4e-3, 6e-6, 14e-6, 27e-9, 1.6e-9)
SETTINGS = BudgetSettings()
MAX_TOKENS = 8192


def budget_of(
    decodes: list[int], backlog: float = 0, settings: BudgetSettings = SETTINGS
) -> Budget:
    kv = [1000 * num for num in decodes]
    return open_budget(settings, PRICES, decodes, kv, backlog, MAX_TOKENS)


def prompts_of(*lengths: list[int], done: int = 0) -> list[list[Prompt]]:
    return [
        [Prompt((float(i), i, 0), length, done, i) for i, length in enumerate(rank)]
        for rank in lengths
    ]


@pytest.mark.parametrize("seed", range(20))
def test_more_prompts_take_no_longer_than_one_of_all_their_tokens_on_one_rank(seed: int) -> None:
    """Wherever they go, and whatever of them is cached."""
    rng = random.Random(seed)
    num_ranks = rng.randint(1, 4)
    budget, before = budget_of([10] * num_ranks), prompts_of(*[[50]] * num_ranks)
    after, num_more = [list(rank) for rank in before], 0
    for _ in range(rng.randint(1, 4)):
        left, done = rng.choice([10, 500, 6000]), rng.choice([0, 0, 3000])
        rng.choice(after).append(Prompt((1.0, 0, 0, 0), left, done, 0))
        num_more += left + done
    longest_s, least_s = (
        seconds_of(budget, prompts, [sum(each.left for each in rank) for rank in prompts])
        for prompts in (after, before)
    )
    assert longest_s - least_s <= PRICES.most(num_more) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_a_level_takes_the_budget_and_not_more_or_all_that_there_is(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks = rng.randint(1, 8)
    decodes = [rng.randint(0, 200) for _ in range(num_ranks)]
    prompts = prompts_of(
        *[[rng.randint(1, 9000) for _ in range(rng.choice([0, 1, 3]))] for _ in range(num_ranks)],
        done=rng.choice([0, 20_000]),
    )
    budget = budget_of(decodes, rng.randint(0, 100_000))
    counts = fill(budget, prompts, 128)
    assert all(num <= free for num, free in zip(counts, budget.num_free, strict=True))
    sums = [sum(prompt.left for prompt in rank) for rank in prompts]
    assert all(min(most, 128) <= num <= most for num, most in zip(counts, sums, strict=True))
    seconds = seconds_of(budget, prompts, counts)
    # What little is left of a prompt runs along, and so does the least chunk.
    assert seconds <= 1.09 * budget.seconds + 128 * PRICES.token + 128 * 30_000 * PRICES.pair
    if any(num < min(most, MAX_TOKENS / 2) for num, most in zip(counts, sums, strict=True)):
        assert seconds > 0.97 * budget.seconds


def test_ranks_with_much_kv_and_prompts_that_stand_far_back_run_fewer_tokens() -> None:
    even = fill(budget_of([10, 10]), prompts_of([9000], [9000]), 128)
    assert even[0] == even[1]
    [short, long] = fill(budget_of([10, 250]), prompts_of([9000], [9000]), 128)
    assert short > long
    [_, deep] = fill(
        budget_of([10, 10]), [*prompts_of([9000]), *prompts_of([9000], done=25_000)], 9
    )
    assert deep < even[1]
    [lone, _] = fill(budget_of([10, 10]), prompts_of([9000], []), 128)
    assert lone > 1.3 * even[0]  # the experts are all ranks'


def test_the_gap_widens_smoothly_with_the_backlog_up_to_its_bound() -> None:
    seconds = [budget_of([50] * 8, backlog).seconds for backlog in range(0, 400_000, 1000)]
    assert seconds[0] == 0.05
    assert seconds[-1] == 0.2
    assert seconds == sorted(seconds)
    steps = [after - before for before, after in pairwise(seconds)]
    assert max(steps) < 0.03
    bounded = BudgetSettings(max_token_gap_ms=50.0)
    assert budget_of([50] * 8, 400_000, bounded).seconds == 0.05
    assert budget_of([0] * 8).seconds == 0.08  # nobody waits for it


def test_answers_that_wait_to_go_on_have_the_widest_gap_at_once_whether_or_not_others_decode() -> (
    None
):
    assert [budget_of([num] * 2, math.inf).seconds for num in (0, 50)] == [0.2, 0.2]


def test_where_tokens_take_long_the_widest_gap_has_room_for_some_of_each_rank() -> None:
    """So a long prompt does not run in steps that are mostly their own fixed part."""
    slow = PRICES._replace(base=0.06, row=2e-3, mean=2e-3, pair=1e-6)
    budget = open_budget(SETTINGS, slow, [4, 4], [4000, 4000], 100_000, MAX_TOKENS)
    counts = fill(budget, prompts_of([1900], [1900]), 128)
    assert min(counts) > 350
    assert budget.seconds == slow.base + slow.prompts + 400 * slow.unit
    bounded = BudgetSettings(max_token_gap_ms=700.0)
    assert open_budget(bounded, slow, [4, 4], [0, 0], 100_000, MAX_TOKENS).seconds == 0.7


def test_what_prompts_seem_to_take_whatever_they_are_widens_the_gap_by_no_more_than_the_base() -> (
    None
):
    """Of chunks that are alike, as under pressure, it may be learnt in place of what tokens take."""
    prices = PRICES._replace(base=0.06, prompts=0.06, row=1e-3, mean=1e-3)
    misread = prices._replace(prompts=0.8, row=1e-9, mean=1e-9)
    assert gap_range(SETTINGS, misread)[0] == gap_range(SETTINGS, prices)[0]
    assert gap_range(SETTINGS, misread)[1] <= gap_range(SETTINGS, prices)[1]
    assert gap_range(SETTINGS, prices._replace(prompts=0.01)) < gap_range(SETTINGS, prices)


def test_however_slow_steps_are_without_prompts_some_of_these_run() -> None:
    slow, settings = PRICES._replace(base=0.3), BudgetSettings(target_token_gap_ms=50.0)
    for decodes in ([9, 9], [0, 0]):
        budget = open_budget(settings, slow, decodes, [0, 0], 0, MAX_TOKENS)
        counts = fill(budget, prompts_of([4000], [4000]), 128)
        assert min(counts) == (128 if any(decodes) else 4000)


def new_hold() -> Hold:
    """One that has just run some prompts."""
    hold = Hold(SETTINGS, 0.0)
    hold.note([0, 0], 0.0)
    return hold


def decide(hold: Hold, now: float, decodes: int, *lengths: list[int], bound: float = 0.0) -> Why:
    prompts = prompts_of(*lengths)
    budget = budget_of([decodes] * len(lengths))
    counts = fill(budget, prompts, 128)
    return hold.decide(Offer.of(budget, prompts, counts), now, oldest=bound, num_stuck=0)


def test_prompts_run_at_once_where_nobody_decodes_or_they_fill_the_step() -> None:
    assert decide(new_hold(), 0.0, 0, [200], []) is Why.NO_DECODES
    assert decide(new_hold(), 0.0, 100, [3000], [3000]) is Why.FULL


@pytest.mark.parametrize("num_decodes", [1, 30, 200, 400])
def test_a_prompt_is_held_the_longer_the_more_decodes_it_costs_and_never_beyond_its_target(
    num_decodes: int,
) -> None:
    hold, now = new_hold(), 0.0
    while decide(hold, now, num_decodes, [200], *[[]] * 7) is Why.HELD:
        now += 0.01
    # What all decodes lose, in seconds, over the weight: 4 ms for prompts, and the excess of one rank.
    waste_s = PRICES.prompts + PRICES.row * 200 * 7 / 8
    cost_s = 8 * num_decodes * waste_s / SETTINGS.first_token_weight
    assert now == pytest.approx(min(cost_s, 0.5), abs=0.011)


def test_prompts_of_a_full_group_run_when_their_empty_rows_have_cost_what_the_step_will() -> None:
    """In each step of 12 ms, 4 of 120 rows end: most are served with prompts in every
    sqrt(2 * 4 ms * 120 / (4 * 12 ms)) = 4.5th step, whoever waits."""
    hold, num_steps, why = new_hold(), 0, Why.HELD
    while why is Why.HELD:
        num_steps += 1
        ended = [32] * 2 * num_steps  # of each rank; others took their rows
        budget = budget_of([60 - len(ended)] * 2, 400 * 32)
        counts, now = [sum(ended)] * 2, 0.012 * num_steps
        offer = Offer.of(budget, prompts_of(ended, ended), counts)
        why = hold.decide(offer, now, oldest=0.0, num_stuck=400)
    assert why is Why.DEBT
    assert 3 <= num_steps <= 6


def test_a_prompt_after_a_time_without_any_runs_at_once() -> None:
    hold = new_hold()
    for now in range(10):
        hold.skip(now / 10)
    assert decide(hold, 1.0, 250, [200], [], bound=1.0) is Why.DUE


def test_what_one_rank_has_more_is_trimmed_only_where_many_decodes_pay_for_it() -> None:
    prompts = prompts_of([3000], *[[400]] * 7)
    for num_decodes, is_trimmed in ((1, False), (250, True)):
        hold, budget = new_hold(), budget_of([num_decodes] * 8)
        for now in range(100):
            hold.note([800] * 8, now / 10)
        counts = fill(budget, prompts, 128)
        trimmed = hold.trim(budget, prompts, counts, num_stuck=0)
        assert (trimmed != counts) == is_trimmed
        assert all(128 <= after <= before for after, before in zip(trimmed, counts, strict=True))
        assert trimmed[1:] == counts[1:]


@pytest.mark.parametrize(
    ("fixed_ms", "settings", "expected_ms"),
    [
        (12.0, {}, (50, 200)),
        (40.0, {}, (225, 375)),
        (120.0, {}, (500, 1025)),
        (120.0, {"target_first_token_ms": 700.0}, (700, 1525)),
        (400.0, {}, (1600, 3775)),
        (40.0, {"target_token_gap_ms": 50.0}, (50, 200)),
        (40.0, {"max_token_gap_ms": 80.0}, (80, 80)),
        (12.0, {"max_token_gap_ms": 80.0}, (50, 80)),
    ],
)
def test_a_model_whose_steps_are_long_whatever_they_run_gets_a_longer_target(
    fixed_ms: float, settings: dict[str, float], expected_ms: tuple[float, float]
) -> None:
    prices = PRICES._replace(base=0.75e-3 * fixed_ms, prompts=0.25e-3 * fixed_ms)
    for backlog, each_ms in zip((0, 10**6), expected_ms, strict=True):
        budget = open_budget(BudgetSettings(**settings), prices, [9], [0], backlog, MAX_TOKENS)
        assert budget.seconds == pytest.approx(each_ms / 1e3)
