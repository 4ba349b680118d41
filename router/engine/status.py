"""Status of one group, as GetStatus sends it, from the numbers of its engine."""

from protos.serving.v1 import serving_pb2 as pb
from protos.transport.errors import duration
from router.scheduling.counters import EpochStats, by_rank
from router.scheduling.scheduler import Scheduler
from router.scheduling.speculation import GateState
from router.scheduling.step import GroupInfo
from router.scheduling.step_cost import StepCost

_STATES = {
    GateState.DRAFTING: pb.SPECULATION_STATE_DRAFTING,
    GateState.PAUSED: pb.SPECULATION_STATE_PAUSED,
    GateState.OFF: pb.SPECULATION_STATE_OFF,
}


def epoch_status(
    stats: EpochStats, info: GroupInfo | None, scheduler: Scheduler | None, now: float
) -> pb.GroupStatus:
    """Returns what is known of a group's epoch, and of its ranks while it is formed.

    Args:
        stats: Of the epoch; while the group forms, of none.
        info: None before the first forming.
        scheduler: None while the group forms.
        now: On the clock of `stats`.
    """
    status = pb.GroupStatus(
        step=stats.num_steps,
        last_step_age=None if stats.last_time is None else duration(now - stats.last_time),
        graphs=[
            pb.GraphCount(runner=runner, size=size, miss=miss, num_steps=num_steps)
            for (runner, size, miss), num_steps in stats.graph_counts().items()
        ],
    )
    if info is not None:
        status.epoch, status.block_size = info.epoch, info.shape.block_size
        status.max_num_seqs = info.shape.rows_per_rank
    if info is not None and scheduler is not None:
        status.ranks.extend(_ranks(stats, info, scheduler))
        if info.shape.speculation is not None:
            status.speculation.CopyFrom(
                pb.SpeculationStatus(
                    algorithm=info.shape.speculation.algorithm,
                    state=_STATES[scheduler.gate.state],
                    num_steps=stats.drafts.num_steps,
                    num_drafts=stats.drafts.num_drafts,
                    num_accepted_drafts=stats.drafts.num_accepted,
                    tokens_per_step=scheduler.gate.tokens_per_step,
                )
            )
    return status


def step_cost_status(cost: StepCost) -> pb.StepCostStatus:
    """Returns what is known of a group's steps."""
    seconds = {f"{part}_s": value for part, value in cost.coefficients().items()}
    return pb.StepCostStatus(
        num_steps=sum(cost.num_steps),
        is_known=cost.is_known,
        margin=cost.margin,
        mean_error=cost.error,
        **seconds,
    )


def hide_from_callers(status: pb.GetStatusResponse) -> None:
    """Takes out of a status what concerns operators only: executors' addresses, problems, flows."""
    tellers: list[pb.GroupStatus | pb.Event] = [*status.groups, *status.events]
    for told in tellers:
        if told.problem:
            told.problem = "told to operators only: see --operators, or the router's log"
    for group in status.groups:
        group.ClearField("flows")
        for rank in group.ranks:
            rank.ClearField("address")
        for member in group.members:
            member.ClearField("address")
            member.ClearField("instance_id")
        for spare in group.elastic.spares:
            spare.ClearField("address")


def _ranks(stats: EpochStats, info: GroupInfo, scheduler: Scheduler) -> list[pb.RankStatus]:
    last_step, counts = stats.last_step(), by_rank(stats.counts())
    return [
        pb.RankStatus(
            dp_rank=rank,
            address=info.addresses[rank],
            num_running=scheduler.table.num_bound(rank),
            last_step_tokens=last_step[rank][0] if last_step else 0,
            last_step_duration=duration(last_step[rank][1]) if last_step else None,
            total_tokens=counts[rank].scheduled_tokens,
            num_used_blocks=cache.pool.num_used,
            num_cached_blocks=cache.pool.num_cached,
            num_free_blocks=cache.pool.num_free,
            prefix_hit_rate=cache.hit_rate,
            num_preemptions=counts[rank].preemptions,
        )
        for rank, cache in enumerate(scheduler.caches)
    ]
