"""Guesses at another caller's prompts and request ids, by what answers tell and how long they take."""

import random
import time
from collections.abc import Callable
from math import erfc, sqrt
from statistics import median
from typing import Any

import grpc
import numpy as np

from protos.serving.v1 import serving_pb2 as pb
from tests.attack.callers import calling
from tests.attack.target import Outcome, Target

NUM_TRIES = 1000
NUM_TOKENS = 160  # of a prompt: ten blocks, which take most of the time of its answer
TOKENS = range(30, 130)
NUM_CANCELS = 50  # of a request, while it runs
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


def guessed_ids(target: Target) -> Outcome:
    """A8: a caller cancels ids, of which another's running request has some, by the toss of a coin."""
    toss = random.Random(13)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    told: dict[bool, set[str]] = {False: set(), True: set()}
    num_lost = 0
    with calling(target, 0) as owner, calling(target, 1) as other:
        for _ in range(target.share(NUM_TRIES) // NUM_CANCELS):
            asked = _prompt(toss)
            asked.stop.max_tokens, asked.stop.ignore_eos = 400, True
            asked.request_id, other_id = (f"order-{toss.getrandbits(32):08x}" for _ in range(2))
            answers = owner("Generate", asked)
            next(iter(answers))
            for _ in range(NUM_CANCELS):
                is_right = toss.random() < 0.5
                guess = asked.request_id if is_right else other_id
                begun = time.perf_counter()
                answer = _cancel(other, guess)
                seconds[is_right].append(time.perf_counter() - begun)
                told[is_right].add(answer)
            num_lost += _cancel(owner, asked.request_id) != "OK"  # it was there to the end
            answers.cancel()
    right, wrong = seconds[True], seconds[False]
    z, p = rank_test(right, wrong)
    tries = (
        f"Cancel of {len(right)} running requests' ids: {told[True]} in {1e3 * median(right):.2f} "
        f"ms (median), of {len(wrong)} others: {told[False]} in {1e3 * median(wrong):.2f} ms; "
        f"Mann-Whitney z = {z:+.2f}, p = {p:.2g}; {num_lost} requests ended"
    )
    faults = [f"ends {num_lost} requests"] * (num_lost > 0)
    faults += ["answers tell ids"] * (told[True] != told[False]) + ["time tells ids"] * (
        p < LEAST_P
    )
    return Outcome(tries, " and ".join(faults))


def _cancel(call: Callable[[str, Any], Any], request_id: str) -> str:
    """Returns what is answered, without the id."""
    try:
        call("Cancel", pb.CancelRequest(request_id=request_id))
    except grpc.RpcError as error:
        return f"{error.code().name} {error.details()}".replace(request_id, "ID")
    return "OK"


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
