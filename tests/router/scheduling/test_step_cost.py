"""If these fail, the router plans by step times that its executors do not take."""

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from router.scheduling.step import (
    NOTHING,
    Agreement,
    PaddingMode,
    StepPlan,
    StepResult,
)
from router.scheduling.step_cost import KNOWN_STEPS, PARTS, SCALES, START, StepCost, StepCosts
from tests.router.support.plans import NO_DECODES, join_batches

# 30B-A3B on H200: ms of a step, and of one with prompts; us of a token; ns of KV and of a pair.
TRUE = {"base": 8e-3, "prompts": 4e-3, "row": 6e-6, "mean": 14e-6, "kv": 27e-9, "pair": 1.6e-9}
NUM_RANKS = 8


def step(tokens: list[int], kv: list[int], pairs: list[float] | None) -> StepPlan:
    mode = PaddingMode.MAX_LEN if pairs is None else PaddingMode.SUM_LEN
    agreement = Agreement(tuple(tokens), tuple(tokens), pairs is not None, mode, None)
    num_pairs = None if pairs is None else np.array(pairs)
    plan = join_batches([NO_DECODES] * len(tokens))
    return plan._replace(agreement=agreement, kv_tokens=np.array(kv), num_pairs=num_pairs)


def seconds(plan: StepPlan, cost: dict[str, float] = TRUE) -> float:
    """The formula, worked out rank by rank."""
    tokens = list(plan.agreement.global_num_tokens)
    if plan.num_pairs is None:
        tokens = [max(tokens)] * len(tokens)
    pairs = [0.0] * len(tokens) if plan.num_pairs is None else plan.num_pairs.tolist()
    own = [
        cost["row"] * n + cost["kv"] * k + cost["pair"] * a
        for n, k, a in zip(tokens, plan.kv_tokens.tolist(), pairs, strict=True)
    ]
    prompts = cost["prompts"] * plan.agreement.has_extend
    return cost["base"] + prompts + max(own) + cost["mean"] * sum(tokens) / len(tokens)


def steps(rng: random.Random, count: int) -> Iterator[StepPlan]:
    """Steps of ranks that decode up to 100 sequences; a half of them run prompts on some ranks."""
    for _ in range(count):
        decodes = [rng.randint(5, 100) for _ in range(NUM_RANKS)]
        kv = [num * rng.randint(200, 4000) for num in decodes]
        if rng.random() < 0.5:
            yield step(decodes, kv, None)
            continue
        chunks = [rng.choice([0, rng.randint(100, 4000)]) for _ in range(NUM_RANKS)]
        pairs = [chunk * (rng.randint(0, 20_000) + chunk / 2) for chunk in chunks]
        yield step([*map(sum, zip(decodes, chunks, strict=True))], kv, pairs)


def learn(cost: StepCost, rng: random.Random, count: int, factor: float = 1.0) -> None:
    """Shows it steps with noise of 2 %; of each hundred, one takes half as long again."""
    for plan in steps(rng, count):
        spike = 1.5 if rng.random() < 0.01 else 1.0
        cost.add(plan, factor * spike * seconds(plan) * rng.lognormvariate(0, 0.02))


def mean_error(cost: StepCost, rng: random.Random, factor: float = 1.0) -> float:
    errors = [abs(cost.predict(p) / (factor * seconds(p)) - 1) for p in steps(rng, 200)]
    return sum(errors) / len(errors)


@pytest.mark.parametrize("start", [0.25, 1.5, 4.0])
def test_coefficients_are_learnt_from_a_wrong_start(start: float) -> None:
    rng = random.Random(1)
    cost = StepCost([start * each for each in START])
    learn(cost, rng, 1400)
    assert cost.coefficients() == pytest.approx(TRUE, rel=0.08)
    assert mean_error(cost, rng) < 0.01
    assert 0.01 < cost.error < 0.04  # what noise and spikes leave
    assert 1.02 < cost.margin < 1.08  # 0.95 quantile of the noise, and of spikes


def test_a_group_that_becomes_twice_as_slow_is_believed_within_256_steps() -> None:
    rng, cost = random.Random(2), StepCost()
    learn(cost, rng, 1400)
    learn(cost, rng, 256, factor=2.0)
    assert mean_error(cost, rng, factor=2.0) < 0.02


@pytest.mark.parametrize("factor", [0.5, 1.7, 2.0])
def test_the_first_five_steps_of_an_epoch_say_what_those_of_its_group_take(factor: float) -> None:
    errors = []
    for seed in range(12):
        rng, cost = random.Random(seed), StepCost()
        learn(cost, rng, 600)
        cost.begin_epoch()
        learn(cost, rng, 5, factor)
        errors.append(mean_error(cost, rng, factor))
    assert np.mean(errors) < 0.2


def test_a_step_that_stood_still_is_not_learnt_from_unless_all_do() -> None:
    rng, cost = random.Random(3), StepCost()
    learn(cost, rng, 400)
    before, [plan] = cost.coefficients(), steps(rng, 1)
    for _ in range(7):
        cost.add(plan, 5 * seconds(plan))
    assert cost.coefficients() == before
    learn(cost, rng, 200, factor=5.0)
    assert mean_error(cost, rng, factor=5.0) < 0.03


def test_ranks_that_always_run_alike_do_not_have_a_part_that_takes_less_than_nothing() -> None:
    rng, cost, errors = random.Random(7), StepCost(), []
    for number in range(600):
        tokens = rng.choice((40, 140, 1000, 2000)) if number % 2 else 16
        pairs = [500.0 * tokens] * 2 if tokens > 16 else None
        plan = step([tokens] * 2, [rng.randint(500, 5000)] * 2, pairs)
        took = seconds(plan) * rng.lognormvariate(0, 0.2) * (3 if rng.random() < 0.05 else 1)
        errors.append(abs(cost.predict(plan) / seconds(plan) - 1))
        cost.add(plan, took)
    assert np.mean(errors[100:]) < 0.15
    assert max(errors[100:]) < 0.6


def test_an_hour_without_prompts_leaves_what_is_known_of_them() -> None:
    rng, cost = random.Random(4), StepCost()
    learn(cost, rng, 1400)
    for _ in range(20_000):
        plan = step([50] * NUM_RANKS, [50_000] * NUM_RANKS, None)
        cost.add(plan, seconds(plan) * rng.lognormvariate(0, 0.02))
    assert np.isfinite(list(cost.coefficients().values())).all()
    assert mean_error(cost, rng) < 0.05
    learn(cost, rng, 200)
    assert mean_error(cost, rng) < 0.02


def test_how_often_somebody_asks_changes_nothing() -> None:
    rng, asked, unasked = random.Random(6), StepCost(), StepCost()
    for number, plan in enumerate(steps(rng, 600)):
        took = seconds(plan) * (2 if number > 300 else 1) * rng.lognormvariate(0, 0.02)
        asked.add(plan, took)
        unasked.add(plan, took)
        assert asked.margin >= 1
    assert asked.coefficients() == unasked.coefficients()
    assert (asked.margin, asked.error) == (unasked.margin, unasked.error)


@pytest.mark.parametrize("num_plain", [0, KNOWN_STEPS, 1000])
def test_nobody_goes_by_it_before_enough_steps_were_seen(num_plain: int) -> None:
    cost = StepCost()
    for number in range(num_plain + max(KNOWN_STEPS, 2 * KNOWN_STEPS - num_plain)):
        assert not cost.is_known
        cost.add(step([9] * 2, [90] * 2, None if number < num_plain else [40.0] * 2), 0.01)
    assert cost.is_known


def test_padded_rows_count_as_rows() -> None:
    cost = StepCost()
    plain = step([10, 2], [0, 0], None)
    even = step([10, 10], [0, 0], None)
    assert cost.predict(plain) == cost.predict(even)
    graph = Agreement((10, 2), (10, 2), False, PaddingMode.MAX_LEN, 16)
    per_row = sum(START[i] * SCALES[i] for i in map(PARTS.index, ("row", "mean")))
    padded = plain._replace(agreement=graph)
    assert cost.predict(padded) - cost.predict(plain) == pytest.approx(6 * per_row)


def test_an_epoch_of_the_same_kind_keeps_what_is_known() -> None:
    costs, rng = StepCosts(), random.Random(5)
    costs.begin_epoch("30b")
    learn(costs.plain, rng, 100)
    known = costs.plain.coefficients()
    costs.begin_epoch("30b")
    assert costs.plain.is_known
    assert costs.plain.coefficients() == known
    costs.begin_epoch("r1")
    assert not costs.plain.is_known
    assert costs.plain.coefficients() != known


def test_a_speculative_step_is_priced_by_what_its_rows_would_take_without_drafts() -> None:
    costs, rng = StepCosts(), random.Random(0)
    rows = [20, 40, *[10] * (NUM_RANKS - 2)]
    plain = step(rows, [50_000] * NUM_RANKS, None)
    agreement = replace(plain.agreement, num_draft_tokens=4, graph_size=40)
    drafted = plain._replace(agreement=agreement, num_sampled=rows)
    answer = StepResult(NOTHING, None, [0], forward_ns=[int(3 * seconds(plain) * 1e9)])
    assert costs.add(drafted, answer) is None
    learn(costs.plain, rng, 600)
    assert costs.add(drafted, answer) == pytest.approx(3, rel=0.05)
    assert costs.add(plain, answer) is None


@pytest.mark.parametrize("shortest_s", [1e-9, 4e-5])
@pytest.mark.parametrize("longest_s", [1e-9, 1.0, 2.0**44 * 1e-9])
def test_times_that_no_step_takes_are_learnt_from_too(shortest_s: float, longest_s: float) -> None:
    """An executor may report any, of steps that are all alike or not."""
    rng, cost = random.Random(1), StepCost()
    for plan in [*steps(rng, 300), *300 * [step([1], [0], None)]]:
        cost.add(plan, rng.choice([shortest_s, longest_s]))
        assert 0 < cost.predict(plan) < 1e9
