"""Speculative part of the demo: the same requests with and without drafts, in turns.

Two whole stacks stand side by side, and while one answers, the other sleeps. What is asked are the
longest problems that the model knows, all at once, so that most steps decode.
"""

import asyncio
import random
import string
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median

from deploy.local.demo_tasks import STOP_ID, Problem, rev, sort
from deploy.local.launch import DEMO_MODEL, LocalStack
from router.client import Client, GroupStatus, Options

FOLDER = Path(__file__).parents[1] / "demo_drafts"
DRAFTS = ("eagle", "mtp", "mtp3", "frozen_kv")
DEFAULT_DRAFTS = "frozen_kv"

NUM_ROUNDS = 9
NUM_PROBLEMS = 16  # few for each rank: there drafts pay
WORD_LEN, NUM_DIGITS = 12, 10
OPTIONS: Options = {"max_tokens": 16, "stop_token_ids": (STOP_ID,)}


@dataclass(frozen=True, slots=True)
class Turn:
    """One stack's answers to all problems, and their times.

    Attributes:
        answers: Token ids of each.
        decode_s: From a request's first token to its last, the mean.
        total_s: Until all were answered.
    """

    answers: list[list[int]]
    decode_s: float
    total_s: float


def draw_problems(seed: int) -> list[Problem]:
    """Returns problems with long answers, the same ones for the same seed."""
    rng = random.Random(seed)
    return [
        sort("".join(rng.choices(string.digits, k=NUM_DIGITS)))
        if number % 2
        else rev("".join(rng.choices(string.ascii_lowercase, k=WORD_LEN)))
        for number in range(NUM_PROBLEMS)
    ]


async def take_turn(client: Client, problems: Sequence[Problem]) -> Turn:
    """Asks everything at once and waits for all answers."""
    begun = time.perf_counter()
    async with client.many() as many:
        asked = (many.complete(problem.prompt, **OPTIONS) for problem in problems)
        completions = await asyncio.gather(*asked)
    finishes = [completion.finish for completion in completions]
    return Turn(
        answers=[completion.token_ids for completion in completions],
        decode_s=mean(finish.total_s - finish.first_token_s for finish in finishes),
        total_s=time.perf_counter() - begun,
    )


def print_drafts(group: GroupStatus) -> None:
    """Prints what came of a group's drafts, if it drafts."""
    drafts = group.speculation
    if not drafts.HasField("tokens_per_step"):
        return
    print(
        f"\nDrafts ({drafts.algorithm}): {drafts.num_accepted_drafts} of {drafts.num_drafts} "
        f"accepted in {drafts.num_steps} speculative steps; "
        f"{drafts.tokens_per_step:.2f} tokens per sequence and step"
    )


async def compare(
    seed: int,
    *,
    dp_size: int,
    attn_tp_size: int,
    executor_args: Sequence[str],
    draft_args: Sequence[str],
) -> bool:
    """Prints what drafts gain. Returns whether both stacks answered alike, and drafts were faster.

    Args:
        seed: Of the problems.
        dp_size: DP ranks of each stack.
        attn_tp_size: Executors of each DP rank.
        executor_args: Flags of every executor.
        draft_args: Further flags of the executors that draft.
    """
    problems = draw_problems(seed)
    print(f"\n{len(problems)} long answers, without drafts and with them, in turns")
    stack = partial(LocalStack, DEMO_MODEL, dp_size=dp_size, attn_tp_size=attn_tp_size)
    async with (
        stack(executor_args=executor_args) as plain_stack,
        stack(executor_args=(*executor_args, *draft_args)) as draft_stack,
        plain_stack.client() as plain_client,
        draft_stack.client() as draft_client,
    ):
        plain, drafted = [], []
        for _ in range(NUM_ROUNDS):
            plain.append(await take_turn(plain_client, problems))
            drafted.append(await take_turn(draft_client, problems))
        [group] = await draft_client.get_status()
    for name, turns in (("without", plain), ("with drafts", drafted)):
        decode_s, total_s = (
            median(getattr(t, of) for t in turns) for of in ("decode_s", "total_s")
        )
        num_tokens = sum(map(len, turns[0].answers))
        print(
            f"  {name:<12} {num_tokens / total_s:5.0f} output tokens/s; "
            f"{decode_s * 1e3:5.0f} ms from a request's first token to its last"
        )
    gain = median(t.total_s for t in plain) / median(t.total_s for t in drafted)
    decode_gain = median(t.decode_s for t in plain) / median(t.decode_s for t in drafted)
    print(f"  {gain:.2f}x the output tokens/s, {decode_gain:.2f}x as fast behind the first token")
    print_drafts(group)
    is_same = all(turn.answers == plain[0].answers for turn in (*plain, *drafted))
    print("Every answer alike, token for token." if is_same else "DIFFERENT answers.")
    return is_same and gain > 1
