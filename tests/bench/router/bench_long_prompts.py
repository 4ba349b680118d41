"""Long prompts beside streaming answers, on real processes: steps by chunks and by time.

    python -m tests.bench.router.bench_long_prompts [--rounds 3] [--prompt 1900] [--rate 0.35] [--target 300]

The random Qwen3-MoE of 703 M parameters (bench_cpu_model) on two executors. Eight answers stream while
prompts of that many tokens come at random, so many a second, the same ones for both routers: one runs
chunks as large as fit (`--target-token-gap-ms 0`), the other steps of the target in milliseconds, and up
to twice that under pressure. By turns: p99 of the gaps between tokens of the streaming answers, and p99
and p50 of the long prompts' first tokens, in milliseconds. The last line has the medians of the rounds,
and the error of step times that `GetStatus` tells.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deploy.local.launch import LocalStack
from router.client import Client
from tests.bench.executor.bench_cpu_model import make_checkpoint
from tests.bench.support.options import parse_options
from tests.bench.support.quiet import quiet

NUM_STREAMS, STREAM_TOKENS = 8, 200
PROMPT_LEN = 32  # of the answers that stream
WARM_LENS = (30, 100, 300, 600)
NUM_WARM = 40  # prompts in which step times are learnt

Figures = npt.NDArray[np.float64]


def prompt(length: int) -> list[int]:
    return [random.randint(1, 30) for _ in range(length)]


async def first_token(client: Client, length: int) -> float:
    """Runs a request. Returns its milliseconds to the first token."""
    answer = await client.complete(prompt(length), max_tokens=2, ignore_eos=True)
    return 1e3 * answer.first_token_s


async def gaps_of(client: Client) -> list[float]:
    """Streams an answer. Returns milliseconds between its tokens."""
    times = []
    async for _ in client.generate(prompt(PROMPT_LEN), max_tokens=STREAM_TOKENS, ignore_eos=True):
        times.append(time.perf_counter())
    return [1e3 * gap for gap in np.diff(times)]


async def warm_up(client: Client) -> None:
    stream = asyncio.ensure_future(gaps_of(client))
    for number in range(NUM_WARM):
        await first_token(client, WARM_LENS[number % len(WARM_LENS)])
    await stream


async def measure(client: Client, length: int, rate: float, seed: int) -> Figures:
    """Returns p99 of the gaps of streaming answers, p99 and p50 of the long prompts' first tokens."""
    rng = random.Random(seed)
    streams = [asyncio.ensure_future(gaps_of(client)) for _ in range(NUM_STREAMS)]
    prompts = []
    while not all(stream.done() for stream in streams):
        prompts.append(asyncio.ensure_future(first_token(client, length)))
        await asyncio.wait(streams, timeout=rng.expovariate(rate))
    gaps = [gap for stream in streams for gap in await stream]
    firsts = await asyncio.gather(*prompts)
    return np.array([np.percentile(gaps, 99), *np.percentile(firsts, (99, 50))])


@asynccontextmanager
async def served(folder: Path, **settings: float) -> AsyncIterator[Client]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    async with LocalStack(folder, router_args=flags) as stack, stack.client() as client:
        await warm_up(client)
        yield client


def show(by_chunks: Figures, by_time: Figures) -> None:
    values = [*by_chunks.tolist(), *by_time.tolist(), *(by_time / by_chunks)[:2].tolist()]
    print("{:6.0f}{:9.0f}{:9.0f}{:13.0f}{:9.0f}{:9.0f}{:12.2f}{:9.2f}".format(*values), flush=True)


async def beside_long_prompts(length: int, rounds: int, rate: float, target: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        make_checkpoint(Path(name))
        by_time = {"target_token_gap_ms": target, "max_token_gap_ms": 2 * target}
        async with (
            served(Path(name), target_token_gap_ms=0) as first,
            served(Path(name), target_first_token_ms=3000, **by_time) as second,
        ):
            print(
                "by chunks: gap p99, first token p99, p50; by time; ratios of gap and first token p99"
            )
            found = []
            for seed in range(rounds):
                found.append([await measure(c, length, rate, seed) for c in (first, second)])
                show(*found[-1])
            show(*np.median(found, axis=0))
            [group] = await second.get_status()
            print(f"step times: mean error {group.step_cost.mean_error:.3f}")


def main() -> None:
    quiet()
    options = parse_options(__doc__, rounds=3, prompt=1900, rate=0.35, target=300)
    random.seed(0)
    asyncio.run(beside_long_prompts(options.prompt, options.rounds, options.rate, options.target))


if __name__ == "__main__":
    main()
