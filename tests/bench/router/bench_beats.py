"""Compares what a step costs a router with beats and without them, by turns, and counts what beats take of it.

    python -m tests.bench.router.bench_beats [--step-ms 14] [--sequences 64] [--steps 24] [--turns 60]

The real Engine and ExecutorGroup drive one executor process, its server real as well, whose device does
nothing but take its time. One executor is the hardest case: with more, a step costs the router more, and so
do its beats. While the same sequences decode, beats stop and go on:

    turn     without   with   with   without       of `steps` steps each, after some that are not measured

A ratio is of a turn, so that what drifts is in both its halves. The parts without beats of two turns, the
outer two over the inner two, are the same against the same: what a ratio of nothing comes to here. CPU time is
the process's, gRPC's threads included. A median's error is its standard error. Beats are looked after every
100 ms, beside a step: `steps` are made up to a whole number of such periods.

What beats take is counted, too: the CPU time of the event loop's thread in all that `Attendance` does while steps run,
and beats that travel then, each for what it costs while the group is idle. The cost of
the clock is taken off. Exits with 1 if that is more than 1 % of a step's CPU time, if the period grows by more
than 1 %, or if the CPU time does and twice its error does not account for it, or if that error is above 2 %.
"""

import asyncio
import math
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import uvloop

from protos.executor.beats import BEAT_S
from router.engine.engines import Engines
from router.executors.attendance import Attendance
from router.executors.group import GroupSettings
from tests.bench.support.options import parse_options
from tests.bench.support.quiet import quiet
from tests.bench.support.routing import running_engines, simulated_executor
from tests.bench.support.simulated_executor import MAX_MODEL_LEN
from tests.router.support.requests import make_request

REQUIRED = 0.01
MAX_ERROR = 0.02
IDLE_S = 2.0
WITH_BEATS = GroupSettings(step_timeout_s=120)
WITHOUT_BEATS = GroupSettings(step_timeout_s=120, silent_after_ms=0)
TURN = (False, True, True, False)
MAX_STEPS = MAX_MODEL_LEN - 96  # of an epoch
PARTS = ("note_step", "note_late_answer", "note_answers", "_tick", "_note")


class Cost(NamedTuple):
    """What a step took, in microseconds; of its CPU time, what was counted; and beats that came meanwhile."""

    period_us: float
    cpu_us: float
    counted_us: float
    num_beats: float


class Ratio(NamedTuple):
    """Median of ratios, and its standard error."""

    median: float
    error: float

    @classmethod
    def of(cls, ratios: list[float]) -> "Ratio":
        if len(ratios) < 2:
            return cls(*ratios or [1.0], math.inf)
        # Of a normal distribution; its width from the quartiles, as single turns are far off.
        low, median, high = statistics.quantiles(ratios, n=4)
        return cls(median, 1.2533 * (high - low) / 1.349 / len(ratios) ** 0.5)

    def __str__(self) -> str:
        return f"{self.median:.4f} ± {self.error:.4f}"


class Comparison(NamedTuple):
    """Costs of beats.

    Attributes:
        turns: Costs of the parts of each turn, see TURN.
        router_us, executor_us: CPU time of a beat either way while the group is idle, at each end.
    """

    turns: list[list[Cost]]
    router_us: float
    executor_us: float

    def ratio(self, name: str) -> Ratio:
        """Returns what a cost with beats is of that without."""
        costs = ([getattr(part, name) for part in turn] for turn in self.turns)
        return Ratio.of([(b + c) / (a + d) for a, b, c, d in costs])

    def control(self, name: str) -> Ratio:
        """Returns what a cost without beats is of another one without."""
        parts = [[getattr(turn[place], name) for place in (0, 3)] for turn in self.turns]
        pairs = zip(parts[::2], parts[1::2], strict=False)
        return Ratio.of([(b + c) / (a + d) for (a, b), (c, d) in pairs])

    @property
    def with_beats(self) -> list[Cost]:
        return [part for turn in self.turns for part in turn[1:3]]

    @property
    def share(self) -> float:
        """Median of the part of a step's CPU time that is for beats."""
        return statistics.median(
            (cost.counted_us + cost.num_beats * self.router_us) / cost.cpu_us
            for cost in self.with_beats
        )

    @property
    def is_met(self) -> bool:
        period, cpu = self.ratio("period_us"), self.ratio("cpu_us")
        is_same = period.median <= 1 + REQUIRED and cpu.median - 2 * cpu.error <= 1 + REQUIRED
        return is_same and cpu.error <= MAX_ERROR and self.share <= REQUIRED


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


class Switch:
    """Stops the beats of the one executor and has them go on."""

    def __init__(self) -> None:
        self._attended: tuple[Any, ...] = ()

    @asynccontextmanager
    async def wired(self) -> AsyncIterator[None]:
        """Notes who attends whom, until it ends."""
        attend = Attendance.attend

        def noted(*args: Any) -> None:
            self._attended = args
            attend(*args)

        with mock.patch.object(Attendance, "attend", noted):
            yield

    def turn(self, *, is_on: bool) -> None:
        attendance, *call = self._attended
        if is_on:
            attendance.attend(*call)
        else:
            attendance.close()


async def measure(
    address: str, num_sequences: int, num_steps: int, num_skipped: int, num_turns: int
) -> list[list[Cost]]:
    """Returns the mean costs of a step in each part of so many turns, while the same sequences decode.

    Args:
        address: The executor's.
        num_sequences: That decode.
        num_steps: That are measured in each part.
        num_skipped: Before these, in which beats begin or end.
        num_turns: Of one epoch.
    """
    count, switch = Count(), Switch()
    num_parts, length = len(TURN) * num_turns, num_skipped + num_steps
    running = running_engines(address, depth=2, settings=WITH_BEATS)
    async with count.taken(), switch.wired(), running as engines:
        listener = engines.listeners.open()
        for number in range(num_sequences):
            fields = {"request_id": f"r{number}", "tag": number, "is_columnar": True}
            # And a part before and behind: in the first steps sequences begin, in the last they end.
            max_tokens = (num_parts + 2) * length
            engines.submit(make_request([1 + number % 900] * 8, listener, max_tokens, **fields))
        num_tokens, step, marks = 0, 0, dict[int, tuple[float, ...]]()
        while engines.num_live:
            await listener.wait()
            num_tokens += int(engines.take_columns(listener).num_tokens.sum())
            listener.ended.clear()
            before, step = step, num_tokens // num_sequences
            if step == before:
                continue
            clocks = time.perf_counter(), time.process_time()
            marks[step] = (*clocks, count.ns / 1e9, count.num_beats / 1e6)
            part, place = divmod(step, length)
            if 1 <= part <= num_parts:
                is_on = TURN[(part - 1) % len(TURN)]
                if place == 0:
                    switch.turn(is_on=is_on)
                assert place < length - 1 or _beats(engines) == is_on
    ends = range(2 * length - 1, (num_parts + 1) * length, length)
    costs = [_cost(marks, end - num_steps, end) for end in ends]
    return [costs[first : first + len(TURN)] for first in range(0, num_parts, len(TURN))]


def _beats(engines: Engines) -> bool:
    [member] = engines.status()[0].members
    return bool(member.HasField("last_beat_age"))


def _cost(marks: dict[int, tuple[float, ...]], first: int, last: int) -> Cost:
    """Returns the mean cost of the steps after one until another."""
    scale = 1e6 / (last - first)
    begun, ended = marks[first], marks[last]
    return Cost(*(scale * (end - begin) for begin, end in zip(begun, ended, strict=True)))


async def idle_cost(address: str, pid: int) -> tuple[float, float]:
    """Returns the CPU time of a beat while no step runs, at the router and at the executor."""
    costs = {}
    for settings in (WITHOUT_BEATS, WITH_BEATS):
        count = Count()
        running = running_engines(address, depth=2, settings=settings)
        async with count.taken(), running:
            await asyncio.sleep(IDLE_S / 4)
            begun = time.process_time() * 1e6, _cpu_us(pid)
            num_before = count.num_beats
            await asyncio.sleep(IDLE_S)
            costs[settings] = time.process_time() * 1e6 - begun[0], _cpu_us(pid) - begun[1]
    both = zip(costs[WITHOUT_BEATS], costs[WITH_BEATS], strict=True)
    router_us, executor_us = (on - off for off, on in both)
    num_beats = 2 * (count.num_beats - num_before)  # as many go as come
    return router_us / num_beats, executor_us / num_beats


def _cpu_us(pid: int) -> float:
    """Returns the CPU time of a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e3


async def compare(step_ms: float, num_sequences: int, num_steps: int, num_turns: int) -> Comparison:
    """Returns what beats cost.

    Raises:
        ValueError: A turn is longer than an epoch of the simulated executor.
    """
    period = math.ceil(1000 * BEAT_S / step_ms)
    num_steps, num_skipped = -(-num_steps // period) * period, period + 1
    most = (MAX_STEPS // (num_skipped + num_steps) - 2) // len(TURN)
    if most < 1:
        raise ValueError(
            f"parts of {num_skipped + num_steps} steps of {step_ms:g} ms: {len(TURN) + 2} of them are to "
            f"fit into {MAX_STEPS}; take fewer or longer steps"
        )
    turns = list[list[Cost]]()
    async with simulated_executor(step_ms, num_sequences) as (address, pid, _):
        while len(turns) < num_turns:
            count = min(most, num_turns - len(turns))
            turns += await measure(address, num_sequences, num_steps, num_skipped, count)
        return Comparison(turns, *await idle_cost(address, pid))


async def run(step_ms: float, num_sequences: int, num_steps: int, num_turns: int) -> bool:
    costs = await compare(step_ms, num_sequences, num_steps, num_turns)
    print(
        f"{num_turns} turns of {len(TURN)} times {num_steps} steps of {step_ms:g} ms, "
        f"{num_sequences} sequences"
    )
    print("                     without       with   with / without     without / without")
    for name in ("period_us", "cpu_us"):
        parts = [[getattr(part, name) for part in turn] for turn in costs.turns]
        off = statistics.median(value for turn in parts for value in (turn[0], turn[3]))
        on = statistics.median(value for turn in parts for value in turn[1:3])
        print(
            f"{name.replace('_us', ' us'):16}{off:12.1f}{on:11.1f}   "
            f"{costs.ratio(name)}    {costs.control(name)}"
        )
    counted_us = statistics.median(cost.counted_us for cost in costs.with_beats)
    seconds = sum(cost.period_us for cost in costs.with_beats) / 1e6
    print(
        f"a beat, idle: {costs.router_us:.0f} us at the router, {costs.executor_us:.0f} us at the executor; "
        f"{sum(cost.num_beats for cost in costs.with_beats) / seconds:.2f} a second while steps run\n"
        f"counted: {counted_us:.2f} us a step; with beats that travelled, {costs.share:.2%} of its CPU"
    )
    print(
        f"required: period, CPU time and share within {REQUIRED:.0%}: "
        f"{'met' if costs.is_met else 'NOT MET'}"
    )
    return costs.is_met


def main() -> None:
    quiet()
    options = parse_options(__doc__, step_ms=14.0, sequences=64, steps=24, turns=60)
    steps = (options.step_ms, options.sequences, options.steps, options.turns)
    sys.exit(0 if uvloop.run(run(*steps)) else 1)


if __name__ == "__main__":
    main()
