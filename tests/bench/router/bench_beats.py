"""Compares what a step costs a router with beats and without them, by turns.

    python -m tests.bench.router.bench_beats [--step-ms 14] [--sequences 64] [--steps 150] [--turns 20]

The real Engine and ExecutorGroup drive one executor process, its server real as well, whose device does
nothing but take its time. One executor is the hardest case: with more, a step costs the router more, and so
do its beats. Each turn forms the group anew, with and without beats in an order that alternates, lets
sequences decode, and takes the steps after the first tenth. A ratio is of the two of a turn. CPU time is
the process's, gRPC's threads included. Exits with 1 if a median ratio is off by more than 1 %.
"""

import statistics
import sys
import time
from typing import NamedTuple

import uvloop

from router.executors.group import GroupSettings
from tests.bench.support.options import parse_options
from tests.bench.support.quiet import quiet
from tests.bench.support.routing import running_engines, simulated_executor
from tests.router.support.requests import make_request

REQUIRED = 0.01
SETTINGS = {
    True: GroupSettings(step_timeout_s=120),
    False: GroupSettings(step_timeout_s=120, silent_after_ms=0),
}


class Cost(NamedTuple):
    """What a step took, in microseconds."""

    period_us: float
    cpu_us: float


async def measure(address: str, num_sequences: int, num_steps: int, *, has_beats: bool) -> Cost:
    """Returns the mean cost of a step of sequences that decode."""
    async with running_engines(address, depth=2, settings=SETTINGS[has_beats]) as engines:
        listener = engines.listeners.open()
        for number in range(num_sequences):
            fields = {"request_id": f"r{number}", "tag": number, "is_columnar": True}
            engines.submit(make_request([1 + number % 900] * 8, listener, num_steps, **fields))
        first, last, num_tokens, marks = num_steps // 10, num_steps - 2, 0, []
        while engines.num_live:
            await listener.wait()
            num_tokens += int(engines.take_columns(listener).num_tokens.sum())
            listener.ended.clear()
            step = num_tokens / num_sequences
            if first <= step <= last:
                marks.append((step, time.perf_counter(), time.process_time()))
        (first_step, begun, begun_cpu), *_, (last_step, ended, ended_cpu) = marks
        steps = last_step - first_step
        return Cost((ended - begun) / steps * 1e6, (ended_cpu - begun_cpu) / steps * 1e6)


async def compare(
    step_ms: float, num_sequences: int, num_steps: int, num_turns: int
) -> list[tuple[Cost, Cost]]:
    """Returns each turn's costs without beats and with them."""
    costs = []
    async with simulated_executor(step_ms, num_sequences) as (address, _):
        for turn in range(num_turns):
            pair = {}
            for has_beats in (turn % 2 == 0, turn % 2 == 1):
                pair[has_beats] = await measure(
                    address, num_sequences, num_steps, has_beats=has_beats
                )
            costs.append((pair[False], pair[True]))
    return costs


def median_ratios(costs: list[tuple[Cost, Cost]]) -> Cost:
    """Returns the medians of what costs with beats are of those without."""
    ratios = [Cost(*(b / a for a, b in zip(off, on, strict=True))) for off, on in costs]
    return Cost(*map(statistics.median, zip(*ratios, strict=True)))


async def run(step_ms: float, num_sequences: int, num_steps: int, num_turns: int) -> bool:
    costs = await compare(step_ms, num_sequences, num_steps, num_turns)
    medians = median_ratios(costs)
    print(f"{num_turns} turns of {num_steps} steps of {step_ms:g} ms, {num_sequences} sequences")
    print("                     without       with   median ratio   quartiles")
    for name, median in medians._asdict().items():
        off, on = ([getattr(pair[index], name) for pair in costs] for index in (0, 1))
        low, _, high = statistics.quantiles((b / a for a, b in zip(off, on, strict=True)), n=4)
        print(
            f"{name.replace('_us', ' us'):16}{statistics.median(off):12.1f}"
            f"{statistics.median(on):11.1f}{median:15.4f}   {low:.4f} to {high:.4f}"
        )
    is_met = max(medians) <= 1 + REQUIRED
    print(f"required: at most {1 + REQUIRED:g}: {'met' if is_met else 'NOT MET'}")
    return is_met


def main() -> None:
    quiet()
    options = parse_options(__doc__, step_ms=14.0, sequences=64, steps=150, turns=20)
    steps = (options.step_ms, options.sequences, options.steps, options.turns)
    sys.exit(0 if uvloop.run(run(*steps)) else 1)


if __name__ == "__main__":
    main()
