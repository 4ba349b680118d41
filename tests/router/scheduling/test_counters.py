"""Numbers that operators act on: each is checked against what really happened in a run."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from router.errors import Cancelled, QueueFull
from router.requests.request import Sequence
from router.scheduling.counters import (
    PHASES,
    EpochStats,
    GroupMeasures,
    RecoveryTimes,
    RequestMeasures,
    StepTimes,
    by_rank,
)
from router.scheduling.speculation import DraftCounts
from router.scheduling.step import (
    CapturedSizes,
    GroupShape,
    InFlight,
    PaddingMode,
    StepResult,
)
from tests.router.support.stepper import Stepper, make_shape, speculation
from tests.sim.world import Group, World
from tests.support.virtual_clock import on_virtual_clock

GRAPHS = CapturedSizes((1, 2, 4), (8, 16), "prefill")
SIZES = {"num_blocks": 24, "rows_per_rank": 6, "max_num_batched_tokens": 24}
SHAPE = make_shape(dp_size=3, graph_sizes=GRAPHS, **SIZES)
DRAFTING = replace(SHAPE, speculation=speculation())


@pytest.fixture(
    scope="module",
    params=[(0.0, SHAPE), (0.03, SHAPE), (0.0, DRAFTING), (0.03, DRAFTING)],
    ids=["steady", "losing executors", "drafting", "drafting, and losing executors"],
)
def finished(request: pytest.FixtureRequest) -> World:
    return finished_run(*request.param)


@on_virtual_clock
async def finished_run(loss_rate: float, shape: GroupShape) -> World:
    """A router under load whose executors die now and then."""
    world = World(random.Random(9), shape=shape, loss_rate=loss_rate, slow_rate=0.02)
    clients = [world.client(number, n=1, deadline=None) for number in range(60)]
    await world.run_clients(clients)
    return world


def group_of(finished: World) -> Group:
    [group] = finished.groups
    return group


def sequences_of(finished: World) -> list[Sequence]:
    return [request.sequences[0] for request in finished.requests]


def test_every_sequence_has_its_times_counted_once(finished: World):
    totals, engines = group_of(finished).engine.measures.totals(), finished.engines
    sequences = sequences_of(finished)
    started = [s for s in sequences if s.progress.start_time is not None]
    first = [s.progress.first_token_time for s in sequences]
    waits = [s.progress.start_time - s.request.arrival_time for s in started]
    good = [s for s in sequences if s.error is None]

    assert sum(totals.queue_s.counts) == len(started)
    assert totals.queue_s.total == pytest.approx(sum(waits))
    assert sum(totals.first_token_s.counts) == len([t for t in first if t is not None])
    assert sum(engines.measures.total_s.counts) == len(good)
    reasons = [s.error.reason if s.error else s.finish_reason.name for s in sequences]
    assert +engines.measures.ended == Counter(reasons)
    assert engines.measures.ended[Cancelled.reason] > 0


def test_gaps_of_a_sequence_add_up_to_the_time_between_its_first_and_last_token(finished: World):
    """However often it was preempted, or lost its executors, in between."""
    totals = group_of(finished).engine.measures.totals()
    begun = [s for s in sequences_of(finished) if s.num_output_tokens]
    spans = {s: s.progress.end_time - s.progress.first_token_time for s in begun}
    total_s = totals.inter_token_s.total

    assert sum(totals.inter_token_s.counts) == sum(s.num_output_tokens - 1 for s in begun)
    # One that was cancelled went on waiting after its last token.
    most = sum(spans.values())
    assert most - sum(spans[s] for s in begun if s.error) - 1e-6 <= total_s <= most + 1e-6
    assert sum(spans[s] for s in begun if s.error) < most / 3


def test_steps_and_tokens_add_up_over_epochs(finished: World):
    """A step that was lost with its executors was not committed, so it does not count."""
    group, [status] = group_of(finished), finished.engines.status()
    totals, plans = group.engine.measures.totals(), group.executors.plans
    num_steps = sum(totals.steps.values())

    assert totals.num_epochs == group.executors.num_epochs
    assert sum(totals.recovery_s.counts) == totals.num_epochs - 1
    assert totals.losses == {"lost": totals.num_epochs - 1, "left": 0}
    assert num_steps <= len(plans)
    if totals.num_epochs == 1:
        assert num_steps == len(plans) == status.step
        expected = np.sum([plan.agreement.global_num_tokens for plan in plans], axis=0)
        assert [rank.scheduled_tokens for rank in totals.ranks] == expected.tolist()
        longest = sum(max(plan.agreement.global_num_tokens) for plan in plans)
        assert {r.scheduled_tokens + r.imbalance_tokens for r in totals.ranks} == {longest}
        rows = [
            (plan.agreement.graph_size or 0) * (plan.agreement.num_draft_tokens or 1)
            or max(plan.agreement.global_num_tokens)
            if plan.agreement.padding_mode is PaddingMode.MAX_LEN
            else plan.agreement.global_num_tokens[0]
            for plan in plans
        ]
        assert totals.ranks[0].scheduled_tokens + totals.ranks[0].padding_tokens == sum(rows)
        idle = [plan.agreement.global_num_tokens.count(0) for plan in plans]
        assert sum(rank.idle_steps for rank in totals.ranks) == sum(idle)
    else:
        assert status.step < num_steps < len(plans)
    sequences = sequences_of(finished)
    sampled = sum(s.num_output_tokens for s in sequences)
    assert totals.num_output_tokens >= sampled > 0  # tokens past a stop are dropped
    prompts = [len(s.request.prompt) for s in sequences if s.progress.start_time is not None]
    assert sum(rank.prompt_tokens for rank in totals.ranks) == sum(prompts)


def test_drafts_add_up_over_epochs(finished: World):
    """Of each sequence and of the group, whoever loses an executor in between."""
    totals = group_of(finished).engine.measures.totals()
    progress = [sequence.progress for sequence in sequences_of(finished)]
    drafts, [group] = totals.drafts, finished.engines.status()
    status = group.speculation
    offered = sum(p.num_drafts for p in progress)
    accepted = sum(p.num_accepted_drafts for p in progress)
    num_verified = sum(n for (runner, _), n in totals.steps.items() if runner == "verify")
    if group_of(finished).shape.speculation is None:
        assert not group.HasField("speculation")
        assert drafts == DraftCounts()
        assert offered == accepted == num_verified == 0
        return
    assert status.algorithm == "eagle"
    assert 0 < num_verified <= drafts.num_steps  # some are larger than any graph
    assert 0 < accepted < offered
    assert (drafts.num_drafts, drafts.num_accepted) == (offered, accepted)
    assert status.num_steps <= drafts.num_steps
    if status.num_steps:  # of the last epoch, which may have begun a moment ago
        assert 1 < status.tokens_per_step < 4


def test_a_step_with_drafts_counts_the_tokens_gained_and_its_rows_at_full_width():
    shape = make_shape(
        graph_sizes=CapturedSizes((2,)), speculation=speculation(), max_num_logits=32
    )
    stepper = Stepper(shape)
    stats = EpochStats(
        stepper.scheduler.caches, stepper.scheduler.num_preemptions, shape.graph_sizes
    )
    stepper.submit([1, 2, 3], max_tokens=7)
    for _ in range(2):
        plan, [result] = stepper.plan(), stepper.results
        assert plan is not None
        stats.add(plan, result, 1.0, stepper.commit())
    assert stats.drafts == DraftCounts(num_steps=1, num_drafts=3, num_accepted=3)
    assert stats.num_output_tokens == 1 + 4
    [rank] = by_rank(stats.counts())
    assert (rank.scheduled_tokens, rank.padding_tokens) == (3 + 4, 2 * 4 - 4)
    assert [(runner, size) for runner, size, _ in stats.graph_counts()] == [
        ("eager", 0),
        ("verify", 2),
    ]


def test_the_wire_is_what_neither_side_accounts_for(monkeypatch: pytest.MonkeyPatch):
    times, stepper = StepTimes(), Stepper(make_shape())
    stepper.submit([1, 2, 3])
    plan = stepper.plan()
    assert plan is not None
    monkeypatch.setattr("router.scheduling.counters.time.perf_counter", lambda: 9.0)
    forward_ns = [1_500_000_000, 2_000_000_000]
    result = StepResult(np.zeros(0, np.int32), None, [0, 1_000_000_000], forward_ns)
    times.add(InFlight(plan, begun=1.0, planned=2.5, sent=3.0), result, 8.0)

    assert times.seconds == {
        "plan": 1.5, "encode": 0.5, "wire": 2.0, "queue": 1.0, "execute": 2.0, "commit": 1.0
    }  # fmt: skip
    assert tuple(times.seconds) == PHASES


def test_a_group_is_lost_from_an_unplanned_loss_until_it_has_formed_again():
    measures = GroupMeasures()
    seen = [measures.totals().is_lost]
    measures.begin_epoch(EpochStats())
    measures.end_epoch(1.0)
    seen.append(measures.totals().is_lost)
    measures.begin_epoch(EpochStats())
    seen.append(measures.totals().is_lost)
    measures.end_epoch(3.0, is_planned=True)
    seen.append(measures.totals().is_lost)
    assert seen == [False, True, False, False]


def test_a_recovery_says_what_it_waited_for():
    times = RecoveryTimes()

    def seen() -> dict[tuple[str, str], float]:
        return {phase: s.total for phase, s in times.phase_s.items() if sum(s.counts)}

    times.form(0.0, 1.0, has_work=True)
    times.step(2.0)
    assert seen() == {}, "nothing was lost"
    times.lose(10.0)
    times.form(12.0, 12.5, has_work=True)
    times.step(13.5)
    times.step(20.0)
    loss = {("loss", "wait"): 2.0, ("loss", "form"): 0.5, ("loss", "step"): 1.0}
    assert seen() == loss
    assert (times.total_s.total, times.num_takeovers) == (2.5, 0)
    times.lose(30.0)
    times.stand_by()
    times.form(40.0, 40.25, has_work=False)
    times.step(50.0)
    assert seen() == {**loss, ("takeover", "form"): 0.25}
    assert (times.total_s.total, times.num_takeovers) == (2.5, 1)


def test_every_reason_is_there_before_it_happens():
    """Prometheus sees no increase in a series whose first value is 1."""
    measures = RequestMeasures()
    assert measures.refused[QueueFull.reason] == 0
    assert QueueFull.reason in measures.refused
    assert {"STOP", "LENGTH", "CANCELLED"} <= set(measures.ended)
