"""Guesses at another caller's prompt, by what an answer tells and by how long it takes."""

import random
import time
from math import erfc, sqrt
from statistics import median

import numpy as np

from protos.serving.v1 import serving_pb2 as pb
from tests.attack.callers import calling
from tests.attack.target import Outcome, Target

NUM_TRIES = 1000
NUM_TOKENS = 160  # of a prompt: ten blocks, which take most of the time of its answer
TOKENS = range(30, 130)
LEAST_P = 1e-3  # of no difference; less is taken for one


def guessed_prompts(target: Target) -> Outcome:
    """A8: a caller sends prompts, of which another has just sent some, by the toss of a coin."""
    toss = random.Random(13)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    cached = {False: 0, True: 0}
    with calling(target, 0) as owner, calling(target, 1) as other:
        for _ in range(target.share(NUM_TRIES)):
            secret, guess = _prompt(toss), _prompt(toss)
            is_right = toss.random() < 0.5
            list(owner("Generate", secret))
            begun = time.perf_counter()
            answers = list(other("Generate", secret if is_right else guess))
            seconds[is_right].append(time.perf_counter() - begun)
            cached[is_right] += answers[-1].finish.num_cached_tokens
    right, wrong = seconds[True], seconds[False]
    z, p = rank_test(right, wrong)
    tries = (
        f"{len(right)} right guesses in {1e3 * median(right):.2f} ms (median), {cached[True]} cached "
        f"tokens; {len(wrong)} wrong ones in {1e3 * median(wrong):.2f} ms, {cached[False]}; "
        f"Mann-Whitney z = {z:+.2f}, p = {p:.2g}"
    )
    told = ["counts"] * (cached[True] != cached[False]) + ["time"] * (p < LEAST_P)
    return Outcome(tries, f"told by {' and '.join(told)}" if told else "")


def _prompt(toss: random.Random) -> pb.GenerateRequest:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=toss.choices(TOKENS, k=NUM_TOKENS)))
    request.stop.max_tokens = 1
    return request


def rank_test(these: list[float], those: list[float]) -> tuple[float, float]:
    """Returns z and the two-sided p of Mann and Whitney's test, by its normal approximation.

    z is negative where `these` are less. Ties have no correction: clocks of a nanosecond have none.
    """
    ranks = np.empty(len(these) + len(those))
    ranks[np.argsort([*these, *those], kind="stable")] = np.arange(1, len(ranks) + 1)
    size = len(these) * len(those)
    u = ranks[: len(these)].sum() - len(these) * (len(these) + 1) / 2
    z = float((u - size / 2) / sqrt(size * (len(ranks) + 1) / 12))
    return z, erfc(abs(z) / sqrt(2))
