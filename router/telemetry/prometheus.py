"""What a router tells Prometheus, and how it is read: on the event loop, between two steps.

A scrape's thread asks the loop for a snapshot of all numbers, which takes it a fraction of a
step's time, and writes them down itself. The names are listed in deploy/prometheus/METRICS.md.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from protos.telemetry.metrics import Family, Histogram
from router.client.status import GroupState, GroupStatus, RankStatus, SpeculationState
from router.engine.engines import Cell
from router.scheduling.counters import GroupTotals, RankCounts

SNAPSHOT_TIMEOUT_S = 5.0  # a loop that takes longer is stuck; the scrape then fails, and shows it

GROUP, RANK = ("group",), ("group", "rank")


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """All numbers of a router at one moment."""

    version: str
    model_name: str
    is_ready: bool
    num_live_requests: int
    num_open_calls: int
    refused: dict[str, int]
    ended: dict[str, int]
    total_s: Histogram
    groups: list[GroupStatus]
    totals: list[GroupTotals]


def take_snapshot(cell: Cell, version: str) -> Snapshot:
    """Returns the numbers of a cell. Call it on the event loop."""
    requests = cell.measures
    return Snapshot(
        version=version,
        model_name="" if cell.model is None else cell.model.name,
        is_ready=cell.is_ready,
        num_live_requests=cell.num_live,
        num_open_calls=cell.readers.num_open,
        refused=dict(requests.refused),
        ended=dict(requests.ended),
        total_s=requests.total_s.copy(),
        groups=cell.status(),
        totals=cell.totals(),
    )


def collector(cell: Cell, version: str) -> Callable[[], Iterable[Family]]:
    """Returns what a thread calls to collect the metrics of a cell of the running loop."""
    loop = asyncio.get_running_loop()

    async def snapshot() -> Snapshot:
        return take_snapshot(cell, version)

    def collect() -> Iterable[Family]:
        asked = asyncio.run_coroutine_threadsafe(snapshot(), loop)
        return families(asked.result(SNAPSHOT_TIMEOUT_S))

    return collect


def families(now: Snapshot) -> Iterator[Family]:
    """Yields every metric of a router, also those that have no series yet."""
    yield from _router_families(now)
    yield from _group_families(now)
    yield from _rank_families(now)


def _router_families(now: Snapshot) -> Iterator[Family]:
    def gauge(name: str, help_text: str, value: float) -> Family:
        return Family(f"lockstep_router_{name}", "gauge", help_text, (), [((), value)])

    yield Family(
        "lockstep_router_info",
        "gauge",
        "1; its labels say which release serves which model.",
        ("version", "model"),
        [((now.version, now.model_name), 1.0)],
    )
    yield gauge("ready", "Whether requests should be sent here.", float(now.is_ready))
    yield gauge("live_requests", "Requests that wait or run.", now.num_live_requests)
    yield gauge("open_calls", "Generate calls and GenerateMany streams.", now.num_open_calls)
    yield Family(
        "lockstep_router_refused_requests_total",
        "counter",
        "Requests and calls that were not taken, by the reason that the client was given.",
        ("reason",),
        [((reason,), count) for reason, count in now.refused.items()],
    )
    yield Family(
        "lockstep_router_ended_sequences_total",
        "counter",
        "Sequences that were taken and ended: STOP, LENGTH, or the error's reason.",
        ("reason",),
        [((reason,), count) for reason, count in now.ended.items()],
    )
    yield Family(
        "lockstep_router_request_seconds",
        "histogram",
        "From arrival to the last token, of sequences that ended without an error.",
        (),
        [((), now.total_s)],
    )


def _group_families(now: Snapshot) -> Iterator[Family]:
    yield _of_status(
        now,
        "group_ready",
        "Whether the group has formed and can step.",
        lambda g: float(g.state is GroupState.READY),
    )
    yield _of_totals(
        now,
        "group_lost",
        "gauge",
        "1 from the loss of an executor that was not told to stop until the group has formed again.",
        lambda t: float(t.is_lost),
    )
    yield _of_status(now, "epoch", "Number of the group's epoch.", lambda g: g.epoch)
    yield _of_status(
        now,
        "last_step_age_seconds",
        "Since the last step; grows while there is nothing to do, too.",
        lambda g: g.last_step_age_s,
    )
    yield _of_status(
        now,
        "waiting_sequences",
        "Sequences that no rank runs yet, or again.",
        lambda g: g.num_waiting,
    )
    yield _of_status(now, "waiting_tokens", "Their tokens.", lambda g: g.num_waiting_tokens)
    yield _of_status(
        now, "kv_usage_ratio", "Share of the group's KV blocks that live sequences hold.", _kv_usage
    )
    yield _of_status(
        now,
        "imbalance_ratio",
        "Tokens of the rank with most over the mean of all, in the last step; 1 is even.",
        _imbalance,
    )
    yield _of_totals(
        now, "output_tokens_total", "counter", "Tokens sampled.", lambda t: t.num_output_tokens
    )
    yield from _draft_families(now)
    yield from _epoch_families(now)
    yield from _step_families(now)
    for name, help_text, value_of in (
        ("queue", "From a sequence's arrival to its first step.", lambda t: t.queue_s),
        (
            "time_to_first_token",
            "From a sequence's arrival to its first token.",
            lambda t: t.first_token_s,
        ),
        ("inter_token", "Between two tokens of a sequence.", lambda t: t.inter_token_s),
        (
            "recovery",
            "From the loss of an epoch until the group had formed again.",
            lambda t: t.recovery_s,
        ),
    ):
        yield _of_totals(now, f"{name}_seconds", "histogram", help_text, value_of)


def _draft_families(now: Snapshot) -> Iterator[Family]:
    yield _of_totals(
        now,
        "speculative_steps_total",
        "counter",
        "Steps with drafts.",
        lambda t: t.drafts.num_steps,
    )
    yield _of_totals(
        now,
        "drafts_total",
        "counter",
        "Drafts that could have been accepted.",
        lambda t: t.drafts.num_drafts,
    )
    yield _of_totals(
        now,
        "accepted_drafts_total",
        "counter",
        "Drafts that were accepted.",
        lambda t: t.drafts.num_accepted,
    )
    yield _of_status(
        now,
        "tokens_per_draft_step",
        "Tokens that a sequence gains in a step with drafts, lately; none before the first.",
        lambda g: None if g.speculation is None else g.speculation.tokens_per_step,
    )
    yield _of_status(
        now,
        "drafts_paused",
        "1 while too few drafts are accepted to pay, so that steps are plain.",
        lambda g: (
            None if g.speculation is None else float(g.speculation.state is SpeculationState.PAUSED)
        ),
    )


def _epoch_families(now: Snapshot) -> Iterator[Family]:
    yield _of_totals(
        now, "epochs_total", "counter", "Times the group formed.", lambda t: t.num_epochs
    )
    yield Family(
        "lockstep_router_ended_epochs_total",
        "counter",
        "Epochs that are over: left, when an executor was told to stop, or lost.",
        ("group", "reason"),
        [
            ((*labels, reason), count)
            for labels, total in _totals(now)
            for reason, count in total.losses.items()
        ],
    )


def _step_families(now: Snapshot) -> Iterator[Family]:
    yield Family(
        "lockstep_router_steps_total",
        "counter",
        "Steps by what ran them: a captured graph's runner, or eager and why no graph did.",
        ("group", "runner", "miss"),
        [
            ((*labels, runner, miss), count)
            for labels, total in _totals(now)
            for (runner, miss), count in total.steps.items()
        ],
    )
    yield Family(
        "lockstep_router_step_seconds_total",
        "counter",
        "Where the time of steps went. plan, encode, commit: this router. queue, execute: the "
        "executor that took longest. wire: the rest. Steps overlap, so phases add up to more "
        "than the time that passed.",
        ("group", "phase"),
        [
            ((*labels, phase), seconds)
            for labels, total in _totals(now)
            for phase, seconds in total.step_seconds.items()
        ],
    )


def _of_status(
    now: Snapshot, name: str, help_text: str, value_of: Callable[[GroupStatus], float | None]
) -> Family:
    """Returns a gauge of each group that has a value."""
    series = [((str(status.group),), value_of(status)) for status in now.groups]
    known = [(labels, value) for labels, value in series if value is not None]
    return Family(f"lockstep_router_{name}", "gauge", help_text, GROUP, known)


def _of_totals(
    now: Snapshot,
    name: str,
    kind: str,
    help_text: str,
    value_of: Callable[[GroupTotals], float | Histogram],
) -> Family:
    """Returns what each group's totals come to."""
    series = [(labels, value_of(total)) for labels, total in _totals(now)]
    return Family(f"lockstep_router_{name}", kind, help_text, GROUP, series)


def _totals(now: Snapshot) -> list[tuple[tuple[str], GroupTotals]]:
    """Returns each group's label and totals."""
    return [
        ((str(status.group),), total) for status, total in zip(now.groups, now.totals, strict=True)
    ]


def _rank_families(now: Snapshot) -> Iterator[Family]:
    ranks = [
        ((str(group.group), str(rank.dp_rank)), rank)
        for group in now.groups
        for rank in group.ranks
    ]
    counts = [
        ((str(group.group), str(dp_rank)), rank)
        for group, total in zip(now.groups, now.totals, strict=True)
        for dp_rank, rank in enumerate(total.ranks)
    ]

    def gauge(name: str, help_text: str, value_of: Callable[[RankStatus], float]) -> Family:
        series = [(labels, value_of(rank)) for labels, rank in ranks]
        return Family(f"lockstep_router_{name}", "gauge", help_text, RANK, series)

    def counter(name: str, help_text: str, value_of: Callable[[RankCounts], int]) -> Family:
        series = [(labels, value_of(rank)) for labels, rank in counts]
        return Family(f"lockstep_router_{name}_total", "counter", help_text, RANK, series)

    yield gauge("running_sequences", "Sequences bound to the rank.", lambda r: r.num_running)
    yield gauge("last_step_tokens", "Tokens in the last step.", lambda r: r.last_step_tokens)
    yield gauge(
        "last_step_seconds",
        "Time that the rank's executor took for the last step.",
        lambda r: r.last_step_s,
    )
    yield Family(
        "lockstep_router_kv_blocks",
        "gauge",
        "KV blocks: used by live sequences, cached as a reusable prefix, or free.",
        ("group", "rank", "state"),
        [
            ((*labels, state), value)
            for labels, rank in ranks
            for state, value in (
                ("used", rank.num_used_blocks),
                ("cached", rank.num_cached_blocks),
                ("free", rank.num_free_blocks),
            )
        ],
    )
    yield counter("scheduled_tokens", "Tokens that the rank ran.", lambda r: r.scheduled_tokens)
    yield counter(
        "padding_tokens",
        "Rows that the rank ran besides, up to the graph's size or the longest rank's tokens.",
        lambda r: r.padding_tokens,
    )
    yield counter(
        "imbalance_tokens",
        "Tokens that the rank had less than the longest rank of each step.",
        lambda r: r.imbalance_tokens,
    )
    yield counter(
        "idle_steps",
        "Steps in which the rank had no tokens and others did.",
        lambda r: r.idle_steps,
    )
    yield counter(
        "prompt_tokens", "Prompt tokens of the sequences that it began.", lambda r: r.prompt_tokens
    )
    yield counter(
        "prefix_hit_tokens",
        "Those prompt tokens that its prefix cache had.",
        lambda r: r.prefix_hit_tokens,
    )
    yield counter(
        "preemptions", "Sequences that lost their blocks to others.", lambda r: r.preemptions
    )


def _kv_usage(group: GroupStatus) -> float | None:
    num_used = sum(rank.num_used_blocks for rank in group.ranks)
    num_others = sum(rank.num_cached_blocks + rank.num_free_blocks for rank in group.ranks)
    return num_used / (num_used + num_others) if num_used + num_others else None


def _imbalance(group: GroupStatus) -> float | None:
    tokens = [rank.last_step_tokens for rank in group.ranks]
    return max(tokens) * len(tokens) / sum(tokens) if any(tokens) else None
