"""Recent past of a router: its last events, and each group's numbers once a second."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import structlog

from protos.serving.v1 import serving_pb2 as pb
from protos.transport.errors import duration
from router.scheduling.counters import GroupTotals

log = structlog.get_logger()

MAX_EVENTS = 32  # of each group, so that one that comes and goes crowds out no other's
MAX_SAMPLES = 300
SAMPLE_S = 1.0
_COLUMNS = [field.name for field in pb.History.DESCRIPTOR.fields]
# Fields of a line of the log that are no details of an event: it has the first ones itself, and a
# request is for its caller to know.
_NO_DETAILS = {"group", "epoch", "problem", "step_id", "request_id"}


class Events:
    """Last events of one group, or of the router as a whole.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last: deque[tuple[float, pb.Event]] = deque(maxlen=MAX_EVENTS)

    def note(self, level: int, name: str, **fields: Any) -> None:
        """Logs an event, and keeps it.

        Args:
            level: As of `logging`.
            name: What happened, such as "group_lost".
            fields: Of the line in the log; `group`, `epoch` and `problem` are the event's own.
        """
        log.log(level, name, **fields)
        own = {key: fields[key] for key in ("group", "epoch", "problem") if key in fields}
        details = " ".join(f"{key}={fields[key]}" for key in fields if key not in _NO_DETAILS)
        level_name = logging.getLevelName(level).lower()
        event = pb.Event(name=name, level=level_name, details=details, **own)
        event.time.GetCurrentTime()
        self._last.append((self._clock(), event))

    def messages(self) -> Iterator[pb.Event]:
        """Yields the events, the oldest first; they belong to this object."""
        for time, event in self._last:
            event.age.CopyFrom(duration(self._clock() - time))
            yield event


class History:
    """Numbers of one group over the last minutes."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, ...]] = deque(maxlen=MAX_SAMPLES)
        self._before: tuple[float, ...] | None = None  # time and counts of the last sample

    def add(self, now: float, status: pb.GroupStatus, totals: GroupTotals) -> None:
        """Takes a sample; to be called every SAMPLE_S."""
        num_tokens = sum(rank.scheduled_tokens for rank in totals.ranks)
        counts = (now, totals.num_output_tokens, num_tokens, sum(totals.steps.values()))
        before, self._before = self._before, counts
        if before is None:
            return
        seconds, *grown = (new - old for new, old in zip(counts, before, strict=True))
        num_running = sum(rank.num_running for rank in status.ranks)
        num_used_blocks = sum(rank.num_used_blocks for rank in status.ranks)
        rates = [round(count / seconds) for count in grown]
        self._samples.append((*rates, num_running, status.num_waiting, num_used_blocks))

    def message(self) -> pb.History:
        """Returns the samples as columns."""
        return pb.History(**dict(zip(_COLUMNS, zip(*self._samples, strict=True), strict=False)))
