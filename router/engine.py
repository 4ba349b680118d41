"""The loop that steps one group: form, then schedule, send, receive, commit, until it is lost.

Start and recovery are the same path. What a lost group costs is its KV cache: the sequences that
it ran wait again, with the tokens that they have, and the next epoch computes them anew.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

import structlog

from protos.errors import RpcError
from router.admission import Admission
from router.errors import ExecutorFailed, ExecutorLost, GroupMismatch
from router.group import GroupInfo
from router.model import ServedModel
from router.readers import Reader, Readers
from router.request import NO_COLUMNS, Columns, Request, Sequence
from router.scheduler import Scheduler
from router.status import GraphCount, GroupState, GroupStatus, RankStatus
from router.step import GraphMiss, StepPlan, StepResult
from router.step_builder import GraphSizes

log = structlog.get_logger()

MAX_LOST_STEPS = 3  # a request that lost this many in a row is taken to be their cause


class Executors(Protocol):
    """One group of executors, as the engine sees it."""

    async def form(self) -> GroupInfo:
        """Brings all executors into a new epoch.

        Raises:
            ExecutorLost: One of them is not there.
            GroupMismatch: They do not fit together.
        """
        ...

    def send(self, plan: StepPlan) -> None:
        """Sends a step. Earlier ones need not have come back."""
        ...

    async def receive(self) -> StepResult:
        """Returns the result of the earliest step that has not come back.

        Raises:
            ExecutorLost: An executor died, hangs or answered wrongly.
        """
        ...

    async def lost(self) -> None:
        """Returns never; raises ExecutorLost as soon as an executor is."""
        ...

    async def close(self) -> None:
        """Ends every stream and connection."""
        ...


class Engine:
    """Steps all DP ranks of one group together.

    Args:
        group: Its number, for people.
        executors: The group.
        admission: Its waiting line.
        readers: Everybody who may wait for tokens.
        pipeline_depth: Steps in flight at most; 2 hides the way to the executors.
        min_chunk_tokens: See Scheduler.
        retry_delay_s: Between attempts to form the group.
        on_end: Told of each sequence that ends.
    """

    def __init__(
        self,
        group: int,
        executors: Executors,
        admission: Admission,
        readers: Readers,
        *,
        pipeline_depth: int,
        min_chunk_tokens: int,
        retry_delay_s: float,
        on_end: Callable[[Sequence], None],
    ) -> None:
        self.group = group
        self.model: ServedModel | None = None
        self.is_ready = False
        self._executors = executors
        self._admission = admission
        self._readers = readers
        self._pipeline_depth = pipeline_depth
        self._min_chunk_tokens = min_chunk_tokens
        self._retry_delay_s = retry_delay_s
        self._on_end = on_end
        self._clock = asyncio.get_running_loop().time
        self._has_work = asyncio.Event()
        self._in_flight: deque[StepPlan] = deque()
        self._info: GroupInfo | None = None
        self._scheduler: Scheduler | None = None
        self._stats = _Stats()
        self._problem = "its executors have not been reached yet"

    async def run(self) -> None:
        """Runs the group for ever."""
        while True:
            try:
                scheduler = await self._form()
                await self._run_epoch(scheduler)
            except (ExecutorLost, GroupMismatch) as error:
                self._lose(error)
                await asyncio.sleep(self._retry_delay_s)

    async def _run_epoch(self, scheduler: Scheduler) -> None:
        """Steps until an executor is lost."""
        while True:
            while len(self._in_flight) < self._pipeline_depth:
                plan = scheduler.schedule()
                if plan is None:
                    break
                self._executors.send(plan)
                self._in_flight.append(plan)
            if self._in_flight:
                result = await self._executors.receive()
                plan = self._in_flight.popleft()
                scheduler.commit(plan, result)
                self._stats.add(plan, self._clock())
            else:
                await self._wait_for_work()

    # ---- what others ask of it, between two awaits of the loop

    def submit(self, request: Request) -> None:
        """Lines up a request.

        Raises:
            QueueFull: There is no room.
        """
        self._admission.submit(request)
        for sequence in request.sequences:
            sequence.group = self.group
        self._has_work.set()

    def fail(self, sequence: Sequence, error: RpcError) -> None:
        """Ends a live sequence of this group with an error."""
        if sequence.table is None:
            self._admission.discard(sequence)
            sequence.error = error
            self._on_end(sequence)
        else:
            assert self._scheduler is not None
            self._scheduler.fail(sequence, error)
            self._has_work.set()

    def take_columns(self, reader: Reader) -> Columns:
        """Returns a reader's new tokens of its columnar requests in this group."""
        if self._scheduler is None:
            return NO_COLUMNS
        return self._scheduler.table.take_columns(reader.index)

    @property
    def num_waiting_tokens(self) -> int:
        return self._admission.num_tokens

    @property
    def num_running(self) -> int:
        if self._scheduler is None or self._info is None:
            return 0
        table = self._scheduler.table
        return sum(table.num_bound(rank) for rank in range(self._info.shape.dp_size))

    def status(self) -> GroupStatus:
        now, stats = self._clock(), self._stats
        return GroupStatus(
            group=self.group,
            state=GroupState.READY if self.is_ready else GroupState.FORMING,
            problem=self._problem,
            epoch=0 if self._info is None else self._info.epoch,
            step=stats.num_steps,
            last_step_age_s=None if stats.last_time is None else now - stats.last_time,
            num_waiting=len(self._admission),
            num_waiting_tokens=self._admission.num_tokens,
            ranks=tuple(self._rank_statuses()),
            graphs=stats.graph_counts(self._info.shape.graph_sizes) if self._info else (),
        )

    def _rank_statuses(self) -> list[RankStatus]:
        info, scheduler, stats = self._info, self._scheduler, self._stats
        if info is None or scheduler is None:
            return []
        return [
            RankStatus(
                dp_rank=rank,
                address=info.addresses[rank],
                num_running=scheduler.table.num_bound(rank),
                last_step_tokens=stats.last_tokens[rank] if stats.last_tokens else 0,
                total_tokens=stats.total_tokens[rank] if stats.total_tokens else 0,
                num_used_blocks=cache.pool.num_used,
                num_cached_blocks=cache.pool.num_cached,
                num_free_blocks=cache.pool.num_free,
                prefix_hit_rate=cache.hit_rate,
                num_preemptions=scheduler.num_preemptions[rank],
            )
            for rank, cache in enumerate(scheduler.caches)
        ]

    # ---- epochs

    async def _form(self) -> Scheduler:
        info = await self._executors.form()
        scheduler = Scheduler(
            info.shape,
            self._admission,
            self._readers,
            min_chunk_tokens=self._min_chunk_tokens,
            clock=self._clock,
            on_end=self._on_end,
        )
        self._info, self._scheduler, self._stats = info, scheduler, _Stats()
        self.model, self.is_ready, self._problem = info.model, True, ""
        log.info(
            "group_ready",
            group=self.group,
            epoch=info.epoch,
            dp_size=info.shape.dp_size,
            model=info.model.name,
        )
        return scheduler

    def _lose(self, error: Exception) -> None:
        """Takes the group out of service; whom it ran waits again."""
        lost_plans, self._in_flight = self._in_flight, deque()
        if self.is_ready or str(error) != self._problem:
            log.warning("group_lost", group=self.group, problem=str(error), steps=len(lost_plans))
        self.is_ready, self._problem = False, str(error)
        if self._scheduler is None:
            return
        suspects = self._suspects(lost_plans)
        self._scheduler.abandon()
        self._scheduler = None
        for request in suspects:
            if request.count_lost_step() >= MAX_LOST_STEPS:
                self._fail_request(request)

    def _suspects(self, lost_plans: deque[StepPlan]) -> set[Request]:
        """The live requests that were in a lost step."""
        assert self._scheduler is not None
        sequences = self._scheduler.table.sequences
        rows = {row for plan in lost_plans for row in plan.runs.nonzero()[0].tolist()}
        return {s.request for row in rows if (s := sequences[row]) is not None}

    def _fail_request(self, request: Request) -> None:
        error = ExecutorFailed(
            f"executors were lost in {request.num_lost_steps} steps in a row that ran this "
            f"request: it is not tried again"
        )
        for sequence in request.sequences:
            if not sequence.is_ended:
                self.fail(sequence, error)

    async def _wait_for_work(self) -> None:
        """Returns when there may be something to schedule; raises if the group is lost first."""
        lost = asyncio.ensure_future(self._executors.lost())
        work = asyncio.ensure_future(self._has_work.wait())
        try:
            await asyncio.wait((lost, work), return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                lost.result()
        finally:
            lost.cancel()
            work.cancel()
        self._has_work.clear()


class _Stats:
    """What an epoch's steps amounted to."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.last_time: float | None = None
        self.last_tokens: tuple[int, ...] = ()
        self.total_tokens: list[int] = []
        # By whether a rank extended, the graph's size, and why there was none.
        self._num_steps: Counter[tuple[bool, int | None, GraphMiss | None]] = Counter()

    def add(self, plan: StepPlan, now: float) -> None:
        self.num_steps += 1
        self.last_time = now
        agreement = plan.agreement
        self._num_steps[agreement.has_extend, agreement.graph_size, agreement.graph_miss] += 1
        self.last_tokens = agreement.global_num_tokens
        totals = self.total_tokens or [0] * len(self.last_tokens)
        self.total_tokens = [a + b for a, b in zip(totals, self.last_tokens, strict=True)]

    def graph_counts(self, sizes: GraphSizes) -> tuple[GraphCount, ...]:
        """Returns the steps by what ran them, runner by runner, sizes ascending."""
        counts: Counter[tuple[str, int, str]] = Counter()
        for (has_extend, size, miss), num_steps in self._num_steps.items():
            if size is None:
                counts["eager", 0, miss or ""] += num_steps
            else:
                counts[sizes.extend_runner if has_extend else "decode", size, ""] += num_steps
        return tuple(GraphCount(*key, num_steps) for key, num_steps in sorted(counts.items()))
