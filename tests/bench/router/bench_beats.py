"""Compares what a step costs a router with beats and without them, by turns, and counts what beats take of it.

    python -m tests.bench.router.bench_beats [--step-ms 14] [--sequences 64] [--steps 150] [--turns 20]

The real Engine and ExecutorGroup drive one executor process, its server real as well, whose device does
nothing but take its time. One executor is the hardest case: with more, a step costs the router more, and so
do its beats. Each turn forms the group anew, with and without beats in an order that alternates, lets
sequences decode, and takes the steps after the first tenth. A ratio is of the two of a turn. CPU time is
the process's, gRPC's threads included: from turn to turn it differs by more than the 1 % that is asked for.

So its part is counted, too: the CPU time of the event loop's thread in all that `Attendance` does while steps run,
and beats that travel then, each for what it costs while the group is idle. The cost of
the clock is taken off. Exits with 1 if the part is more than 1 % of a step's CPU
time, or if the median of the periods' ratios is off by more than 1 %.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import uvloop

from router.executors.attendance import Attendance
from router.executors.group import GroupSettings
from tests.bench.support.options import parse_options
from tests.bench.support.quiet import quiet
from tests.bench.support.routing import running_engines, simulated_executor
from tests.router.support.requests import make_request

REQUIRED = 0.01
IDLE_S = 2.0
SETTINGS = {
    True: GroupSettings(step_timeout_s=120),
    False: GroupSettings(step_timeout_s=120, silent_after_ms=0),
}
PARTS = ("note_step", "note_late_answer", "note_answers", "_tick", "_note")


class Cost(NamedTuple):
    """What a step took, in microseconds; of its CPU time, what was counted; and beats that came meanwhile."""

    period_us: float
    cpu_us: float
    counted_us: float
    num_beats: float


class Comparison(NamedTuple):
    """Costs of beats.

    Attributes:
        turns: Each turn's costs without them and with them.
        router_us, executor_us: CPU time of a beat either way while the group is idle, at each end.
    """

    turns: list[tuple[Cost, Cost]]
    router_us: float
    executor_us: float

    @property
    def ratios(self) -> tuple[float, float]:
        """Medians of what a step's period and CPU time with beats are of those without."""
        period, cpu, *_ = zip(*(_ratios(*turn) for turn in self.turns), strict=True)
        return statistics.median(period), statistics.median(cpu)

    @property
    def share(self) -> float:
        """Median of the part of a step's CPU time that is for beats."""
        return statistics.median(
            (cost.counted_us + cost.num_beats * self.router_us) / cost.cpu_us
            for _, cost in self.turns
        )

    @property
    def is_met(self) -> bool:
        period, _ = self.ratios
        return period <= 1 + REQUIRED and self.share <= REQUIRED


def _ratios(off: Cost, on: Cost) -> tuple[float, float]:
    return on.period_us / off.period_us, on.cpu_us / off.cpu_us


class Count:
    """CPU time of this thread in calls of `Attendance`, in nanoseconds, and the beats that came."""

    def __init__(self) -> None:
        self.ns = self.num_beats = 0
        self._is_inside = False
        self._clock_ns = min(-time.thread_time_ns() + time.thread_time_ns() for _ in range(1000))

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Counts until it ends."""
        with ExitStack() as stack:
            for name in PARTS:
                timed = self._timed(getattr(Attendance, name), is_beat=name == "_note")
                stack.enter_context(mock.patch.object(Attendance, name, timed))
            yield

    def _timed(self, part: Callable[..., Any], *, is_beat: bool) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.num_beats += is_beat
            if self._is_inside:
                return part(*args)
            self._is_inside = True
            time.thread_time_ns()  # so that what follows pays for the part's cold caches, not the clock's
            begun = time.thread_time_ns()
            try:
                return part(*args)
            finally:
                self.ns += time.thread_time_ns() - begun - self._clock_ns
                self._is_inside = False

        return call


async def measure(address: str, num_sequences: int, num_steps: int, *, has_beats: bool) -> Cost:
    """Returns the mean cost of a step of sequences that decode."""
    count = Count()
    running = running_engines(address, depth=2, settings=SETTINGS[has_beats])
    async with count.taken(), running as engines:
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
                clocks = time.perf_counter(), time.process_time()
                marks.append((step, *clocks, count.ns / 1e9, count.num_beats / 1e6))
        [member] = engines.status()[0].members
        assert member.HasField("last_beat_age") == has_beats
    (first_step, *begun), *_, (last_step, *ended) = marks
    scale = 1e6 / (last_step - first_step)
    return Cost(*(scale * (end - begin) for begin, end in zip(begun, ended, strict=True)))


async def idle_cost(address: str, pid: int) -> tuple[float, float]:
    """Returns the CPU time of a beat while no step runs, at the router and at the executor."""
    costs = {}
    for has_beats in (False, True):
        count = Count()
        running = running_engines(address, depth=2, settings=SETTINGS[has_beats])
        async with count.taken(), running:
            await asyncio.sleep(IDLE_S / 4)
            begun = time.process_time() * 1e6, _cpu_us(pid)
            num_before = count.num_beats
            await asyncio.sleep(IDLE_S)
            costs[has_beats] = time.process_time() * 1e6 - begun[0], _cpu_us(pid) - begun[1]
    router_us, executor_us = (on - off for off, on in zip(costs[False], costs[True], strict=True))
    num_beats = 2 * (count.num_beats - num_before)  # as many go as come
    return router_us / num_beats, executor_us / num_beats


def _cpu_us(pid: int) -> float:
    """Returns the CPU time of a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e3


async def compare(step_ms: float, num_sequences: int, num_steps: int, num_turns: int) -> Comparison:
    """Returns what beats cost."""
    turns = []
    async with simulated_executor(step_ms, num_sequences) as (address, pid, _):
        for turn in range(num_turns):
            pair = {}
            for has_beats in (turn % 2 == 0, turn % 2 == 1):
                pair[has_beats] = await measure(
                    address, num_sequences, num_steps, has_beats=has_beats
                )
            turns.append((pair[False], pair[True]))
        return Comparison(turns, *await idle_cost(address, pid))


async def run(step_ms: float, num_sequences: int, num_steps: int, num_turns: int) -> bool:
    costs = await compare(step_ms, num_sequences, num_steps, num_turns)
    print(f"{num_turns} turns of {num_steps} steps of {step_ms:g} ms, {num_sequences} sequences")
    print("                     without       with   median ratio   quartiles")
    columns = zip(*(_ratios(*turn) for turn in costs.turns), strict=True)
    for name, ratios in zip(Cost._fields, columns, strict=False):
        off, on = ([getattr(pair[index], name) for pair in costs.turns] for index in (0, 1))
        low, median, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name.replace('_us', ' us'):16}{statistics.median(off):12.1f}"
            f"{statistics.median(on):11.1f}{median:15.4f}   {low:.4f} to {high:.4f}"
        )
    with_beats = [cost for _, cost in costs.turns]
    counted_us = statistics.median(cost.counted_us for cost in with_beats)
    seconds = sum(cost.period_us for cost in with_beats) / 1e6
    print(
        f"a beat, idle: {costs.router_us:.0f} us at the router, {costs.executor_us:.0f} us at the executor; "
        f"{sum(cost.num_beats for cost in with_beats) / seconds:.2f} a second while steps run\n"
        f"counted: {counted_us:.2f} us a step; with beats that travelled, {costs.share:.2%} of its CPU"
    )
    print(
        f"required: period and share within {REQUIRED:.0%}: {'met' if costs.is_met else 'NOT MET'}"
    )
    return costs.is_met


def main() -> None:
    quiet()
    options = parse_options(__doc__, step_ms=14.0, sequences=64, steps=150, turns=20)
    steps = (options.step_ms, options.sequences, options.steps, options.turns)
    sys.exit(0 if uvloop.run(run(*steps)) else 1)


if __name__ == "__main__":
    main()
