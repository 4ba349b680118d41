"""Demo: a whole service on this machine, checked by its answers (``python -m deploy.local.demo``).

Starts executors and a router with the model in deploy/demo_model, or in --model, sends sums,
reversals and sortings in all the ways there are, and compares every answer with the right one. With
--compare a single executor answers first, and every token must be the same. With --speculative a
draft model drafts, and the same requests are answered with it and without, in turns. Exits with 1
if an answer is wrong, if drafts were slower, or if a process is left running.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from deploy.local import demo_speculative, flags
from deploy.local.demo_tasks import (
    STOP_ID,
    Kind,
    Problem,
    problems,
    solved_lines,
    text_of,
    token_ids,
)
from deploy.local.launch import DEMO_MODEL, LocalStack, metrics_args, num_cores
from deploy.local.processes import ProcessEnded, cancel_at_signals
from router.client import CallFailed, Client, Finish, GroupStatus, Many, Options, Prompt

NUM_SHOWN = 6  # requests that the terminal shows token by token
NUM_CONTEXTS = 12  # each opens many prompts, so that its KV blocks are used again
CONTEXT_LENS = (200, 300)
MAX_ANSWER_TOKENS = 16
OPTIONS: Options = {"max_tokens": MAX_ANSWER_TOKENS, "stop_token_ids": (STOP_ID,)}
EXECUTOR_ARGS = ("--kv-cache-bytes", str(128 << 20))  # the default is more than the demo needs

NAMES = {
    Kind.ADD: "sums that it was not trained on",
    Kind.REV: "words reversed",
    Kind.SORT: "digits sorted",
}

# The model misses a problem now and then (deploy/demo_model/README.md), but none of these, under
# Hugging Face transformers: tests/e2e/serving/test_demo.py. So a wrong answer is the server's fault.
NUM_REQUESTS = 300
SEED = 1


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """A problem and how it is sent.

    Attributes:
        context: Solved problems that come first; empty for a short prompt.
        as_ids: Whether the prompt is sent as token ids rather than text.
        on_stream: Whether it goes through GenerateMany rather than Generate.
    """

    problem: Problem
    context: str
    as_ids: bool
    on_stream: bool

    @property
    def text(self) -> str:
        return self.context + self.problem.prompt

    @property
    def prompt(self) -> Prompt:
        return token_ids(self.text) if self.as_ids else self.text


def draw_requests(seed: int, count: int) -> list[DemoRequest]:
    """Returns the same requests for the same arguments, and a longer list begins with a shorter.

    A third of the problems comes behind a few hundred tokens of solved ones.
    """
    rng = random.Random(seed)
    contexts = [
        solved_lines(rng.randrange(1 << 32), rng.randint(*CONTEXT_LENS))
        for _ in range(NUM_CONTEXTS)
    ]
    return [
        DemoRequest(
            problem=problem,
            context=rng.choice(contexts) if rng.random() < 1 / 3 else "",
            as_ids=rng.random() < 1 / 2,
            on_stream=rng.random() < 1 / 2,
        )
        for problem in problems(seed, count)
    ]


@dataclass(frozen=True, slots=True)
class Answer:
    """Outcome of a request."""

    request: DemoRequest
    token_ids: list[int]
    finish: Finish

    @property
    def text(self) -> str:
        return text_of(self.token_ids)

    @property
    def is_right(self) -> bool:
        return self.request.problem.is_answered_by(self.text)


async def ask(client: Client | Many, request: DemoRequest) -> Answer:
    """Sends a request and waits for the whole answer."""
    completion = await client.complete(request.prompt, **OPTIONS)
    return Answer(request, completion.token_ids, completion.finish)


async def show(client: Client, request: DemoRequest) -> Answer:
    """Sends a request as text and prints each token when it comes."""
    print(f"  {request.problem.prompt.strip()}", end="", flush=True)
    ids: list[int] = []
    finish = None
    async for delta in client.generate(request.text, **OPTIONS):
        print(delta.text.strip(), end="", flush=True)
        ids += delta.token_ids
        finish = delta.finish
    assert finish is not None, "the last delta says how it ended"
    print(f"   (behind {len(request.context)} tokens of others)" if request.context else "")
    return Answer(request, ids, finish)


async def ask_all(client: Client, requests: Sequence[DemoRequest]) -> list[Answer]:
    """Sends all requests at once, and shows the first few as they come."""
    async with client.many() as many, asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(ask(many if request.on_stream else client, request))
            for request in requests[NUM_SHOWN:]
        ]
        shown = [await show(client, request) for request in requests[:NUM_SHOWN]]
        print(f"  ... and {len(asked)} more at the same time", flush=True)
    return shown + [task.result() for task in asked]


async def ask_one_executor(
    model: Path, requests: Sequence[DemoRequest], dtype: str
) -> list[list[int]]:
    """Returns the tokens that a single executor answers with."""
    args = (*EXECUTOR_ARGS, "--dtype", dtype)
    async with (
        LocalStack(model, dp_size=1, executor_args=args) as stack,
        stack.client() as client,
        client.many() as many,
    ):
        answers = await asyncio.gather(*(ask(many, request) for request in requests))
    return [answer.token_ids for answer in answers]


def print_differences(answers: Sequence[Answer], expected: Sequence[list[int]]) -> bool:
    """Prints which answers are other than a single executor's. Returns whether none is."""
    pairs = list(zip(answers, expected, strict=True))
    num_equal = sum(answer.token_ids == ids for answer, ids in pairs)
    print(f"  {num_equal} of {len(pairs)} token for token as a single executor answers them")
    for answer, ids in pairs:
        if answer.token_ids != ids:
            prompt = answer.request.problem.prompt.strip()
            print(f"  DIFFERENT: {prompt} was answered {answer.token_ids}, by a single one {ids}")
    return num_equal == len(pairs)


def print_score(answers: Sequence[Answer], elapsed_s: float) -> None:
    """Prints how many answers of each kind are right, which are wrong, and the speed."""
    print("\nAnswers")
    for kind, name in NAMES.items():
        are_right = [answer.is_right for answer in answers if answer.request.problem.kind is kind]
        print(f"  {name:<32} {sum(are_right):>4} of {len(are_right)} right")
    for answer in answers:
        if not answer.is_right:
            problem = answer.request.problem
            print(f"  WRONG: {problem.line.strip()} was answered {answer.text.strip()!r}")
    finishes = [answer.finish for answer in answers]
    num_prompt = sum(finish.num_prompt_tokens for finish in finishes)
    num_cached = sum(finish.num_cached_tokens for finish in finishes)
    num_output = sum(finish.num_completion_tokens for finish in finishes)
    first_token_s = sorted(finish.first_token_s for finish in finishes)[len(finishes) // 2]
    print(
        f"  {num_prompt} prompt tokens ({num_cached} of them from the prefix cache) and "
        f"{num_output} output tokens\n  in {elapsed_s:.1f} s: {num_output / elapsed_s:.0f} output "
        f"tokens/s; the median first token came after {first_token_s:.2f} s"
    )


def print_ranks(group: GroupStatus, answers: Sequence[Answer]) -> None:
    """Prints what each DP rank did."""
    print(f"\nRanks, after {group.step} steps that they took together")
    print("  rank  requests  tokens  prefix hits  blocks in use  cached   free")
    for rank in group.ranks:
        num_requests = sum(answer.finish.dp_rank == rank.dp_rank for answer in answers)
        print(
            f"  {rank.dp_rank:>4}  {num_requests:>8}  {rank.total_tokens:>6}  "
            f"{rank.prefix_hit_rate:>11.0%}  {rank.num_used_blocks:>13}  "
            f"{rank.num_cached_blocks:>6}  {rank.num_free_blocks:>5}"
        )


def print_graphs(group: GroupStatus) -> None:
    """Prints what ran the steps: replays by runner and size, and misses by reason."""
    print("\nSteps, by what ran them on every rank")
    for runner, counts in groupby(group.graphs, key=lambda count: count.runner):
        if runner == "eager":
            parts = [f"{count.miss.replace('_', ' ')}: {count.num_steps}" for count in counts]
            print(f"  {'no graph':<17}  {', '.join(parts)}")
        else:
            parts = [f"{count.size}: {count.num_steps}" for count in counts]
            print(f"  {runner:<17}  size: replays  {', '.join(parts)}")


async def idle_group(client: Client) -> GroupStatus:
    """Returns the group's status when the last step is over and nothing runs."""
    while True:
        [group] = await client.get_status()
        if not any(rank.num_running or rank.num_used_blocks for rank in group.ranks):
            return group


async def run(args: argparse.Namespace) -> bool:
    """Runs the demo. Returns whether every answer was right and every process ended."""
    cancel_at_signals()
    is_good = await run_requests(args)
    if args.speculative is not None:
        is_good &= await demo_speculative.compare(
            args.seed,
            dp_size=args.dp_size,
            attn_tp_size=args.attn_tp_size,
            executor_args=(*EXECUTOR_ARGS, *flags.executor_args(args, flags.SHARING)),
            draft_args=flags.executor_args(args, flags.DRAFTING),
        )
    return is_good


async def run_requests(args: argparse.Namespace) -> bool:
    """Asks everything and prints what came of it. Returns whether all was as it should be."""
    requests = draw_requests(args.seed, args.requests)
    expected = None
    if args.compare:
        args.dtype = args.dtype or "float32"
        print(f"Asking a single executor, in {args.dtype}, for the tokens", flush=True)
        expected = await ask_one_executor(args.model, requests, args.dtype)
    print(f"Starting {flags.describe(args)} and a router ... ", end="", flush=True)
    start_time = time.perf_counter()
    stack = LocalStack(
        args.model,
        **flags.group_args(args),
        executor_args=(*EXECUTOR_ARGS, *flags.executor_args(args)),
        router_args=metrics_args(),
        log_dir=args.log_dir,
    )
    async with stack:
        print(f"ready after {time.perf_counter() - start_time:.1f} s on {num_cores()} cores")
        if page := await stack.status_page():
            print(f"While it runs, {page} shows what it is doing.")
        print()
        async with stack.client() as client:
            start_time = time.perf_counter()
            answers = await ask_all(client, requests)
            print_score(answers, time.perf_counter() - start_time)
            is_same = expected is None or print_differences(answers, expected)
            group = await idle_group(client)
            print_ranks(group, answers)
            print_graphs(group)
            demo_speculative.print_drafts(group)
    num_right = sum(answer.is_right for answer in answers)
    print(f"\n{num_right} of {len(answers)} right. ", end="")
    if stack.left_running:
        print(f"LEFT RUNNING: {', '.join(stack.left_running)}")
    else:
        print("All processes have ended.")
    return num_right == len(answers) and is_same and not stack.left_running


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Serves the demo model and checks its answers.")
    parser.add_argument(
        "--requests",
        type=int,
        default=NUM_REQUESTS,
        help=f"how many problems to ask [default: {NUM_REQUESTS}]",
    )
    parser.add_argument(
        "--seed", type=int, default=SEED, help=f"which problems are asked [default: {SEED}]"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="compare each token with a single executor's answer, in float32 unless said",
    )
    parser.add_argument(
        "--speculative",
        nargs="?",
        const=demo_speculative.DEFAULT_DRAFTS,
        choices=demo_speculative.DRAFTS,
        help=f"draft, and compare with not drafting [default: {demo_speculative.DEFAULT_DRAFTS}]",
    )
    flags.add_flags(parser)
    args = parser.parse_args()
    if args.speculative is not None:
        if args.model.resolve() != DEMO_MODEL:
            parser.error(f"--speculative: its drafts are of {DEMO_MODEL}, not of {args.model}")
        args.draft_model = demo_speculative.FOLDER / args.speculative
        args.dtype = args.dtype or "float32"  # with and without: the same tokens
    if args.requests < 1:
        parser.error(f"--requests {args.requests}: need at least 1")
    try:
        is_good = asyncio.run(run(args))
    except (ProcessEnded, TimeoutError, CallFailed, ExceptionGroup) as error:
        first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
        print(f"\nThe demo failed: {type(first).__name__}: {first}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("\nStopped.", file=sys.stderr)
        return 130
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
