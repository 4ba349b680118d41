"""What an executor's steps amounted to, as plain numbers that the compute thread adds to.

Nothing here knows who asks; metrics.py makes Prometheus' text of it.
"""

import time
from collections import Counter

from executor.errors import InvalidStep, StepDisagreement, StepFailed
from protos.telemetry.metrics import STEP_BOUNDS, Histogram

PHASES = ("queue", "fill", "peers", "draft", "forward", "sample")


class Measures:
    """One executor's numbers since it started.

    Attributes:
        phase_ns: Where the time of steps went. "queue": arrived, while the step before ran. "fill":
            columns read, staged and sent to the device. "peers": waiting until every executor had
            begun the step. "draft": the draft model's passes, those behind the answer as well.
            "forward": the forward pass. "sample": until the tokens were on the host. On a GPU
            passes count as long as their launch takes, and "sample" includes waiting for them.
        execute_s: From a step's beginning to its answer.
        steps: By the forward mode of this rank, and whether a graph was replayed.
        scheduled_tokens: Tokens of its rank's sequences.
        padding_tokens: Rows that it ran beside them, up to the size of the graph.
        failures: Steps that were refused or failed, by the error's reason.
        joins: Join calls, by "joined" or "failed".
    """

    def __init__(self) -> None:
        self.phase_ns = dict.fromkeys(PHASES, 0)
        self.execute_s = Histogram(STEP_BOUNDS)
        self.steps: Counter[tuple[str, bool]] = Counter()
        self.scheduled_tokens = 0
        self.padding_tokens = 0
        # Counted from 0, as Prometheus sees no increase in a series that begins with 1.
        self.failures = Counter({e.reason: 0 for e in (InvalidStep, StepDisagreement, StepFailed)})
        self.joins = Counter({"joined": 0, "failed": 0})
        self._start_ns = 0
        self._lap_ns = 0

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

    def waited_for_peers(self, wait_ns: int) -> None:
        """So much of the phase under way was "peers"."""
        self.phase_ns["peers"] += wait_ns
        self._lap_ns += wait_ns

    def end_step(self, mode: str, *, num_tokens: int, num_rows: int, is_replay: bool) -> int:
        """A step has its answer. Returns how many nanoseconds that took."""
        step_ns = time.perf_counter_ns() - self._start_ns
        self.execute_s.observe(step_ns / 1e9)
        self.steps[mode, is_replay] += 1
        self.scheduled_tokens += num_tokens
        self.padding_tokens += num_rows - num_tokens
        return step_ns
