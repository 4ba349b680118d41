"""Scheduling policies beside each other in virtual time: the real scheduler, and models of its peers.

    python -m tests.bench.policies.bench_policies [--trace FILE] [--loads 0.6] [--ranks 8] [--cost 30b]
                                                  [--front] [--flows] [--requests 1500] [--svg FILE]

Requests come as a trace says, faster or slower: load 1 is the rate at which policies with chunks of
8,192 tokens end requests when all of them wait at once. A step takes what a formula says of its tokens,
KV and prompts (`world.py`; `--cost` 30b, r1 or cpu), give or take 2 %. vLLM, SGLang and TensorRT-LLM
are models of their schedulers (`peers.py`) with a perfect host. Every policy has the same ranks, rows,
KV and kind of prefix cache.

A line for each policy: milliseconds to the first token and between two tokens, per token of an answer,
seconds to the end, tokens a second, the mean rank's tokens over the fullest's in steps with prompts,
share of prompts found in caches, preemptions. With `--front`, all settings of the peers: for each that no other
peer's setting beats in p99 of first token and gap, its first token over the best of ours whose gap is no larger.
With `--flows`, milliseconds to the first token of short prompts beside long ones and of a flow beside a
flood, with the requests told apart and as one caller's, and how evenly four flows are served (`flows.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

from tests.bench.policies.flows import print_flood, print_long_beside_short, print_shares
from tests.bench.policies.front import Point, draw, leads
from tests.bench.policies.lockstep import lockstep
from tests.bench.policies.peers import DEFAULT, sweep
from tests.bench.policies.traces import OWN, Arrival, jobs_at, read_trace
from tests.bench.policies.world import COSTS, Cost, Outcome, Policy, Sizes, serve
from tests.bench.support.options import parse_options

Builds = Mapping[str, Callable[[Sizes], Policy]]

LARGE_CHUNKS = ("vLLM 8192", "SGLang 8192, tokens", "TensorRT-LLM 8192, balanced")
LOCKSTEP: Builds = {"Lockstep": lockstep()}
LOCKSTEP_SWEEP: Builds = {
    f"Lockstep {target:g} to {factor * target:g} ms, weight {weight:g}": lockstep(
        target_token_gap_ms=float(target),
        max_token_gap_ms=float(factor * target),
        first_token_weight=weight,
    )
    for target in (15, 18, *range(21, 32), 33, 35, 37, 40, 45, 50, 60, 75, 100, 150, 200)
    for factor in (1, 4)
    for weight in (10.0, 1e9)
    if factor * target <= 400
}
COLUMNS = {
    "first p50": ".0f",
    "first p95": ".0f",
    "first p99": ".0f",
    "gap p50": ".1f",
    "gap p95": ".0f",
    "gap p99": ".0f",
    "gap p99.9": ".0f",
    "token p50": ".1f",
    "token p99": ".0f",
    "end s": ".2f",
    "longest s": ".1f",
    "tokens/s": ".0f",
    "balance": ".2f",
    "hits": ".2f",
    "preempted": ".0f",
}


def capacity(arrivals: list[Arrival], sizes: Sizes, cost: Cost) -> float:
    """Returns requests a second at load 1: of copies that fill all rows three times over."""
    num_copies = -(-3 * sizes.num_ranks * sizes.num_rows // len(arrivals))
    rates = []
    for name in LARGE_CHUNKS:
        jobs = [job for copy in range(num_copies) for job in jobs_at(arrivals, None, copy=copy)]
        serve(DEFAULT[name](sizes), jobs, cost)
        ends = sorted(job.end for job in jobs if job.end is not None)
        first, last = len(ends) // 5, 4 * len(ends) // 5
        rates.append((last - first) / (ends[last] - ends[first]))
    return max(rates)


def run(
    builds: Builds, arrivals: list[Arrival], rate: float, sizes: Sizes, cost: Cost
) -> dict[str, Outcome]:
    """Serves the same requests by each policy, and prints a line for each."""
    print(f"  {'':<28}" + "".join(f"{name:>10}" for name in COLUMNS))
    outcomes = {}
    for name, build in builds.items():
        outcome = outcomes[name] = serve(build(sizes), jobs_at(arrivals, rate), cost)
        figures = outcome.figures()
        cells = "".join(f"{figures[column]:>10{form}}" for column, form in COLUMNS.items())
        print(f"  {name:<28}{cells}", flush=True)
    return outcomes


def compare(arrivals: list[Arrival], rate: float, sizes: Sizes, cost: Cost) -> dict[str, Point]:
    """Prints how far ours is ahead at each point of the peers' front. Returns all points."""
    points = {}
    for name, build in {**LOCKSTEP_SWEEP, **sweep()}.items():
        figures = serve(build(sizes), jobs_at(arrivals, rate), cost).figures()
        points[name] = figures["first p99"], figures["gap p99"]
    own = {name: point for name, point in points.items() if name.startswith("Lockstep")}
    others = {name: point for name, point in points.items() if name not in own}
    found = leads(own, others)
    ratios = [ratio for _, ratio in found]
    print(
        f"  front of {len(others)} settings: {len(found)} points, first token over ours at no larger "
        f"gap {min(ratios):.2f} least, {median(ratios):.2f} median, {max(ratios):.2f} most"
    )
    for name, ratio in found:
        print(
            f"    {name:<36}{others[name][0]:>8.0f}{others[name][1]:>8.0f}{ratio:>8.2f}", flush=True
        )
    return points


def neighbours(arrivals: list[Arrival], full: float, sizes: Sizes, cost: Cost) -> None:
    """Prints what one kind of request, or one flow, does to another."""
    peers = {name: DEFAULT[name](sizes) for name in LARGE_CHUNKS}
    own = {
        f"Lockstep, order weight {w:g}": lockstep(prompt_order_weight=w)(sizes) for w in (0, 2, 8)
    }
    print_long_beside_short({**peers, **own}, arrivals, full, cost)
    for rows in (sizes.num_rows, 64):
        few = replace(sizes, num_rows=rows)
        print(f"  {rows} rows a rank")
        names = ("Lockstep, two flows", "Lockstep, one flow", "Lockstep, alone")
        print_flood({name: lockstep()(few) for name in names}, arrivals, full, cost)
    print_shares(lockstep()(sizes), arrivals, full, cost)


def main() -> None:
    sizes = {"ranks": 8, "requests": 1500, "cost": "30b", "loads": (0.6,)}
    options = parse_options(__doc__, front=False, flows=False, trace=Path, svg=Path, **sizes)
    group, cost = Sizes(num_ranks=options.ranks), COSTS[options.cost]
    traces = OWN if options.trace is None else {options.trace.stem: options.trace}
    panels: dict[str, dict[str, Point]] = {}
    for trace, path in traces.items():
        arrivals = read_trace(path, options.requests)
        full = capacity(arrivals, group, cost)
        if options.flows:
            print(f"{trace}, {options.ranks} ranks", flush=True)
            neighbours(arrivals, full, group, cost)
            continue
        for load in options.loads:
            title = f"{trace}, load {load:g} ({full * load:.1f} requests/s), {options.ranks} ranks"
            print(title, flush=True)
            if options.front:
                panels[title] = compare(arrivals, full * load, group, cost)
            else:
                run({**LOCKSTEP, **DEFAULT}, arrivals, full * load, group, cost)
    if options.svg is not None and panels:
        options.svg.write_text(draw(panels))


if __name__ == "__main__":
    main()
