"""Planner of a step's prompts: its budget, which of them run, and their chunks.

Moves 2 to 7 of a step (`Scheduler`). Prompts that are held are laid out once: until more than a few
decodes end, a step only decides again whether they run. New ones that come meanwhile wait unbound, and
count in that as if they were bound.
"""

import math
from collections.abc import Callable
from itertools import chain
from operator import add
from typing import NamedTuple

import numpy as np

from router.requests.request import Int32Array, Sequence
from router.requests.waiting_queue import SequenceQueue
from router.scheduling.columns import Mask, RowSet
from router.scheduling.counters import GroupMeasures
from router.scheduling.kv.row_blocks import RowBlocks
from router.scheduling.prompts.binding import Binder
from router.scheduling.prompts.order import PromptOrder
from router.scheduling.prompts.rank_choice import fill_level
from router.scheduling.sequence_table import RowStatus, SequenceTable
from router.scheduling.speculation import Drafting
from router.scheduling.step import GroupShape
from router.scheduling.step_budget import (
    Budget,
    BudgetSettings,
    Hold,
    Offer,
    Prompt,
    Why,
    drained_tokens,
    fill,
    gap_range,
    open_budget,
)
from router.scheduling.step_builder import Chunk, StepBuilder

# Prompt tokens of a rank for each second of the target while it is not known what steps take: few, and not
# always as many, as steps that are alike tell nothing apart.
UNKNOWN_RATES = 10_000, 20_000

MAX_UNBOUND = 64  # sequences that come while prompts are held, and wait with them
FEW_ENDS = 64  # one of so many decodes: without it, prompts are held or run as with it


class _Layout(NamedTuple):
    """What a step could run of prompts.

    Attributes:
        rows: Of the prompts, ascending.
        budget: Of the step.
        prompts: [dp_size] each rank's, in order.
        counts: [dp_size] tokens of these.
        offer: What that gives and costs.
        num_urgent: Their tokens that may widen the gap; infinity: callers wait for them to go on.
        oldest: When the first of them was bound.
        num_stuck: Sequences that waited for rows or KV.
        waiting: How many new sequences wait until these run, and their tokens.
        since: When the first of them began to.
        offer_beside: The offer with them.
    """

    rows: list[int]
    budget: Budget
    prompts: list[list[Prompt]]
    counts: list[int]
    offer: Offer
    num_urgent: float
    oldest: float
    num_stuck: int
    waiting: tuple[int, int]
    since: float
    offer_beside: Offer

    def is_beside(self, num_decodes: list[int], max_tokens: int) -> bool:
        """Whether hardly any of the decodes have ended that it was laid out beside, and each rank has room.

        One that lacked a block then may run now, in place of another rank's.
        """
        num_before, num_now = self.budget.num_decodes, sum(num_decodes)
        has_room = all(map(max_tokens.__ge__, map(add, self.counts, num_decodes)))
        return has_room and num_now <= num_before <= num_now + num_before // FEW_ENDS


class PromptPlanner:
    """Takes prompts into steps.

    Args:
        shape: The group's sizes.
        table: Its rows.
        blocks: Theirs.
        waiting: The sequences that wait.
        builder: Builds the steps.
        binder: Binds them.
        order: Says whose turn it is.
        drafting: Asked whether a step is for drafts; None: none is.
        settings: What the operator said.
        measures: Counts decisions.
        clock: In seconds.
    """

    def __init__(
        self,
        shape: GroupShape,
        table: SequenceTable,
        blocks: RowBlocks,
        waiting: SequenceQueue,
        builder: StepBuilder,
        binder: Binder,
        order: PromptOrder,
        drafting: Drafting | None,
        settings: BudgetSettings,
        measures: GroupMeasures,
        clock: Callable[[], float],
    ) -> None:
        self._shape = shape
        self._table = table
        self._blocks = blocks
        self._waiting, self._line = waiting, waiting.line
        self._builder = builder
        self._binder = binder
        self._order = order
        self._drafting = drafting
        self._settings = settings
        self._measures = measures
        self._clock = clock
        self._hold = Hold(settings, clock())
        self._first_target_s, _ = gap_range(settings, order.prices)
        self._held: _Layout | None = None  # what the last step did not run

    def take(self, runs: Mask) -> tuple[Int32Array | None, list[list[Chunk]]]:
        """Binds waiting sequences, and takes prompts into the step unless it is the drafts' turn.

        Args:
            runs: bool [R], rows that decode. Rows that are preempted here leave it.

        Returns:
            The decodes' limits if the step drafts while prompts wait, and each rank's chunks.
        """
        table = self._table
        rows = table.prompt_rows
        if not len(self._waiting) and not rows:
            self._hold.skip(self._clock())
            return None, []
        decodes = table.row_set(runs)
        num_decodes = decodes.num_rows
        held, order = self._take_held(rows), self._order
        chunk = self._shape.max_num_batched_tokens
        if held is not None and held.is_beside(num_decodes, chunk):
            if not len(self._waiting):
                counts = self._decide(held._replace(num_stuck=0, waiting=(0, 0)))
                return None, self._take_chunks(held.prompts, counts, runs, num_decodes)
            if self._wait_with(held):
                return None, []
        if self._settings.go_by_time:
            num_seen = self._measures.costs.plain.num_steps[True]
            num_tokens = int(self._first_target_s * UNKNOWN_RATES[num_seen % 2])
            chunk = min(chunk, max(num_tokens, self._settings.min_chunk_tokens))
        order.begin_plan()
        self._waiting.order_by_length(order.seconds_behind(1))
        prompts, budget = held.prompts if held else order.bound(rows), None
        if order.goes_by_time:
            budget = self._open_budget(decodes, rows, held)
            chunk = budget.chunk
        since = held.since if held is not None and held.waiting[0] else self._clock()
        num_stuck = self._binder.bind(prompts, num_decodes, chunk, since)
        if num_stuck:  # one may have given way
            status = table.status
            runs &= status == RowStatus.DECODE
            prompts = [[p for p in rank if status[p.row] == RowStatus.EXTEND] for rank in prompts]
            held = None
        if self._drafting is not None:
            limits = self._drafting.take_turn(runs, has_waiting=len(self._waiting) > 0)
            if limits is not None:
                return limits, []
        if budget is None:
            counts = self._fill_evenly(prompts, num_decodes, chunk)
        else:
            counts = self._fill(prompts, num_decodes, budget, num_stuck, held)
        return None, self._take_chunks(prompts, counts, runs, num_decodes)

    def _take_held(self, rows: list[int]) -> _Layout | None:
        """Returns what the last step held, if these rows are all that it held.

        As nothing of them has run, their order and what they ask for is what it was. If no others wait, and
        hardly any decode has ended, only time has passed: prices and KV, too, are those of that step.
        """
        held, self._held = self._held, None
        if held is None or self._drafting is not None or self._line.are_rivals:
            return None
        return held if held.rows == rows else None

    def _wait_with(self, held: _Layout) -> bool:
        """Whether all that wait go on waiting with what is held, which is then held again.

        To bind each as it comes would have every step lay everything out anew.
        """
        now, waiting = self._clock(), (len(self._waiting), self._waiting.num_tokens)
        if held.num_stuck or not self._waiting.are_new:
            return False
        if waiting != held.waiting:
            if not self._have_places():
                return False
            num_waiting, num_tokens = waiting
            since = held.since if held.waiting[0] else now
            offer = held.offer.beside(num_waiting, held.budget.prices.most(num_tokens))
            held = held._replace(waiting=waiting, since=since, offer_beside=offer)
        why = self._hold.decide(held.offer_beside, now, oldest=held.oldest, num_stuck=0)
        if why is not Why.HELD:
            return False
        self._measures.decisions[why] += 1
        self._held = held
        return True

    def _have_places(self) -> bool:
        """Whether all that wait are few, and there are rows for them."""
        num_rows, num_bound = len(self._table.sequences), int(self._table.num_bound_rows.sum())
        return (
            len(self._waiting) <= min(MAX_UNBOUND, num_rows - num_bound)
            and self._waiting.has_much_room
        )

    def _num_urgent(self, rows: list[int], *, may_hurry: bool = True) -> float:
        """Returns the tokens that rows have to run and that may widen the gap.

        Infinity: interrupted answers have yet to go on.
        """
        table, num_tokens = self._table, 0
        for row in rows:
            sequence = table.bound(row)
            if may_hurry and _hurries(sequence):
                return math.inf
            if sequence.request.priority >= 0:
                num_tokens += int(table.num_extend[row]) - int(table.num_computed[row])
        return num_tokens

    def _open_budget(self, decodes: RowSet, rows: list[int], held: _Layout | None) -> Budget:
        """Returns the time of this step; `rows` are those of its prompts, all of them held or none."""
        # Beside other flows' answers, a flow that resumes many has its share of the time, as ever.
        is_alone = not self._line.are_rivals or not any(decodes.num_rows)
        backlog = held.num_urgent if held else self._num_urgent(rows, may_hurry=is_alone)
        if is_alone and (first := self._waiting.peek()) and _hurries(first):
            backlog = math.inf  # their callers wait for the next token
        else:
            most = drained_tokens(self._settings, self._order.prices) * self._shape.dp_size
            backlog += self._waiting.backlog(most)
        return open_budget(
            self._settings,
            self._order.prices,
            decodes.num_rows,
            self._builder.kv_tokens(decodes),
            backlog,
            self._shape.max_num_batched_tokens,
        )

    def _fill_evenly(
        self, prompts: list[list[Prompt]], num_decodes: list[int], chunk: int
    ) -> list[int]:
        """Returns how many prompt tokens each rank runs: up to one number of tokens for all ranks."""
        fullest = max(num_decodes)
        most = min(self._shape.max_num_batched_tokens, fullest + chunk)
        floor = fullest + self._settings.min_chunk_tokens  # of prompts; a level is of all tokens
        left = [sum(prompt.left for prompt in rank) for rank in prompts]
        level = fill_level(num_decodes, left, max_tokens=most, floor=floor)
        return [level - num for num in num_decodes]

    def _fill(
        self,
        prompts: list[list[Prompt]],
        num_decodes: list[int],
        budget: Budget,
        num_stuck: int,
        held: _Layout | None,
    ) -> list[int]:
        """Returns how many prompt tokens each rank runs; none if they are held.

        Args:
            held: What the last step held, all of which is among the prompts; None: it held nothing, or
                something else.
        """
        counts = fill(budget, prompts, self._settings.min_chunk_tokens)
        if not any(counts):
            return counts
        rows = sorted(prompt.row for prompt in chain.from_iterable(prompts))
        new = rows if held is None else list(set(rows).difference(held.rows))
        bound = list(map(self._table.bound, new))
        starts = [each.progress.start_time for each in bound]
        oldest = min((start for start in starts if start is not None), default=math.inf)
        num_urgent = self._num_urgent(new)
        if held is not None:
            oldest, num_urgent = min(oldest, held.oldest), num_urgent + held.num_urgent
        if self._line.are_rivals:  # a flood's many are no reason to hold another's prompt
            num_stuck = min([num_stuck, *(sequence.flow.num_waiting for sequence in bound)])
        offer = Offer.of(budget, prompts, counts)
        own = rows, budget, prompts, counts, offer
        return self._decide(_Layout(*own, num_urgent, oldest, num_stuck, (0, 0), math.inf, offer))

    def _decide(self, layout: _Layout) -> list[int]:
        """Returns how many prompt tokens each rank runs of those laid out; none if they are held."""
        prompts, counts, num_stuck = layout.prompts, layout.counts, layout.num_stuck
        now = self._clock()
        why = self._hold.decide(layout.offer, now, oldest=layout.oldest, num_stuck=num_stuck)
        self._measures.decisions[why] += 1
        if why is Why.HELD:
            self._held = layout
            return [0] * len(counts)
        counts = self._hold.trim(layout.budget, prompts, counts, num_stuck=num_stuck)
        self._hold.note(counts, now)
        return counts

    def _take_chunks(
        self,
        prompts: list[list[Prompt]],
        counts: list[int],
        runs: Mask,
        num_decodes: list[int],
    ) -> list[list[Chunk]]:
        """Returns each rank's chunks of prompts, each with blocks, up to so many tokens.

        Rows that are preempted for them leave `runs`.
        """
        if not any(counts):
            return []
        chunks = self._cut(prompts, num_decodes, counts)
        taken = list(chain.from_iterable(chunks))
        rows = np.array([chunk.row for chunk in taken], dtype=np.int64)
        num_tokens = np.array([chunk.num_tokens for chunk in taken], dtype=np.int32)
        if self._blocks.give_all(rows, num_tokens):
            return chunks
        status = self._table.status
        chunks = self._cut(prompts, num_decodes, counts, self._blocks.give)
        runs &= status == RowStatus.DECODE
        return [[c for c in rank if status[c.row] == RowStatus.EXTEND] for rank in chunks]

    def _cut(
        self,
        prompts: list[list[Prompt]],
        num_decodes: list[int],
        counts: list[int],
        give: Callable[[int, int, int], int] | None = None,
    ) -> list[list[Chunk]]:
        """Returns each rank's chunks up to so many tokens.

        Args:
            give: Says how many tokens of a rank's row get blocks, of those that it would run; None: all.
        """
        table, shape = self._table, self._shape
        chunks: list[list[Chunk]] = [[] for _ in range(shape.dp_size)]
        for rank, tokens_left in enumerate(counts):
            logits_left = shape.max_num_logits - num_decodes[rank]
            for _, left, _, row in prompts[rank]:
                count, num_logits = min(tokens_left, left), 1
                if table.num_scored and table.scores_prompt[row]:
                    count = num_logits = min(count, logits_left)
                if count <= 0 or logits_left <= 0 or table.status[row] != RowStatus.EXTEND:
                    continue
                if give is not None:
                    count = give(rank, row, count)
                if count > 0:
                    chunks[rank].append(Chunk(row, count))
                    tokens_left -= count
                    logits_left -= num_logits
        return chunks


def _hurries(sequence: Sequence) -> bool:
    """Whether steps may take the largest gap until it goes on: not for batch work."""
    return sequence.is_interrupted and sequence.request.priority >= 0
