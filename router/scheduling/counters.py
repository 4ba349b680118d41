"""Counters of steps and requests: plain numbers that grow while the router runs.

An epoch's numbers are in its EpochStats; GroupMeasures adds them up over epochs, since what is
counted for months must not fall back at each recovery. The step loop pays for a few additions;
everything else is worked out when somebody asks (GetStatus, a scrape).
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from protos.telemetry.metrics import LATENCY_BOUNDS, STEP_BOUNDS, Histogram
from protos.transport.errors import RpcError
from protos.transport.interceptors import PORT_REFUSALS
from router.errors import (
    Cancelled,
    ChatTemplateFailed,
    ConstraintFailed,
    DeadlineExceeded,
    ExecutorFailed,
    HistoryGone,
    InvalidRequest,
    ModelNotFound,
    Moved,
    MovedAsPlanned,
    NotReady,
    OperatorsOnly,
    PromptTooLong,
    QueueFull,
    RequestExists,
    ResumeMismatch,
    ShuttingDown,
    Unimplemented,
)
from router.requests.flows import FlowCounts
from router.requests.request import FinishReason, Request, Sequence
from router.scheduling.kv.prefix_cache import PrefixCache
from router.scheduling.plan_lead import PlanLead
from router.scheduling.speculation import NO_DRAFTS, DraftCounts
from router.scheduling.step import (
    NO_GRAPHS,
    Agreement,
    CapturedSizes,
    GraphMiss,
    InFlight,
    PaddingMode,
    StepPlan,
    StepResult,
)
from router.scheduling.step_budget import Why
from router.scheduling.step_cost import StepCosts

# Counted from 0, as Prometheus sees no increase in a series that begins with 1.
REFUSALS = (
    InvalidRequest,
    PromptTooLong,
    ChatTemplateFailed,
    ModelNotFound,
    RequestExists,
    ResumeMismatch,
    QueueFull,
    NotReady,
    ShuttingDown,
    Moved,
    DeadlineExceeded,
    Cancelled,
    OperatorsOnly,
    HistoryGone,
    Unimplemented,
)
FAILURES = (Cancelled, DeadlineExceeded, ShuttingDown, Moved, ConstraintFailed, ExecutorFailed)

Counts = npt.NDArray[np.int64]

FOLD_STEPS = 64  # steps are added up so many at a time, or when somebody asks

PHASES = ("plan", "encode", "wire", "queue", "execute", "commit")


class RankCounts(NamedTuple):
    """Counters of one DP rank.

    Attributes:
        scheduled_tokens: Tokens of its sequences.
        padding_tokens: Rows that it ran beside them, up to the graph's or the longest rank's.
        imbalance_tokens: Tokens that it had less than the longest rank of each step.
        idle_steps: Steps in which it had none.
        prompt_tokens: Prompt tokens of the sequences that it began.
        prefix_hit_tokens: Prompt tokens of these that were in its cache.
        preemptions: Sequences that lost their blocks to others.
    """

    scheduled_tokens: int
    padding_tokens: int
    imbalance_tokens: int
    idle_steps: int
    prompt_tokens: int
    prefix_hit_tokens: int
    preemptions: int


def by_rank(counts: Counts) -> list[RankCounts]:
    return [RankCounts(*rank) for rank in counts.T.tolist()]


class KeptKV:
    """Tokens of sequences that a loss had wait again: whose KV was computed before it.

    Attributes:
        num_found: Those whose KV the cache had as they were bound again.
        num_again: Those that are computed again, by what became of the rank's executors: "kept", where
            others have taken its blocks or its place since, and "lost".
        checks: Those of `KeptCheck`, by what they found.
    """

    def __init__(self) -> None:
        self.checks = {"equal": 0, "differs": 0}
        self.num_found = 0
        self.num_again = {"kept": 0, "lost": 0}

    def add(self, num_computed: int, num_cached: int, *, is_kept: bool) -> None:
        """Counts a sequence that is bound again."""
        num_found = min(num_computed, num_cached)
        self.num_found += num_found
        self.num_again["kept" if is_kept else "lost"] += num_computed - num_found


class EpochStats:
    """What an epoch's steps amounted to.

    Args:
        caches: Of each rank; what they count themselves is read there.
        num_preemptions: [dp_size], which the scheduler keeps up.
        graph_sizes: What the executors have captured.

    Attributes:
        num_steps: Steps committed.
        last_time: Of the last commit; None before the first.
        num_output_tokens: Tokens sampled.
        drafts: What came of drafts.
    """

    def __init__(
        self,
        caches: SequenceOf[PrefixCache] = (),
        num_preemptions: SequenceOf[int] = (),
        graph_sizes: CapturedSizes = NO_GRAPHS,
    ) -> None:
        self.num_steps = 0
        self.last_time: float | None = None
        self.num_output_tokens = 0
        self.drafts = DraftCounts()
        self._caches = caches
        self._num_preemptions = num_preemptions
        self._graph_sizes = graph_sizes
        self._last_tokens: SequenceOf[int] = ()
        self._last_forward_ns: SequenceOf[int] = ()
        self._counts = np.zeros((4, len(caches)), np.int64)  # the first four of RankCounts
        # By whether a rank extended, whether any drafted, the graph's size, and why there was none.
        self._num_steps: Counter[tuple[bool, bool, int | None, GraphMiss | None]] = Counter()
        self._agreements: list[Agreement] = []  # of steps that are not in the counts yet

    def add(
        self, plan: StepPlan, result: StepResult, now: float, drafts: DraftCounts = NO_DRAFTS
    ) -> None:
        """Counts a step that was committed now, and what came of its drafts."""
        self.num_steps += 1
        self.last_time = now
        self._last_tokens = plan.agreement.global_num_tokens
        self._last_forward_ns = result.forward_ns
        self.num_output_tokens += len(result.token_ids)
        if plan.limits is not None:
            self.drafts += drafts
        self._agreements.append(plan.agreement)
        if len(self._agreements) == FOLD_STEPS:
            self._fold()

    def _fold(self) -> None:
        """Adds up the steps since the last call: many at once take a third of one at a time."""
        agreements, self._agreements = self._agreements, []
        if not agreements:
            return
        self._num_steps.update(
            (a.has_extend, a.num_draft_tokens > 0, a.graph_size, a.graph_miss) for a in agreements
        )
        tokens = np.array([a.global_num_tokens for a in agreements])
        longest = tokens.max(axis=1)
        is_level = np.array([a.padding_mode is PaddingMode.MAX_LEN for a in agreements])
        rows = np.array([(a.graph_size or 0) * (a.num_draft_tokens or 1) for a in agreements])
        rows = np.maximum(rows, longest)[:, None] * is_level[:, None]
        self._counts += (
            tokens.sum(axis=0),
            np.where(is_level[:, None], rows - tokens, 0).sum(axis=0),
            (longest[:, None] - tokens).sum(axis=0),
            (tokens == 0).sum(axis=0),
        )

    def last_step(self) -> list[tuple[int, float]]:
        """Returns each rank's tokens and its executor's seconds of the last step; [] before it."""
        seconds = [forward_ns / 1e9 for forward_ns in self._last_forward_ns]
        return list(zip(self._last_tokens, seconds, strict=True))

    def counts(self) -> Counts:
        """Returns what each rank did: int64 [7, dp_size], in the order of RankCounts."""
        self._fold()
        queried = [cache.num_queried_tokens for cache in self._caches]
        hits = [cache.num_hit_tokens for cache in self._caches]
        others = np.array((queried, hits, self._num_preemptions), np.int64)
        return np.concatenate((self._counts, others))

    def graph_counts(self) -> dict[tuple[str, int, str], int]:
        """Returns the steps by what ran them: runner, size, and why there was no graph; sorted."""
        self._fold()
        counts: Counter[tuple[str, int, str]] = Counter()
        for (has_extend, drafts, size, miss), num_steps in self._num_steps.items():
            if size is None:
                counts["eager", 0, miss or ""] += num_steps
            else:
                runner = "verify" if drafts else "decode"
                runner = self._graph_sizes.extend_runner if has_extend else runner
                counts[runner, size, ""] += num_steps
        return dict(sorted(counts.items()))


class StepTimes:
    """Where the time of steps went, in seconds since the router started.

    Attributes:
        seconds: By phase. Of the router: "plan", "encode" and "commit". Of the executors that took
            longest: "queue", from a step's arrival until the step before it was done, and
            "execute". "wire" is the rest, from sending a step until its last answer was looked at.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def add(self, step: InFlight, result: StepResult, received: float) -> None:
        """A step has just been committed, which was received at a time of time.perf_counter."""
        self.seconds["plan"] += step.planned - step.begun
        self.seconds["encode"] += step.sent - step.planned
        self.seconds["commit"] += time.perf_counter() - received
        queued_s, execute_s = max(result.queued_ns) * 1e-9, max(result.forward_ns) * 1e-9
        self.seconds["queue"] += queued_s
        self.seconds["execute"] += execute_s
        self.seconds["wire"] += max(0.0, received - step.sent - queued_s - execute_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTotals:
    """A group's numbers at one moment, safe to read from another thread.

    Attributes:
        ranks: By DP rank.
        steps: Steps by what ran them and why no graph did.
        step_seconds: By phase, see StepTimes.
        losses: Epochs that are over: "left" if an executor was told to stop, else "lost".
        is_lost: Whether the last one was lost, and the group has not formed since.
        faults: "lied": executors that said what cannot be; "unexpected": errors of this router;
            "stale_kv": KV that was kept and was wrong.
        suspicions: Executors that fell silent, by what came of it: "cleared", "lost", "false".
        recovery_phase_s: See RecoveryTimes.
        num_takeovers: Times the group was taken from another router.
        drafts: What came of drafts.
        decisions: Steps with prompts bound, by what was done about these, see Why.
        num_late_plans: See PlanLead; likewise the one that follows.
        num_kept_tokens: See KeptKV; likewise the two that follow.
        step_cost: Coefficients of steps without drafts, see StepCost; likewise the two that follow.
        flows: By name; none where there is one only.
    """

    ranks: list[RankCounts]
    steps: dict[tuple[str, str], int]
    step_seconds: dict[str, float]
    num_output_tokens: int
    drafts: DraftCounts
    num_epochs: int
    losses: dict[str, int]
    is_lost: bool
    faults: dict[str, int]
    suspicions: dict[str, int]
    num_takeovers: int
    queue_s: Histogram
    first_token_s: Histogram
    inter_token_s: Histogram
    recovery_s: Histogram
    recovery_phase_s: dict[tuple[str, str], Histogram]
    decisions: dict[str, int]
    num_late_plans: int
    plan_lead_s: float
    num_kept_tokens: int
    num_recomputed_tokens: dict[str, int]
    num_kept_checks: dict[str, int]
    step_cost: dict[str, float]
    step_margin: float
    step_error: float
    flows: dict[str, FlowCounts]


class RecoveryTimes:
    """Times in which a group does not step: from a loss, or as it is taken from another router.

    A phase is "wait", until the forming that succeeds begins; "form", until the group has formed; and
    "step", until its first step is back, if anything waits for it.

    Attributes:
        total_s: From a loss until the group has formed again.
        phase_s: By what it comes after, "loss" or "takeover", and phase. How long a driver was silent
            before a takeover is not in it.
        num_takeovers: Times the group was taken from another router.
    """

    def __init__(self) -> None:
        phases = ("loss", "wait"), *product(("loss", "takeover"), ("form", "step"))
        self.total_s = Histogram(LATENCY_BOUNDS)
        self.phase_s = {phase: Histogram(LATENCY_BOUNDS) for phase in phases}
        self.num_takeovers = 0
        self._lost_time: float | None = None
        self._stood_by = False  # since the last epoch
        self._formed: tuple[str, float] | None = None  # after what and when, until the first step

    def lose(self, now: float) -> None:
        """Notes a loss."""
        self._lost_time, self._formed = now, None

    def stand_by(self) -> None:
        """Notes that another router drives the group: what is lost is that one's to recover."""
        self._lost_time, self._stood_by = None, True

    def form(self, begun: float, now: float, *, has_work: bool) -> None:
        """Notes that the group has formed.

        Args:
            begun: When that forming began.
            now: The time.
            has_work: Whether a step follows at once.
        """
        if self._stood_by:
            self.num_takeovers += 1
        elif self._lost_time is not None:
            self.total_s.observe(now - self._lost_time)
            self.phase_s["loss", "wait"].observe(begun - self._lost_time)
        else:
            return  # its first epoch
        after = "takeover" if self._stood_by else "loss"
        self.phase_s[after, "form"].observe(now - begun)
        self._formed = (after, now) if has_work else None
        self._lost_time, self._stood_by = None, False

    def step(self, now: float) -> None:
        """Notes that a step is back."""
        if self._formed is not None:
            after, formed = self._formed
            self.phase_s[after, "step"].observe(now - formed)
            self._formed = None


class GroupMeasures:
    """One group's numbers over all of its epochs.

    Attributes:
        times: Where the time of its steps went.
        costs: What its steps take, as far as that is learnt.
        lead: How long before a step's end the next one is planned.
        flow_counts: Returns the counts of its flows.
        decisions: Steps planned by time while prompts were bound, by what they did about these.
        queue_s: From a sequence's arrival to the first step that ran it.
        first_token_s: From a sequence's arrival to its first token.
        inter_token_s: Between two tokens of a sequence.
        recovery: Times of its recoveries.
        faults: See GroupTotals; likewise the one that follows.
        suspicions: Counted by who watches the executors.
        kept_kv: What was computed before losses.
    """

    def __init__(self) -> None:
        self.kept_kv = KeptKV()
        self.faults = Counter({"lied": 0, "unexpected": 0, "stale_kv": 0})
        self.suspicions = Counter[str]()
        self.times = StepTimes()
        self.costs = StepCosts()
        self.lead = PlanLead()
        self.flow_counts: Callable[[], dict[str, FlowCounts]] = dict
        self.decisions: Counter[str] = Counter(dict.fromkeys(Why, 0))
        self.queue_s = Histogram(LATENCY_BOUNDS)
        self.first_token_s = Histogram(LATENCY_BOUNDS)
        self.inter_token_s = Histogram(STEP_BOUNDS)
        self.recovery = RecoveryTimes()
        self._num_epochs = 0
        self._losses = Counter({"lost": 0, "left": 0})
        self._is_lost = False
        self._current = EpochStats()
        # What the epochs before the current one came to.
        self._counts = self._current.counts()
        self._steps: Counter[tuple[str, str]] = Counter()
        self._num_output_tokens = 0
        self._drafts = DraftCounts()

    def begin_epoch(self, stats: EpochStats) -> EpochStats:
        """Notes that the group has formed. Returns the epoch's stats."""
        self._num_epochs += 1
        self._is_lost = False
        self._current = stats
        return stats

    def end_epoch(self, now: float, *, is_planned: bool = False) -> None:
        """Notes that the current epoch is over.

        Args:
            now: When, on the clock of its recoveries.
            is_planned: Whether an executor was told to stop, and said so.
        """
        self.recovery.lose(now)
        self._is_lost = not is_planned
        self._losses["left" if is_planned else "lost"] += 1
        self._counts, self._steps = self._all_counts(), self._all_steps()
        self._num_output_tokens += self._current.num_output_tokens
        self._drafts += self._current.drafts
        self._current = EpochStats()

    def stand_by(self) -> None:
        """Notes that another router drives the group."""
        self.recovery.stand_by()
        self._is_lost = False

    def totals(self) -> GroupTotals:
        """Returns all numbers as they are now."""
        return GroupTotals(
            ranks=by_rank(self._all_counts()),
            steps=dict(self._all_steps()),
            step_seconds=self.times.seconds.copy(),
            num_output_tokens=self._num_output_tokens + self._current.num_output_tokens,
            drafts=self._drafts + self._current.drafts,
            num_epochs=self._num_epochs,
            losses=dict(self._losses),
            is_lost=self._is_lost,
            faults=dict(self.faults),
            suspicions=dict(self.suspicions),
            num_takeovers=self.recovery.num_takeovers,
            queue_s=self.queue_s.copy(),
            first_token_s=self.first_token_s.copy(),
            inter_token_s=self.inter_token_s.copy(),
            recovery_s=self.recovery.total_s.copy(),
            recovery_phase_s={
                phase: seconds.copy() for phase, seconds in self.recovery.phase_s.items()
            },
            decisions=dict(self.decisions),
            num_late_plans=self.lead.num_late,
            plan_lead_s=self.lead.seconds,
            num_kept_tokens=self.kept_kv.num_found,
            num_recomputed_tokens=dict(self.kept_kv.num_again),
            num_kept_checks=dict(self.kept_kv.checks),
            step_cost=self.costs.plain.coefficients(),
            step_margin=self.costs.plain.margin,
            step_error=self.costs.plain.error,
            flows=self.flow_counts(),
        )

    def _all_counts(self) -> Counts:
        parts = self._counts, self._current.counts()
        total = np.zeros((len(RankCounts._fields), max(part.shape[1] for part in parts)), np.int64)
        for part in parts:
            total[:, : part.shape[1]] += part
        return total

    def _all_steps(self) -> Counter[tuple[str, str]]:
        steps = self._steps.copy()
        for (runner, _, miss), num_steps in self._current.graph_counts().items():
            steps[runner, miss] += num_steps
        return steps


class RequestMeasures:
    """What became of requests, of all groups together.

    Attributes:
        refused: Requests and calls that were not taken, by the error's reason.
        ended: Sequences that ended, by STOP, LENGTH or the error's reason.
        total_s: From arrival to the last token, of sequences that ended without an error.
        resumed: Requests that were resumed, by whether they went on token for token ("true").
        num_resumed_tokens: Output tokens that these came with.
        kv_snapshots: Snapshots of the prefix caches for subscribers, by why they were sent.
    """

    def __init__(self) -> None:
        self.refused = Counter(
            dict.fromkeys((*(error.reason for error in REFUSALS), *PORT_REFUSALS), 0)
        )
        self.ended = Counter({reason.name: 0 for reason in FinishReason})
        self.ended.update({error.reason: 0 for error in FAILURES})
        self.total_s = Histogram(LATENCY_BOUNDS)
        self.resumed = Counter({"true": 0, "false": 0})
        self.num_resumed_tokens = 0
        self.kv_snapshots = Counter(dict.fromkeys(("new", "epoch", "slow"), 0))

    def add_refusal(self, reason: str) -> None:
        """Counts a call that was turned away before anybody read a request in it."""
        self.refused[reason] += 1

    def add_resumed(self, request: Request) -> None:
        """Counts a request that was taken, if it is a resumed one."""
        if request.attempt:
            self.resumed["true" if request.is_exact else "false"] += 1
            self.num_resumed_tokens += sum(each.num_resumed for each in request.sequences)

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts an error that leaves the block."""
        try:
            yield
        except RpcError as error:
            self.refused[error.reason] += 1
            raise

    def add_end(self, sequence: Sequence) -> None:
        """Counts a sequence that has just ended."""
        if (error := sequence.error) is not None:
            self.ended[Moved.reason if isinstance(error, MovedAsPlanned) else error.reason] += 1
            return
        assert sequence.finish_reason is not None
        assert sequence.progress.end_time is not None
        self.ended[sequence.finish_reason.name] += 1
        self.total_s.observe(sequence.progress.end_time - sequence.request.arrival_time)


class TokenGaps:
    """Times between two tokens of a sequence, for one table's rows, counted without a look at each.

    Ranks step together, so nearly every sequence that gains a token in a step gained one in the
    step before: all of these waited as long as the step took, and count as one value. Sequences
    that were left out of a step, or lost their row, are looked at one by one.

    Args:
        num_rows: Rows of the table.
        histogram: Gets every gap, in seconds.
    """

    def __init__(self, num_rows: int, histogram: Histogram) -> None:
        self._histogram = histogram
        self._had_token = np.zeros(num_rows, dtype=np.bool_)  # in the last commit, and still there
        self._num_had = 0  # how many
        self._time = 0.0  # of the last commit
        self._away: dict[int, float] = {}  # other rows with tokens, and when the last one came

    def enter(self, row: int, last_token_time: float | None) -> None:
        """A sequence is bound to a row; None if it has no token yet."""
        if last_token_time is not None:
            self._away[row] = last_token_time

    def leave(self, row: int) -> float | None:
        """A sequence gives up its row. Returns when its last token came, if it ever had one."""
        if not self._had_token[row]:
            return self._away.pop(row, None)
        self._had_token[row] = False
        self._num_had -= 1
        return self._time

    def add(
        self,
        has_token: npt.NDArray[np.bool_],
        num_tokens: int,
        first_rows: Collection[int],
        now: float,
    ) -> None:
        """Counts the gaps that a commit ended.

        Args:
            has_token: [R] rows that gained a token; belongs to this object from now on.
            num_tokens: Number of these rows.
            first_rows: Rows for which it was the first.
            now: Time of the commit, in seconds.
        """
        num_going_on = num_tokens - len(first_rows)
        if self._away:
            for row in [row for row in self._away if has_token[row]]:
                self._histogram.observe(now - self._away.pop(row))
                num_going_on -= 1
        if num_going_on:
            self._histogram.observe(now - self._time, num_going_on)
        if num_going_on < self._num_had:
            left_out = np.flatnonzero(self._had_token > has_token).tolist()
            self._away.update(dict.fromkeys(left_out, self._time))
        self._had_token, self._num_had, self._time = has_token, num_tokens, now
