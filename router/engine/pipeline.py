"""Steps in flight of one epoch: planned when it is time, sent, and committed in their order.

With two in flight, a step is planned while the one before it runs, as late as executors allow, so that
who comes meanwhile is in it; a timer sees to that, and what it cannot raise is kept for the loop.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter

from router.engine.executors import Executors
from router.engine.settings import EngineSettings
from router.scheduling.counters import EpochStats, GroupMeasures
from router.scheduling.scheduler import Scheduler
from router.scheduling.step import InFlight


class StepPipeline:
    """The steps of one epoch that are on their way.

    Args:
        scheduler: Plans and commits them.
        executors: Run them.
        settings: How many, and whether they go by time.
        may_plan: Whether there shall be another one.
        measures: Of the group.
        stats: Of the epoch.

    Attributes:
        scheduler: As given.
        steps: The steps, the earliest first.
        late_error: What went wrong while the timer planned; None: nothing.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executors: Executors,
        settings: EngineSettings,
        *,
        may_plan: Callable[[], bool],
        measures: GroupMeasures,
        stats: EpochStats,
    ) -> None:
        self.scheduler = scheduler
        self.steps: deque[InFlight] = deque()
        self.late_error: BaseException | None = None
        self._executors = executors
        self._settings = settings
        self._may_plan = may_plan
        self._measures = measures
        self._stats = stats
        self._loop = asyncio.get_running_loop()
        self._begin_time = 0.0  # of the earliest step, on an executor
        self._timer: asyncio.TimerHandle | None = None  # that plans the next one

    def fill(self) -> None:
        """Plans and sends steps, or sees to it that the next one is planned when it is time."""
        while len(self.steps) < self._settings.pipeline_depth:
            if (wait_s := self._until_plan_s()) > 0:
                self._timer = self._loop.call_later(wait_s, self._plan_late)
                return
            if not self._plan():
                return

    async def take_answer(self) -> None:
        """Receives and commits the earliest step.

        Raises:
            ExecutorLost: An executor died, hangs or answered wrongly.
            GroupHeld: Another router has taken the group.
            Exception: What went wrong while the timer planned.
        """
        step = self.steps[0]
        result = await self._executors.receive(step)
        received = perf_counter()
        self.stop_timer()
        if self.late_error is not None:
            raise self.late_error
        drafts = self.scheduler.commit(step.plan, result)
        self.steps.popleft()
        self._begin_time = self._loop.time()
        self._measures.lead.note(min(result.queued_ns) * 1e-9, was_put_off=step.is_late)
        self._stats.add(step.plan, result, self._begin_time, drafts)
        self._measures.times.add(step, result, received)

    def stop_timer(self) -> None:
        """Plans nothing until `fill` is called."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _plan(self, *, is_late: bool = False) -> bool:
        """Plans a step and sends it; returns False if there is nothing to run, or none shall be."""
        if not self._may_plan():
            return False
        begun = perf_counter()
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        step = InFlight(plan, begun, perf_counter(), is_late)
        if not self.steps:
            self._begin_time = self._loop.time()
        self._executors.send(step)
        self.steps.append(step)
        return True

    def _plan_late(self) -> None:
        try:
            self._plan(is_late=True)
        except BaseException as error:
            self.late_error = error

    def _until_plan_s(self) -> float:
        """Returns seconds until the next step is planned; 0: now."""
        if self._settings.pipeline_depth != 2 or len(self.steps) != 1:
            return 0.0
        plan = self.steps[0].plan
        cost = self._measures.costs.of(plan)
        if not (cost.is_known and self._settings.go_by_time):
            return 0.0
        wait_s = self._measures.lead.wait_s(cost.predict(plan))
        return self._begin_time + wait_s - self._loop.time() if wait_s else 0.0
