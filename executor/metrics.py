"""Metrics of an executor: numbers that its compute thread adds to, and their table for Prometheus.

A scrape reads them in a thread of its own. deploy/prometheus/METRICS.md lists the names.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from executor.errors import InvalidStep, StepFailed
from protos.telemetry.metrics import STEP_BOUNDS, Family, Histogram, Metric, families_of
from protos.transport.credentials import first_to_expire, stale_files
from protos.transport.interceptors import PORT_REFUSALS

PHASES = ("queue", "fill", "draft", "forward", "sample", "read")


STORE_STRANGER = "STORE_STRANGER"  # a connection that brought the rendezvous store no entry


class StepTimes(NamedTuple):
    """When a step began, and when all of it had been launched, on the clock of ``Measures``."""

    start_ns: int
    launched_ns: int


class Measures:
    """One executor's numbers since it started.

    Attributes:
        num_restarts: How often its supervisor had started it again by then.
        phase_ns: Where the time of steps went. "queue": arrived, while the step before ran. "fill":
            columns read, staged and sent to the device. "draft": the draft model's passes, those
            behind the answer as well. "forward": the forward pass. "sample": tokens and scores
            from logits. "read": until they were on the host and in an answer. On a GPU all but
            "read" count as long as their launch takes, and run while the step before is waited for.
        execute_s: From a step's beginning to its answer, without what the step before took of it.
        steps: By the forward mode of this rank, and whether a graph was replayed.
        scheduled_tokens: Tokens of its rank's sequences.
        padding_tokens: Rows that it ran beside them, up to the size of the graph.
        failures: Steps that were refused or failed, by the error's reason.
        joins: Join calls, by "joined" or "failed".
        loaded_bytes: Of experts, loaded at Joins and ahead of them.
        beat_late_s: By how much the event loop came too late to its beats.
        refused: Calls, scrapes and connections to the rendezvous store that were not taken, by reason.
    """

    def __init__(self, num_restarts: int = 0) -> None:
        self.num_restarts = num_restarts
        self.phase_ns = dict.fromkeys(PHASES, 0)
        self.execute_s = Histogram(STEP_BOUNDS)
        self.steps: Counter[tuple[str, bool]] = Counter()
        self.scheduled_tokens = 0
        self.padding_tokens = 0
        # Counted from 0, as Prometheus sees no increase in a series that begins with 1.
        self.failures = Counter({e.reason: 0 for e in (InvalidStep, StepFailed)})
        self.joins = Counter({"joined": 0, "failed": 0})
        self.loaded_bytes = 0
        self.beat_late_s = Histogram(STEP_BOUNDS)
        self.refused = Counter(dict.fromkeys([*PORT_REFUSALS, STORE_STRANGER], 0))
        self._start_ns = 0
        self._lap_ns = 0
        self._end_ns = 0

    def add_refusal(self, reason: str) -> None:
        """A call or a scrape was not taken."""
        self.refused[reason] += 1

    def begin_step(self) -> None:
        """A step begins."""
        self._start_ns = self._lap_ns = time.perf_counter_ns()

    def begin_phase(self) -> None:
        """A phase begins that did not when the one before it ended."""
        self._lap_ns = time.perf_counter_ns()

    def end_phase(self, phase: str) -> None:
        """A phase has ended that began when the one before it did."""
        now_ns = time.perf_counter_ns()
        self.phase_ns[phase] += now_ns - self._lap_ns
        self._lap_ns = now_ns

    def launched(self) -> StepTimes:
        """The host has done what it does before a step's tokens are known."""
        return StepTimes(self._start_ns, self._lap_ns)

    def end_step(
        self, times: StepTimes, mode: str, *, num_tokens: int, num_rows: int, is_replay: bool
    ) -> int:
        """A step has its answer, perhaps in another thread. Returns how many nanoseconds it took."""
        before_ns, self._end_ns = self._end_ns, time.perf_counter_ns()
        self.phase_ns["read"] += self._end_ns - max(times.launched_ns, before_ns)
        step_ns = self._end_ns - max(times.start_ns, before_ns)
        self.execute_s.observe(step_ns / 1e9)
        self.steps[mode, is_replay] += 1
        self.scheduled_tokens += num_tokens
        self.padding_tokens += num_rows - num_tokens
        return step_ns


class Numbers(NamedTuple):
    """All numbers of an executor at one moment.

    Attributes:
        num_kv_blocks: 0 while it loads.
        num_resident: Experts in the slots of an elastic executor.
        epoch: The epoch that it is joined to; None if to none.
        device_memory: Bytes of an accelerator's memory by state; empty on a CPU.
    """

    measures: Measures
    dp_rank: int
    attn_tp_rank: int
    num_kv_blocks: int
    num_resident: int
    epoch: int | None
    device_memory: dict[str, int]


# fmt: off
METRICS: list[Metric[Numbers]] = [
    Metric("info", "gauge", ("dp_rank", "attn_tp_rank"),
           lambda n: {(str(n.dp_rank), str(n.attn_tp_rank)): 1.0},
           "1; its labels say which executor of its group this is."),
    Metric("ready", "gauge", (), lambda n: float(n.epoch is not None),
           "Whether it is joined to an epoch."),
    Metric("epoch", "gauge", (), lambda n: n.epoch or 0,
           "The epoch that it is joined to; 0 if to none."),
    Metric("restarts_total", "counter", (), lambda n: n.measures.num_restarts,
           "Times that it died or was stuck and its supervisor started it again (--max-restarts)."),
    Metric("kv_blocks", "gauge", (), lambda n: n.num_kv_blocks,
           "KV blocks of its pool; 0 while it loads."),
    Metric("resident_experts", "gauge", (), lambda n: n.num_resident,
           "Experts of a layer that an elastic executor holds; 0 of any other."),
    Metric("loaded_bytes_total", "counter", (), lambda n: n.measures.loaded_bytes,
           "Bytes of experts that an elastic executor has loaded, at Joins and ahead of them."),
    Metric("device_memory_bytes", "gauge", ("state",), lambda n: n.device_memory,
           "Memory of its GPU that PyTorch uses (allocated) or holds (reserved); none on a CPU."),
    Metric("joins_total", "counter", ("outcome",), lambda n: n.measures.joins.copy(),
           "Join calls, by outcome."),
    Metric("beat_late_seconds", "histogram", (), lambda n: n.measures.beat_late_s.copy(),
           "By how much its event loop came too late to beats for routers."),
    Metric("steps_total", "counter", ("mode", "graph"),
           lambda n: {(mode, "replay" if is_replay else "eager"): count
                      for (mode, is_replay), count in n.measures.steps.copy().items()},
           "Steps by this rank's forward mode, and whether a captured graph was replayed."),
    Metric("refused_calls_total", "counter", ("reason",), lambda n: n.measures.refused.copy(),
           "Calls and scrapes that were not taken, by reason."),
    Metric("files_not_reloaded", "gauge", ("setting",), lambda n: stale_files(),
           "Readers of a setting's files that go on with what was in them before, since what is "
           "there now makes no sense: removed tokens still count."),
    Metric("certificate_begin_timestamp_seconds", "gauge", ("setting",),
           lambda n: {name: v.begin for name, v in first_to_expire().items()},
           "From when the certificate of a setting's file that expires first is valid."),
    Metric("certificate_expiry_timestamp_seconds", "gauge", ("setting",),
           lambda n: {name: v.end for name, v in first_to_expire().items()},
           "Until when it is valid."),
    Metric("failed_steps_total", "counter", ("reason",),
           lambda n: n.measures.failures.copy(),
           "Steps that were refused or failed, by the error's reason."),
    Metric("tokens_total", "counter", ("kind",),
           lambda n: {"scheduled": n.measures.scheduled_tokens,
                      "padding": n.measures.padding_tokens},
           "Rows that steps ran: tokens of sequences (scheduled) and what filled up graphs "
           "(padding)."),
    Metric("step_seconds_total", "counter", ("phase",),
           lambda n: {phase: ns / 1e9 for phase, ns in n.measures.phase_ns.items()},
           "Where the time of steps went: queue (while the step before ran), fill (columns to the "
           "device), draft (the draft model), forward (on a GPU: its launch), sample (tokens from "
           "logits), read (until they were on the host)."),
    Metric("execute_seconds", "histogram", (), lambda n: n.measures.execute_s.copy(),
           "From a step's beginning, or the answer of the one before, to its answer."),
]
# fmt: on


def collector(numbers: Callable[[], Numbers]) -> Callable[[], Iterable[Family]]:
    """Returns what a thread calls to collect the metrics."""
    return lambda: families_of(METRICS, "lockstep_executor_", (), [((), numbers())])
