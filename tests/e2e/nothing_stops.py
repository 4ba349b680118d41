"""Table of what must not stop callers, and for how long it may hold them up (``make nothing-stops``).

Starts stacks of the demo model with 64 streams, half of them on one GenerateMany, and breaks them. Each
line says what is required, what was measured, and whether it holds; exits with 1 if one does not.
"""

import argparse
import asyncio
import gc
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import uvloop

from deploy.local.demo_tasks import token_ids
from deploy.local.launch import STOP_TIMEOUT_S, LocalStack
from protos.serving.v1.serving_pb2 import SPARE_STATE_STAGED
from router.client import CallFailed, Client
from tests.bench.router import bench_beats
from tests.bench.router.bench_formings import (
    REQUIRED_LONGEST_MS,
    REQUIRED_MEDIAN_MS,
    form_often,
)
from tests.bench.support.quiet import quiet
from tests.e2e.chaos import BEGIN_S, Report, streaming
from tests.e2e.conftest import PATIENT_STEPS, SAME_ANSWERS
from tests.e2e.support.envoy import envoy_before
from tests.e2e.support.logs import logged, records, scraped
from tests.e2e.support.poisoned_executor import POISON
from tests.e2e.support.stacks import PoisonedStack, first_member, served, serving_pid, supervised

REQUIRED_IN_PLACE_S = 0.5  # median
REQUIRED_BESIDE_START_S = 0.2  # of medians: 1.3 s where a process takes 1.1 s to start
REQUIRED_REPLACED_S = 0.25, 0.6  # median, and at most
REQUIRED_SHRUNK_S = 0.3  # median
REQUIRED_GROWN_S = 0.15  # at most
SPARES = 5  # of a stack, each of which takes a place once
GROW_AFTER = ("--grow-after-s", "1")
REQUIRED_NOTICED_S = 0.65, 1.0  # median, and at most
REQUIRED_TAKEOVER_S = 0.4, 1.0  # median, and at most
PAUSE_S = (0.7, 2.0)
NUM_BUSY_LOOPS = 4
MANY_STEPS = 20
STEADY_S = 2.0  # until streams that a fault held up have gone on for a while
REQUIRED_KEPT = 0.97  # of the tokens of sequences whose rank lost no executor
STEP_MS = 14.0  # of the demo model's
METRICS = ("--metrics-listen", "127.0.0.1:0")


@dataclass(frozen=True)
class Size:
    """How much of each line to run."""

    num_streams: int = 64
    num_kills: int = 20
    num_router_kills: int = 10
    num_double_kills: int = 5
    num_updates: int = 5
    num_stops: int = 20
    num_pauses: int = 10
    num_turns: int = 60
    num_steps: int = 24
    busy_s: float = 120.0
    num_formings: int = 1000
    group_sizes: Sequence[int] = tuple(REQUIRED_MEDIAN_MS)
    executor_args: Sequence[str] = SAME_ANSWERS
    steady_s: float = STEADY_S


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Attributes:
        what: What is broken.
        required: Of it.
        measured: What came of it.
        is_right: Whether nothing was lost or wrong, however long it took.
        is_in_time: Whether it was quick and sparing enough.
    """

    what: str
    required: str
    measured: str
    is_right: bool
    is_in_time: bool = True

    def __str__(self) -> str:
        verdict = "holds" if self.is_right and self.is_in_time else "MISSED"
        return f"| {self.what} | {self.required} | {self.measured} | {verdict} |"


async def table(size: Size, folder: Path) -> AsyncIterator[Line]:
    """Yields each line once it is measured."""
    yield await replacements(size, folder / "replacements")
    async for line in shrinks(size, folder / "shrinks"):
        yield line
    for line in await restarts(size, folder / "in-place", in_place=True):
        yield line
    restarted, _ = await restarts(size, folder / "restarts", in_place=False)
    yield restarted
    for num_executors in size.group_sizes:
        yield await formings(num_executors, size)
    yield await stops(size, folder / "stops")
    yield await pauses(size, folder / "pauses")
    yield await busy(size, folder / "busy")
    yield await poison(size, folder / "poison")
    yield await poison(size, folder / "spared", spares=1)
    yield await router_kills(size, folder / "router")
    yield await takeovers(size, folder / "takeovers")
    yield await takeovers(size, folder / "envoy", has_envoy=True)
    yield await double_kills(size, folder / "both")
    yield await updates(size, folder / "updates")
    yield await beats(size)


async def replacements(size: Size, folder: Path) -> Line:
    """Executors are killed that never come back, and a spare takes the place of each."""
    report, undisturbed_s, gaps_s = Report(), list[float](), list[float]()
    for first in range(0, size.num_kills, SPARES):
        num_kills = min(SPARES, size.num_kills - first)
        settings = _elastic(size, dp_size=2, spares=num_kills)
        async with served(folder / f"from-{first}", **settings) as (stack, client):
            rng, gaps = random.Random(6 + first), len(report.gaps_s)
            await _are_staged(
                client, num_kills
            )  # or their starts would take the cores from the streams
            async with streaming(client, size.num_streams, rng, report, has_same_sums=False):
                await asyncio.sleep(BEGIN_S * size.num_streams)
                for number in range(num_kills):
                    await asyncio.sleep(size.steady_s)
                    process = await first_member(stack, number + 1)
                    report.note(f"{process.name} killed")
                    await process.kill()
                    await logged(stack.router, "group_ready", number + 2)
                await asyncio.sleep(size.steady_s)
            gaps_s += report.gaps_s[gaps:]
            undisturbed_s.append(report.gaps_s[gaps - 1])
            report.begin()
    median_s, longest_s = statistics.median(gaps_s), max(gaps_s)
    required_median_s, required_s = REQUIRED_REPLACED_S
    return Line(
        f"{size.num_kills} executors killed that never come back, a spare each time",
        f"0 lost, 0 wrong; longest gap at a caller: median ≤ {required_median_s}, max ≤ {required_s} s",
        f"{_streams(report)}; {_gaps(gaps_s)}, undisturbed {max(undisturbed_s):.2f} s",
        not report.wrong,
        median_s <= required_median_s and longest_s <= required_s,
    )


async def shrinks(size: Size, folder: Path) -> AsyncIterator[Line]:
    """Executors are killed until one is left, and started again until all are."""
    report = Report()
    shrunk_s, started_s, grown_s = list[float](), list[float](), list[float]()
    later_s = list[float]()  # of waits that began or ended in the seconds around
    settings = _elastic(size, dp_size=3, spares=0)
    async with served(folder, **settings) as (stack, client):
        rng = random.Random(7)
        async with streaming(client, size.num_streams, rng, report, has_same_sums=False):
            for number in range(max(1, size.num_kills // 4)):
                for kills in (1, 2):
                    await asyncio.sleep(size.steady_s)
                    report.note(f"{stack.executors[kills].name} killed")
                    await stack.executors[kills].kill()
                    await logged(stack.router, "group_ready", 1 + 4 * number + kills)
                    await asyncio.sleep(size.steady_s)
                    shrunk_s.append(report.gaps_s[-1])
                for starts in (1, 2):
                    report.note(f"{stack.executors[starts].name} started again")
                    await stack.start_again(starts)
                    await stack.executors[starts].event("ready_to_join")
                    started_s.append(report.gaps_s[-1])
                    report.note(f"{stack.executors[starts].name} is there")
                    formed = await logged(stack.router, "group_ready", 3 + 4 * number + starts)
                    await asyncio.sleep(size.steady_s)
                    grown_s.append(report.gap_at_s(_time_of(formed[-1])))
                    later_s.append(report.gaps_s[-1])
    median_s = statistics.median(shrunk_s)
    yield Line(
        f"{len(shrunk_s)} executors killed, 3 to 2 to 1 without return (8 experts)",
        f"tokens equal in float32; longest gap at a caller: median ≤ {REQUIRED_SHRUNK_S} s",
        f"{_streams(report)}; {_gaps(shrunk_s)}",
        not report.wrong,
        median_s <= REQUIRED_SHRUNK_S,
    )
    yield Line(
        f"the same started again, {len(grown_s)} times 1 to 2 or 2 to 3",
        f"tokens equal in float32; longest gap ≤ {REQUIRED_GROWN_S} s",
        f"{_gaps(grown_s)}, of callers that waited as it grew, for first tokens too; of any around then "
        f"{max(later_s):.2f} s; {max(started_s):.2f} s while it starts on the same cores",
        not report.wrong,
        max(grown_s) <= REQUIRED_GROWN_S,
    )


def _elastic(size: Size, *, dp_size: int, spares: int) -> dict[str, Any]:
    """Returns the settings of a stack whose tokens are the same wherever its experts are."""
    return {
        "dp_size": dp_size,
        "min_dp_size": 1,
        "spares": spares,
        "executor_args": (*size.executor_args, "--dtype", "float32"),
        "router_args": (*PATIENT_STEPS, *GROW_AFTER),
    }


async def restarts(size: Size, log_dir: Path, *, in_place: bool) -> tuple[Line, Line]:
    """Executors are killed, one after the other, and started again.

    Args:
        in_place: Whether only the process that serves is killed, which its supervisor starts again; or
            the supervisor's, too.
    """
    report, starts_s = Report(), list[float]()
    args = (
        (*size.executor_args, "--max-restarts", str(size.num_kills))
        if in_place
        else size.executor_args
    )
    settings = {"executor_args": args, "router_args": (*PATIENT_STEPS, *METRICS)}
    async with served(log_dir, **settings) as (stack, client):
        streams = streaming(client, size.num_streams, random.Random(1), report)
        async with supervised(stack), streams:
            for number in range(size.num_kills):
                await asyncio.sleep(size.steady_s)
                before, index = divmod(number, len(stack.executors))
                process = stack.executors[index]
                report.note(f"{process.name} killed")
                killed = time.time()
                if in_place:
                    os.kill(await serving_pid(process, before + 1), signal.SIGKILL)
                else:
                    await process.kill()
                formed = await logged(stack.router, "group_ready", number + 2)
                started = await logged(stack.executors[index], "ready_to_join", before + 2)
                starts_s.append(_time_of(started[-1]) - killed)
            await asyncio.sleep(size.steady_s)
        kept = await _Kept.of(stack)
    parts = ", ".join(
        f"{name} {statistics.median(record[f'seconds_{name}'] for record in formed[1:]):.2f}"
        for name in ("down", "waiting", "forming")
    )
    median_s = statistics.median(report.gaps_s[1:])
    start_s = statistics.median(starts_s)
    if in_place:
        whose, required_s, how = "their supervisors (--max-restarts)", REQUIRED_IN_PLACE_S, ""
    else:
        whose, required_s = "what had started the whole process", start_s + REQUIRED_BESIDE_START_S
        how = f": {REQUIRED_BESIDE_START_S} s more than a start"
    restarted = Line(
        f"{size.num_kills} executors killed and started again by {whose}, no spare",
        f"0 lost, 0 wrong; longest gap at a caller: median ≤ {required_s:.2f} s{how}",
        f"{_streams(report)}; {_gaps(report.gaps_s[1:])}, "
        f"undisturbed {report.gaps_s[0]:.2f} s; started in {start_s:.2f} s; "
        f"medians of the router's: {parts} s",
        not report.wrong,
        median_s <= required_s,
    )
    return restarted, Line(
        "the KV of those who ran on the other executor",
        f"≥ {REQUIRED_KEPT:.0%} of their tokens are not computed again",
        str(kept),
        not report.wrong,
        kept.num_tokens > 0 and kept.share >= REQUIRED_KEPT,
    )


@dataclass(frozen=True)
class _Kept:
    """Tokens of sequences whose group was lost, and not an executor of their rank.

    Attributes:
        num_tokens: That were computed before.
        num_again: Of these, that were computed again.
        num_lost: Tokens that others, whose KV was lost, had computed again.
    """

    num_tokens: int
    num_again: int
    num_lost: int

    @classmethod
    async def of(cls, stack: LocalStack) -> "_Kept":
        formed = records(stack.router.log_path, "group_ready")
        again = (await scraped(stack.router))["lockstep_router_recomputed_tokens_total"]
        return cls(
            sum(record["kept_tokens"] for record in formed),
            round(again["kept", "0"]),
            round(again["lost", "0"]),
        )

    @property
    def share(self) -> float:
        return 1 - self.num_again / max(1, self.num_tokens)

    def __str__(self) -> str:
        return f"{self.share:.2%} of {self.num_tokens:,} tokens; {self.num_lost:,} of others lost"


async def formings(num_executors: int, size: Size) -> Line:
    """Executors that are all there form a group again and again."""
    times_ms = await form_often(num_executors, size.num_formings)
    required_ms = REQUIRED_MEDIAN_MS[num_executors]
    median_ms, longest_ms = statistics.median(times_ms), max(times_ms)
    return Line(
        f"{len(times_ms):,} formings with {num_executors} executors",
        f"median ≤ {required_ms:.0f} ms, none above {REQUIRED_LONGEST_MS:.0f} ms",
        f"median {median_ms:.1f}, max {longest_ms:.1f} ms",
        len(times_ms) == size.num_formings,
        median_ms <= required_ms and longest_ms <= REQUIRED_LONGEST_MS,
    )


async def stops(size: Size, log_dir: Path) -> Line:
    """Executors are stopped, and killed once that was noticed; the supervisor starts them again."""
    report, noticed_s = Report(), list[float]()
    settings = {"executor_args": size.executor_args, "router_args": PATIENT_STEPS}
    async with served(log_dir, **settings) as (stack, client):
        streams = streaming(client, size.num_streams, random.Random(3), report)
        async with supervised(stack), streams:
            for number in range(size.num_stops):
                await asyncio.sleep(size.steady_s)
                process = stack.executors[number % len(stack.executors)]
                report.note(f"{process.name} stopped")
                stopped = time.time()
                process.pause()
                *_, lost = await logged(stack.router, "group_lost", number + 1)
                noticed_s.append(_time_of(lost) - stopped)
                await process.kill()
                await logged(stack.router, "group_ready", number + 2)
            await asyncio.sleep(size.steady_s)
    median_s, longest_s = statistics.median(noticed_s), max(noticed_s)
    required_median_s, required_s = REQUIRED_NOTICED_S
    return Line(
        f"{size.num_stops} executors stopped (SIGSTOP) under load",
        f"0 lost, 0 wrong; noticed in median ≤ {required_median_s}, max ≤ {required_s} s",
        f"{_streams(report)}; noticed in median {median_s:.2f}, max {longest_s:.2f} s",
        not report.wrong,
        median_s <= required_median_s and longest_s <= required_s,
    )


async def pauses(size: Size, log_dir: Path) -> Line:
    """Executors are stopped for a while and go on, whether or not that was noticed."""
    report, rng = Report(), random.Random(4)
    settings = {"executor_args": size.executor_args, "router_args": (*PATIENT_STEPS, *METRICS)}
    async with served(log_dir, **settings) as (stack, client):
        async with streaming(client, size.num_streams, rng, report):
            for number in range(size.num_pauses):
                await asyncio.sleep(size.steady_s)
                process = stack.executors[number % len(stack.executors)]
                report.note(f"{process.name} paused")
                process.pause()
                await asyncio.sleep(rng.uniform(*PAUSE_S))
                process.resume()
            await asyncio.sleep(size.steady_s)
        num_lost = len(records(stack.router.log_path, "group_lost"))
        kept = await _Kept.of(stack)
    least_s, most_s = PAUSE_S
    return Line(
        f"{size.num_pauses} executors stopped for {least_s} to {most_s} s, and on again",
        "0 lost, 0 wrong; at most one forming each; KV kept",
        f"{_streams(report)}; {num_lost} formings, longest gap {max(report.gaps_s[1:]):.2f} s; "
        f"KV kept of {kept}",
        not report.wrong and num_lost <= size.num_pauses and not kept.num_lost,
        kept.share >= REQUIRED_KEPT,
    )


async def busy(size: Size, log_dir: Path) -> Line:
    """Other processes take the machine's cores for themselves."""
    report = Report()
    settings = {"executor_args": size.executor_args, "router_args": PATIENT_STEPS}
    async with served(log_dir, **settings) as (stack, client):
        async with streaming(client, size.num_streams, random.Random(5), report):
            with busy_loops(NUM_BUSY_LOOPS):
                await asyncio.sleep(size.busy_s)
        num_silent = len(records(stack.router.log_path, "executor_silent"))
        num_lost = len(records(stack.router.log_path, "group_lost"))
    return Line(
        f"{size.busy_s:g} s beside {NUM_BUSY_LOOPS} busy loops (--busy-s 600: ten minutes)",
        "0 lost, 0 wrong, no false alarm",
        f"{_streams(report)}; {num_silent} executors taken for silent, {num_lost} epochs lost, "
        f"longest gap {report.gaps_s[0]:.2f} s",
        not report.wrong,
        num_silent == 0,
    )


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """Processes that compute, until the end of the block."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


async def poison(size: Size, log_dir: Path, *, spares: int = 0) -> Line:
    """A request kills every executor that computes it, among others."""
    report, failure = Report(), "nothing"
    prompt = token_ids(f"\n{POISON}=")
    settings: dict[str, Any] = {"executor_args": size.executor_args}
    if spares:
        settings = _elastic(size, dp_size=2, spares=spares)
    async with served(log_dir, PoisonedStack, **settings) as (stack, client):
        rng, has_same_sums = random.Random(2), not spares
        streams = streaming(client, size.num_streams, rng, report, has_same_sums=has_same_sums)
        async with supervised(stack), streams:
            await asyncio.sleep(size.steady_s)
            report.note("poison")
            try:
                await client.complete(prompt, max_tokens=80)
            except CallFailed as error:
                failure = error.reason
            await asyncio.sleep(size.steady_s)
        losses = records(stack.router.log_path, "group_lost")
    return Line(
        f"a poison request among {size.num_streams} streams, {spares or 'no'} spare",
        "it fails, and nothing else",
        f"it fails with {failure}; {_streams(report)}; {len(losses)} losses, "
        f"longest gap {report.gaps_s[1]:.2f} s",
        failure == "EXECUTOR_FAILED" and not report.wrong,
    )


async def router_kills(size: Size, log_dir: Path) -> Line:
    """The router is killed, and started again; callers go on from what they have."""
    report = Report()
    async with (
        served(log_dir, executor_args=size.executor_args) as (stack, client),
        streaming(client, size.num_streams, random.Random(3), report),
    ):
        for _ in range(size.num_router_kills):
            await asyncio.sleep(size.steady_s)
            report.note("router killed")
            await stack.kill_router()
            await _gone_on(client, size.num_streams)
        await asyncio.sleep(size.steady_s)
    return Line(
        f"{size.num_router_kills} times the only router killed and started again",
        "the library's callers: 0 failed, 0 wrong",
        f"{_streams(report)}; {_gaps(report.gaps_s[1:])}",
        not report.wrong,
    )


async def beats(size: Size) -> Line:
    """Steps with beats and without them, by turns, when nothing fails."""
    turns = (STEP_MS, size.num_streams, size.num_steps, size.num_turns)
    costs = await bench_beats.compare(*turns)
    return Line(
        f"beats, {size.num_turns} turns of twice {size.num_steps} steps with them and without",
        f"steps per second and router CPU per step within {bench_beats.REQUIRED:.0%}",
        f"step period {costs.ratio('period_us')}, router CPU {costs.ratio('cpu_us')} of without; without "
        f"of without {costs.control('cpu_us')}; counted inside: {costs.share:.2%} of the router's CPU",
        is_right=True,
        is_in_time=costs.is_met,
    )


async def takeovers(size: Size, log_dir: Path, *, has_envoy: bool = False) -> Line:
    """The router that drives is killed, the other takes over, and it is started again to stand by."""
    report = await _break_routers(
        size, log_dir, size.num_router_kills, _kill_router, has_envoy=has_envoy
    )
    median_s, longest_s = statistics.median(report.gaps_s[1:]), max(report.gaps_s[1:])
    required_median_s, required_s = REQUIRED_TAKEOVER_S
    return Line(
        f"{size.num_router_kills} times the router that drives killed, another standing by"
        + (", behind Envoy" if has_envoy else ""),
        f"the library's callers: 0 failed, 0 wrong; gap: median ≤ {required_median_s}, "
        f"max ≤ {required_s} s",
        f"{_streams(report)}; {_gaps(report.gaps_s[1:])}",
        not report.wrong,
        median_s <= required_median_s and longest_s <= required_s,
    )


async def double_kills(size: Size, log_dir: Path) -> Line:
    """The router that drives and an executor are killed at once; the supervisor starts both again."""
    report = await _break_routers(size, log_dir, size.num_double_kills, _kill_both)
    return Line(
        f"{size.num_double_kills} times the router that drives and an executor killed within 10 ms",
        "0 failed, 0 wrong",
        f"{_streams(report)}; {_gaps(report.gaps_s[1:])}",
        not report.wrong,
    )


async def updates(size: Size, log_dir: Path) -> Line:
    """The router that drives is told to stop, hands over, and is started again to stand by."""
    report = await _break_routers(size, log_dir, size.num_updates, _stop_router)
    return Line(
        f"{size.num_updates} planned updates of the router that drives",
        "0 failed, 0 wrong",
        f"{_streams(report)}; {_gaps(report.gaps_s[1:])}",
        not report.wrong,
    )


async def _kill_router(stack: LocalStack, number: int) -> None:
    await stack.routers[number].kill()


async def _kill_both(stack: LocalStack, number: int) -> None:
    await asyncio.gather(stack.routers[number].kill(), stack.executors[number].kill())


async def _stop_router(stack: LocalStack, number: int) -> None:
    assert await stack.routers[number].stop(STOP_TIMEOUT_S) == 0, "it did not end well"


async def _break_routers(
    size: Size,
    log_dir: Path,
    num_times: int,
    break_one: Callable[[LocalStack, int], Awaitable[None]],
    *,
    has_envoy: bool = False,
) -> Report:
    """Breaks the router that drives, of two, again and again, and starts it again."""
    report = Report()
    async with AsyncExitStack() as exits:
        settings = {"executor_args": size.executor_args, "router_args": PATIENT_STEPS}
        entered = served(log_dir, num_routers=2, **settings)
        stack, client = await exits.enter_async_context(entered)
        if has_envoy:
            envoy = await exits.enter_async_context(envoy_before(stack.addresses, log_dir))
            client = await exits.enter_async_context(Client(envoy.address))
        await exits.enter_async_context(supervised(stack))
        streams = streaming(client, size.num_streams, random.Random(6), report)
        await exits.enter_async_context(streams)
        for _ in range(num_times):
            await asyncio.sleep(size.steady_s)
            driver = await _driver_of(stack)
            report.note(f"{stack.routers[driver].name} broken")
            await break_one(stack, driver)
            await stack.start_router_again(driver)
            async with Client(stack.addresses[await _driver_of(stack)]) as other:
                await _gone_on(other, size.num_streams)
        await asyncio.sleep(size.steady_s)
    return report


async def _driver_of(stack: LocalStack) -> int:
    """Returns the number of the router that takes requests, once another one stands by."""
    async with AsyncExitStack() as exits:
        clients = [await exits.enter_async_context(Client(each)) for each in stack.addresses]
        while True:
            for number, client in enumerate(clients):
                status = await client.get_router_status()
                if status.is_ready and status.groups[0].num_standbys:
                    return number
            await asyncio.sleep(0.01)


async def _are_staged(client: Client, number: int) -> None:
    """Returns when an elastic group has so many spares that need load nothing to take a place."""
    while True:
        [group] = await client.get_status()
        if sum(each.state == SPARE_STATE_STAGED for each in group.elastic.spares) == number:
            return
        await asyncio.sleep(0.05)


async def _gone_on(client: Client, num_streams: int) -> None:
    """Returns when nearly all streams are back and have had tokens.

    A machine that is busy takes its time for that, and five routers that died before it are a reason to
    give a request up.
    """
    step_then = None
    while True:
        [group] = await client.get_status()
        num_running = sum(rank.num_running for rank in group.ranks)
        if step_then is None and num_running >= 0.75 * num_streams and not group.num_waiting:
            step_then = group.step
        if step_then is not None and group.step > step_then + MANY_STEPS:
            return
        await asyncio.sleep(0.05)


def _streams(report: Report) -> str:
    return f"{report.num_streams} streams right, {len(report.wrong)} lost or wrong"


def _time_of(record: dict[str, Any]) -> float:
    """Returns when a line of a log was written, in seconds since the epoch."""
    return datetime.fromisoformat(record["timestamp"]).timestamp()


def _gaps(gaps_s: Sequence[float]) -> str:
    return f"gap median {statistics.median(gaps_s):.2f}, max {max(gaps_s):.2f} s"


async def show(size: Size, folder: Path) -> bool:
    """Prints the table. Returns whether all of it holds."""
    holds = True
    print("| what | required | measured | |\n|---|---|---|---|", flush=True)
    async for line in table(size, folder):
        print(line, flush=True)
        holds &= line.is_right and line.is_in_time
    return holds


def main() -> None:
    quiet()
    gc.freeze()  # or what this process imported would be searched for garbage, for 0.1 s, while it measures
    parser = argparse.ArgumentParser(description=__doc__)
    usual = Size()
    parser.add_argument("--streams", type=int, default=usual.num_streams)
    parser.add_argument("--kills", type=int, default=usual.num_kills)
    parser.add_argument("--router-kills", type=int, default=usual.num_router_kills)
    parser.add_argument("--double-kills", type=int, default=usual.num_double_kills)
    parser.add_argument("--updates", type=int, default=usual.num_updates)
    parser.add_argument("--formings", type=int, default=usual.num_formings)
    parser.add_argument("--stops", type=int, default=usual.num_stops)
    parser.add_argument("--pauses", type=int, default=usual.num_pauses)
    parser.add_argument("--turns", type=int, default=usual.num_turns)
    parser.add_argument("--busy-s", type=float, default=usual.busy_s)
    args = parser.parse_args()
    size = Size(
        num_streams=args.streams,
        num_kills=args.kills,
        num_router_kills=args.router_kills,
        num_double_kills=args.double_kills,
        num_updates=args.updates,
        num_formings=args.formings,
        num_stops=args.stops,
        num_pauses=args.pauses,
        num_turns=args.turns,
        busy_s=args.busy_s,
    )
    with tempfile.TemporaryDirectory() as folder:
        # A router's loop: the one that forms groups in here is one.
        sys.exit(not uvloop.run(show(size, Path(folder))))


if __name__ == "__main__":
    main()
