"""Requests with defaults for what a test does not care about."""

import asyncio
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from router.requests.request import (
    Listener,
    OutputOptions,
    Request,
    SamplingParams,
    StopConditions,
    TokenLogprob,
)


def make_request(
    prompt: SequenceOf[int] | np.ndarray, listener: Listener, max_tokens: int = 4, **fields: Any
) -> Request:
    """A request that arrives now, or at time 0 where no event loop runs.

    Args:
        fields: Of Request and of StopConditions.
    """
    stop = StopConditions(
        max_tokens=max_tokens,
        **{
            name: fields.pop(name)
            for name in ("min_tokens", "stop_token_ids", "has_stop_strings")
            if name in fields
        },
    )
    defaults = {
        "request_id": "r",
        "sampling": SamplingParams(),
        "stop": stop,
        "output": OutputOptions(),
        "arrival_time": _now(),
    }
    return Request(
        prompt=np.array(prompt, dtype=np.int32), listener=listener, **{**defaults, **fields}
    )


def scored(token_id: int, *top_ids: int) -> TokenLogprob:
    """A token with a log probability of its own; those of its alternatives are -1, -2, ..."""
    top_logprobs = -np.arange(1, len(top_ids) + 1, dtype=np.float32)
    given = np.array([-token_id / 4], np.float32)
    return TokenLogprob(token_id, -token_id / 8, np.array(top_ids, np.int32), top_logprobs, given)


def _now() -> float:
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return 0.0
