"""If these fail, a group drafts where that costs more than it saves, or never tries again."""

import random

import pytest

from router.scheduling.speculation import (
    PAUSE_STEPS,
    PROBE_STEPS,
    DraftCounts,
    DraftGate,
    DraftSettings,
    GateState,
)
from tests.router.support.stepper import speculation


def gate_of(min_tokens_per_step: float = 1.5, *, is_on: bool = True) -> DraftGate:
    return DraftGate(
        DraftSettings(
            speculation="on" if is_on else "off", min_tokens_per_draft_step=min_tokens_per_step
        )
    )


def pause(gate: DraftGate) -> None:
    """Lets drafts fail until they are not wanted."""
    for _ in range(PROBE_STEPS):
        assert gate.wants_drafts()
        gate.add(8, 8)
    assert gate.state is GateState.PAUSED


# ---- what a group can draft


def test_a_path_and_the_token_behind_it_are_the_most_that_a_step_gains() -> None:
    assert speculation().max_gain == 4
    tree = speculation(num_draft_tokens=13, num_draft_steps=3, topk=4, num_reserved_tokens=20)
    assert tree.max_gain == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_draft_tokens": 1}, "num_draft_tokens=1: .* need 2 or more"),
        ({"num_draft_steps": 4}, "num_draft_steps=4: .* num_draft_tokens=4.* need 1 to 3"),
        ({"num_draft_steps": 0}, "num_draft_steps=0: .* need 1 to 3"),
        ({"topk": 0}, "topk=0: need 1"),
        ({"num_reserved_tokens": 3}, "num_reserved_tokens=3: a step may add 4 tokens"),
    ],
)
def test_what_makes_no_sense_is_said_with_what_would(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        speculation(**fields)


def test_counts_add_up() -> None:
    assert DraftCounts(1, 6, 2) + DraftCounts(2, 5, 5) == DraftCounts(3, 11, 7)


# ---- whether drafts pay


def test_drafts_are_judged_only_once_there_are_some_steps_to_go_by() -> None:
    gate = gate_of()
    assert gate.tokens_per_step is None
    for _ in range(PROBE_STEPS - 1):
        gate.add(8, 8)
    assert gate.wants_drafts()
    gate.add(8, 8)
    assert not gate.wants_drafts()


def test_drafts_that_pay_go_on() -> None:
    gate = gate_of(1.4)
    for _ in range(10 * PROBE_STEPS):
        assert gate.wants_drafts()
        gate.add(10, 15)
    assert gate.tokens_per_step == pytest.approx(1.5)


def test_a_step_counts_for_as_many_rows_as_it_has() -> None:
    """One lucky row does not outweigh a hundred."""
    gate = gate_of()
    for _ in range(PROBE_STEPS // 2):
        gate.add(1, 4)
        gate.add(100, 100)
    assert gate.tokens_per_step is not None
    assert 1 < gate.tokens_per_step < 1.1
    assert gate.state is GateState.PAUSED


@pytest.mark.parametrize(("price", "pays"), [(1.9, True), (2.1, False)])
def test_once_steps_are_timed_drafts_pay_by_what_they_take(price: float, pays: bool) -> None:
    for least, is_heard in ((1.5, True), (3.0, True), (1.0, False)):
        gate = gate_of(least)
        for _ in range(2 * PROBE_STEPS):
            gate.add(8, 16, price)
        assert (gate.state is GateState.DRAFTING) == (pays or not is_heard)


def test_traffic_that_changes_is_noticed() -> None:
    gate = gate_of()
    for _ in range(1000):
        gate.add(8, 32)
    steps = 0
    while gate.state is GateState.DRAFTING:
        gate.add(8, 8)
        steps += 1
    assert 50 < steps < 250  # not at once, and not after as many as there were


def test_after_a_pause_drafts_are_tried_again_and_judged_by_what_comes_then() -> None:
    gate = gate_of()
    for _ in range(3):
        pause(gate)
        assert [gate.wants_drafts() for _ in range(PAUSE_STEPS)] == [False] * PAUSE_STEPS
        assert gate.wants_drafts()
    for _ in range(PROBE_STEPS - 1):
        gate.add(8, 24)
    assert gate.tokens_per_step == pytest.approx(3.0)
    assert gate.wants_drafts()


def test_answers_of_steps_in_flight_end_no_pause_and_start_no_other() -> None:
    gate = gate_of()
    pause(gate)
    left = [gate.wants_drafts() for _ in range(10)]
    gate.add(8, 8)
    gate.add(8, 32)
    left += [gate.wants_drafts() for _ in range(PAUSE_STEPS - 10)]
    assert not any(left)
    assert gate.wants_drafts()


def test_a_least_of_one_token_never_gives_up() -> None:
    gate = gate_of(1.0)
    for _ in range(100):
        assert gate.wants_drafts()
        gate.add(4, 4)


def test_an_operator_who_says_off_is_obeyed() -> None:
    gate = gate_of(is_on=False)
    assert not any(gate.wants_drafts() for _ in range(2 * PAUSE_STEPS))
    gate.add(8, 32)
    assert gate.state is GateState.OFF


@pytest.mark.parametrize("seed", range(10))
def test_the_estimate_is_within_what_was_seen(seed: int) -> None:
    rng = random.Random(seed)
    gate, means = gate_of(1.0), []
    for _ in range(300):
        num_rows = rng.randint(1, 64)
        num_tokens = sum(rng.randint(1, 4) for _ in range(num_rows))
        means.append(num_tokens / num_rows)
        gate.add(num_rows, num_tokens)
        assert gate.tokens_per_step is not None
        assert min(means) - 1e-9 <= gate.tokens_per_step <= max(means) + 1e-9
