"""World of the comparison: jobs, one clock, and steps that take what a formula says.

A plan is formed at some time and its step begins once the step before has ended, `HOST_S` later than
its plan at least; its tokens come at its end. Two steps are in flight: the next plan is formed when a
step ends, while the one after it runs. Arrivals up to then are known to it. A job's output length is
known to the world only.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from router.scheduling.step import PaddingMode
from router.scheduling.step_builder import pick_padding_mode

HOST_S = 1e-3
DEPTH = 2
BLOCK = 512  # tokens of a KV block, and of a name of a prefix
NOISE = 0.02


@dataclass(eq=False, slots=True)
class Job:
    """A request and what became of it. Times are in seconds.

    Attributes:
        names: Of each full block of the prompt, with all before it; equal ones can be shared.
        num_cached: Prompt tokens that a prefix cache had.
    """

    number: int
    arrival: float
    num_prompt: int
    num_output: int
    names: tuple[int, ...] = ()
    flow: str = ""
    priority: int = 0
    first: float | None = None
    end: float | None = None
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a step, see `router.scheduling.step_cost`."""

    base: float
    prompts: float
    row: float
    mean: float
    kv: float
    pair: float

    def seconds(
        self, tokens: Sequence[int], kv: Sequence[int], pairs: Sequence[float] | None
    ) -> float:
        """Returns what a step takes whose ranks have so many tokens, KV to read, and pairs."""
        mode = pick_padding_mode(tokens, has_extend=pairs is not None)
        if mode is PaddingMode.MAX_LEN:
            tokens = [max(tokens)] * len(tokens)
        own = max(
            self.row * n + self.kv * k + self.pair * a
            for n, k, a in zip(tokens, kv, pairs or [0.0] * len(kv), strict=True)
        )
        extra = 0.0 if pairs is None else self.prompts
        return self.base + extra + own + self.mean * sum(tokens) / len(tokens)


COSTS = {
    "30b": Cost(8e-3, 4e-3, 6e-6, 14e-6, 27e-9, 1.6e-9),  # 30B-A3B on H200, bf16
    "r1": Cost(30e-3, 10e-3, 50e-6, 80e-6, 23e-9, 10e-9),  # 671B-A37B on H200, fp8
    "cpu": Cost(1.56e-3, 0.0, 22e-6, 22e-6, 915e-9, 110e-9),  # the demo model, a thread a rank
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of the group that every policy serves with."""

    num_ranks: int = 8
    num_rows: int = 256
    num_kv_tokens: int = 800_000
    max_len: int = 31_744
    max_tokens: int = 8192

    @property
    def num_blocks(self) -> int:
        return self.num_kv_tokens // BLOCK


@dataclass(slots=True)
class Work:
    """A step of all ranks.

    Attributes:
        tokens: Of each rank.
        kv: Tokens of KV that each rank's decodes read.
        pairs: Query-key pairs of each rank's prompts; None: there are none.
        handle: The policy's own.
        start: When it begins, once that is known.
        seconds: What it takes.
        queued: How long its plan lay ready.
        is_late: Whether it was planned while the step before it ran.
    """

    tokens: Sequence[int]
    kv: Sequence[int]
    pairs: Sequence[float] | None
    handle: object
    start: float = 0.0
    seconds: float = 0.0
    queued: float = 0.0
    is_late: bool = False


class Gaps:
    """Times between two tokens of a job: values and how often each came.

    Attributes:
        num_left_out: Gaps that are not among them.
    """

    def __init__(self) -> None:
        self.values: list[float] = []
        self.counts: list[int] = []
        self.num_left_out = 0

    def observe(self, value: float, count: int = 1) -> None:
        if count:
            self.values.append(value)
            self.counts.append(count)

    def leave_out(self, start: int, shorter_than: float) -> None:
        """Leaves out, of those observed from the start on, what is shorter."""
        pairs = list(zip(self.values[start:], self.counts[start:], strict=True))
        kept = [pair for pair in pairs if pair[0] >= shorter_than]
        self.num_left_out += sum(count for _, count in pairs) - sum(count for _, count in kept)
        self.values[start:] = [value for value, _ in kept]
        self.counts[start:] = [count for _, count in kept]

    def clear(self) -> None:
        self.values.clear()
        self.counts.clear()
        self.num_left_out = 0

    def percentiles(self, *shares: float) -> list[float]:
        if not self.values:
            return [0.0] * len(shares)
        values = np.array(self.values)
        order = values.argsort()
        sums = np.array(self.counts)[order].cumsum()
        places = [min(int(sums.searchsorted(share * sums[-1])), len(order) - 1) for share in shares]
        return [float(values[order[place]]) for place in places]


class Policy(Protocol):
    """What decides.

    Attributes:
        gaps: Filled by `commit`, as are the jobs' times.
        num_preemptions: So far.
    """

    gaps: Gaps

    @property
    def num_preemptions(self) -> int: ...

    def submit(self, job: Job) -> None:
        """A job arrives."""
        ...

    def plan(self, now: float) -> Work | None:
        """Returns the next step; None if there is nothing to run."""
        ...

    def wait_s(self, work: Work) -> float:
        """Returns how long after a step's start the next one is planned."""
        ...

    def commit(self, work: Work, now: float) -> None:
        """The earliest step in flight ends."""
        ...


@dataclass
class Outcome:
    """A run's jobs and steps."""

    jobs: Sequence[Job]
    gaps: Gaps
    num_preemptions: int
    end: float
    num_steps: int
    shares: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Returns the figures of a run: milliseconds, but for those named otherwise."""
        first = np.array([job.first - job.arrival for job in self.jobs if job.first is not None])
        total = np.array([job.end - job.arrival for job in self.jobs if job.end is not None])
        assert len(total) == len(self.jobs), "a job was dropped"
        num_tokens = len(self.jobs) + sum(self.gaps.counts) + self.gaps.num_left_out
        assert num_tokens == sum(job.num_output for job in self.jobs), "a token was, or came twice"
        per_token = [
            (job.end - job.first) / (job.num_output - 1)
            for job in self.jobs
            if job.num_output > 1 and job.end is not None and job.first is not None
        ]
        gaps = self.gaps.percentiles(0.5, 0.95, 0.99, 0.999)
        num_prompt = sum(job.num_prompt for job in self.jobs)
        return {
            **{f"first p{p}": 1e3 * float(np.percentile(first, p)) for p in (50, 95, 99)},
            **{f"gap p{p}": 1e3 * gap for p, gap in zip((50, 95, 99, 99.9), gaps, strict=True)},
            **{f"token p{p}": 1e3 * float(np.percentile(per_token, p)) for p in (50, 99)},
            "end s": float(total.mean()),
            "longest s": float(first.max()),
            "requests/s": self._steady_rate(),
            "tokens/s": sum(job.num_output for job in self.jobs) / self.end,
            "balance": float(np.mean(self.shares)) if self.shares else 1.0,
            "hits": sum(job.num_cached for job in self.jobs) / num_prompt,
            "preempted": self.num_preemptions,
        }

    def _steady_rate(self) -> float:
        """Returns requests ended a second, without the first and last fifth."""
        ends = sorted(job.end for job in self.jobs if job.end is not None)
        first, last = len(ends) // 5, 4 * len(ends) // 5
        return (last - first) / max(ends[last] - ends[first], 1e-9)


def serve(
    policy: Policy, jobs: Sequence[Job], cost: Cost, *, seed: int = 0, until: float = math.inf
) -> Outcome:
    """Serves all jobs, in order of arrival, to their ends; or until some time.

    Gaps that begin after the last arrival do not count: a policy that let nothing decode while prompts
    come would have hardly any others.
    """
    rng = np.random.default_rng(seed)
    coming, in_flight = deque(jobs), deque[Work]()
    shares: list[float] = []
    last_arrival = jobs[-1].arrival
    now = device = 0.0
    num_steps = 0
    while True:
        wait_s = policy.wait_s(in_flight[0]) if len(in_flight) == 1 else 0.0
        if wait_s:  # the next plan is formed while it runs
            now = max(now, min(in_flight[0].start + wait_s, device))
        while coming and coming[0].arrival <= now:
            policy.submit(coming.popleft())
        work = policy.plan(now) if len(in_flight) < DEPTH else None
        if work is not None:
            work.is_late = wait_s > 0
            work.start = max(device, now + HOST_S)
            work.queued = work.start - now - HOST_S
            seconds = cost.seconds(work.tokens, work.kv, work.pairs)
            work.seconds = seconds * float(rng.lognormal(0.0, NOISE))
            device = work.start + work.seconds
            in_flight.append(work)
            num_steps += 1
            if work.pairs is not None:
                shares.append(sum(work.tokens) / len(work.tokens) / max(work.tokens))
        elif in_flight:
            work = in_flight.popleft()
            now = work.start + work.seconds
            num_gaps = len(policy.gaps.values)
            policy.commit(work, now)
            policy.gaps.leave_out(num_gaps, now - last_arrival)
        elif coming:
            now = coming[0].arrival
        else:
            until = now
        if now >= until:
            return Outcome(jobs, policy.gaps, policy.num_preemptions, now, num_steps, shares)
