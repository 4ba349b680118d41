"""Table of attacks: memory, latency and failures of honest calls (``python -m tests.attack``).

Starts a router and two executors of this checkout, and of another one if told, attacks them in
every way that there is, and prints what it did to the router and to an honest client beside.
"""

import argparse
import asyncio
import json
import resource
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from deploy.local.launch import LocalStack
from deploy.local.ports import held_port
from deploy.local.processes import ROOT
from router.client import Options
from tests.attack import callers, guesses, ports, strangers
from tests.attack.besieged import (
    MIB,
    Memory,
    guarded_stack,
    processes_of,
    rss_mib,
    run_apart,
    target_of,
    watched,
)
from tests.attack.honest import KINDS, PLAIN, SCORED, Calls, honest_calls
from tests.attack.hostile_executor import LIES, Lie, hostile_executor
from tests.attack.target import Attack, Outcome
from tests.e2e.support.envoy import Envoy, envoy_before, until_ready

GUESSES = "A8 guesses at another caller's prompts"
ATTACKS: Sequence[tuple[str, Attack]] = (
    ("A1 header bombs", callers.header_bombs),
    ("A2 leaps of the epoch, by a stranger", strangers.epoch_leaps),
    ("A2 leaps of the epoch, with the token", strangers.epoch_leaps_with_the_token),
    ("A3 a stranger's store", strangers.joins_of_a_stranger),
    ("A5 the rendezvous store", strangers.store_filled),
    ("A6 calls of headers only", callers.unfinished_calls),
    ("A6 Watch without end", callers.watches),
    ("A7 half-sent messages", callers.half_sent_messages),
    ("A8 another caller's requests", callers.others_requests),
    (GUESSES, guesses.guessed_prompts),
    ("A8 guesses at ids", guesses.guessed_ids),
    ("A9 silent strangers while a group forms", strangers.silent_strangers),
    ("B3 half scrapes", strangers.half_scrapes),
    ("B7 rapid resets", callers.rapid_resets),
    ("B9 unread answers", callers.unread_answers),
    ("ports without credentials", ports.every_port),
)
FAILS_OVER_SOON = ("--failover-after-s", "0.2")

HEAD = """\
| attack | what was sent | router MiB before / most / after | executor MiB | honest p50 and p99 ms, \
at rest / attacked | failed | verdict |
|---|---|---|---|---|---|---|"""

Run = Callable[[Memory], Awaitable[Outcome]]
"""Attacks; returns what came of it by then."""

# The group itself is made to form again, for which honest calls wait.
FORMS_AGAIN = ("A2 leaps of the epoch, with the token", "A9")

REST_S, SETTLE_S = 6.0, 2.0
GUESS_PAUSE_S = 0.5
TOLD_S, LIE_S = 10.0, 2.0  # in which a router asks for a lie, and hears it
MOST_MORE_MIB = 150.0 * 1e6 / MIB
MOST_KEPT_MIB = 50.0  # of that, once the attack is over
MOST_OF_EXECUTOR_MIB = (
    250.0  # whose allocator takes 170 MiB over its first 200 prompts, and no more
)
MOST_ADDRESS_SPACE = 4 << 30  # of a router that a hostile executor may make allocate


@dataclass
class Row:
    """What an attack did.

    Attributes:
        sent: What was sent, and what came of it.
        router_mib: Memory of the router before, at most, and after.
        executor_mib: Of the executor that gained most, or Envoy, before and at most.
        p50_ms, p99_ms: Of honest calls at rest, and under attack.
        failed: Honest calls that failed or were answered wrong, and all.
        faults: Bounds that were passed, as people read them.
        details: What stands below the table.
    """

    sent: str
    router_mib: tuple[float, float, float]
    executor_mib: tuple[float, float]
    p50_ms: tuple[float, float]
    p99_ms: tuple[float, float]
    failed: tuple[int, int]
    faults: list[str] = field(default_factory=list)
    details: tuple[str, ...] = ()

    def judge(self, *, is_timed: bool) -> None:
        before, peak, after = self.router_mib
        at_rest, under = self.p99_ms
        for is_fault, words in (
            (peak - before > MOST_MORE_MIB, f"+{peak - before:.0f} MiB"),
            (after - before > MOST_KEPT_MIB, f"keeps {after - before:.0f} MiB"),
            (
                self.executor_mib[1] - self.executor_mib[0] > MOST_OF_EXECUTOR_MIB,
                "executor's memory",
            ),
            (is_timed and under > 3 * at_rest + 100, "p99"),
            (self.failed[0] > 0, f"{self.failed[0]} failed calls"),
        ):
            if is_fault:
                self.faults.append(words)

    def __str__(self) -> str:
        router = " / ".join(f"{mib:.0f}" for mib in self.router_mib)
        p50, p99 = (" / ".join(f"{ms:.0f}" for ms in pair) for pair in (self.p50_ms, self.p99_ms))
        verdict = ", ".join(self.faults) or "holds"
        executor = f"+{self.executor_mib[1] - self.executor_mib[0]:.0f}"
        failed = f"{self.failed[0]} of {self.failed[1]}"
        return f"{self.sent} | {router} | {executor} | {p50}; {p99} | {failed} | {verdict}"


class Siege:
    """Attacks on one stack, each on a router that was just started.

    Args:
        stack: The stack.
        hostile_listen: Where a hostile executor may listen.
        envoy: Before its router, if callers come that way.
    """

    def __init__(self, stack: LocalStack, hostile_listen: str, envoy: Envoy | None) -> None:
        self._stack = stack
        self._envoy = envoy
        self._public = stack.address if envoy is None else envoy.address
        self._listen = hostile_listen
        self._usual_args = list(stack.router_args)
        self._at_rest = Calls()

    async def measure_rest(self) -> None:
        async with honest_calls(self._public, self._stack.token):
            await asyncio.sleep(1.0)
        async with honest_calls(self._public, self._stack.token) as calls:
            await asyncio.sleep(REST_S)
        assert not calls.failures, calls.failures
        self._at_rest = calls

    def all_attacks(self) -> Iterator[tuple[str, Callable[[], Awaitable[Row]]]]:
        """Yields each attack's name, and what measures it."""
        for name, attack in ATTACKS:
            is_timed = not name.startswith(FORMS_AGAIN)
            pause_s = GUESS_PAUSE_S if name == GUESSES else 0.0  # it measures times itself
            yield name, partial(self.attack, attack, is_timed=is_timed, pause_s=pause_s)
        for name, lie in LIES.items():
            yield f"A4 {name}", partial(self.lie, name, lie)

    async def attack(self, attack: Attack, *, is_timed: bool, pause_s: float) -> Row:
        await self._renew(self._usual_args)
        target = replace(await target_of(self._stack), public=self._public)
        if self._envoy is not None:
            target = replace(target, envoy_metrics=self._envoy.metrics_address)

        async def run(router: Memory) -> Outcome:
            outcome = await run_apart(attack, target, router)
            await asyncio.sleep(SETTLE_S / 2)
            return outcome

        row = await self._beside_honest_calls(run, (PLAIN,) if pause_s else KINDS, pause_s)
        row.judge(is_timed=is_timed)
        return row

    async def lie(self, name: str, lie: Lie) -> Row:
        """Has a second group, of a hostile executor only, lie so."""
        stack, target = self._stack, await target_of(self._stack)
        address, token = stack.executor_addresses[0], target.executor_token
        async with hostile_executor(self._listen, address, token) as hostile:

            async def run(_: Memory) -> Outcome:
                hostile.tell(lie)
                with suppress(TimeoutError):
                    async with asyncio.timeout(TOLD_S):
                        while not (hostile.num_told or stack.router.has_ended):
                            await asyncio.sleep(0.05)
                await asyncio.sleep(LIE_S)
                faults = ["the router died"] if stack.router.has_ended else []
                lines = self._lines_about(lie)
                if not lines:
                    faults.append("not named in the log")
                sent = f"an executor says: {name} ({hostile.num_told} times)"
                return Outcome(sent, ", ".join(faults), lines[:1])

            await self._renew([*self._usual_args, "--group", self._listen, *FAILS_OVER_SOON])
            kinds = (SCORED,) * 3 if lie.is_scored else KINDS
            row = await self._beside_honest_calls(run, kinds)
        row.judge(is_timed=True)
        return row

    def _lines_about(self, lie: Lie) -> tuple[str, ...]:
        """Returns what the log of this router says of the executor and the field that it lied in."""
        log = self._stack.router.log_path.read_text().rpartition('"event": "configuration"')[2]
        lines = [line for line in log.splitlines() if line.startswith("{") and self._listen in line]
        told = [line for line in map(json.loads, lines) if lie.word in line.get("problem", "")]
        return tuple(f"{line['event']}: {line['problem']}" for line in told if "problem" in line)

    async def _beside_honest_calls(
        self, run: Run, kinds: Sequence[Options] = KINDS, pause_s: float = 0.0
    ) -> Row:
        stack = self._stack
        pids = [stack.router.pid, *(executor.pid for executor in stack.executors)]
        if self._envoy is not None:
            pids.append(self._envoy.process.pid)
        async with watched(*pids) as [router, *executors]:
            async with honest_calls(self._public, stack.token, kinds, pause_s) as calls:
                outcome = await run(router)
            await asyncio.sleep(SETTLE_S)
            after = rss_mib(router.pid)
        most = max(executors, key=lambda memory: memory.peak - memory.before)
        row = Row(
            outcome.sent,
            (router.before, router.peak, after),
            (most.before, most.peak),
            (self._at_rest.ms(0.5), calls.ms(0.5)),
            (self._at_rest.ms(0.99), calls.ms(0.99)),
            (len(calls.failures), calls.num_calls),
            [outcome.fault] if outcome.fault else [],
            outcome.details,
        )
        for failure in calls.failures[:2]:
            print("   ", failure.replace("\n", " ")[:200], file=sys.stderr)
        return row

    async def _renew(self, router_args: Sequence[str]) -> None:
        """Starts another router, and executors that no longer serve."""
        stack = self._stack
        stack.router_args = router_args
        for number, executor in enumerate(stack.executors):
            if executor.has_ended:
                await stack.restart_executor(number)
        try:
            stack.ready_timeout_s = 15.0
            await stack.restart_router(timeout_s=3.0)
        except Exception:  # wedged: the executors are to start again, too
            stack.ready_timeout_s = 120.0
            for number in range(len(stack.executors)):
                await stack.restart_executor(number)
            await stack.restart_router(timeout_s=3.0)
        if self._envoy is not None:
            await until_ready(self._envoy.address, self._envoy.process)
        limits = (MOST_ADDRESS_SPACE, MOST_ADDRESS_SPACE)  # or it takes the whole machine's
        resource.prlimit(stack.router.pid, resource.RLIMIT_AS, limits)


async def besiege(
    root: Path, names: Sequence[str], *, asks_for_tokens: bool, has_envoy: bool
) -> dict[str, Row]:
    """Runs the attacks whose names begin so on a stack of a checkout."""
    rows: dict[str, Row] = {}
    async with AsyncExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="attack-"))
        port = cleanup.enter_context(held_port())
        cleanup.enter_context(processes_of(root))
        stack = guarded_stack(Path(folder), asks_for_tokens=asks_for_tokens)
        await cleanup.enter_async_context(stack)
        envoy = None
        if has_envoy:
            envoy = await cleanup.enter_async_context(envoy_before([stack.address], Path(folder)))
        siege = Siege(stack, f"127.0.0.1:{port}", envoy)
        await siege.measure_rest()
        for name, measure in siege.all_attacks():
            if name.startswith(tuple(names)):
                rows[name] = await measure()
                print(f"{name} | {rows[name]}", flush=True)
    return rows


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Attacks stacks and prints a table.")
    parser.add_argument(
        "checkouts",
        nargs="*",
        type=Path,
        default=[ROOT],
        help="roots of checkouts to attack, one after the other; the last is run as its overlays "
        "are, with tokens, those before it without any [default: this one]",
    )
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of names, such as A1")
    parser.add_argument(
        "--envoy", action="store_true", help="callers reach the router by Envoy (deploy/envoy)"
    )
    args = parser.parse_args()
    tables: dict[Path, dict[str, Row]] = {}
    *_, last = roots = [root.resolve() for root in args.checkouts]
    for root in roots:
        print(f"\n{root}\n", flush=True)
        tables[root] = asyncio.run(
            besiege(root, args.only, asks_for_tokens=root == last, has_envoy=args.envoy)
        )
    print(f"\n{HEAD}")
    for name in tables[root]:
        for number, rows in enumerate(tables.values()):
            if name in rows:
                print(f"| {name if not number else ''} | {rows[name]} |")
    for root, rows in tables.items():
        print(f"\nWhat strangers learnt of {root}, and what its router's log says of executors:\n")
        for name, row in rows.items():
            for detail in row.details:
                print(f"* {name}: {detail}")
    return int(any(row.faults for row in tables[root].values()))


if __name__ == "__main__":
    sys.exit(main())
