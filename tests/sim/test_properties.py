"""If these fail, prompts starve, steps run too much or too little, or flows are counted wrongly."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from router.scheduling.scheduler import SchedulerSettings
from router.scheduling.sequence_table import RowStatus
from tests.bench.policies.flows import first_tokens, serve_together, stream
from tests.bench.policies.lockstep import Lockstep, lockstep
from tests.bench.policies.traces import Arrival
from tests.bench.policies.world import COSTS, Job, Sizes, Work, serve

CHANGE_AT, FOLLOWS_IN = 600, 100  # steps


class Troubled:
    """What steps take, when it is not as it was, or not as the formula has it.

    Args:
        kind: spikes, of five times a step's time; doubled, from a step on; a slow rank.

    Attributes:
        with_prompts: Seconds of the steps with prompts that the budget should have foreseen.
    """

    def __init__(self, kind: str) -> None:
        self.with_prompts: list[float] = []
        self._kind = kind
        self._cost = COSTS["30b"]
        self._rng = random.Random(0)
        self._num_steps = 0

    def seconds(
        self, tokens: Sequence[int], kv: Sequence[int], pairs: Sequence[float] | None
    ) -> float:
        self._num_steps += 1
        cost, has_changed = self._cost, self._num_steps > CHANGE_AT
        own = [
            cost.row * n + cost.kv * k + cost.pair * a
            for n, k, a in zip(tokens, kv, pairs or [0.0] * len(kv), strict=True)
        ]
        if self._kind == "slow rank" and has_changed:
            own[0] *= 3
        extra = cost.base if pairs is None else cost.base + cost.prompts
        seconds = extra + max(own) + cost.mean * sum(tokens) / len(tokens)
        if self._kind == "spikes" and self._rng.random() < 0.01:
            return 5 * seconds
        if self._kind == "doubled" and has_changed:
            seconds *= 2
        if pairs is not None and self._num_steps > CHANGE_AT + FOLLOWS_IN:
            self.with_prompts.append(seconds)
        return seconds


@pytest.mark.parametrize("kind", ["spikes", "doubled", "slow rank"])
def test_when_steps_are_not_what_was_learnt_the_budget_follows_and_no_prompt_starves(
    kind: str,
) -> None:
    cost, policy = Troubled(kind), lockstep(max_token_gap_ms=50.0)(Sizes(num_ranks=4))
    jobs = stream([Arrival(n / 20, 1500, 40) for n in range(600)], 20.0, 30.0)
    serve(policy, jobs, cost)  # type: ignore[arg-type]
    assert policy.measures.costs.plain.is_known
    assert len(cost.with_prompts) > 100
    assert np.percentile(cost.with_prompts, 95) < 0.06
    assert max(job.first - job.arrival for job in jobs if job.first is not None) < 1.5


class Checked(Lockstep):
    """Looks at each plan, and at what is counted for each flow."""

    def plan(self, now: float) -> Work | None:
        table = self.scheduler.table
        had_bound = np.count_nonzero(table.status == RowStatus.EXTEND) > 0
        work = super().plan(now)
        if had_bound and work is not None and not sum(work.kv):
            assert work.pairs is not None, "nothing decodes, and prompts wait all the same"
        if work is None and not self.scheduler.in_flight:
            assert not len(self.waiting), "nothing runs, and something waits"
        rows = table.live_rows().tolist()
        for caller, flow in self.waiting.line:
            waiting = [s for s in self.waiting if s.request.caller == caller]
            assert flow.num_held == sum(table.bound(row).flow is flow for row in rows)
            assert flow.num_waiting == len(waiting)
            assert flow.num_tokens == sum(len(s.tokens) for s in waiting)
            assert flow.num_urgent == sum(len(s.tokens) for s in waiting if s.request.priority >= 0)
        return work


@pytest.mark.parametrize("seed", range(6))
def test_work_is_conserved_counted_and_ends_whatever_comes(seed: int) -> None:
    """Few rows and little KV, bursts of three flows, priorities; each job waits for a bounded time."""
    rng = random.Random(seed)
    sizes = Sizes(num_ranks=2, num_rows=rng.choice([2, 8]), num_kv_tokens=40_000, max_tokens=2048)
    policy = Checked(sizes, SchedulerSettings(target_token_gap_ms=rng.choice([0.0, 20.0, 50.0])))
    jobs = [
        Job(
            number,
            rng.choice([0.0, 1.0, rng.uniform(0, 3)]),
            rng.choice([rng.randint(1, 3000), 15_000]),
            rng.randint(1, 60),
            flow=rng.choice(["a", "b", "c"]),
            priority=rng.choice([0, 0, -1, 2]),
        )
        for number in range(70)
    ]
    serve_together(policy, COSTS["30b"], jobs)
    assert all(job.end is not None for job in jobs)
    assert all(flow.is_idle for _, flow in policy.waiting.line)


def test_a_long_prompt_among_short_ones_that_never_cease_waits_for_a_bounded_time() -> None:
    """They ask for nearly all that there is, and each of them goes before it for a second."""
    policy = lockstep()(Sizes(num_ranks=2))
    short = stream([Arrival(n / 80, 900, 10) for n in range(80)], 80.0, 12.0)
    long = [Job(0, 6.0 + n, 30_000, 5) for n in range(2)]
    serve_together(policy, COSTS["30b"], short, long)
    assert first_tokens(long)[1] < 4000
