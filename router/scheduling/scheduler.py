"""Scheduler of one group: each step's sequences and KV blocks, and what a step's answer ends.

`schedule` hands out work and counts it as computed at once, so that the next step is planned before
this one is back; `commit` takes the tokens. A row of the table goes this way:

    waiting ──bind───▶ prompt chunks ──▶ decodes ──end──▶ freed once no step in flight runs it
       ▲                     └───preempt────┘
       └──────once no step in flight runs it

The SequenceTable knows each sequence, its rank's PrefixCache each block, and only the engine's task
touches either. A step is planned in eight moves:

    1  decodes   every row that can, one token
    2  budget    seconds that the step may take                          prompts, step_budget
    3  bind      waiting prompts, in the line's order, to ranks          prompts
    4  hold      whether prompts run at all, or wait for more            step_budget
    5  level     one level of time for all ranks                         step_budget
    6  trim      its top, where that costs more than it gives            step_budget
    7  chunks    each rank's prompts up to it, with blocks               prompts
    8  when      as late as executors allow                              the engine

Until enough steps were timed (`step_cost`), the level is one of tokens and nothing is held.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import chain

import numpy as np

from protos.transport.errors import RpcError
from router.errors import ConstraintFailed
from router.requests.request import Listeners, Sequence
from router.requests.waiting_queue import SequenceQueue
from router.scheduling.columns import Growth, Mask
from router.scheduling.commit import (
    NewTokens,
    apply_stop_conditions,
    hand_out_logprobs,
    write_runs,
    write_tokens,
)
from router.scheduling.counters import GroupMeasures, TokenGaps
from router.scheduling.kv.prefix_cache import PrefixCache
from router.scheduling.kv.row_blocks import RowBlocks
from router.scheduling.kv.salvage import salvage
from router.scheduling.prompts.binding import Binder
from router.scheduling.prompts.lookup import PrefixLookup
from router.scheduling.prompts.order import PromptOrder
from router.scheduling.prompts.planner import PromptPlanner
from router.scheduling.sequence_table import RowStatus, SequenceTable
from router.scheduling.speculation import DraftCounts, DraftGate, Drafting, DraftSettings
from router.scheduling.step import GroupShape, StepPlan, StepResult
from router.scheduling.step_budget import BudgetSettings
from router.scheduling.step_builder import StepBuilder


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings(BudgetSettings, DraftSettings):
    """Settings of a group's scheduler."""


class Scheduler:
    """Continuous batching for the DP ranks of one group in one epoch: decodes first, then prompts.

    Args:
        shape: The group's sizes.
        waiting: Queue of the waiting sequences; preempted ones go back to it.
        listeners: Woken at each commit.
        settings: What the operator said.
        clock: The event loop's time, in seconds.
        on_end: Told of each bound sequence that ends, after its row has let go of it.
        measures: Gets the sequences' times.
        caches: [dp_size] prefix cache of each rank, with what the last epoch left in it; None: empty.
        kv_ids: [dp_size] which KV each rank has, see GroupInfo; empty: it is in no later epoch.

    Attributes:
        caches: [dp_size] prefix cache of each rank.
        num_preemptions: [dp_size] sequences that lost their blocks to others.
        gate: Knows whether drafts pay.
        in_flight: Steps that were handed out and not committed, the earliest first.
    """

    def __init__(
        self,
        shape: GroupShape,
        waiting: SequenceQueue,
        listeners: Listeners,
        settings: SchedulerSettings,
        *,
        clock: Callable[[], float],
        on_end: Callable[[Sequence], None],
        measures: GroupMeasures | None = None,
        caches: list[PrefixCache] | None = None,
        kv_ids: SequenceOf[str] = (),
    ) -> None:
        self.table = SequenceTable(
            dp_size=shape.dp_size,
            rows_per_rank=shape.rows_per_rank,
            max_model_len=shape.max_model_len,
            block_size=shape.block_size,
            kv_window=shape.kv_window,
        )
        self.caches = PrefixCache.of_group(shape) if caches is None else caches
        self.num_preemptions = [0] * shape.dp_size
        self.gate = DraftGate(settings)
        speculation = shape.speculation if self.gate.is_on else None
        self._waiting, self._line = waiting, waiting.line
        self._listeners = listeners
        self._clock = clock
        self._on_end = on_end
        self._measures = measures = measures or GroupMeasures()
        self._gaps = TokenGaps(len(self.table.status), measures.inter_token_s)
        self._blocks = blocks = RowBlocks(
            self.table, self.caches, self.preempt, shape.max_window_blocks
        )
        self._drafting: Drafting | None = None  # where no step ever is speculative
        if speculation is not None:
            self._drafting = Drafting(self.table, blocks, speculation, self.gate)
        self._lookup = PrefixLookup(
            self.caches, blocks, shape.block_size, kv_ids or [""] * shape.dp_size
        )
        order = PromptOrder(self.table, waiting.line, settings, measures.costs)
        self._builder = StepBuilder(self.table, shape, speculation)
        own = shape, self.table, blocks, waiting
        binder = Binder(*own, self._lookup, order, self._gaps, measures, clock, self.preempt)
        self._prompts = PromptPlanner(
            *own, self._builder, binder, order, self._drafting, settings, measures, clock
        )
        self.in_flight: deque[StepPlan] = deque()
        self._leaving: list[int] = []  # rows in PREEMPTED or ENDED

    def schedule(self) -> StepPlan | None:
        """Hands out the next step; None if there is nothing to run."""
        num_preemptions = sum(self.num_preemptions)
        runs, growth = self._take_decodes()
        limits, chunks = self._prompts.take(runs)
        has_lost = sum(self.num_preemptions) > num_preemptions
        if not np.count_nonzero(runs) and not any(chunks):
            # If preemption left nothing to run, schedule again: the waiting sequence has blocks now.
            return self.schedule() if has_lost and not self._leaving else None
        if limits is None and self._drafting is not None:
            limits = self._drafting.prepare(runs, chunks)
        if has_lost or self._drafting is not None:
            growth = None  # not what executors have to be told, or not all of it
        plan = self._builder.build(runs, chunks, limits, growth)
        if rows := [chunk.row for chunk in chain.from_iterable(chunks)]:
            self._blocks.show(rows)
        self.in_flight.append(plan)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> DraftCounts:
        """Takes a step's tokens, ends the sequences that they end and wakes the listeners.

        Returns what came of its drafts, without sequences that have ended meanwhile.
        """
        table, is_speculative = self.table, plan.limits is not None
        earliest = self.in_flight.popleft()
        assert earliest is plan, "steps are answered in their order"
        hand_out_logprobs(plan, result)
        if table.num_constrained:
            self._fail_rows(result)
        num_before = table.num_tokens.copy() if self._line.are_many else None
        write = write_runs if is_speculative else write_tokens
        new = write(table, plan, result, has_ended=bool(self._leaving))
        self._note_times(new, has_first=bool(plan.chunks))
        self._listeners.wake(table.listener, new.has_token)
        due = [table.bound(row) for row, _ in new.due]
        num_dropped = sum(apply_stop_conditions(table, *row) for row in new.due)
        if num_before is not None:
            self._line.charge_outputs(table.flow.repeat(table.num_tokens - num_before))
        self._end([sequence for sequence in due if sequence.is_ended])
        if table.has_windows:
            self._blocks.give_back(plan, new.has_token)
        self._free_left_rows()
        price = self._measures.costs.add(plan, result)
        if is_speculative:
            self.gate.add(new.num_rows, new.num_kept, price)
            # What one step gives a sequence comes together: no time passes between its tokens.
            num_more = new.num_kept - num_dropped - new.num_rows
            self._measures.inter_token_s.observe(0.0, num_more)
        return new.drafts

    def preempt(self, row: int) -> None:
        """Takes a sequence off its rank; at once, or when the step that runs it is back."""
        progress = self.table.bound(row).progress
        progress.num_preemptions += 1
        progress.gave_way = True
        self.num_preemptions[self.table.rank_of(row)] += 1
        self.table.set_status(row, RowStatus.PREEMPTED)
        self._line.give_back(self.table.bound(row))
        self._leaving.append(row)
        self._free_left_rows()

    def fail(self, sequence: Sequence, error: RpcError) -> None:
        """Ends a bound sequence with an error, now; its row is free when no step runs it."""
        sequence.error = error
        self._end([sequence])
        self._free_left_rows()

    def salvage(self, lost: SequenceOf[StepPlan]) -> None:
        """Leaves in the caches what a later epoch may find there. Call it before `abandon`.

        Args:
            lost: All steps that were handed out and not committed.
        """
        num_computed = salvage(self.table, self._blocks, self.caches, lost)
        for row, sequence in enumerate(self.table.sequences):
            if sequence is not None:
                sequence.progress.num_computed_tokens = int(num_computed[row])
                sequence.progress.kv_id = self._lookup.kv_ids[sequence.dp_rank]

    def abandon(self) -> None:
        """Returns every bound sequence to the waiting queue; the epoch is over."""
        for row in self.table.live_rows().tolist():
            self._line.give_back(self.table.bound(row))
            self.table.bound(row).progress.gave_way = False
        self.table.tokens.settle_all()  # once for all
        for sequence in self.table.sequences:
            if sequence is not None:
                self._send_back(sequence)

    def num_left_tokens(self, sequence: Sequence) -> int:
        """Returns prompt tokens that bound sequences and a new one, whose prefix is cached, have to run."""
        table = self.table
        num_bound = np.sum(
            (table.num_extend - table.num_computed)[table.status == RowStatus.EXTEND]
        )
        return int(num_bound) + len(sequence.tokens) - self._lookup.estimate(sequence)

    # ---- decodes

    def _take_decodes(self) -> tuple[Mask, Growth | None]:
        """Returns bool [R], rows that decode in this step, each with a block for its next token.

        And the blocks that they just got; None if that took preemption.
        """
        table = self.table
        # A row at max_computed has its last token in flight.
        can_run: Mask = table.status == RowStatus.DECODE
        can_run &= table.num_computed < table.max_computed
        is_full = table.num_computed == table.num_blocks * table.block_size
        is_full &= can_run
        growth = self._blocks.grow(is_full)
        if growth is None:
            can_run &= table.num_computed < table.num_blocks * table.block_size
            can_run &= table.status == RowStatus.DECODE
        return can_run, growth

    # ---- new tokens

    def _note_times(self, new: NewTokens, *, has_first: bool) -> None:
        table, now = self.table, self._clock()
        first_rows: list[int] = []
        if has_first:  # only what ran a prompt's end samples a first token
            is_first = table.num_tokens == table.num_prompt + 1
            first_rows = np.flatnonzero(is_first & new.has_token).tolist()
            for row in first_rows:
                sequence = table.bound(row)
                sequence.progress.first_token_time = now
                self._measures.first_token_s.observe(now - sequence.request.arrival_time)
        self._gaps.add(new.has_token, new.num_rows, first_rows, now)

    # ---- rows that are given up

    def _fail_rows(self, result: StepResult) -> None:
        """Ends the sequences that cannot keep to their grammars, with none of the step's tokens."""
        for rank, row, problem in result.failures:
            sequence = self.table.sequences[int(self.table.first_rows[rank]) + row]
            if sequence is not None and sequence.request.grammar:  # else it has ended meanwhile
                sequence.error = ConstraintFailed(problem)
                self._end([sequence])

    def _end(self, sequences: list[Sequence]) -> None:
        """Lets go of bound sequences whose finish_reason or error was just set, and then tells of them."""
        table, rows = self.table, [sequence.row for sequence in sequences]
        table.tokens.settle_for_now(rows)
        for sequence, row in zip(sequences, rows, strict=True):
            self._blocks.leave(sequence)
            self._gaps.leave(row)
            if table.status[row] != RowStatus.PREEMPTED:
                self._line.end(sequence)
                self._leaving.append(row)
            table.set_status(row, RowStatus.ENDED)
        for sequence in sequences:
            self._on_end(sequence)

    def _send_back(self, sequence: Sequence) -> None:
        self.table.detach(sequence)
        sequence.progress.last_token_time = self._gaps.leave(sequence.row)
        if sequence.needs_prompt_logprobs:
            sequence.prompt_logprobs.clear()  # it starts over
        self._waiting.push(sequence)

    def _free_left_rows(self) -> None:
        """Frees the rows that are leaving and that no step in flight runs, with their blocks."""
        if not self._leaving:
            return
        running = [plan.runs for plan in self.in_flight]
        left: list[int] = []
        staying: list[int] = []
        for row in self._leaving:
            (staying if any(runs[row] for runs in running) else left).append(row)
        if not left:
            return
        self._leaving = staying
        self._blocks.release(left)
        for row in left:
            if (sequence := self.table.sequences[row]) is not None:  # it was preempted
                self._send_back(sequence)
        self.table.free_rows(left)
