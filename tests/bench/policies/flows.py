"""Neighbours: short prompts beside long ones, a small flow beside a flood, flows that always wait."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter

import numpy as np

from tests.bench.policies.lockstep import Lockstep
from tests.bench.policies.traces import Arrival, jobs_at
from tests.bench.policies.world import Cost, Job, Policy, serve

WARM_UP = 150  # requests, in which step times are learnt
SHARE_S = 40.0  # over which shares are looked at
FAR = 1000  # copies of a trace, apart from those of other flows
LATER = 1 << 24  # numbers of jobs, apart from those that step times are learnt with


def stream(
    arrivals: Sequence[Arrival], rate: float, seconds: float, *, copy: int = 1, flow: str = ""
) -> list[Job]:
    """Returns jobs of one flow that come at so many a second for so long, from this copy on."""
    count, period = max(1, int(rate * seconds)), len(arrivals) / rate
    jobs: list[Job] = []
    while len(jobs) < count:
        turn = len(jobs) // len(arrivals)
        for job in jobs_at(arrivals, rate, copy=copy + turn):
            jobs.append(replace(job, arrival=job.arrival + turn * period, flow=flow))
    return jobs[:count]


def serve_together(policy: Policy, cost: Cost, *flows: list[Job], until: float = np.inf) -> None:
    """Serves jobs of several flows by a policy that has learnt what steps take."""
    jobs = sorted(chain(*flows), key=attrgetter("arrival"))
    for number, job in enumerate(jobs, start=LATER):
        job.number = number
    serve(policy, jobs, cost, until=until)


def warm(policy: Policy, arrivals: Sequence[Arrival], rate: float, cost: Cost) -> Policy:
    """Has a policy learn what steps take. It has nothing to do then."""
    serve(policy, jobs_at(arrivals[:WARM_UP], rate, copy=FAR), cost)
    return policy


def first_tokens(jobs: Sequence[Job]) -> tuple[float, float]:
    """Returns p50 and p99 of the milliseconds to the first token."""
    waits = [1e3 * (job.first - job.arrival) for job in jobs if job.first is not None]
    return float(np.percentile(waits, 50)), float(np.percentile(waits, 99))


def throughput(jobs: Sequence[Job]) -> float:
    """Returns prompt and output tokens a second, until the last of them."""
    return sum(job.num_prompt + job.num_output for job in jobs) / max(
        job.end or 0.0 for job in jobs
    )


def served(policy: Lockstep) -> list[int]:
    """Returns the tokens that each flow was given."""
    return [flow.num_served_tokens for flow in policy.waiting.line.counts().values()]


def jain(shares: Sequence[float]) -> float:
    """Returns 1 where all shares are alike, 1 over their number where one has all."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def print_long_beside_short(
    policies: dict[str, Policy], arrivals: list[Arrival], full: float, cost: Cost
) -> None:
    """Short prompts at load 0.4 beside three of 30,000 tokens a second, of one caller."""
    print(f"  {'short beside long':<28}{'short p50':>10}{'p99':>10}{'long p50':>10}{'p99':>10}")
    for name, policy in policies.items():
        short = stream(arrivals, 0.4 * full, 60.0, copy=1)
        long = stream([Arrival(n / 3, 30_000, 200) for n in range(30)], 3.0, 60.0, copy=FAR)
        serve_together(warm(policy, arrivals, 0.4 * full, cost), cost, short, long)
        cells = "".join(f"{value:>10.0f}" for value in (*first_tokens(short), *first_tokens(long)))
        print(f"  {name:<28}{cells}", flush=True)


def print_flood(
    policies: dict[str, Policy], arrivals: list[Arrival], full: float, cost: Cost
) -> None:
    """A flow of 3 % of capacity beside one that asks 150 %, and by itself; both as one caller's."""
    print(f"  {'3 % beside a flood of 150 %':<28}{'p50':>10}{'p99':>10}{'flood tokens/s':>16}")
    for name, policy in policies.items():
        warm(policy, arrivals, 0.4 * full, cost)
        flows = ("", "") if "one flow" in name else ("small", "flood")
        small = stream(arrivals, 0.03 * full, 60.0, copy=FAR + 1, flow=flows[0])
        flood = stream(arrivals, 1.5 * full, 60.0, copy=1, flow=flows[1])
        serve_together(policy, cost, small, *([] if "alone" in name else [flood]))
        rate = 0.0 if "alone" in name else throughput(flood)
        cells = "".join(f"{value:>10.0f}" for value in first_tokens(small))
        print(f"  {name:<28}{cells}{rate:>16.0f}", flush=True)


def print_shares(policy: Lockstep, arrivals: list[Arrival], full: float, cost: Cost) -> None:
    """Four flows, of which one asks 240 % of capacity and three 40 % each."""
    warm(policy, arrivals, 0.4 * full, cost)
    flows = [
        stream(arrivals, load * full, SHARE_S, copy=FAR * n, flow=f"flow {n}")
        for n, load in enumerate((2.4, 0.4, 0.4, 0.4), start=1)
    ]
    serve_together(policy, cost, *flows, until=SHARE_S)
    shares = served(policy)[-4:]
    print(
        f"  four flows in {SHARE_S:g} s: tokens {shares}, Jain index {jain(shares):.3f}", flush=True
    )
