"""Load that every peer gets, and the figures that come of it.

Needs no package: each peer imports it in an environment of its own. A peer prints its figures as
lines of JSON behind MARK, among what else it prints.
"""

import asyncio
import csv
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path

MARK = "FIGURES "
VOCAB_SIZE = 32768
PROMPT_LEN = 512
BATCHES = (1, 8, 32)
WARM_UP_LEN = 32
NUM_PREFILLS = 8  # of which the first two are left out
NUM_STEPS = 48  # of a decode, after the last prompt
NUM_LEFT_OUT = 8  # of those
TRACE = Path(__file__).parents[1] / "data" / "azure_conversations.csv"
NUM_REQUESTS = 96  # of it
SHRINK = 4  # of the trace's lengths; its times stay

# Sends a prompt, and yields how many tokens each message of the answer brings.
Generate = Callable[[list[int], int], AsyncIterator[int]]


def make_prompt(number: int, length: int = PROMPT_LEN) -> list[int]:
    """Returns random tokens, the same for a number each time, others for each number."""
    return random.Random(number).choices(range(1, VOCAB_SIZE), k=length)


def report(column: str, **figures: float) -> None:
    print(MARK + json.dumps({"column": column, **figures}), flush=True)


def report_prefill(seconds: Sequence[float]) -> None:
    """Args: seconds: From a prompt to its token, of NUM_PREFILLS prompts one after another."""
    report("prefill", tokens_per_s=PROMPT_LEN / statistics.median(seconds[2:]))


def report_decode(stamps: Sequence[Sequence[float]]) -> None:
    """Counts tokens while all sequences decode: since the slowest one's NUM_LEFT_OUT-th token, until
    the first one's last.

    Args:
        stamps: For each sequence the time of each of its tokens.
    """
    begin = max(times[NUM_LEFT_OUT] for times in stamps)
    end = min(times[-1] for times in stamps)
    num_tokens = sum(begin < moment <= end for times in stamps for moment in times)
    report(f"decode {len(stamps)}", tokens_per_s=num_tokens / (end - begin))


def read_trace() -> list[tuple[float, int, int]]:
    """Returns requests: seconds since the first one's arrival, prompt tokens, output tokens."""
    lines = [line for line in TRACE.read_text().splitlines() if not line.startswith("#")]
    rows = [
        (datetime.fromisoformat(time[:26]).timestamp(), int(num_prompt), int(num_output))
        for time, num_prompt, num_output in list(csv.reader(lines))[1 : 1 + NUM_REQUESTS]
    ]
    first = rows[0][0]
    return [
        (moment - first, max(1, num_prompt // SHRINK), max(1, num_output // SHRINK))
        for moment, num_prompt, num_output in rows
    ]


async def measure_service(generate: Generate) -> None:
    """Reports every column of a service that takes prompts of token ids."""

    async def ask(prompt: list[int], num_tokens: int) -> list[float]:
        """Returns the time of sending and that of each token."""
        stamps = [time.perf_counter()]
        async for num_new in generate(prompt, num_tokens):
            stamps += [time.perf_counter()] * num_new
        assert len(stamps) == num_tokens + 1, f"{len(stamps) - 1} tokens instead of {num_tokens}"
        return stamps

    async def ask_all(
        batch_size: int, first: int, num_tokens: int, length: int = PROMPT_LEN
    ) -> list[list[float]]:
        prompts = [make_prompt(first + row, length) for row in range(batch_size)]
        return await asyncio.gather(*[ask(prompt, num_tokens) for prompt in prompts])

    for batch_size in BATCHES:  # warm-up
        await ask_all(batch_size, 10_000 * batch_size, NUM_LEFT_OUT, WARM_UP_LEN)
    prefills = [await ask(make_prompt(number), 1) for number in range(NUM_PREFILLS)]
    report_prefill([stamps[1] - stamps[0] for stamps in prefills])
    for batch_size in BATCHES:
        answers = await ask_all(batch_size, 100 * batch_size, NUM_STEPS)
        report_decode([stamps[1:] for stamps in answers])

    begun = time.perf_counter()

    async def arrive(number: int, at: float, num_prompt: int, num_output: int) -> list[float]:
        await asyncio.sleep(begun + at - time.perf_counter())
        return await ask(make_prompt(5000 + number, num_prompt), num_output)

    trace = enumerate(read_trace())
    report_mix(await asyncio.gather(*[arrive(number, *request) for number, request in trace]))


def report_mix(answers: Sequence[Sequence[float]]) -> None:
    """Args: answers: For each request the time of its sending, then of each token."""
    num_tokens = sum(len(stamps) - 1 for stamps in answers)
    wall_s = max(stamps[-1] for stamps in answers) - min(stamps[0] for stamps in answers)
    first_ms = [1e3 * (stamps[1] - stamps[0]) for stamps in answers]
    gaps_ms = []
    for stamps in answers:
        moments = sorted(set(stamps[1:]))  # tokens of one message have one
        gaps_ms += [1e3 * (b - a) for a, b in pairwise(moments)]
    report(
        "mix",
        tokens_per_s=num_tokens / wall_s,
        first_token_ms=statistics.median(first_ms),
        first_token_p99_ms=statistics.quantiles(first_ms, n=100)[98],
        gap_ms=statistics.median(gaps_ms),
        gap_p99_ms=statistics.quantiles(gaps_ms, n=100)[98],
    )
