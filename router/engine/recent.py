"""Recent past of a router: its last events, each group's numbers once a second, flows' shares."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import structlog

from protos.serving.v1 import serving_pb2 as pb
from protos.transport.errors import duration
from router.requests.flows import FlowCounts
from router.scheduling.counters import GroupTotals

log = structlog.get_logger()

MAX_EVENTS = 32  # of each group, so that one that comes and goes crowds out no other's
MAX_SAMPLES = 300
SAMPLE_S = 1.0
SHARE_SAMPLES = 10  # over which flows' shares are told
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


class FlowShares:
    """What flows of one group were given over the last seconds."""

    def __init__(self) -> None:
        self._samples: deque[dict[str, int]] = deque(maxlen=SHARE_SAMPLES)

    def add(self, flows: Mapping[str, FlowCounts]) -> None:
        """Takes a sample; to be called every SAMPLE_S."""
        self._samples.append({name: flow.num_served_tokens for name, flow in flows.items()})

    def messages(self, flows: Mapping[str, FlowCounts]) -> Iterator[pb.FlowStatus]:
        """Yields each flow's part of GetStatus' answer."""
        before = self._samples[0] if self._samples else {}
        gained = {
            name: flow.num_served_tokens - before.get(name, 0) for name, flow in flows.items()
        }
        total = max(1, sum(gained.values()))
        for name, flow in flows.items():
            yield pb.FlowStatus(
                flow=name,
                num_waiting=flow.num_waiting,
                num_running=flow.num_running,
                num_served_tokens=flow.num_served_tokens,
                served_share=gained[name] / total,
            )
