"""Prometheus metrics of a router.

A scrape's thread asks the event loop for a snapshot of all numbers, which takes it a fraction of a
step's time, and writes them down itself. deploy/prometheus/METRICS.md lists the names.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from protos.serving.v1 import serving_pb2 as pb
from protos.telemetry.metrics import Family, Histogram, Metric, families_of
from protos.transport.credentials import first_to_expire, stale_files
from router.engine.engines import Engines
from router.scheduling.counters import GroupTotals, RankCounts

T = TypeVar("T")

SNAPSHOT_TIMEOUT_S = 5.0  # a loop that takes longer is stuck; the scrape then fails, and shows it


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
    resumed: dict[str, int]
    num_resumed_tokens: int
    kv_snapshots: dict[str, int]
    groups: list[pb.GroupStatus]
    totals: list[GroupTotals]


def _last_step_age_s(group: pb.GroupStatus) -> float | None:
    return group.last_step_age.ToNanoseconds() / 1e9 if group.HasField("last_step_age") else None


def _tokens_per_draft_step(group: pb.GroupStatus) -> float | None:
    drafts = group.speculation
    return drafts.tokens_per_step if drafts.HasField("tokens_per_step") else None


def _target_dp_size(group: pb.GroupStatus) -> float | None:
    return group.elastic.target_dp_size if group.HasField("elastic") else None


def _spares(group: pb.GroupStatus) -> dict[str, int]:
    if not group.HasField("elastic"):
        return {}
    counts = {"cold": 0, "staged": 0, "held_off": 0, "unfit": 0}
    for spare in group.elastic.spares:
        counts[pb.SpareState.Name(spare.state).removeprefix("SPARE_STATE_").lower()] += 1
    return counts


def _is_paused(group: pb.GroupStatus) -> float | None:
    is_paused = group.speculation.state == pb.SPECULATION_STATE_PAUSED
    return float(is_paused) if group.HasField("speculation") else None


def _num_blocks(groups: Iterable[pb.GroupStatus]) -> tuple[int, int]:
    """Returns how many KV blocks live sequences hold, and how many there are."""
    ranks = [rank for group in groups for rank in group.ranks]
    num_used = sum(rank.num_used_blocks for rank in ranks)
    return num_used, num_used + sum(r.num_cached_blocks + r.num_free_blocks for r in ranks)


def _kv_usage(group: pb.GroupStatus) -> float | None:
    num_used, num_blocks = _num_blocks([group])
    return num_used / num_blocks if num_blocks else None


def _total_kv_usage(router: Snapshot) -> float:
    num_used, num_blocks = _num_blocks(router.groups)
    return num_used / num_blocks if num_blocks else 1.0


def _cache_config(router: Snapshot) -> dict[tuple[str, str], float]:
    block_size = max((group.block_size for group in router.groups), default=0)
    return {(str(block_size), str(_num_blocks(router.groups)[1])): 1.0}


def _imbalance(group: pb.GroupStatus) -> float | None:
    tokens = [rank.last_step_tokens for rank in group.ranks]
    return max(tokens) * len(tokens) / sum(tokens) if any(tokens) else None


# fmt: off
ROUTER: list[Metric[Snapshot]] = [
    Metric("info", "gauge", ("version", "model"), lambda r: {(r.version, r.model_name): 1.0},
           "1; its labels say which release serves which model."),
    Metric("ready", "gauge", (), lambda r: float(r.is_ready),
           "Whether requests should be sent here."),
    Metric("live_requests", "gauge", (), lambda r: r.num_live_requests,
           "Requests that wait or run."),
    Metric("open_calls", "gauge", (), lambda r: r.num_open_calls,
           "Generate calls and GenerateMany streams."),
    Metric("refused_requests_total", "counter", ("reason",), lambda r: r.refused,
           "Requests and calls that were not taken, by the reason that the client was given."),
    Metric("files_not_reloaded", "gauge", ("setting",), lambda r: stale_files(),
           "Readers of a setting's files that go on with what was in them before, since what is "
           "there now makes no sense: removed tokens still count."),
    Metric("certificate_begin_timestamp_seconds", "gauge", ("setting",),
           lambda r: {name: v.begin for name, v in first_to_expire().items()},
           "From when the certificate of a setting's file that expires first is valid."),
    Metric("certificate_expiry_timestamp_seconds", "gauge", ("setting",),
           lambda r: {name: v.end for name, v in first_to_expire().items()},
           "Until when it is valid."),
    Metric("ended_sequences_total", "counter", ("reason",), lambda r: r.ended,
           "Sequences that were taken and ended: STOP, LENGTH, or the error's reason; MOVED: go on "
           "at another router, which has the executors now."),
    Metric("request_seconds", "histogram", (), lambda r: r.total_s,
           "From arrival to the last token, of sequences that ended without an error."),
    Metric("resumed_requests_total", "counter", ("exact",), lambda r: r.resumed,
           "Requests that were resumed here after their call had broken off, by whether they go on "
           "token for token (true)."),
    Metric("resumed_tokens_total", "counter", (), lambda r: r.num_resumed_tokens,
           "Output tokens that they came with."),
    Metric("kv_snapshots_total", "counter", ("reason",), lambda r: r.kv_snapshots,
           "Lists of all cached blocks that gateways were sent: as they subscribed (new), as a group "
           "had formed with other ranks or pools (epoch), or in place of events that they were too slow "
           "for (slow)."),
]
# Under the names that endpoint pickers look for (the model server protocol of the Gateway API's
# inference extension), which are vLLM's. There is none for LoRA.
PICKERS: list[Metric[Snapshot]] = [
    Metric("num_requests_waiting", "gauge", (), lambda r: sum(g.num_waiting for g in r.groups),
           "Sequences that no rank of this router runs yet, or again."),
    Metric("num_requests_running", "gauge", (),
           lambda r: sum(rank.num_running for g in r.groups for rank in g.ranks),
           "Sequences bound to its ranks."),
    Metric("kv_cache_usage_perc", "gauge", (), _total_kv_usage,
           "Share of its KV blocks that live sequences hold, 0 to 1; 1 while it has no group."),
    Metric("cache_config_info", "gauge", ("block_size", "num_gpu_blocks"), _cache_config,
           "1; its labels say how many tokens a KV block has, and how many blocks there are."),
]
GROUP_STATUS: list[Metric[pb.GroupStatus]] = [
    Metric("group_ready", "gauge", (), lambda g: float(g.state == pb.GROUP_STATE_READY),
           "Whether the group has formed and can step."),
    Metric("group_mismatched", "gauge", (), lambda g: float(g.state == pb.GROUP_STATE_MISMATCHED),
           "1 while its executors do not fit together, so that it cannot form until they are changed."),
    Metric("group_dp_size", "gauge", (), lambda g: len(g.ranks),
           "DP ranks of the group; 0 while it forms."),
    Metric("group_target_dp_size", "gauge", (), _target_dp_size,
           "DP ranks that an elastic group should have; of others, none."),
    Metric("spares", "gauge", ("state",), _spares,
           "Executors that an elastic group has besides: staged, cold, held_off, as they lost their place "
           "not long ago, or unfit, as their settings are others."),
    Metric("reshapes_total", "counter", ("change",), lambda g: dict(g.elastic.changes),
           "Times that an elastic group formed, by what it was to the forming before: first, rejoin, "
           "replace, shrink, grow."),
    Metric("drives", "gauge", (), lambda g: float(g.state != pb.GROUP_STATE_STANDBY),
           "1 while this router drives the group or tries to, 0 while it stands by for another."),
    Metric("standbys", "gauge", (), lambda g: g.num_standbys,
           "Routers that would take the group if this one were gone; 0 of one that stands by."),
    Metric("epoch", "gauge", (), lambda g: g.epoch,
           "Number of the group's epoch."),
    Metric("last_step_age_seconds", "gauge", (), _last_step_age_s,
           "Since the last step; grows while there is nothing to do, too."),
    Metric("waiting_sequences", "gauge", (), lambda g: g.num_waiting,
           "Sequences that no rank runs yet, or again."),
    Metric("waiting_tokens", "gauge", (), lambda g: g.num_waiting_tokens,
           "Their tokens."),
    Metric("kv_usage_ratio", "gauge", (), _kv_usage,
           "Share of the group's KV blocks that live sequences hold."),
    Metric("imbalance_ratio", "gauge", (), _imbalance,
           "Tokens of the rank with most over the mean of all, in the last step; 1 is even."),
    Metric("tokens_per_draft_step", "gauge", (), _tokens_per_draft_step,
           "Tokens that a sequence gains in a step with drafts, lately; none before the first."),
    Metric("drafts_paused", "gauge", (), _is_paused,
           "1 while too few drafts are accepted to pay, so that steps are plain."),
]
GROUP_TOTALS: list[Metric[GroupTotals]] = [
    Metric("group_lost", "gauge", (), lambda t: float(t.is_lost),
           "1 from the loss of an executor that was not told to stop until the group has formed "
           "again."),
    Metric("output_tokens_total", "counter", (), lambda t: t.num_output_tokens,
           "Tokens sampled."),
    Metric("speculative_steps_total", "counter", (), lambda t: t.drafts.num_steps,
           "Steps with drafts."),
    Metric("drafts_total", "counter", (), lambda t: t.drafts.num_drafts,
           "Drafts that could have been accepted."),
    Metric("accepted_drafts_total", "counter", (), lambda t: t.drafts.num_accepted,
           "Drafts that were accepted."),
    Metric("epochs_total", "counter", (), lambda t: t.num_epochs,
           "Times the group formed."),
    Metric("ended_epochs_total", "counter", ("reason",), lambda t: t.losses,
           "Epochs that are over: left, when an executor was told to stop, or lost."),
    Metric("faults_total", "counter", ("reason",), lambda t: t.faults,
           "What is no plain loss: executors that said what cannot be (lied) and are left out until "
           "they restart, errors of this router (unexpected), which its log has, and KV that was kept "
           "over a loss and was wrong (stale_kv)."),
    Metric("suspicions_total", "counter", ("outcome",), lambda t: t.suspicions,
           "Executors that fell silent: cleared by a beat, lost, and of the lost those that were alarms "
           "without need (false), as the same process beat again."),
    Metric("takeovers_total", "counter", (), lambda t: t.num_takeovers,
           "Times this router took the group after another had driven it."),
    Metric("steps_total", "counter", ("runner", "miss"), lambda t: t.steps,
           "Steps by what ran them: a captured graph's runner, or eager and why no graph did."),
    Metric("step_seconds_total", "counter", ("phase",), lambda t: t.step_seconds,
           "Where the time of steps went. plan, encode, commit: this router. queue, execute: the "
           "executor that took longest. wire: the rest. Steps overlap, so phases add up to more "
           "than the time that passed."),
    Metric("step_cost_seconds", "gauge", ("part",), lambda t: t.step_cost,
           "What a step takes, as learnt: base; prompts, if it runs any; row, a token of the rank "
           "that takes longest; mean, one on every rank; kv, a token of KV that it reads; pair, a "
           "query and key of a prompt."),
    Metric("step_margin_ratio", "gauge", (), lambda t: t.step_margin,
           "By which predictions are raised so that 19 of 20 steps are not longer."),
    Metric("step_error_ratio", "gauge", (), lambda t: t.step_error,
           "How far steps are from their prediction without it, on average; 0.05 is 5 %."),
    Metric("prompt_decisions_total", "counter", ("decision",), lambda t: t.decisions,
           "Steps planned while prompts were bound: held, or run because of no_decodes, as they fill "
           "the step (full), have waited for what they cost (debt) or for as long as they may (due)."),
    Metric("late_plans_total", "counter", (), lambda t: t.num_late_plans,
           "Steps whose planning was put off for too long, so that executors waited for them."),
    Metric("plan_lead_seconds", "gauge", (), lambda t: t.plan_lead_s,
           "How long before a step's expected end the next one is planned."),
    Metric("flow_waiting_sequences", "gauge", ("flow",),
           lambda t: {name: flow.num_waiting for name, flow in t.flows.items()},
           "Sequences of a flow that wait; where there are several flows, of the first 32 each, of the "
           "rest as other."),
    Metric("flow_running_sequences", "gauge", ("flow",),
           lambda t: {name: flow.num_running for name, flow in t.flows.items()},
           "Sequences of a flow that are bound to ranks."),
    Metric("flow_served_tokens_total", "counter", ("flow",),
           lambda t: {name: flow.num_served_tokens for name, flow in t.flows.items()},
           "Prompt tokens run and output tokens of a flow, without what ran again."),
    Metric("queue_seconds", "histogram", (), lambda t: t.queue_s,
           "From a sequence's arrival to its first step."),
    Metric("time_to_first_token_seconds", "histogram", (), lambda t: t.first_token_s,
           "From a sequence's arrival to its first token."),
    Metric("inter_token_seconds", "histogram", (), lambda t: t.inter_token_s,
           "Between two tokens of a sequence."),
    Metric("recovery_seconds", "histogram", (), lambda t: t.recovery_s,
           "From the loss of an epoch until the group had formed again."),
    Metric("recovery_phase_seconds", "histogram", ("after", "phase"), lambda t: t.recovery_phase_s,
           "Where the time of recoveries went, after a loss or a takeover: wait, until the forming that "
           "succeeded began; form, until the group had formed; step, until its first step was back, if "
           "sequences waited for it."),
    Metric("kept_tokens_total", "counter", (), lambda t: t.num_kept_tokens,
           "Tokens of sequences that a loss had wait again, whose KV was still there when they went "
           "on."),
    Metric("recomputed_tokens_total", "counter", ("executor",), lambda t: t.num_recomputed_tokens,
           "Those that had been computed and are again: where the rank lost an executor and its KV "
           "(lost), and where not (kept), since others took its blocks or its place meanwhile."),
    Metric("kept_kv_checks_total", "counter", ("result",), lambda t: t.num_kept_checks,
           "Sequences whose KV was kept over a loss and computed once more, to compare: equal, or differs "
           "(--verify-kept-kv)."),
]
RANK_STATUS: list[Metric[pb.RankStatus]] = [
    Metric("running_sequences", "gauge", (), lambda r: r.num_running,
           "Sequences bound to the rank."),
    Metric("last_step_tokens", "gauge", (), lambda r: r.last_step_tokens,
           "Tokens in the last step."),
    Metric("last_step_seconds", "gauge", (), lambda r: r.last_step_duration.ToNanoseconds() / 1e9,
           "Time that the rank's executor took for the last step."),
    Metric("kv_blocks", "gauge", ("state",),
           lambda r: {"used": r.num_used_blocks, "cached": r.num_cached_blocks,
                      "free": r.num_free_blocks},
           "KV blocks: used by live sequences, cached as a reusable prefix, or free."),
]
RANK_TOTALS: list[Metric[RankCounts]] = [
    Metric("scheduled_tokens_total", "counter", (), lambda r: r.scheduled_tokens,
           "Tokens that the rank ran."),
    Metric("padding_tokens_total", "counter", (), lambda r: r.padding_tokens,
           "Rows that the rank ran besides, up to the graph's size or the longest rank's tokens."),
    Metric("imbalance_tokens_total", "counter", (), lambda r: r.imbalance_tokens,
           "Tokens that the rank had less than the longest rank of each step."),
    Metric("idle_steps_total", "counter", (), lambda r: r.idle_steps,
           "Steps in which the rank had no tokens and others did."),
    Metric("prompt_tokens_total", "counter", (), lambda r: r.prompt_tokens,
           "Prompt tokens of the sequences that it began."),
    Metric("prefix_hit_tokens_total", "counter", (), lambda r: r.prefix_hit_tokens,
           "Those prompt tokens that its prefix cache had."),
    Metric("preemptions_total", "counter", (), lambda r: r.preemptions,
           "Sequences that lost their blocks to others."),
]
# fmt: on


def take_snapshot(engines: Engines, version: str) -> Snapshot:
    """Returns all numbers of a router. Call it on the event loop."""
    requests = engines.measures
    return Snapshot(
        version=version,
        model_name="" if engines.model is None else engines.model.name,
        is_ready=engines.is_ready,
        num_live_requests=engines.num_live,
        num_open_calls=engines.listeners.num_open,
        refused=dict(requests.refused),
        ended=dict(requests.ended),
        total_s=requests.total_s.copy(),
        resumed=dict(requests.resumed),
        num_resumed_tokens=requests.num_resumed_tokens,
        kv_snapshots=dict(requests.kv_snapshots),
        groups=engines.status(),
        totals=engines.totals(),
    )


def on_loop(function: Callable[[], T]) -> Callable[[], T]:
    """Returns what a thread calls to have a function called on the loop that runs now.

    It raises TimeoutError where the loop has not come to it after SNAPSHOT_TIMEOUT_S.
    """
    loop = asyncio.get_running_loop()

    async def call() -> T:
        return function()

    return lambda: asyncio.run_coroutine_threadsafe(call(), loop).result(SNAPSHOT_TIMEOUT_S)


def collector(engines: Engines, version: str) -> Callable[[], Iterable[Family]]:
    """Returns what a thread calls to collect the metrics of a router on the running loop."""
    snapshot = on_loop(lambda: take_snapshot(engines, version))
    return lambda: families(snapshot())


def families(now: Snapshot) -> Iterator[Family]:
    """Yields every metric of a router, with or without series."""
    prefix, group, rank = "lockstep_router_", ("group",), ("group", "rank")
    groups = [((str(status.group),), status) for status in now.groups]
    totals = [(labels, t) for (labels, _), t in zip(groups, now.totals, strict=True)]
    ranks = [((*labels, str(r.dp_rank)), r) for labels, status in groups for r in status.ranks]
    counts = [((*labels, str(i)), r) for labels, t in totals for i, r in enumerate(t.ranks)]
    yield from families_of(ROUTER, prefix, (), [((), now)])
    yield from families_of(GROUP_STATUS, prefix, group, groups)
    yield from families_of(GROUP_TOTALS, prefix, group, totals)
    yield from families_of(RANK_STATUS, prefix, rank, ranks)
    yield from families_of(RANK_TOTALS, prefix, rank, counts)
    yield from families_of(PICKERS, "vllm:", (), [((), now)])
