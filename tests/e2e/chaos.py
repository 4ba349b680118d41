"""Chaos run: executors are killed and stopped under many streams (``python -m tests.e2e.chaos``).

Every stream's tokens must be those that came when nothing was disturbed, neither fewer nor more, and
their log probabilities the same to the last bit; at the end no sequence and no block may be left.
Prints how long each recovery took.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from deploy.local.demo_tasks import solved_lines, token_ids
from deploy.local.launch import LocalStack
from router.client import (
    GROUP_STATE_READY,
    CallFailed,
    Client,
    GroupStatus,
    Many,
    Options,
    TokenLogprob,
)
from tests.e2e.support.logs import records
from tests.e2e.support.stacks import served, supervised

# A hung executor is noticed after two seconds, and another group takes over after one more.
ROUTER_ARGS = ("--step-timeout-s", "2", "--min-step-deadline-s", "2", "--failover-after-s", "1")
NUM_PROMPTS = 16  # each is asked by several streams
NUM_TOKENS = 120
MEAN_PAUSE_S = 1.0  # between two faults
BEGIN_S = 0.03  # from one stream's begin to the next one's: callers do not come all at once
HANG_S = (1.0, 4.0)  # some hangs are over before anybody minds
MAX_WAITS = 1 << 14  # that are kept, of all callers: some seconds' worth

GREEDY: Options = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": True}
SAMPLED: Options = {
    **GREEDY,
    "seed": 11,
    "temperature": 1.5,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.2,
}
CONSTRAINED: Options = {
    "max_tokens": NUM_TOKENS,
    "logprobs": True,
    "seed": 12,
    "temperature": 1.5,
    "regex": r"(\{[a-z]{3,9}:[0-9]+\}){9,}",
}


@dataclass
class Report:
    """What a run did.

    Attributes:
        faults: Each as people read it.
        num_streams: That ended right.
        wrong: Streams that did not, as people read them.
        gaps_s: Longest time that a caller waited for a token: before the first fault, and from each
            fault to the next.
        waits: When the last ones began and ended, in seconds since the epoch.
        recoveries_s: From each loss of a group until it was ready again.
        groups: As they were at the end.
    """

    faults: list[str] = field(default_factory=list)
    num_streams: int = 0
    wrong: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=lambda: [0.0])
    waits: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_WAITS))
    recoveries_s: list[float] = field(default_factory=list)
    groups: list[GroupStatus] = field(default_factory=list)

    def note(self, fault: str) -> None:
        """Notes what is broken now."""
        self.faults.append(fault)
        self.begin()

    def begin(self) -> None:
        """Counts gaps anew."""
        self.gaps_s.append(0.0)

    def note_gap(self, gap_s: float) -> None:
        """Notes how long a caller has just waited for a token, the first of an answer or another."""
        self.gaps_s[-1] = max(self.gaps_s[-1], gap_s)
        now = time.time()
        self.waits.append((now - gap_s, now))

    def gap_at_s(self, moment: float) -> float:
        """Returns the longest wait of those that a moment lies in, in seconds since the epoch."""
        return max((end - begin for begin, end in self.waits if begin < moment < end), default=0.0)


@dataclass(frozen=True)
class Ask:
    """A prompt, how it is sampled, and what comes when nothing is disturbed."""

    prompt: list[int]
    options: Options
    expected: list[TokenLogprob]


async def run_chaos(
    *, num_groups: int, num_streams: int, num_faults: int, seed: int, log_dir: Path
) -> Report:
    """Breaks executors of a new stack ``num_faults`` times while ``num_streams`` always run."""
    rng, report = random.Random(seed), Report()
    settings = {"num_groups": num_groups, "router_args": ROUTER_ARGS}
    async with served(log_dir, **settings) as (stack, client):
        await groups_ready(client)
        async with supervised(stack), streaming(client, num_streams, rng, report):
            for _ in range(num_faults):
                if rng.random() < 0.7:  # else it may strike in the middle of a recovery
                    await groups_ready(client)
                await asyncio.sleep(rng.expovariate(1 / MEAN_PAUSE_S))
                await _break_one(stack, rng, report)
            await groups_ready(client)
        report.groups = await _idle_groups(client)
    report.recoveries_s = _recoveries_s(log_dir)
    return report


@asynccontextmanager
async def streaming(
    client: Client,
    num_streams: int,
    rng: random.Random,
    report: Report,
    *,
    has_same_sums: bool = True,
) -> AsyncIterator[None]:
    """Streams run, half of them on one GenerateMany, and come to their ends behind the block.

    Args:
        has_same_sums: Whether their log probabilities are compared, too: they change in the last bits
            where experts move.
    """
    is_over = asyncio.Event()
    async with client.many() as many, asyncio.TaskGroup() as tasks:
        asks = await _undisturbed(client, rng)
        for number in range(num_streams):
            asker, delay_s = many if number % 2 else client, BEGIN_S * number
            tasks.create_task(_ask_on(asker, asks, number, delay_s, is_over, report, has_same_sums))
        yield
        is_over.set()


async def _undisturbed(client: Client, rng: random.Random) -> list[Ask]:
    prompts = [
        token_ids(solved_lines(rng.randrange(1 << 32), rng.randint(20, 120)) + "\n17+25=")
        for _ in range(NUM_PROMPTS)
    ]
    kinds = {7: SAMPLED, 3: CONSTRAINED}
    options = [kinds.get(number % 8, GREEDY) for number in range(NUM_PROMPTS)]
    answers = await asyncio.gather(
        *(client.complete(p, **o) for p, o in zip(prompts, options, strict=True))
    )
    return [
        Ask(prompt, option, answer.logprobs)
        for prompt, option, answer in zip(prompts, options, answers, strict=True)
    ]


async def _ask_on(
    asker: Client | Many,
    asks: list[Ask],
    number: int,
    delay_s: float,
    is_over: asyncio.Event,
    report: Report,
    has_same_sums: bool,
) -> None:
    """Keeps a stream open, one after another, until the trouble is over."""
    await asyncio.sleep(delay_s)
    while not is_over.is_set():
        ask = asks[number % len(asks)]
        number += 1
        tokens: list[TokenLogprob] = []
        last = time.monotonic()
        try:
            async for delta in asker.generate(ask.prompt, **ask.options):
                last, before = time.monotonic(), last
                report.note_gap(last - before)
                tokens += delta.logprobs
        except CallFailed as error:
            report.wrong.append(str(error))
            return
        ids, expected = ([token.token_id for token in each] for each in (tokens, ask.expected))
        if ids == expected and (tokens == ask.expected or not has_same_sums):
            report.num_streams += 1
        else:
            same = sum(1 for a, b in zip(tokens, ask.expected, strict=False) if a == b)
            wrong = f"{len(tokens)} tokens for {len(ask.expected)}, {same} of them right"
            report.wrong.append(wrong)


async def _break_one(stack: LocalStack, rng: random.Random, report: Report) -> None:
    """Kills an executor, or stops it for a while and then kills it or lets it go on."""
    number = rng.randrange(len(stack.executors))
    process = stack.executors[number]
    kind = rng.choice(["killed", "killed", "stopped, then killed", "stopped for a while"])
    hang_s = 0.0 if kind == "killed" else rng.uniform(*HANG_S)
    report.note(f"{process.name} {kind}" + (f" ({hang_s:.1f} s)" if hang_s else ""))
    if hang_s:
        process.pause()
        await asyncio.sleep(hang_s)
    if "killed" in kind:
        await process.kill()
    else:
        process.resume()


async def groups_ready(client: Client) -> None:
    """Returns when all groups serve."""
    async with asyncio.timeout(120):
        while any(g.state != GROUP_STATE_READY for g in await client.get_status()):
            await asyncio.sleep(0.05)


async def _idle_groups(client: Client) -> list[GroupStatus]:
    """Returns the groups when all have formed, whichever loss was noticed last, and none runs."""
    async with asyncio.timeout(120):
        while not all(map(_is_idle, groups := await client.get_status())):
            await asyncio.sleep(0.05)
    return groups


def _is_idle(group: GroupStatus) -> bool:
    is_used = any(rank.num_running or rank.num_used_blocks for rank in group.ranks)
    return group.state == GROUP_STATE_READY and not group.num_waiting and not is_used


def _recoveries_s(log_dir: Path) -> list[float]:
    formed = records(log_dir / "router.log", "group_ready")
    return [record["seconds_down"] for record in formed if record["epoch"] > 1]


def show(report: Report) -> None:
    """Prints what a run did."""
    for fault in report.faults:
        print(f"  {fault}")
    recoveries = sorted(report.recoveries_s)
    print(
        f"  {len(recoveries)} recoveries, from the loss to the next step: median "
        f"{recoveries[len(recoveries) // 2]:.1f} s, longest {recoveries[-1]:.1f} s"
        if recoveries
        else "  no group was lost"
    )
    print(f"  longest gap at a caller: {max(report.gaps_s):.1f} s")
    print(f"  {report.num_streams} streams right, {len(report.wrong)} wrong")
    for wrong in report.wrong:
        print(f"  WRONG: {wrong}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.e2e.chaos")
    parser.add_argument("--faults", type=int, default=10, help="with each number of groups")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for num_groups in args.groups:
        with tempfile.TemporaryDirectory() as log_dir:
            begin = time.monotonic()
            report = asyncio.run(
                run_chaos(
                    num_groups=num_groups,
                    num_streams=args.streams,
                    num_faults=args.faults,
                    seed=args.seed,
                    log_dir=Path(log_dir),
                )
            )
            print(f"groups: {num_groups}, {time.monotonic() - begin:.0f} s in all")
            show(report)
        if report.wrong:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
