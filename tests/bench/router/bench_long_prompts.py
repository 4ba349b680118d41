"""Long prompts beside streaming answers, on real processes: steps by chunks and by time.

    python -m tests.bench.router.bench_long_prompts [--rounds 8] [--prompts 12] [--length 1900] [--load 0.4]
                                                    [--target-token-gap-ms 300] [--max-token-gap-ms 600]
                                                    [--target-first-token-ms 1000]

The random Qwen3-MoE of 703 M parameters (bench_cpu_model) on two executors. Eight answers stream, one after
another, while prompts of that length come at random, the same ones for both routers; load 1 is as many a
second as the two executors can run, each one prompt after the other. One router runs chunks as large as
fit (`--target-token-gap-ms 0`), the other steps by time, to its own targets where none are given. By
turns, each router first in every other round: p99 of the gaps between tokens of the streaming answers, and
p99 and p50 of the long prompts' first tokens, in milliseconds. Then the means of the rounds, since p99 of a
few prompts is the longest of them, and of some hundred still one of two; and the error of step times that
`GetStatus` tells.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deploy.local.launch import LocalStack
from router.client import Client
from tests.bench.executor.bench_cpu_model import make_checkpoint
from tests.bench.support.options import parse_options
from tests.bench.support.quiet import quiet

TARGETS = ("target_token_gap_ms", "max_token_gap_ms", "target_first_token_ms")
NUM_EXECUTORS = 2
NUM_STREAMS, STREAM_TOKENS = 8, 200
PROMPT_LEN = 32  # of the answers that stream
WARM_LENS = (30, 100, 300, 600)
NUM_WARM = 40  # prompts in which step times are learnt


Figures = list[float]


class Waits(NamedTuple):
    """Milliseconds between the tokens of streaming answers, and to the first tokens of long prompts."""

    gaps: list[float]
    firsts: list[float]

    @property
    def figures(self) -> Figures:
        """p99 of the gaps, p99 and p50 of the first tokens."""
        percentiles = np.percentile(self.gaps, 99), *np.percentile(self.firsts, (99, 50))
        return list(map(float, percentiles))


def prompt(length: int) -> list[int]:
    return [random.randint(1, 30) for _ in range(length)]


async def first_token(client: Client, length: int) -> float:
    """Runs a request. Returns its milliseconds to the first token."""
    answer = await client.complete(prompt(length), max_tokens=2, ignore_eos=True)
    return 1e3 * answer.first_token_s


async def gaps_of(client: Client, end: asyncio.Event) -> list[float]:
    """Streams answers until the end. Returns milliseconds between the tokens of each."""
    gaps: list[float] = []
    while not end.is_set():
        times: list[float] = []
        answer = client.generate(prompt(PROMPT_LEN), max_tokens=STREAM_TOKENS, ignore_eos=True)
        async with aclosing(answer) as deltas:
            async for _ in deltas:
                times.append(time.perf_counter())
                if end.is_set():
                    break
        gaps += (1e3 * np.diff(times)).tolist()
    return gaps


async def warm_up(client: Client) -> None:
    end = asyncio.Event()
    stream = asyncio.ensure_future(gaps_of(client, end))
    for number in range(NUM_WARM):
        await first_token(client, WARM_LENS[number % len(WARM_LENS)])
    end.set()
    await stream


async def seconds_alone(client: Client, length: int) -> float:
    """Returns the seconds to the first token of a prompt with nothing beside it."""
    return statistics.median([await first_token(client, length) for _ in range(3)]) / 1e3


async def measure(client: Client, options: argparse.Namespace, rate: float, seed: int) -> Waits:
    """Has long prompts come, at times that the seed says, to answers that stream."""
    rng, end = random.Random(seed), asyncio.Event()
    streams = [asyncio.ensure_future(gaps_of(client, end)) for _ in range(NUM_STREAMS)]
    prompts = []
    for _ in range(options.prompts):
        await asyncio.sleep(rng.expovariate(rate))
        prompts.append(asyncio.ensure_future(first_token(client, options.length)))
    firsts = await asyncio.gather(*prompts)
    end.set()
    return Waits([gap for stream in streams for gap in await stream], firsts)


@asynccontextmanager
async def served(folder: Path, **settings: float) -> AsyncIterator[Client]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    async with (
        LocalStack(folder, dp_size=NUM_EXECUTORS, router_args=flags) as stack,
        stack.client() as client,
    ):
        await warm_up(client)
        yield client


def show(by_chunks: Figures, by_time: Figures) -> None:
    values = [*by_chunks, *by_time, *(by_time[i] / by_chunks[i] for i in (0, 1))]
    print("{:6.0f}{:9.0f}{:9.0f}{:13.0f}{:9.0f}{:9.0f}{:12.2f}{:9.2f}".format(*values), flush=True)


async def beside_long_prompts(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        make_checkpoint(Path(name))
        targets = {each: ms for each in TARGETS if (ms := getattr(options, each)) is not None}
        async with (
            served(Path(name), target_token_gap_ms=0) as by_chunks,
            served(Path(name), **targets) as by_time,
        ):
            rate = options.load * NUM_EXECUTORS / await seconds_alone(by_chunks, options.length)
            print(f"{rate:.2f} prompts a second")
            print(
                "by chunks: gap p99, first token p99, p50; by time; ratios of gap and first token p99"
            )
            rounds: list[list[Figures]] = []
            for seed in range(options.rounds):
                order = 1 if seed % 2 == 0 else -1
                clients = (by_chunks, by_time)[::order]
                found = [await measure(client, options, rate, seed) for client in clients][::order]
                rounds.append([waits.figures for waits in found])
                show(*rounds[-1])
            show(*np.mean(rounds, axis=0).tolist())
            [group] = await by_time.get_status()
            print(f"step times: mean error {group.step_cost.mean_error:.3f}")


def main() -> None:
    quiet()
    sizes = {"rounds": 8, "prompts": 12, "length": 1900, "load": 0.4}
    options = parse_options(__doc__, **sizes, **dict.fromkeys(TARGETS, float))
    random.seed(0)
    asyncio.run(beside_long_prompts(options))


if __name__ == "__main__":
    main()
