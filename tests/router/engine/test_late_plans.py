"""If these fail, requests wait a step too long for their first token, or executors wait for plans."""

import asyncio
import random

import pytest

from router.engine.engine import Engine
from router.engine.engines import Engines
from router.requests.request import Listeners, Request
from router.requests.waiting_queue import WaitingQueue
from router.scheduling.plan_lead import MAX_LEAD_S, MIN_LEAD_S, PlanLead
from router.scheduling.step import InFlight, StepPlan
from router.scheduling.step_cost import KNOWN_STEPS, StepCosts
from tests.router.support.fake_executors import FakeExecutors
from tests.router.support.requests import make_request
from tests.router.support.running_engines import KnownCosts, drive_group, stepping
from tests.router.support.stepper import assert_right, make_shape
from tests.support.virtual_clock import on_virtual_clock

STEP_S = 0.05


class Even(random.Random):
    """Steps take what they take, give or take a share."""

    share = 0.0

    def uniform(self, a: float, b: float) -> float:
        return 1 + self.share * (2 * self.random() - 1)


def engine_of(
    engines: Engines, rng: random.Random, *, is_elastic: bool = False, **settings: float
) -> Engine:
    shape = make_shape(dp_size=2 if is_elastic else 1, max_model_len=150)
    executors = FakeExecutors(shape, rng, step_s=STEP_S, is_elastic=is_elastic)
    waiting = WaitingQueue(max_sequences=8, max_tokens=1000)
    engine = drive_group(engines, executors, waiting, first_token_weight=1e9, **settings)
    engine.measures.costs = KnownCosts()
    return engine


def submit(engines: Engines, name: str, max_tokens: int) -> Request:
    request = make_request([3, 4], engines.listeners.open(), max_tokens, request_id=name)
    engines.submit(request)
    return request


async def end_of(request: Request) -> Request:
    while request.is_live:
        await request.listener.wait()
    return request


def num_steps_until_first_token(request: Request) -> float:
    [sequence] = request.sequences
    assert sequence.progress.first_token_time is not None
    return (sequence.progress.first_token_time - request.arrival_time) / STEP_S


@pytest.mark.parametrize(("target_ms", "num_steps"), [(0.0, 2), (500.0, 1)])
@on_virtual_clock
async def test_who_comes_while_a_step_runs_is_in_the_next_one(
    target_ms: float, num_steps: int
) -> None:
    """Planned at once, the next one would be fixed by then."""
    engines = Engines(Listeners(8))
    engine = engine_of(engines, Even(), target_token_gap_ms=target_ms)
    async with stepping(engine):
        submit(engines, "long", 100)
        await asyncio.sleep(80.5 * STEP_S)
        waited = num_steps_until_first_token(await end_of(submit(engines, "late", 1)))
        assert num_steps < waited < num_steps + 1
        assert engine.measures.lead.num_late == 0


@on_virtual_clock
async def test_who_comes_after_a_change_of_size_is_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What steps take is known from before it."""
    engines = Engines(Listeners(KNOWN_STEPS + 2))
    engine = engine_of(engines, Even(4), is_elastic=True)
    monkeypatch.setattr(engine.measures, "costs", StepCosts())
    executors = engine._executors
    assert isinstance(executors, FakeExecutors)
    async with stepping(engine):
        for number in range(KNOWN_STEPS):
            await end_of(submit(engines, f"r{number}", 4))
        submit(engines, "long", 100)
        await asyncio.sleep(4 * STEP_S)
        size = executors.shape.dp_size
        executors.end_at_border()
        while engine.status().epoch < 2 or engine.status().step < 3:
            await asyncio.sleep(0.1 * STEP_S)
        assert executors.shape.dp_size != size
        assert num_steps_until_first_token(await end_of(submit(engines, "late", 1))) < 2


@on_virtual_clock
async def test_executors_hardly_ever_wait_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their steps vary by a tenth."""
    queued: list[float] = []
    note = PlanLead.note

    def spy(lead: PlanLead, queued_s: float, *, was_put_off: bool) -> None:
        queued.extend([queued_s] * was_put_off)
        note(lead, queued_s, was_put_off=was_put_off)

    monkeypatch.setattr(PlanLead, "note", spy)
    engines, rng = Engines(Listeners(8)), Even(1)
    rng.share = 0.1
    engine = engine_of(engines, rng)
    async with stepping(engine):
        for number in range(8):
            await end_of(submit(engines, f"r{number}", 120))
        assert engine._stats.num_steps >= 800
        assert len(queued) >= 800
        assert sum(queued_s <= 0 for queued_s in queued) < 30


@on_virtual_clock
async def test_an_error_in_a_late_plan_is_a_loss_of_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = Engines(Listeners(8))
    engine = engine_of(engines, Even())
    async with stepping(engine):
        request = submit(engines, "a", 100)
        await asyncio.sleep(20 * STEP_S)
        assert engine._pipeline is not None
        assert engine._pipeline._timer is not None

        def fail() -> StepPlan:
            monkeypatch.undo()  # the next plan would not fail
            raise ZeroDivisionError("planning failed")

        monkeypatch.setattr(engine._pipeline.scheduler, "schedule", fail)
        await end_of(request)
        assert engine.measures.faults["unexpected"] == 1
        assert request.sequences[0].error is None
        assert engine.status().epoch == 2


@on_virtual_clock
async def test_what_a_late_plan_names_is_not_believed_where_it_was_never_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though the group is lost for another reason meanwhile."""
    engines = Engines(Listeners(8))
    engine = engine_of(engines, Even())
    executors = engine._executors
    assert isinstance(executors, FakeExecutors)
    async with stepping(engine):
        request = submit(engines, "a", 100)
        await asyncio.sleep(20.5 * STEP_S)
        late = make_request([*range(1, 33)], engines.listeners.open(), 8, request_id="b")

        def fail(_: InFlight) -> None:
            monkeypatch.undo()
            executors.kill(0.0)
            raise ZeroDivisionError("it cannot be sent")

        monkeypatch.setattr(executors, "send", fail)
        connection_is_lost = random.Random(2)  # and no KV
        monkeypatch.setattr(executors, "_rng", connection_is_lost)
        engines.submit(late)
        await end_of(late)
        await end_of(request)
        assert engine.status().epoch == 2
        assert_right(late, request)


def test_the_lead_grows_when_plans_come_late_and_shrinks_when_they_lie_ready() -> None:
    lead = PlanLead()
    assert lead.wait_s(0.1) == pytest.approx(0.094)
    assert lead.wait_s(0.0015) == 0  # over before it pays
    for _ in range(20):
        lead.note(0.0, was_put_off=True)
    assert (lead.seconds, lead.num_late) == (MAX_LEAD_S, 20)
    for _ in range(1000):
        lead.note(0.002, was_put_off=True)
    assert lead.seconds == MIN_LEAD_S


def test_a_lead_that_came_to_be_too_long_for_the_steps_shrinks_while_none_is_put_off() -> None:
    lead = PlanLead()
    for _ in range(20):
        lead.note(0.0, was_put_off=True)
    assert lead.wait_s(0.008) == 0
    for _ in range(1000):
        lead.note(0.0, was_put_off=False)  # the first steps after a pause
    assert lead.wait_s(0.008) == 0
    for _ in range(1000):
        lead.note(0.008, was_put_off=False)
    assert lead.wait_s(0.008) > 0.006
    assert lead.num_late == 20
