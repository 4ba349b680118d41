"""Scheduler of one group: each step's sequences and KV blocks, and what a step's answer ends.

`schedule` hands out work and counts it as computed at once, so that the next step is planned before
this one is back; `commit` takes the tokens. A row of the table goes this way:

    waiting ──_bind──▶ prompt chunks ──▶ decodes ──end──▶ freed once no step in flight runs it
       ▲                     └───preempt────┘
       └──────once no step in flight runs it

The SequenceTable knows each sequence, its rank's PrefixCache each block, and only the engine's task
touches either. A step is planned in eight moves:

    1  decodes   every row that can, one token
    2  budget    seconds that the step may take                          step_budget
    3  bind      waiting prompts, in the line's order, to ranks          rank_choice
    4  hold      whether prompts run at all, or wait for more            step_budget
    5  level     one level of time for all ranks                         step_budget
    6  trim      its top, where that costs more than it gives            step_budget
    7  chunks    each rank's prompts up to it, with blocks
    8  when      as late as executors allow                              the engine

Until enough steps were timed (`step_cost`), the level is one of tokens and nothing is held.
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import chain

import numpy as np

from protos.transport.errors import RpcError
from router.errors import ConstraintFailed
from router.requests.request import Int32Array, Listeners, Sequence
from router.requests.waiting_queue import SequenceQueue, is_last_suspect
from router.scheduling.columns import Mask, RowSet
from router.scheduling.commit import (
    NewTokens,
    apply_stop_conditions,
    hand_out_logprobs,
    write_runs,
    write_tokens,
)
from router.scheduling.counters import GroupMeasures, TokenGaps
from router.scheduling.kv.prefix_cache import (
    NO_PREFIX,
    BlockHash,
    CachedPrefix,
    PrefixCache,
    Wanted,
    part_name,
)
from router.scheduling.kv.row_blocks import RowBlocks
from router.scheduling.kv.salvage import salvage
from router.scheduling.rank_choice import RankLoads, fill_level
from router.scheduling.sequence_table import RowStatus, SequenceTable
from router.scheduling.speculation import DraftCounts, DraftGate, Drafting, DraftSettings
from router.scheduling.step import GroupShape, StepPlan, StepResult
from router.scheduling.step_budget import (
    Budget,
    BudgetSettings,
    Hold,
    Prices,
    Prompt,
    Turn,
    Why,
    drained_tokens,
    fill,
    open_budget,
)
from router.scheduling.step_builder import Chunk, StepBuilder

ROWS_PER_KEPT = 128  # of a group: so seldom one stays free for a flow that has none
SHARED_TOKENS = 64  # for which an interrupted sequence waits for another that runs them

# Budget, prompts, tokens of each rank, when the oldest was bound, rows, and decodes of each rank.
_Held = tuple[Budget, list[list[Prompt]], list[int], float, list[int], list[int]]


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
        self._kv_ids = kv_ids or [""] * shape.dp_size
        self.num_preemptions = [0] * shape.dp_size
        self.gate = DraftGate(settings)
        speculation = shape.speculation if self.gate.is_on else None
        self._shape = shape
        self._waiting, self._line = waiting, waiting.line
        self._listeners = listeners
        self._settings = settings
        self._clock = clock
        self._on_end = on_end
        self._measures = measures or GroupMeasures()
        self._gaps = TokenGaps(len(self.table.status), self._measures.inter_token_s)
        self._blocks = RowBlocks(self.table, self.caches, self.preempt, shape.max_window_blocks)
        self._drafting: Drafting | None = None  # where no step ever is speculative
        if speculation is not None:
            self._drafting = Drafting(self.table, self._blocks, speculation, self.gate)
        self._builder = StepBuilder(self.table, shape, speculation)
        self.in_flight: deque[StepPlan] = deque()
        self._leaving: list[int] = []  # rows in PREEMPTED or ENDED
        self._hold = Hold(settings, clock())
        self._held: _Held | None = None  # what the last step did not run
        self._goes_by_time = False
        self._is_first_binding = True  # in this epoch
        self._prices = Prices(*self._measures.costs.plain.values())

    def schedule(self) -> StepPlan | None:
        """Hands out the next step; None if there is nothing to run."""
        num_preemptions = sum(self.num_preemptions)
        runs = self._take_decodes()
        limits, chunks = self._take_prompts(runs)
        if not np.count_nonzero(runs) and not any(chunks):
            # If preemption left nothing to run, schedule again: the waiting sequence has blocks now.
            has_lost = sum(self.num_preemptions) > num_preemptions
            return self.schedule() if has_lost and not self._leaving else None
        if limits is None and self._drafting is not None:
            limits = self._drafting.prepare(runs, chunks)
        if self._line.are_many:
            self._line.charge_decodes(self.table.flow.take(self.table.row_set(runs).rows))
        plan = self._builder.build(runs, chunks, limits)
        for chunk in chain.from_iterable(chunks):
            self._blocks.show(chunk.row)
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
        write = write_runs if is_speculative else write_tokens
        new = write(table, plan, result, has_ended=bool(self._leaving))
        self._note_times(new, has_first=plan.agreement.has_extend)
        self._listeners.wake(table.listener, new.has_token)
        due = [table.bound(row) for row, _ in new.due]
        num_dropped = sum(apply_stop_conditions(table, *row) for row in new.due)
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
        self.table.bound(row).progress.num_preemptions += 1
        self.num_preemptions[self.table.rank_of(row)] += 1
        self.table.status[row] = RowStatus.PREEMPTED
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
                sequence.progress.kv_id = self._kv_ids[sequence.dp_rank]

    def abandon(self) -> None:
        """Returns every bound sequence to the waiting queue; the epoch is over."""
        for row in self.table.live_rows().tolist():
            self._line.give_back(self.table.bound(row))
        for sequence in self.table.sequences:
            if sequence is not None:
                self._send_back(sequence)

    # ---- decodes

    def _take_decodes(self) -> Mask:
        """Returns bool [R]: rows that decode in this step, each with a block for its next token."""
        table = self.table
        # A row at max_computed has its last token in flight.
        can_run: Mask = table.status == RowStatus.DECODE
        can_run &= table.num_computed < table.max_computed
        is_full = table.num_computed == table.num_blocks * table.block_size
        is_full &= can_run
        if np.count_nonzero(is_full) and not self._blocks.grow(np.flatnonzero(is_full)):
            can_run &= table.num_computed < table.num_blocks * table.block_size
            can_run &= table.status == RowStatus.DECODE
        return can_run

    # ---- prompts

    def _take_prompts(self, runs: Mask) -> tuple[Int32Array | None, list[list[Chunk]]]:
        """Binds waiting sequences, and takes prompts into the step unless it is the drafts' turn.

        Args:
            runs: bool [R], rows that decode. Rows that are preempted here leave it.

        Returns:
            The decodes' limits if the step drafts while prompts wait, and each rank's chunks.
        """
        table = self.table
        rows = np.flatnonzero(table.status == RowStatus.EXTEND).tolist()
        if not len(self._waiting) and not rows:
            self._hold.skip(self._clock())
            return None, []
        decodes = table.row_set(runs)
        num_decodes = decodes.num_rows
        if self._still_holds(rows, num_decodes):
            return None, []
        self._learn_prices()
        prompts = self._bound_prompts(rows)
        budget = self._open_budget(decodes, prompts) if self._goes_by_time else None
        num_preemptions = sum(self.num_preemptions)
        num_stuck = self._bind_waiting(num_decodes, prompts, budget)
        if sum(self.num_preemptions) > num_preemptions:
            status = table.status
            runs &= status == RowStatus.DECODE
            prompts = [[p for p in rank if status[p.row] == RowStatus.EXTEND] for rank in prompts]
        if self._drafting is not None:
            limits = self._drafting.take_turn(runs, has_waiting=len(self._waiting) > 0)
            if limits is not None:
                return limits, []
        counts = self._fill(prompts, num_decodes, budget, num_stuck)
        if not any(counts):
            return None, []
        chunks = self._take_chunks(prompts, num_decodes, counts)
        runs &= table.status == RowStatus.DECODE
        return None, chunks

    def _still_holds(self, rows: list[int], num_decodes: list[int]) -> bool:
        """Whether the prompts that the last step held are all that there is, and are held again.

        Prices and KV are those of that step: only time has passed.
        """
        held, self._held = self._held, None
        if held is None or len(self._waiting) or self._drafting is not None:
            return False
        budget, prompts, counts, oldest, *known = held
        if known != [rows, num_decodes]:
            return False
        now = self._clock()
        why = self._hold.decide(budget, prompts, counts, now, oldest=oldest, num_stuck=0)
        if why is Why.HELD:
            self._measures.decisions[why] += 1
            self._held = held
        return why is Why.HELD

    def _bound_prompts(self, rows: list[int]) -> list[list[Prompt]]:
        """Returns each rank's bound prompts in the order in which they run."""
        self._line.plan += 1
        prompts: list[list[Prompt]] = [[] for _ in range(self._shape.dp_size)]
        for row in rows:
            insort(prompts[self.table.rank_of(row)], self._prompt(row))
        return prompts

    def _prompt(self, row: int) -> Prompt:
        """Returns what a row has to run; what it has run brings it forward."""
        table = self.table
        done = int(table.num_computed[row])
        turn = self._turn(table.bound(row), done)
        return Prompt(turn, int(table.num_extend[row]) - done, done, row)

    def _turn(self, sequence: Sequence, done: int = 0) -> Turn:
        """Returns the place of a sequence of which so many tokens have run."""
        start, number, index = sequence.turn
        served = sequence.flow.standing(self._line.plan)
        return served, start - self._seconds_behind(done), number, index

    def _seconds_behind(self, num_tokens: int) -> float:
        """Returns by how much so many tokens set a prompt back in the line."""
        if not self._goes_by_time:
            return 0.0
        return self._settings.prompt_order_weight * self._prices.token * num_tokens

    def _learn_prices(self) -> None:
        cost = self._measures.costs.plain
        self._goes_by_time = cost.is_known and self._settings.go_by_time
        self._prices = Prices(*cost.values(with_margin=True))
        self._waiting.order_by_length(self._seconds_behind(1))

    def _open_budget(self, decodes: RowSet, prompts: list[list[Prompt]]) -> Budget:
        """Returns the time of this step."""
        bound = [(self.table.bound(p.row), p.left) for p in chain.from_iterable(prompts)]
        first = self._waiting.peek()
        if (first and first.is_interrupted) or any(each.is_interrupted for each, _ in bound):
            backlog = math.inf  # their callers wait for the next token
        else:
            most = drained_tokens(self._settings, self._prices) * self._shape.dp_size
            backlog = sum(left for each, left in bound if each.request.priority >= 0)
            backlog += self._waiting.backlog(most)
        return open_budget(
            self._settings,
            self._prices,
            decodes.num_rows,
            self._builder.kv_tokens(decodes).tolist(),
            backlog,
            self._shape.max_num_batched_tokens,
        )

    def _bind_waiting(
        self, num_decodes: list[int], prompts: list[list[Prompt]], budget: Budget | None
    ) -> int:
        """Binds waiting sequences, in order, to ranks that can run them in this step.

        Returns how many wait for rows or KV, of which the first finds none.
        """
        if not len(self._waiting):
            return 0
        deferred, num_stuck = [], 0
        chunk = self._shape.max_num_batched_tokens if budget is None else budget.chunk
        loads = RankLoads(
            self._shape, self.table, self._blocks.pools, prompts, num_decodes, chunk, self._prices
        )
        if self._is_first_binding:
            self._is_first_binding = False
            if any(each.progress.has_kept_kv(self._kv_ids) for each in self._waiting):
                self._bind_kept(loads)
        coming = dict[BlockHash, Turn]()
        for prompt in chain.from_iterable(prompts):
            self._note_coming(coming, self.table.bound(prompt.row))
        while (sequence := self._waiting.peek()) is not None:
            if self._waits_for_its_leader(sequence) or self._waits_for_blocks(sequence, coming):
                deferred.append(self._waiting.pop())
            elif not self._bind_to_best_rank(sequence, loads):
                if loads.is_stuck:
                    num_stuck = len(self._waiting)
                    self._preempt_for(sequence)
                break
            else:
                self._note_coming(coming, sequence)
        for sequence in deferred:
            self._waiting.push(sequence)
        return num_stuck

    def _waits_for_its_leader(self, sequence: Sequence) -> bool:
        """Whether the request's first continuation still runs the prompt that they share."""
        leader = sequence.request.sequences[0]
        is_running = leader.table is not None and leader is not sequence
        return is_running and self.table.status[leader.row] == RowStatus.EXTEND

    def _note_coming(self, coming: dict[BlockHash, Turn], sequence: Sequence) -> None:
        """Notes a block that an interrupted sequence, which is bound, runs before long, and its turn."""
        if sequence.is_interrupted:
            done = int(self.table.num_computed[sequence.row])
            for name in self._last_shared(sequence.block_hashes, done // self._shape.block_size):
                coming.setdefault(name, self._turn(sequence, done))

    def _waits_for_blocks(self, sequence: Sequence, coming: dict[BlockHash, Turn]) -> bool:
        """Whether a bound sequence is about to run what this one would have to run next.

        After a loss many go on at once. Of those that begin alike one computes that, and the others find
        it as soon as it is planned. New prompts run at once, wherever there is time.
        """
        if not (coming and sequence.is_interrupted):
            return False
        wanted = self._wanted_blocks(sequence)
        found = PrefixCache.find_in(self.caches, wanted)
        first = max((len(prefix.blocks) for prefix in found.values()), default=0)
        turns = [coming.get(name) for name in self._last_shared(wanted.hashes, first)]
        return any(turn is not None and turn <= self._turn(sequence) for turn in turns)

    def _last_shared(self, hashes: list[BlockHash], first: int) -> list[BlockHash]:
        """Returns the name of the block from `first` on that makes it worth to wait, if there is one."""
        place = first + max(1, SHARED_TOKENS // self._shape.block_size) - 1
        return hashes[place : place + 1]

    def _is_kept_out(self, sequence: Sequence) -> bool:
        """Whether what rows are free are kept for flows that have none.

        Who gives way leaves a row when the step that runs it is back; who comes beside a flood need
        not wait for that, and the flood need not compute again what gave way.
        """
        if not (self._line.are_many and sequence.flow.num_held):
            return False
        num_rows = len(self.table.sequences)
        return num_rows - int(self.table.num_bound_rows.sum()) <= num_rows // ROWS_PER_KEPT

    def _bind_kept(self, loads: RankLoads) -> None:
        """Binds what ranks have KV of since before a loss, until others take rows and blocks there."""
        others = []
        while (sequence := self._waiting.peek()) is not None:
            if not self._bind_to_best_rank(sequence, loads, only_home=True):
                others.append(self._waiting.pop())
        for sequence in others:
            self._waiting.push(sequence)

    def _bind_to_best_rank(
        self, sequence: Sequence, loads: RankLoads, *, only_home: bool = False
    ) -> bool:
        if not only_home and self._is_kept_out(sequence):
            loads.is_stuck = True
            return False
        num_tokens = len(sequence.tokens)  # once bound, its tokens are a whole row
        wanted = self._wanted_blocks(sequence)
        self._blocks.name_wanted(wanted)
        found = PrefixCache.find_in(self.caches, wanted)
        home = self._find_home(sequence, wanted, found)
        if only_home and home is None:
            return False
        goes_on = sequence.num_output_tokens > 0
        turn = self._turn(sequence)
        rank = loads.pick(turn, num_tokens, found, goes_on=goes_on, home=home)
        if rank is None or (only_home and rank != home):
            return False
        cached = found.get(rank, NO_PREFIX)
        row = self._bind(self._waiting.pop(), rank, cached)
        prompt = self._prompt(row) if rank in found else Prompt(turn, num_tokens, 0, row)
        loads.add(rank, prompt, len(cached.blocks))
        return True

    def _find_home(
        self, sequence: Sequence, wanted: Wanted, found: dict[int, CachedPrefix]
    ) -> int | None:
        """Returns the rank that has KV of a sequence since before a loss, if one does.

        Adds to what was found there the block that the sequence had not filled.
        """
        progress = sequence.progress
        if not progress.has_kept_kv(self._kv_ids) or not self._may_find(sequence):
            return None
        home = self._kv_ids.index(progress.kv_id)
        prefix = found.get(home, NO_PREFIX)
        num_full, num_part = divmod(progress.num_computed_tokens, self._shape.block_size)
        if num_part and num_full == len(prefix.blocks):
            parent = wanted.hashes[num_full - 1] if num_full else sequence.request.cache_salt
            end = progress.num_computed_tokens
            name = part_name(parent, sequence.tokens[end - num_part : end], sequence.turn)
            prefix = self.caches[home].add_part(prefix, name, num_part)
        if not len(prefix.blocks):
            return None
        found[home] = prefix
        return home

    @staticmethod
    def _may_find(sequence: Sequence) -> bool:
        """Whether none of its prompt tokens is to be scored, and KV is not what executors may be lost by."""
        return not (sequence.needs_prompt_logprobs or is_last_suspect(sequence))

    def _wanted_blocks(self, sequence: Sequence) -> Wanted:
        """Returns the blocks that it could share: all full ones but the last token's."""
        hashes, tokens, block_size = sequence.block_hashes, sequence.tokens, self._shape.block_size
        salt, count = sequence.request.cache_salt, (len(tokens) - 1) // block_size
        if sequence.hashed_size != block_size:  # by another group
            hashes.clear()
            sequence.hashed_size = block_size
        if not self._may_find(sequence):
            count = 0
        return Wanted(hashes, tokens[: count * block_size], block_size, salt)

    def num_left_tokens(self, sequence: Sequence) -> int:
        """Returns prompt tokens that bound sequences and a new one, whose prefix is cached, have to run."""
        wanted, table = self._wanted_blocks(sequence), self.table
        self._blocks.name_wanted(wanted)
        num_cached = self._shape.block_size * max(cache.estimate(wanted) for cache in self.caches)
        num_bound = np.sum(
            (table.num_extend - table.num_computed)[table.status == RowStatus.EXTEND]
        )
        return int(num_bound) + len(sequence.tokens) - num_cached

    def _bind(self, sequence: Sequence, rank: int, cached: CachedPrefix) -> int:
        """Gives a sequence a row of a rank, which it returns."""
        cache = self.caches[rank]
        cache.use(cached)
        row, progress = self.table.bind(sequence, rank, cached), sequence.progress
        num_cached = cached.num_tokens(self._shape.block_size)
        is_new = progress.start_time is None
        self._line.take(sequence, (sequence.num_tokens - num_cached) * is_new)
        self.table.flow[row] = sequence.flow.number
        self._gaps.enter(row, progress.last_token_time)
        if is_new:
            progress.start_time = self._clock()
            progress.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens)
            cache.num_queried_tokens += sequence.num_prompt_tokens
            cache.num_hit_tokens += progress.num_cached_tokens
            self._measures.queue_s.observe(progress.start_time - sequence.request.arrival_time)
        if progress.num_computed_tokens:
            is_kept = progress.has_kept_kv(self._kv_ids)
            self._measures.kept_kv.add(progress.num_computed_tokens, num_cached, is_kept=is_kept)
            progress.num_computed_tokens = 0
        return row

    def _preempt_for(self, sequence: Sequence) -> None:
        """Preempts the last sequence of another flow, or of lower priority, for a waiting one before it."""
        table, rows = self.table, self.table.live_rows()
        if self._leaving or not len(rows):
            return
        flow, priority = self._line.flow_of(sequence.request.caller), sequence.request.priority
        last = table.bound(table.last_in_order(rows))
        if last.flow is not flow and last.order < (*flow.next_key, *sequence.turn):
            rows = rows[table.flow.take(rows) == flow.number]
            if not len(rows):
                return
            last = table.bound(table.last_in_order(rows))
        is_less = last.request.priority < priority and last.turn > sequence.turn
        if last.flow is not flow or is_less:
            self.preempt(last.row)

    def _fill(
        self,
        prompts: list[list[Prompt]],
        num_decodes: list[int],
        budget: Budget | None,
        num_stuck: int,
    ) -> list[int]:
        """Returns how many prompt tokens each rank runs; none if they are held."""
        floor = self._settings.min_chunk_tokens
        if budget is None:
            most, left = (
                self._shape.max_num_batched_tokens,
                [sum(p.left for p in r) for r in prompts],
            )
            floor += max(num_decodes)  # the setting is of prompts, a level of all tokens
            level = fill_level(num_decodes, left, max_tokens=most, floor=floor)
            return [level - num for num in num_decodes]
        counts, now = fill(budget, prompts, floor), self._clock()
        if not any(counts):
            return counts
        bound = [self.table.bound(prompt.row) for prompt in chain.from_iterable(prompts)]
        starts = [sequence.progress.start_time for sequence in bound]
        oldest = min(start for start in starts if start is not None)
        if self._line.are_many:  # a flood's many are no reason to hold another's prompt
            num_stuck = min(num_stuck, *(sequence.flow.num_waiting for sequence in bound))
        why = self._hold.decide(budget, prompts, counts, now, oldest=oldest, num_stuck=num_stuck)
        self._measures.decisions[why] += 1
        if why is Why.HELD:
            rows = sorted(prompt.row for prompt in chain.from_iterable(prompts))
            self._held = budget, prompts, counts, oldest, rows, num_decodes
            return [0] * len(counts)
        counts = self._hold.trim(budget, prompts, counts, num_stuck=num_stuck)
        self._hold.note(counts, now)
        return counts

    def _take_chunks(
        self, prompts: list[list[Prompt]], num_decodes: list[int], counts: list[int]
    ) -> list[list[Chunk]]:
        """Returns each rank's chunks of prompts, each with blocks, up to so many tokens."""
        chunks = self._cut(prompts, num_decodes, counts, lambda _rank, _row, count: count)
        taken = list(chain.from_iterable(chunks))
        rows = np.array([chunk.row for chunk in taken], dtype=np.int64)
        num_tokens = np.array([chunk.num_tokens for chunk in taken], dtype=np.int32)
        if self._blocks.give_all(rows, num_tokens):
            return chunks
        status = self.table.status
        chunks = self._cut(prompts, num_decodes, counts, self._blocks.give)
        return [[c for c in rank if status[c.row] == RowStatus.EXTEND] for rank in chunks]

    def _cut(
        self,
        prompts: list[list[Prompt]],
        num_decodes: list[int],
        counts: list[int],
        give: Callable[[int, int, int], int],
    ) -> list[list[Chunk]]:
        """Returns each rank's chunks up to so many tokens.

        Args:
            give: Says how many tokens of a rank's row get blocks, of those that it would run.
        """
        table, shape = self.table, self._shape
        chunks: list[list[Chunk]] = [[] for _ in range(shape.dp_size)]
        for rank, tokens_left in enumerate(counts):
            logits_left = shape.max_num_logits - num_decodes[rank]
            for _, left, _, row in prompts[rank]:
                count, num_logits = min(tokens_left, left), 1
                if table.scores_prompt[row]:
                    count = num_logits = min(count, logits_left)
                if count <= 0 or logits_left <= 0 or table.status[row] != RowStatus.EXTEND:
                    continue
                count = give(rank, row, count)
                if count > 0:
                    chunks[rank].append(Chunk(row, count))
                    tokens_left -= count
                    logits_left -= num_logits
        return chunks

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
        """Lets go of bound sequences whose finish_reason or error was just set."""
        if not sequences:
            return
        self._blocks.leave(sequences)
        for sequence in sequences:
            row = sequence.row
            self._gaps.leave(row)
            if self.table.status[row] != RowStatus.PREEMPTED:
                self._line.end(sequence)
                self._leaving.append(row)
            self.table.status[row] = RowStatus.ENDED
            self._on_end(sequence)

    def _send_back(self, sequence: Sequence) -> None:
        sequence.progress.last_token_time = self._gaps.leave(sequence.row)
        self.table.detach([sequence])
        if sequence.needs_prompt_logprobs:
            sequence.prompt_logprobs.clear()  # it starts over
        self._waiting.push(sequence)

    def _free_left_rows(self) -> None:
        """Frees the rows that are leaving and that no step in flight runs, with their blocks."""
        if not self._leaving:
            return
        table, leaving = self.table, np.array(self._leaving, dtype=np.int64)
        is_left = np.ones(len(leaving), dtype=np.bool_)
        for plan in self.in_flight:
            is_left &= ~plan.runs.take(leaving)
        left = leaving[is_left].tolist()
        if not left:
            return
        self._leaving = leaving[~is_left].tolist()
        self._blocks.release(left)
        for row in left:
            if table.status[row] == RowStatus.PREEMPTED:
                self._send_back(table.bound(row))
            table.free_row(row)
