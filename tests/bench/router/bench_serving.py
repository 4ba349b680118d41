"""Times the whole system on this machine: router and executors as processes, a real model.

    python -m tests.bench.router.bench_serving [--dp-size 2] [--requests 64] [--tokens 64]

The demo model, sharded experts and all, on the CPU. Each load sends its requests at once, on one
GenerateMany stream, greedy, until max_tokens (the end of the sequence is ignored), and counts the
output tokens from the first request's sending to the last one's end; the prompts are random, so
nothing is cached. A load of one request tells of latency, the largest of throughput. The model is
tiny: on a real one the router's share is smaller. CPU numbers of shared cores vary by a
factor of two; compare runs made a moment apart.
"""

import asyncio
import random
import time

from deploy.local.launch import LocalStack
from router.client import Client
from tests.bench.support.options import parse_options
from tests.bench.support.quiet import quiet

PROMPT_LEN = 16


async def measure(client: Client, num_requests: int, num_tokens: int) -> tuple[float, float]:
    """Returns seconds to the median request's first token, and to the last one's end."""
    rng = random.Random(num_requests)
    prompts = [[rng.randint(1, 30) for _ in range(PROMPT_LEN)] for _ in range(num_requests)]
    first_token_s: list[float] = []
    started = time.perf_counter()

    async with client.many() as many:

        async def complete(prompt: list[int]) -> None:
            completion = await many.complete(
                prompt, max_tokens=num_tokens, ignore_eos=True, temperature=0.0
            )
            assert len(completion.token_ids) == num_tokens
            assert completion.finish is not None
            first_token_s.append(completion.finish.first_token_s)

        await asyncio.gather(*(complete(prompt) for prompt in prompts))
    wall_s = time.perf_counter() - started
    return sorted(first_token_s)[num_requests // 2], wall_s


async def run(dp_size: int, max_requests: int, num_tokens: int) -> None:
    async with LocalStack(dp_size=dp_size) as stack, stack.client() as client:
        await measure(client, 4, 8)  # warm-up
        print(f"demo model, {dp_size} executors, {PROMPT_LEN} + {num_tokens} tokens per request")
        print(f"{'requests':>10}{'tokens/s':>12}{'ms/step':>10}{'first token ms':>16}")
        num_requests = 1
        while num_requests <= max_requests:
            first_token_s, wall_s = await measure(client, num_requests, num_tokens)
            print(
                f"{num_requests:>10}{num_requests * num_tokens / wall_s:>12.0f}"
                f"{wall_s / num_tokens * 1e3:>10.1f}{first_token_s * 1e3:>16.1f}",
                flush=True,
            )
            num_requests *= 4


def main() -> None:
    quiet()
    options = parse_options(__doc__, dp_size=2, requests=64, tokens=64)
    asyncio.run(run(options.dp_size, options.requests, options.tokens))


if __name__ == "__main__":
    main()
