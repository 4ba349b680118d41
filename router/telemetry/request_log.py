"""Request log: that a request was taken, and how it ended.

With --log-level debug, two lines for each request. Otherwise only requests that this router
itself gave up have one: where they ran is asked when it is too late to turn a level up. A line has the request's id, and the group, epoch and step at that moment.
"""

import logging
from collections.abc import Callable
from typing import Any

import structlog

from router.errors import ExecutorFailed, ShuttingDown
from router.requests.request import Request, Sequence

log = structlog.stdlib.get_logger(__name__)
_levels = logging.getLogger(__name__)

# Ends that are neither the caller's wish nor its limit; not their subclasses, as what moves goes on.
GIVEN_UP = (ExecutorFailed, ShuttingDown)


class RequestLog:
    """Writes about requests. Implements engines.Observer.

    Args:
        ids: Returns a group's number, epoch and step, as other lines of the log have them.
    """

    def __init__(self, ids: Callable[[int], dict[str, int]]) -> None:
        self._ids = ids

    def on_submit(self, request: Request) -> None:
        """A request was taken."""
        if _levels.isEnabledFor(logging.DEBUG):
            log.debug(
                "request_taken",
                **self._ids(request.sequences[0].group),
                request_id=request.request_id,
                caller=request.caller,
                prompt_tokens=len(request.prompt),
                max_tokens=request.stop.max_tokens,
                sequences=len(request.sequences),
                priority=request.priority,
                attempt=request.attempt,
            )

    def on_end(self, request: Request) -> None:
        """Its last sequence has ended."""
        is_given_up = any(type(s.error) in GIVEN_UP for s in request.sequences)
        level = logging.INFO if is_given_up else logging.DEBUG
        if _levels.isEnabledFor(level):
            log.log(
                level,
                "request_given_up" if is_given_up else "request_ended",
                **self._ids(request.sequences[0].group),
                request_id=request.request_id,
                caller=request.caller,
                prompt_tokens=len(request.prompt),
                sequences=[_describe(sequence) for sequence in request.sequences],
            )


def _describe(sequence: Sequence) -> dict[str, Any]:
    """Returns what became of one continuation; times are seconds since the request's arrival."""
    arrival, progress = sequence.request.arrival_time, sequence.progress
    reason = sequence.finish_reason
    outcome = sequence.error.reason if sequence.error else reason.name if reason else ""
    described: dict[str, Any] = {
        "outcome": outcome,
        "dp_rank": sequence.dp_rank,
        "output_tokens": sequence.num_output_tokens,
        "resumed_tokens": sequence.num_resumed,
        "cached_tokens": progress.num_cached_tokens,
        "preemptions": progress.num_preemptions,
    }
    for name, time in (
        ("first_step_s", progress.start_time),
        ("first_token_s", progress.first_token_time),
        ("end_s", progress.end_time),
    ):
        if time is not None:
            described[name] = round(time - arrival, 6)
    return described
