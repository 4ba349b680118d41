"""Lockstep in the comparison: the real scheduler, with answers made up."""

from collections.abc import Callable
from functools import partial

import numpy as np

from router.requests.request import Listeners, Sequence
from router.requests.waiting_queue import WaitingQueue
from router.scheduling.counters import GroupMeasures
from router.scheduling.scheduler import Scheduler, SchedulerSettings
from router.scheduling.step import GroupShape, StepPlan, StepResult
from tests.bench.policies.world import BLOCK, Gaps, Job, Sizes, Work
from tests.router.support.requests import make_request

UNBOUNDED = 10**12


class Lockstep:
    """A scheduler without executors.

    Args:
        sizes: Of the group.
        settings: Of the scheduler.
    """

    def __init__(self, sizes: Sizes, settings: SchedulerSettings) -> None:
        self.gaps = Gaps()
        self.now = 0.0
        self._settings = settings
        listeners = Listeners(max_listeners=1)
        self._listener = listeners.open()
        self.waiting = WaitingQueue(max_sequences=UNBOUNDED, max_tokens=UNBOUNDED)
        self.measures = GroupMeasures()
        self.measures.inter_token_s = self.gaps  # type: ignore[assignment]
        self._jobs: dict[int, Job] = {}
        self.scheduler = Scheduler(
            GroupShape(
                dp_size=sizes.num_ranks,
                num_blocks=(sizes.num_blocks,) * sizes.num_ranks,
                block_size=BLOCK,
                rows_per_rank=sizes.num_rows,
                max_num_batched_tokens=sizes.max_tokens,
                max_num_logits=2 * sizes.num_rows,
                max_model_len=sizes.max_len,
            ),
            self.waiting,
            listeners,
            settings,
            clock=lambda: self.now,
            on_end=self._on_end,
            measures=self.measures,
        )

    @property
    def num_preemptions(self) -> int:
        return sum(self.scheduler.num_preemptions)

    def submit(self, job: Job) -> None:
        self._jobs[job.number] = job
        names = job.names or (-1 - job.number,) * (job.num_prompt // BLOCK + 1)
        prompt = np.repeat(np.array(names), BLOCK)[: job.num_prompt]
        missing = np.full(job.num_prompt - len(prompt), -1 - job.number)
        fields = {"request_id": str(job.number), "arrival_time": job.arrival, "tag": job.number}
        request = make_request(
            np.concatenate((prompt, missing)),
            self._listener,
            job.num_output,
            priority=job.priority,
            caller=(job.flow,) if job.flow else (),
            **fields,
        )
        self.waiting.submit(request)

    def plan(self, now: float) -> Work | None:
        self.now = now
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        pairs = None if plan.num_pairs is None else plan.num_pairs.tolist()
        return Work(plan.agreement.global_num_tokens, plan.kv_tokens.tolist(), pairs, plan)

    def wait_s(self, work: Work) -> float:
        plan, cost = work.handle, self.measures.costs.plain
        assert isinstance(plan, StepPlan)
        if not (cost.is_known and self._settings.go_by_time):
            return 0.0
        return self.measures.lead.wait_s(cost.predict(plan))

    def commit(self, work: Work, now: float) -> None:
        self.now = now
        plan = work.handle
        assert isinstance(plan, StepPlan)
        self.measures.lead.note(work.queued, was_put_off=work.is_late)
        tokens, forward_ns = np.ones(sum(plan.num_sampled), np.int32), int(work.seconds * 1e9)
        self.scheduler.commit(plan, StepResult(tokens, None, [0], [forward_ns]))

    def _on_end(self, sequence: Sequence) -> None:
        job, progress = self._jobs.pop(sequence.request.tag), sequence.progress
        assert sequence.num_output_tokens == job.num_output
        job.first, job.end, job.num_cached = (
            progress.first_token_time,
            self.now,
            progress.num_cached_tokens,
        )


def lockstep(**settings: object) -> Callable[[Sizes], Lockstep]:
    """Returns what makes a scheduler with these settings, and names them."""
    return partial(Lockstep, settings=SchedulerSettings(**settings))  # type: ignore[arg-type]
