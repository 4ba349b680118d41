"""A flood of one caller beside another caller, on real processes.

    python -m tests.bench.router.bench_neighbours [--requests 600] [--rounds 5] [--pause 0.1] [--turns 10]

The demo model; router, executors and the flood's caller as processes of their own. The flood's requests
come all at once, the other caller's one after another: its milliseconds to the first token while it has
the router for itself, beside the flood, and at most as the flood's own caller; and the flood's tokens a
second alone and beside the other caller, by turns. The last line has the medians of the rounds. The other
caller's pauses are of random length: a flood's answers, which are alike, end in waves, and a caller with
a beat of its own would come in every wave of one round and between those of the next.

Then the flood never ends, its answers are of 16 to 48 tokens, so that they do not end together, and the
other caller calls in every second turn of two seconds: the tokens that the router served the flood, and
both, over those of the turns before and after.
"""

import asyncio
import random
import secrets
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import current_process, get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deploy.local.launch import LocalStack
from router.client import Client
from tests.bench.support.options import parse_options
from tests.bench.support.quiet import quiet

CALLERS = ("flood", "other")
PROMPT_LEN, NUM_TOKENS, OTHER_TOKENS = 32, 32, 8
NUM_IDLE = 30  # requests that find the router idle
SENT_S = 0.3  # in which a flood's requests have been sent
START_S, TURN_S = 2.0, 2.0
SPAWN = get_context("spawn")  # gRPC runs in this process
RNG = random.Random(current_process().name)  # the flood's prompts are others

Figures = npt.NDArray[np.float64]


async def first_token(client: Client, pause_s: float) -> float:
    """Runs a request, and pauses for a random time. Returns its milliseconds to the first token."""
    prompt = [RNG.randint(1, 30) for _ in range(PROMPT_LEN)]
    answer = await client.complete(prompt, max_tokens=OTHER_TOKENS, ignore_eos=True)
    await asyncio.sleep(RNG.uniform(0, 2 * pause_s))
    return 1e3 * answer.first_token_s


class Caller(NamedTuple):
    """One that asks the router for answers."""

    address: str
    token: str

    def flood(self, count: int) -> float:
        """Sends requests at once, in a process of its own. Returns output tokens a second."""
        return asyncio.run(self._flood(count))

    async def _flood(self, count: int) -> float:
        async with Client(self.address, token=self.token) as client, client.many() as many:
            begun = time.perf_counter()
            prompts = [[RNG.randint(1, 30) for _ in range(PROMPT_LEN)] for _ in range(count)]
            requests = [many.complete(p, max_tokens=NUM_TOKENS, ignore_eos=True) for p in prompts]
            await asyncio.gather(*requests)
            return count * NUM_TOKENS / (time.perf_counter() - begun)

    def keep_flooding(self, count: int, seconds: float) -> None:
        """Has so many requests at the router for so long, in a process of its own."""
        asyncio.run(self._keep_flooding(count, time.perf_counter() + seconds))

    async def _keep_flooding(self, count: int, end: float) -> None:
        async def go_on() -> None:
            while time.perf_counter() < end:
                prompt = [RNG.randint(1, 30) for _ in range(PROMPT_LEN)]
                length = RNG.randint(NUM_TOKENS // 2, 3 * NUM_TOKENS // 2)
                await many.complete(prompt, max_tokens=length, ignore_eos=True)

        async with Client(self.address, token=self.token) as client, client.many() as many:
            await asyncio.gather(*[go_on() for _ in range(count)])


async def one_after_another(
    client: Client, until: asyncio.Future[float], pause_s: float
) -> list[float]:
    waits = []
    await asyncio.sleep(SENT_S)
    while not until.done():
        waits.append(await first_token(client, pause_s))
    return waits


async def served(client: Client) -> Figures:
    """Returns the tokens that the flood was given so far, and that all were."""
    [group] = await client.get_status()
    tokens = {flow.flow: flow.num_served_tokens for flow in group.flows}
    return np.array([tokens["flood"], sum(tokens.values())], dtype=np.float64)


async def by_turns(
    flooding: asyncio.Future[None], watch: Client, one: Client, turns: int, pause_s: float
) -> None:
    """Prints what the flood, and all, are served beside the other caller over what they are without."""
    end = time.perf_counter() + START_S
    await asyncio.sleep(START_S)
    rates, waits = [], []
    for turn in range(2 * turns + 1):
        begun, before = time.perf_counter(), await served(watch)
        end += TURN_S  # however late the turn began: the flood ends at a time, too
        if turn % 2:
            while time.perf_counter() < end:
                waits.append(await first_token(one, pause_s))
        await asyncio.sleep(end - time.perf_counter())
        rates.append((await served(watch) - before) / (time.perf_counter() - begun))
    await flooding
    alone = np.array(rates[::2])
    flood, both = np.median(2 * np.array(rates[1::2]) / (alone[:-1] + alone[1:]), axis=0).tolist()
    print(
        f"by turns: flood {flood:.3f}, both {both:.3f} of what the flood has alone, "
        f"the other's first token {np.median(waits):.1f} ms",
        flush=True,
    )


async def beside_a_flood(count: int, rounds: int, pause_s: float, turns: int) -> None:
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, SPAWN) as process:
        run = partial(asyncio.get_running_loop().run_in_executor, process)
        tokens = {name: secrets.token_hex(16) for name in CALLERS}
        file = Path(folder) / "tokens"
        file.write_text("".join(f"{name} {token}\n" for name, token in tokens.items()))
        args = ("--auth-tokens", str(file), "--operators", "flood")
        async with (
            LocalStack(router_args=args, token=file) as stack,
            Client(stack.address, token=tokens["flood"]) as same,
            Client(stack.address, token=tokens["other"]) as one,
        ):
            many = Caller(stack.address, tokens["flood"])
            for _ in range(2):
                await run(many.flood, 200)  # in which step times are learnt
            flood = partial(run, many.flood, count)
            as_one = max(await one_after_another(same, flood(), pause_s))
            print(f"as one caller, at most {as_one:.0f} ms")
            print("idle p50   beside a flood p50   p99   times   flood alone, beside, ratio")
            found = [await one_round(flood, one, pause_s) for _ in range(rounds)]
            show(np.median(found, axis=0))
            seconds = START_S + (2 * turns + 1) * TURN_S
            flooding = run(many.keep_flooding, count, seconds + START_S)
            await by_turns(flooding, same, one, turns, pause_s)


async def one_round(
    flood: Callable[[], asyncio.Future[float]], one: Client, pause_s: float
) -> Figures:
    """Returns milliseconds idle, beside a flood p50 and p99, and the flood's tokens/s alone and beside."""
    idle = [await first_token(one, pause_s) for _ in range(NUM_IDLE)]
    alone = await flood()
    running = flood()
    beside = await one_after_another(one, running, pause_s)
    figures = np.array([np.median(idle), *np.percentile(beside, (50, 99)), alone, await running])
    show(figures)
    return figures


def show(figures: Figures) -> None:
    idle, p50, p99, alone, beside = figures.tolist()
    print(
        f"{idle:8.1f}{p50:21.1f}{p99:6.0f}{p50 / idle:8.2f}"
        f"{alone:14.0f}{beside:8.0f}{beside / alone:7.3f}",
        flush=True,
    )


def main() -> None:
    quiet()
    options = parse_options(__doc__, requests=600, rounds=5, pause=0.1, turns=10)
    asyncio.run(beside_a_flood(options.requests, options.rounds, options.pause, options.turns))


if __name__ == "__main__":
    main()
