"""Engine: the loop of one group, form, then schedule, send, receive, commit, until it is lost.

Start and recovery are the same path. What a loss costs is what the steps in flight computed and the
KV of the executors that are gone: the sequences that the group ran wait again, with the tokens that
they have, and the next epoch computes anew what its ranks' caches do not have (caches.py), or another
group computes all of it (engines.py). Which of them may have been the cause is the Quarantine's to
find out.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

import structlog

from protos.serving.v1 import serving_pb2 as pb
from protos.transport.errors import RpcError, shorten
from router.engine.caches import GroupCaches
from router.engine.executors import Executors
from router.engine.kept_check import KeptCheck
from router.engine.pipeline import StepPipeline
from router.engine.recent import Events, FlowShares, History
from router.engine.retries import RetryDelays
from router.engine.settings import EngineSettings
from router.engine.status import epoch_status, step_cost_status
from router.errors import (
    ExecutorFailed,
    ExecutorGone,
    ExecutorLeft,
    ExecutorLied,
    ExecutorLost,
    GroupHeld,
    GroupMismatch,
    HandedOver,
    KeptKVDiffers,
    SuspectsFirst,
)
from router.requests.request import NO_COLUMNS, Columns, Listener, Listeners, Request, Sequence
from router.requests.waiting_queue import Quarantine, WaitingQueue, note_loss
from router.scheduling.counters import EpochStats, GroupMeasures
from router.scheduling.kv.block_log import BlockLog
from router.scheduling.scheduler import Scheduler
from router.scheduling.step import GroupInfo, InFlight, ServedModel

log = structlog.get_logger()

MIN_CHECK_S = 0.001
TRIAL_CHECK_S = 0.1  # between looks at whether suspects may run
OVERDUE_CHECK_S = 1.0  # between looks at a group that makes no progress
MAX_NAMED = 64  # requests, in one line of the log
AT_ONCE = (ExecutorGone, ExecutorLeft)  # losses behind which the others are as they should be


class Engine:
    """Steps all DP ranks of one group together.

    Args:
        group: Its number, for people.
        executors: The group.
        waiting: Its waiting queue.
        listeners: Of all calls that may wait for tokens.
        settings: What the operator said.
        on_end: Told of each sequence that ends.
        logs_blocks: Whether somebody may ask what the prefix caches hold.

    Attributes:
        on_change: Called when the group has formed or is lost; `Engines.drive` sets it.
        waiting: Its waiting queue, behind the quarantine.
        lost_time: On the event loop's clock, since when it has not been ready.
        measures: What its epochs amounted to, so far.
        events: What last happened to it.
    """

    def __init__(
        self,
        group: int,
        executors: Executors,
        waiting: WaitingQueue,
        listeners: Listeners,
        settings: EngineSettings,
        *,
        on_end: Callable[[Sequence], None],
        logs_blocks: bool = False,
    ) -> None:
        self.group = group
        self.model: ServedModel | None = None
        self.is_ready = False
        self._executors = executors
        self.on_change: Callable[[], None] = lambda: None
        self.waiting = Quarantine(waiting, executors.may_try_suspects)
        self._listeners = listeners
        self._settings = settings
        self._on_end = on_end
        self._caches = GroupCaches(are_logged=logs_blocks)
        self._clock = asyncio.get_running_loop().time
        self.lost_time = self._clock()
        self._progress_time = self._clock()  # formed, committed, or got work when it had none
        self._has_work = asyncio.Event()
        self._delays = RetryDelays(settings.retry_delay_s)
        self._leaving = asyncio.Event()
        self._has_left = asyncio.Event()
        self._info: GroupInfo | None = None
        self._pipeline: StepPipeline | None = None  # of the epoch
        self.measures = GroupMeasures()
        self.measures.flow_counts = waiting.line.counts
        self.measures.suspicions = executors.suspicions
        checks = self.measures.kept_kv.checks
        self._kept_check = KeptCheck(settings.verify_kept_kv, self._push, checks)
        self.events = Events(self._clock)
        self._history, self._flow_shares = History(), FlowShares()
        self._stats = EpochStats()
        self._state = pb.GROUP_STATE_FORMING
        self._problem = "its executors have not been reached yet"

    async def run(self) -> None:
        """Runs the group until `leave`: whatever goes wrong in it is a loss of this group, and no more."""
        while not self._leaving.is_set():
            try:
                await self._run_epoch(await self._form())
            except Exception as error:
                loss, delay_s = self._loss_of(error)
            if self._leaving.is_set():
                break
            was_ready, has_stepped = self.is_ready, self._stats.num_steps > 0
            self._lose_at_any_cost(loss)
            if not was_ready:
                await _wait_for(self._executors.news(), delay_s)
            elif not (has_stepped and isinstance(loss, AT_ONCE)):
                await _wait_for(self._leaving.wait(), delay_s)
        await self._executors.close()  # the other router goes on while callers are told
        self._lose_at_any_cost(HandedOver())
        self._has_left.set()

    def _loss_of(self, error: Exception) -> tuple[Exception, float]:
        """Returns what an error is to the group, and seconds until it may form again."""
        if isinstance(error, ExecutorLost | GroupMismatch):
            down_s = None if self.is_ready else self._clock() - self.lost_time
            return error, self._delays.after_loss(down_s)
        log.error("group_failed", **self.ids(), exc_info=error)
        self.measures.faults["unexpected"] += 1
        self._caches.drop()  # its tables may say what is not so
        problem = shorten(f"{type(error).__name__}: {error}")
        loss = ExecutorLost(f"unexpected in this router, whose log has more: {problem}")
        has_served = self.is_ready and self._stats.num_steps > 0
        return loss, self._delays.after_fault(has_served=has_served)

    async def _run_epoch(self, pipeline: StepPipeline) -> None:
        """Steps until an executor is lost."""
        try:
            while True:
                self.waiting.clear_proven()
                pipeline.fill()
                if pipeline.steps:
                    await pipeline.take_answer()
                    self._progress_time = self._clock()
                    self.measures.recovery.step(self._progress_time)
                    if self._kept_check.problem:
                        raise KeptKVDiffers(self._kept_check.problem)
                elif self._leaving.is_set():
                    raise HandedOver
                elif self.waiting.wants_border:
                    raise SuspectsFirst("requests that may kill executors run before all others")
                else:
                    await self._wait_for_work()
        finally:
            pipeline.stop_timer()

    async def _wait_for_work(self) -> None:
        """Returns when there may be something to schedule; raises if the group is lost first."""
        lost = asyncio.ensure_future(self._executors.lost())
        work = asyncio.ensure_future(self._has_work.wait())
        try:
            recheck_s = TRIAL_CHECK_S if self.waiting.holds_suspects else None
            await asyncio.wait((lost, work), timeout=recheck_s, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                lost.result()
        finally:
            lost.cancel()
            work.cancel()
        if recheck_s is not None:
            self._progress_time = self._clock()  # it does what it can: whoever comes runs at once
        self._has_work.clear()

    def _may_plan(self) -> bool:
        """Whether another step may follow those that are in flight."""
        is_border = self._executors.wants_border or self.waiting.wants_border
        return not (self._leaving.is_set() or is_border)

    async def _form(self) -> StepPipeline:
        """Begins an epoch, with what the one before it left."""
        begun = self._clock()
        info = await self._executors.form()
        self._check_model(info.model)
        caches = self._caches.begin_epoch(info)
        scheduler = Scheduler(
            info.shape,
            self.waiting,
            self._listeners,
            self._settings,
            clock=self._clock,
            on_end=self._end,
            measures=self.measures,
            caches=caches,
            kv_ids=info.kv_ids,
        )
        shape = info.shape  # its ranks may be more or fewer: prices are of one
        kind = info.model.fingerprint, shape.attn_tp_size, shape.graph_sizes, shape.speculation
        self.measures.costs.begin_epoch(kind)
        stats = EpochStats(scheduler.caches, scheduler.num_preemptions, info.shape.graph_sizes)
        self._progress_time = self._clock()
        self._stats = self.measures.begin_epoch(stats)
        has_work = len(self.waiting) > 0
        self.measures.recovery.form(begun, self._progress_time, has_work=has_work)
        self._info = info
        self._pipeline = StepPipeline(
            scheduler,
            self._executors,
            self._settings,
            may_plan=self._may_plan,
            measures=self.measures,
            stats=stats,
        )
        self.model, self.is_ready, self._problem = info.model, True, ""
        self._state = pb.GROUP_STATE_READY
        self.events.note(
            logging.INFO,
            "group_ready",
            group=self.group,
            epoch=info.epoch,
            dp_size=info.shape.dp_size,
            model=info.model.name,
            seconds_down=round(self._clock() - self.lost_time, 3),
            seconds_waiting=round(begun - self.lost_time, 3),
            seconds_forming=round(self._clock() - begun, 3),
            **self._kept_tokens(info.kv_ids),
        )
        self.on_change()
        self._kept_check.begin(list(self.waiting), info.shape.block_size)
        return self._pipeline

    def _kept_tokens(self, kv_ids: Collection[str]) -> dict[str, int]:
        """Returns how many tokens of the sequences that wait again ranks still have, and how many not."""
        counts = {"kept_tokens": 0, "lost_tokens": 0}
        for sequence in self.waiting:
            is_kept = sequence.progress.has_kept_kv(kv_ids)
            name = "kept_tokens" if is_kept else "lost_tokens"
            counts[name] += sequence.progress.num_computed_tokens
        return counts

    def _check_model(self, model: ServedModel) -> None:
        """Checks that what was begun before can go on.

        Raises:
            GroupMismatch: The executors were started again with another model.
        """
        old = self.model
        has_promised = self._info is not None or len(self.waiting) > 0
        if (
            old is not None
            and has_promised
            and (old.fingerprint != model.fingerprint or old.max_model_len > model.max_model_len)
        ):
            raise GroupMismatch(
                f"the group served fingerprint={old.fingerprint} max_model_len={old.max_model_len}, "
                f"and was started again with fingerprint={model.fingerprint} "
                f"max_model_len={model.max_model_len}: start it with the same, or this router too"
            )

    def _lose_at_any_cost(self, error: Exception) -> None:
        """Takes the group out of service; sequences that cannot be kept fail."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None and pipeline.late_error is not None:
            self._caches.drop()  # nobody was sent that plan, and no list of steps has it
        try:
            self._lose(error, pipeline)
        except Exception:
            log.exception("group_not_given_up", **self.ids())
            self.measures.faults["unexpected"] += 1
            self._caches.drop()
            if pipeline is not None:
                self._drop(pipeline.scheduler)

    def _drop(self, scheduler: Scheduler) -> None:
        """Fails every sequence that is still bound to an epoch that is over."""
        error = ExecutorFailed("this router failed to keep the request when a group was lost")
        for sequence in scheduler.table.sequences:
            if sequence is not None:
                scheduler.table.detach(sequence)
                self.fail(sequence, error)
        self.waiting.line.give_back_all()

    def _lose(self, error: Exception, pipeline: StepPipeline | None) -> None:
        """Takes the group out of service; the sequences that it ran wait again."""
        was_ready, self.is_ready = self.is_ready, False
        is_held = isinstance(error, GroupHeld)
        is_planned = is_held or isinstance(error, ExecutorLeft)
        is_stale = isinstance(error, KeptKVDiffers)
        self._tell_loss(error, 0 if pipeline is None else len(pipeline.steps), was_ready=was_ready)
        self.measures.faults["lied"] += isinstance(error, ExecutorLied)
        self.measures.faults["stale_kv"] += is_stale
        if is_stale:
            self._caches.drop()
        if was_ready:
            self.lost_time = self._clock()
            self.measures.end_epoch(self.lost_time, is_planned=is_planned)
        if is_held:
            self.measures.stand_by()
            self.model = self._executors.held_model or self.model
        if pipeline is not None:
            self._end_epoch(pipeline, is_blameless=is_planned or is_stale)
        if was_ready or is_held:
            self.on_change()

    def _tell_loss(self, error: Exception, num_steps: int, *, was_ready: bool) -> None:
        """Notes what has become of the group, once."""
        problem, old = str(error), self._problem
        self._problem = problem
        if isinstance(error, GroupHeld):
            self._state = pb.GROUP_STATE_STANDBY
            if problem != old:
                self.events.note(logging.INFO, "group_standby", **self.ids(), problem=problem)
            return
        is_mismatch = isinstance(error, GroupMismatch)
        self._state = pb.GROUP_STATE_MISMATCHED if is_mismatch else pb.GROUP_STATE_FORMING
        if was_ready and isinstance(error, ExecutorLeft):
            ids = self.ids()
            self.events.note(logging.INFO, "group_left", **ids, problem=problem, steps=num_steps)
        elif was_ready:
            ids = self.ids()
            self.events.note(logging.WARNING, "group_lost", **ids, problem=problem, steps=num_steps)
        elif problem != old:
            level = logging.ERROR if is_mismatch else logging.INFO
            self.events.note(level, "group_not_formed", group=self.group, problem=problem)

    def _end_epoch(self, pipeline: StepPipeline, *, is_blameless: bool) -> None:
        """Has the sequences of an epoch wait again, but those that were found to kill executors."""
        scheduler = pipeline.scheduler
        lost, num_run = _lost_sequences(pipeline.steps, scheduler)
        names = list(dict.fromkeys(sequence.request.request_id for sequence in lost))
        log.info("steps_lost", **self.ids(), requests=len(names), request_ids=names[:MAX_NAMED])
        guilty = [] if is_blameless else note_loss(lost, num_run)
        self._salvage(scheduler, pipeline.steps)
        scheduler.abandon()
        for sequence in self._kept_check.stop():
            self.waiting.discard(sequence)
        if not is_blameless:
            self.waiting.clear_bystanders(lost)
        self.waiting.set_max_running()
        for sequence in guilty:
            self._fail_request(sequence.request)

    def _salvage(self, scheduler: Scheduler, lost_steps: Collection[InFlight]) -> None:
        """Keeps what committed steps computed; nothing, if anything about it is in doubt."""
        if not self._caches.by_rank:
            return
        try:
            scheduler.salvage([step.plan for step in lost_steps])
        except Exception:
            log.exception("kv_not_kept", **self.ids())
            self.measures.faults["unexpected"] += 1
            self._caches.drop()

    def ids(self) -> dict[str, int]:
        """Returns what a log says of the moment; step_id is the earliest that is not back."""
        epoch = 0 if self._info is None else self._info.epoch
        return {"group": self.group, "epoch": epoch, "step_id": self._stats.num_steps + 1}

    def _fail_request(self, request: Request) -> None:
        ids = self.ids()
        self.events.note(logging.ERROR, "request_failed", **ids, request_id=request.request_id)
        error = ExecutorFailed(
            "an executor was lost each time that it ran this request, at last alone: it is not tried again"
        )
        for sequence in request.sequences:
            if not sequence.is_ended:
                self.fail(sequence, error)

    # ---- what others ask of it, between two awaits of the loop

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
            QueueFull: There is no room.
        """
        self._expect_progress()
        self.waiting.submit(request)
        for sequence in request.sequences:
            sequence.group = self.group
        self._has_work.set()

    def _push(self, sequence: Sequence) -> None:
        """Queues a sequence of this router's own."""
        self._expect_progress()
        sequence.group = self.group
        self.waiting.push(sequence)
        self._has_work.set()

    def _end(self, sequence: Sequence) -> None:
        """Tells whom it concerns of a sequence that has ended."""
        if not self._kept_check.take_end(sequence):
            self._on_end(sequence)

    def num_tokens_with(self, request: Request) -> int:
        """Returns the tokens that it would have to run until a new request's first token, at most."""
        sequence = next(s for s in request.sequences if not s.is_ended)
        if self._scheduler is None:
            return self.waiting.num_tokens + len(sequence.tokens)
        return self.waiting.num_tokens + self._scheduler.num_left_tokens(sequence)

    def waiting_requests(self) -> list[Request]:
        """Returns the requests that wait; while the group is down, all of its live ones."""
        return list(dict.fromkeys(sequence.request for sequence in self.waiting))

    def hand_over(self, request: Request, other: "Engine") -> None:
        """Queues a waiting request at another group, where its order of arrival holds."""
        other._expect_progress()
        for sequence in request.sequences:
            if not sequence.is_ended:
                self.waiting.discard(sequence)
                sequence.group = other.group
                other.waiting.push(sequence)
        other._has_work.set()

    @property
    def can_leave(self) -> bool:
        """Whether another router would take the group at once."""
        return self.is_ready and self._executors.num_standbys > 0

    async def leave(self) -> None:
        """Commits the steps in flight, and leaves the group to another router."""
        self._leaving.set()
        self._has_work.set()
        await self._has_left.wait()

    def fail(self, sequence: Sequence, error: RpcError) -> None:
        """Ends a live sequence of this group with an error."""
        if sequence.table is None:
            self.waiting.discard(sequence)
            sequence.error = error
            self._end(sequence)
        else:
            assert self._scheduler is not None
            self._scheduler.fail(sequence, error)
            self._has_work.set()

    def take_columns(self, listener: Listener) -> Columns:
        """Returns a listener's new tokens of its columnar requests in this group."""
        if self._scheduler is None:
            return NO_COLUMNS
        return self._scheduler.table.take_columns(listener.index)

    @property
    def is_standby(self) -> bool:
        """Whether another router drives the group, as far as this one knows; not while it takes over."""
        return self._state == pb.GROUP_STATE_STANDBY and not self._executors.is_driver

    @property
    def is_serving(self) -> bool:
        """Whether it can step and, if it has work, does: what load balancers should know."""
        if not (self.is_ready and self._has_sequences):
            return self.is_ready
        return self._clock() - self._progress_time < self._settings.step_timeout_s

    @property
    def until_overdue_s(self) -> float:
        """Seconds until it may stop serving for want of progress, or serve again thereafter."""
        if not (self.is_ready and self._has_sequences):
            return self._settings.step_timeout_s
        left_s = self._progress_time + self._settings.step_timeout_s - self._clock()
        return max(left_s, MIN_CHECK_S) if left_s > 0 else OVERDUE_CHECK_S

    @property
    def _has_sequences(self) -> bool:
        has_steps = self._pipeline is not None and self._pipeline.steps
        return bool(has_steps or len(self.waiting) or self.num_running)

    @property
    def _scheduler(self) -> Scheduler | None:
        return None if self._pipeline is None else self._pipeline.scheduler

    def _expect_progress(self) -> None:
        """Starts the clock if there was nothing to do. Call it before work is added."""
        if not self._has_sequences:
            self._progress_time = self._clock()

    @property
    def num_running(self) -> int:
        if self._scheduler is None:
            return 0
        table = self._scheduler.table
        return sum(map(table.num_bound, range(table.dp_size)))

    @property
    def block_logs(self) -> list[BlockLog | None]:
        """What each rank's prefix cache holds; one None before the group has formed."""
        return [cache.log for cache in self._caches.by_rank] or [None]

    def flush_cache(self) -> tuple[int, int]:
        """Drops all cached blocks that nobody uses.

        Returns how many these were, and how many are left for prompts to find, since they are used.
        """
        caches = self._caches.by_rank
        num_dropped = sum(cache.pool.evict_all() for cache in caches)
        return num_dropped, sum(cache.num_named for cache in caches)

    def status(self) -> pb.GroupStatus:
        """Returns the group's part of GetStatus' answer."""
        status = epoch_status(self._stats, self._info, self._scheduler, self._clock())
        status.group, status.problem = self.group, self._problem
        status.state = self._state
        status.num_waiting, status.num_waiting_tokens = len(self.waiting), self.waiting.num_tokens
        status.step_cost.CopyFrom(step_cost_status(self.measures.costs.plain))
        status.members.extend(self._executors.members())
        status.num_standbys = self._executors.num_standbys
        if (elastic := self._executors.elastic()) is not None:
            status.elastic.CopyFrom(elastic)
        return status

    def full_status(self) -> pb.GroupStatus:
        """Returns the same with its history and its flows."""
        status = self.status()
        status.history.CopyFrom(self._history.message())
        status.flows.extend(self._flow_shares.messages(self.waiting.line.counts()))
        return status

    def take_sample(self) -> None:
        """Takes down its numbers for the history."""
        totals = self.measures.totals()
        self._history.add(self._clock(), self.status(), totals)
        self._flow_shares.add(totals.flows)


async def _wait_for(news: Awaitable[object], timeout_s: float) -> None:
    """Returns when there is news, or the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await news


def _lost_sequences(
    lost_steps: Collection[InFlight], scheduler: Scheduler
) -> tuple[list[Sequence], int]:
    """Returns the live sequences of the lost steps, and how many ran in them."""
    sequences = scheduler.table.sequences
    rows = {row for step in lost_steps for row in step.plan.runs.nonzero()[0].tolist()}
    live = [sequence for row in rows if (sequence := sequences[row]) is not None]
    return live, len(rows)
