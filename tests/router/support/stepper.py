"""A scheduler and fake executors that a test drives by hand, one step at a time."""

import itertools
from collections import deque
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from router.requests.request import Listeners, Request, Sequence
from router.requests.waiting_queue import SequenceQueue, WaitingQueue
from router.scheduling.counters import GroupMeasures
from router.scheduling.kv.prefix_cache import PrefixCache
from router.scheduling.scheduler import Scheduler, SchedulerSettings
from router.scheduling.sequence_table import RowStatus
from router.scheduling.speculation import DraftCounts
from router.scheduling.step import GroupShape, SpeculationShape, StepPlan
from tests.router.support.block_checks import check_cache
from tests.router.support.fake_rank import FakeRank, expected_output
from tests.router.support.plans import join_results
from tests.router.support.requests import make_request


def make_shape(**sizes: Any) -> GroupShape:
    """A group of one rank with 40 blocks of 4 tokens, unless told otherwise."""
    dp_size = sizes.pop("dp_size", 1)
    num_blocks = sizes.pop("num_blocks", 40)
    defaults = {
        "block_size": 4,
        "rows_per_rank": 8,
        "max_num_batched_tokens": 32,
        "max_num_logits": 16,
        "max_model_len": 48,
    }
    return GroupShape(dp_size=dp_size, num_blocks=(num_blocks,) * dp_size, **{**defaults, **sizes})


def speculation(**fields: Any) -> SpeculationShape:
    """A chain of three drafts, unless told otherwise."""
    defaults = {
        "algorithm": "eagle",
        "num_draft_tokens": 4,
        "num_draft_steps": 3,
        "num_reserved_tokens": 4,
    }
    return SpeculationShape(**{**defaults, **fields})


class Stepper:
    """Plans and commits steps when told to. Each position of the fakes' KV holds its token.

    Args:
        acceptance: Share of drafts that are accepted if those before them are.
        logs_blocks: Whether somebody asks what the prefix caches hold.
        settings: See SchedulerSettings.

    Attributes:
        waiting: What a scheduler that is made from now on takes sequences from.
        ended: Sequences that ended, in order.
        listener: Of every request made here.
        results: What the executors have answered to the steps in flight.
    """

    def __init__(
        self,
        shape: GroupShape,
        *,
        acceptance: float = 1.0,
        logs_blocks: bool = False,
        **settings: Any,
    ) -> None:
        self.shape = shape
        self.admission = WaitingQueue(max_sequences=1000, max_tokens=100_000)
        self.waiting: SequenceQueue = self.admission
        self.listeners = Listeners(max_listeners=4)
        self.listener = self.listeners.open()
        self.ended: list[Sequence] = []
        self.now = 0.0
        self.measures = GroupMeasures()
        self._settings = SchedulerSettings(**{"min_chunk_tokens": 1, **settings})
        self.begin_epoch(PrefixCache.of_group(shape, is_logged=logs_blocks))
        self.ranks = FakeRank.of_group(shape, acceptance=acceptance)
        self._numbers = itertools.count(1)

    def begin_epoch(self, caches: list[PrefixCache]) -> None:
        """Makes a scheduler, as for a group that has formed: nothing is bound or in flight."""
        self.scheduler = Scheduler(
            self.shape,
            self.waiting,
            self.listeners,
            self._settings,
            clock=lambda: self.now,
            on_end=self.ended.append,
            measures=self.measures,
            caches=caches,
            kv_ids=[f"kv{rank}" for rank in range(self.shape.dp_size)],
        )
        self.table = self.scheduler.table
        self.in_flight: deque[StepPlan] = deque()
        self.results: deque[Any] = deque()

    def lose(self) -> None:
        """Loses the steps in flight, and begins an epoch with what the ranks keep."""
        self.scheduler.salvage(self.in_flight)
        self.scheduler.abandon()
        for rank in self.ranks:
            rank.begin_epoch()
        self.begin_epoch(self.scheduler.caches)

    def submit(
        self,
        prompt: SequenceOf[int],
        max_tokens: int = 4,
        **fields: Any,
    ) -> Request:
        """Submits a request; see `make_request`."""
        number = next(self._numbers)
        fields = {"request_id": f"r{number}", "tag": number, "arrival_time": self.now, **fields}
        request = make_request(prompt, self.listener, max_tokens, **fields)
        self.admission.submit(request)
        return request

    def plan(self) -> StepPlan | None:
        """Schedules a step and lets the executors run it; its result waits for `commit`."""
        plan = self.scheduler.schedule()
        if plan is not None:
            batches = plan.batches
            readers = (
                batches if plan.num_pairs is None else map(plan.decodes.batch, range(len(batches)))
            )
            assert plan.kv_tokens.tolist() == [each.num_computed_tokens.sum() for each in readers]
            self.in_flight.append(plan)
            self.results.append(
                join_results(
                    [
                        rank.run(batch, plan.agreement)
                        for rank, batch in zip(self.ranks, batches, strict=True)
                    ]
                )
            )
        return plan

    def commit(self) -> DraftCounts:
        """Commits the earliest step in flight. Returns what came of its drafts."""
        for rank in self.ranks:
            rank.answered()
        return self.scheduler.commit(self.in_flight.popleft(), self.results.popleft())

    def step(self) -> StepPlan:
        """Plans and commits one step; there is work for one."""
        plan = self.plan()
        assert plan is not None
        self.commit()
        return plan

    def run(self, depth: int = 1, max_steps: int = 1000) -> list[StepPlan]:
        """Steps until nothing is left to run, with up to ``depth`` steps in flight."""
        plans = []
        for _ in range(max_steps):
            while len(self.in_flight) < depth and (plan := self.plan()) is not None:
                plans.append(plan)
            if not self.in_flight:
                return plans
            self.commit()
        raise AssertionError(f"still busy after {max_steps} steps")

    def check(self) -> None:
        """Asserts what holds between any two calls."""
        table = self.table
        for rank, cache in enumerate(self.scheduler.caches):
            check_cache(cache)
            rows = range(rank * table.rows_per_rank, (rank + 1) * table.rows_per_rank)
            bound = [row for row in rows if table.status[row] != RowStatus.FREE]
            held = [table.blocks_of(row) for row in bound]
            windows = [table.window_blocks_of(row) for row in bound]
            blocks, window_blocks = (
                set(np.concatenate([np.zeros(0, np.int32), *ids]).tolist())
                for ids in (held, windows)
            )
            assert cache.pool.num_used == len(blocks | window_blocks)
            assert not blocks & window_blocks
        for key, row in self.scheduler._blocks._unnamed.items():
            assert key == table.bound(row).tokens[: table.block_size].tobytes()
            assert table.num_named_blocks[row] == 0
        taken = np.zeros(len(table.status), np.int32)
        for plan in self.in_flight:
            taken += plan.runs
        assert list(map(id, self.scheduler.in_flight)) == list(map(id, self.in_flight))
        assert not taken[table.status == RowStatus.FREE].any()
        is_bound = table.status != RowStatus.FREE
        assert (table.num_tokens <= table.max_len)[is_bound].all()
        assert (table.num_computed <= table.max_computed)[is_bound].all()
        assert (table.num_computed <= table.num_blocks * table.block_size)[is_bound].all()
        # What is in flight may gain nothing; what is not is known to the last token.
        is_decode = table.status == RowStatus.DECODE
        assert (table.num_computed >= table.num_tokens - 1)[is_decode].all()
        is_known = is_decode & (taken == 0)
        assert (table.num_computed == table.num_tokens - 1)[is_known].all()
        if table.has_windows:
            num_past = np.maximum(table.num_computed // table.block_size - table.window_reach, 0)
            is_live = is_decode | (table.status == RowStatus.EXTEND)
            assert (table.num_past_blocks <= num_past)[is_live].all()
            is_answered = is_live & (taken == 0)
            assert (table.num_past_blocks == num_past)[is_answered].all()

    def check_idle(self) -> None:
        """Asserts that no sequence, row or block is left behind."""
        self.check()
        assert len(self.admission) == self.admission.num_tokens == 0
        assert (self.table.status == RowStatus.FREE).all()
        assert all(cache.pool.num_used == 0 for cache in self.scheduler.caches)


CHAIN = speculation()
PROMPT = [1, 2, 3]


def drafting(min_tokens: float = 1, between: int = 2, *, is_on: bool = True) -> dict[str, Any]:
    """Settings of a scheduler: that drafts always pay, unless said otherwise."""
    return {
        "speculation": "on" if is_on else "off",
        "min_tokens_per_draft_step": min_tokens,
        "prompt_steps_between_drafts": between,
    }


ALWAYS = drafting()


def draft_stepper(
    acceptance: float = 1.0, drafts: dict[str, Any] = ALWAYS, **sizes: object
) -> Stepper:
    """A stepper whose group drafts."""
    shape = make_shape(**{"speculation": CHAIN, **sizes})
    return Stepper(shape, acceptance=acceptance, **drafts)


def output_of(request: Request) -> list[list[int]]:
    return [s.tokens[s.num_prompt_tokens : s.num_tokens].tolist() for s in request.sequences]


def right_output(request: Request) -> list[list[int]]:
    """What each continuation must give: the fake model's tokens up to the stop."""
    stop, prompt = request.stop, request.prompt.tolist()
    return [
        expected_output(prompt, stop.max_tokens, stop.stop_token_ids, s.seed, stop.min_tokens)
        for s in request.sequences
    ]


def assert_right(*requests: Request) -> None:
    """Asserts that each continuation ended with the tokens that it must give."""
    for request in requests:
        assert not any(sequence.error for sequence in request.sequences)
        assert output_of(request) == right_output(request)


def finish(world: Stepper, *requests: Request, depth: int = 2) -> None:
    """Runs what is left: each request ends with the tokens that it must give, and leaves nothing."""
    world.run(depth)
    assert_right(*requests)
    world.check_idle()


def token_counts(plan: StepPlan) -> tuple[int, ...]:
    return plan.agreement.global_num_tokens


def widths(plans: list[StepPlan]) -> list[int]:
    return [plan.agreement.num_draft_tokens for plan in plans]


def limits(plan: StepPlan) -> list[int]:
    assert plan.limits is not None
    return plan.limits.tolist()


def stop_at(place: int, prompt: SequenceOf[int] = PROMPT) -> int:
    """A token that an output has at this place and not before, so that it can be a stop token."""
    output = expected_output(prompt, 40, ())
    assert output[place] not in output[:place]
    return output[place]
