"""Scheduling policies beside each other in virtual time: the real scheduler, and models of its peers.

    python -m tests.bench.policies.bench_policies [--trace FILE] [--loads 0.6] [--ranks 8] [--cost 30b]
                                                  [--front] [--flows] [--requests 1500] [--skip 0]
                                                  [--svg FILE] [--processes 2] [--results FILE]

Requests come as a trace says, but for the `--skip` first, and faster or slower: load 1 is the rate at which
policies with chunks of 8,192 tokens end requests when all of them wait at once. More than 8 ranks get the
trace several times. A step takes what a formula says of its tokens, KV and prompts (`world.py`; `--cost` 30b,
r1 or cpu), give or take 2 %. vLLM, SGLang and TensorRT-LLM are models of their schedulers (`peers.py`) with
a perfect host. Every policy has the same ranks, rows, KV and kind of prefix cache.

A line for each policy: milliseconds to the first token and between two tokens, per token of an answer,
seconds to the end, tokens a second, the mean rank's tokens over the fullest's in steps with prompts,
share of prompts found in caches, preemptions; and of what Lockstep as it comes is worse in. With `--front`,
all settings of the peers: for each that no other peer's setting beats in p99 of first token and gap, its first
token over the best of ours whose gap is no larger; of ours run those with the targets next below these gaps.
With `--flows`, milliseconds to the first token of short prompts beside long ones and of a flow beside a flood,
with the requests told apart and as one caller's, and how evenly four flows are served (`flows.py`).

`--loads`, `--ranks` and `--cost` take several with commas. Runs are kept in the file of `--results`, and made
again if code that they follow from has changed.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median

from tests.bench.policies.flows import print_flood, print_long_beside_short, print_shares
from tests.bench.policies.front import Point, draw, front_of, leads
from tests.bench.policies.lockstep import lockstep
from tests.bench.policies.peers import DEFAULT
from tests.bench.policies.results import Figures, Results, Run
from tests.bench.policies.settings import LARGE_CHUNKS, LOCKSTEP, OWN, PEER_SWEEP, sweep_below
from tests.bench.policies.traces import OWN as OWN_TRACES
from tests.bench.policies.traces import Arrival, read_trace
from tests.bench.policies.world import COSTS, Cost, Sizes
from tests.bench.support.options import parse_options

USUAL_RANKS = 8  # more get the trace so often that each has as many requests
KEPT = Path("build/bench_policies.jsonl")
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
COMPARED = ("first p50", "first p99", "gap p99", "token p50", "end s")


def capacity(group: Run, results: Results) -> float:
    """Returns requests a second at load 1: of copies that fill all rows three times over."""
    sizes = Sizes(num_ranks=group.num_ranks)
    num_copies = -(-3 * sizes.num_ranks * sizes.num_rows // group.num_requests)
    runs = [group._replace(setting=name, num_copies=num_copies) for name in LARGE_CHUNKS]
    return max(figures["requests/s"] for figures in results.of(runs))


def run_all(group: Run, names: Sequence[str], results: Results) -> dict[str, Figures]:
    """Returns the figures of each setting."""
    runs = [group._replace(setting=name) for name in names]
    return dict(zip(names, results.of(runs), strict=True))


def print_defaults(group: Run, results: Results) -> None:
    """Prints a line for each policy as it comes, and what ours is worse in."""
    print(f"  {'':<28}" + "".join(f"{name:>10}" for name in COLUMNS) + "  Lockstep is worse in")
    found = run_all(group, (*LOCKSTEP, *DEFAULT), results)
    for name, figures in found.items():
        cells = "".join(f"{figures[column]:>10{form}}" for column, form in COLUMNS.items())
        worse = [column for column in COMPARED if found[OWN][column] > figures[column]]
        print(f"  {name:<28}{cells}  {', '.join(worse) or '-'}", flush=True)
    print(
        f"  {OWN}'s steps took what was predicted within {found[OWN]['error %']:.1f} % on average"
    )


def points_of(found: Mapping[str, Figures]) -> dict[str, Point]:
    return {name: (each["first p99"], each["gap p99"]) for name, each in found.items()}


def print_front(group: Run, results: Results) -> dict[str, Point]:
    """Prints how far ours is ahead at each point of the peers' front. Returns all points."""
    others = points_of(run_all(group, list(PEER_SWEEP), results))
    chosen = sweep_below(others[name][1] for name in front_of(others))
    own = points_of(run_all(group, chosen, results))
    ahead = leads(own, others)
    ratios = [ratio for _, ratio in ahead]
    print(
        f"  front of {len(others)} settings: {len(ahead)} points, first token over ours at no larger "
        f"gap {min(ratios):.2f} least, {median(ratios):.2f} median, {max(ratios):.2f} most"
    )
    for name, ratio in ahead:
        first, gap = others[name]
        print(f"    {name:<36}{first:>8.0f}{gap:>8.1f}{ratio:>8.2f}", flush=True)
    return own | others


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
    numbers = {"requests": 1500, "skip": 0, "processes": len(os.sched_getaffinity(0))}
    lists = {"ranks": (8,), "cost": ("30b",), "loads": (0.6,)}
    files = {"trace": Path, "svg": Path, "results": KEPT}
    options = parse_options(__doc__, front=False, flows=False, **numbers, **lists, **files)
    traces = OWN_TRACES if options.trace is None else {options.trace.stem: options.trace}
    results = Results(options.results, options.processes)
    panels: dict[str, dict[str, Point]] = {}
    for cost, num_ranks, trace in product(options.cost, options.ranks, traces):
        group = Run("", traces[trace], options.requests, num_ranks, cost, None, 1, options.skip)
        full, about = capacity(group, results), f"{trace}, {num_ranks} ranks, {cost}"
        if options.flows:
            print(about, flush=True)
            arrivals = read_trace(traces[trace], options.requests, options.skip)
            neighbours(arrivals, full, Sizes(num_ranks=num_ranks), COSTS[cost])
            continue
        for load in options.loads:
            print(f"{about}, load {load:g} ({full * load:.1f} requests/s)", flush=True)
            at_load = group._replace(rate=full * load, num_copies=-(-num_ranks // USUAL_RANKS))
            if options.front:
                panels[f"{about}, load {load:g}"] = print_front(at_load, results)
            else:
                print_defaults(at_load, results)
    if options.svg is not None and panels:
        options.svg.write_text(draw(panels))


if __name__ == "__main__":
    main()
