"""What one load does to another on real processes: a flood beside a caller, long prompts beside answers.

    python -m tests.bench.router.bench_neighbours [--requests 600] [--rounds 3] [--prompt 1000]

The demo model, router and executors as processes. First, one caller sends all its requests at once, and
another one after another: its milliseconds to the first token while it has the router for itself, beside
the flood, and at most as the flood's own caller; and the flood's tokens a second with it over those without. Then answers stream while long
prompts come eight at a time: p99 of the gaps between their tokens, and of the long prompts' first tokens,
by turns with chunks as large as fit (`--target-token-gap-ms 0`) and with the budget in seconds.
"""

import asyncio
import random
import secrets
import tempfile
import time
from pathlib import Path

import numpy as np

from deploy.local.launch import LocalStack
from router.client import Client
from tests.bench.support.options import parse_options
from tests.bench.support.quiet import quiet

CALLERS = ("flood", "other")
PROMPT_LEN, NUM_TOKENS = 32, 32
NUM_IDLE = 30  # requests that find the router idle
NUM_STREAMS, STREAM_TOKENS = 16, 300
SENT_S = 0.3  # in which a flood's requests have been sent
BURST = 8  # long prompts at a time
BURST_S = 1.0  # from one burst to the next

RNG = random.Random(0)


async def first_token(client: Client, length: int = PROMPT_LEN, num_tokens: int = 8) -> float:
    """Runs a request. Returns its milliseconds to the first token."""
    prompt = [RNG.randint(1, 30) for _ in range(length)]
    answer = await client.complete(prompt, max_tokens=num_tokens, ignore_eos=True)
    return 1e3 * answer.first_token_s


async def flood(client: Client, count: int) -> float:
    """Sends requests at once. Returns output tokens a second."""
    begun = time.perf_counter()
    async with client.many() as many:
        prompts = [[RNG.randint(1, 30) for _ in range(PROMPT_LEN)] for _ in range(count)]
        requests = [many.complete(p, max_tokens=NUM_TOKENS, ignore_eos=True) for p in prompts]
        await asyncio.gather(*requests)
    return count * NUM_TOKENS / (time.perf_counter() - begun)


async def one_after_another(client: Client, until: asyncio.Future[float]) -> list[float]:
    waits = []
    await asyncio.sleep(SENT_S)
    while not until.done():
        waits.append(await first_token(client))
    return waits


async def beside_a_flood(count: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tokens = {name: secrets.token_hex(16) for name in CALLERS}
        file = Path(folder) / "tokens"
        file.write_text("".join(f"{name} {token}\n" for name, token in tokens.items()))
        args = ("--auth-tokens", str(file))
        async with (
            LocalStack(router_args=args, token=file) as stack,
            Client(stack.address, token=tokens["flood"]) as many,
            Client(stack.address, token=tokens["other"]) as one,
        ):
            await flood(many, 100)  # in which step times are learnt
            print(
                f"{'idle p50':>10}{'beside a flood p50':>20}{'p99':>8}{'times':>8}"
                f"{'as one caller, most':>20}{'flood':>8}"
            )
            for _ in range(rounds):
                idle = [await first_token(one) for _ in range(NUM_IDLE)]
                alone = await flood(many, count)
                running = asyncio.ensure_future(flood(many, count))
                as_one = max(await one_after_another(many, running))
                running = asyncio.ensure_future(flood(many, count))
                beside = await one_after_another(one, running)
                p50, p99 = np.percentile(beside, (50, 99))
                usual = float(np.median(idle))
                print(
                    f"{usual:>10.1f}{p50:>20.1f}{p99:>8.1f}{p50 / usual:>8.2f}"
                    f"{as_one:>20.1f}{await running / alone:>8.3f}",
                    flush=True,
                )


async def gaps_of(client: Client) -> list[float]:
    """Streams an answer. Returns milliseconds between its tokens."""
    times = []
    prompt = [RNG.randint(1, 30) for _ in range(PROMPT_LEN)]
    async for _ in client.generate(prompt, max_tokens=STREAM_TOKENS, ignore_eos=True):
        times.append(time.perf_counter())
    return [1e3 * gap for gap in np.diff(times)]


async def burst(client: Client, length: int) -> tuple[float, float]:
    """Streams answers beside long prompts. Returns p99 of their gaps, and of the prompts' first tokens."""
    streams = [asyncio.ensure_future(gaps_of(client)) for _ in range(NUM_STREAMS)]
    prompts = []
    while not all(stream.done() for stream in streams):
        prompts += [asyncio.ensure_future(first_token(client, length, 2)) for _ in range(BURST)]
        await asyncio.wait(streams, timeout=BURST_S)
    gaps = [gap for stream in streams for gap in await stream]
    return float(np.percentile(gaps, 99)), float(np.percentile(await asyncio.gather(*prompts), 99))


async def beside_long_prompts(length: int, rounds: int) -> None:
    chunks = ("--target-token-gap-ms", "0")
    async with (
        LocalStack(router_args=chunks) as before,
        LocalStack() as now,
        before.client() as first,
        now.client() as second,
    ):
        for client in (first, second):
            await burst(client, length)
        print(
            f"{'by chunks: gap p99':>20}{'first p99':>12}{'by time: gap p99':>20}{'first p99':>12}"
        )
        for _ in range(rounds):
            found = [*await burst(first, length), *await burst(second, length)]
            print(
                "".join(f"{value:>{w}.1f}" for value, w in zip(found, (20, 12) * 2, strict=True)),
                flush=True,
            )


def main() -> None:
    quiet()
    options = parse_options(__doc__, requests=600, rounds=3, prompt=1000)
    asyncio.run(beside_a_flood(options.requests, options.rounds))
    asyncio.run(beside_long_prompts(options.prompt, options.rounds))


if __name__ == "__main__":
    main()
