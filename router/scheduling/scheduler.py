"""Scheduler of one group: each step's sequences and KV blocks, and what a step's answer ends.

`schedule` hands out work and counts it as computed at once, so that the next step is planned before
this one is back; `commit` takes the tokens. A row of the table goes this way:

    waiting ──_bind──▶ prompt chunks ──▶ decodes ──end──▶ freed once no step in flight runs it
       ▲                     └───preempt────┘
       └──────once no step in flight runs it

The SequenceTable knows each sequence, its rank's PrefixCache each block, and only the engine's task
touches either. `RankLoads` picks the rank of a waiting sequence, and `fill_level` says how far prompts
fill a step.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import chain

import numpy as np

from protos.settings import at_least, setting
from protos.transport.errors import RpcError
from router.requests.request import Int32Array, Listeners, Sequence
from router.requests.waiting_queue import SequenceQueue
from router.scheduling.block_pool import (
    BlockHash,
    CachedPrefix,
    PrefixCache,
    extend_block_hashes,
)
from router.scheduling.commit import (
    NewTokens,
    apply_stop_conditions,
    hand_out_logprobs,
    write_runs,
    write_tokens,
)
from router.scheduling.counters import GroupMeasures, TokenGaps
from router.scheduling.row_blocks import RowBlocks
from router.scheduling.sequence_table import Mask, RowStatus, SequenceTable
from router.scheduling.speculation import DraftCounts, DraftGate, Drafting, DraftSettings
from router.scheduling.step import GroupShape, StepPlan, StepResult
from router.scheduling.step_builder import Chunk, StepBuilder

# What a cached token weighs against one to be run when ranks are compared: attention reads it
# at every step of its sequence. With it, 16 blocks of KV weigh as much as one block to be run.
KV_WORK = 1 / 16


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings(DraftSettings):
    """Settings of a group's scheduler."""

    min_chunk_tokens: int = setting(512, at_least(1))
    """A prompt runs at least this far in a step, however unequal the ranks."""


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

    Attributes:
        num_preemptions: [dp_size] sequences that lost their blocks to others.
        gate: Knows whether drafts pay.
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
    ) -> None:
        self.table = SequenceTable(
            dp_size=shape.dp_size,
            rows_per_rank=shape.rows_per_rank,
            max_model_len=shape.max_model_len,
            block_size=shape.block_size,
            kv_window=shape.kv_window,
        )
        reach = self.table.window_reach if self.table.has_windows else None
        self.caches = [PrefixCache(num_blocks, reach) for num_blocks in shape.num_blocks]
        self.num_preemptions = [0] * shape.dp_size
        self.gate = DraftGate(settings)
        speculation = shape.speculation if self.gate.is_on else None
        self._shape = shape
        self._waiting = waiting
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
        self._leaving: list[int] = []  # rows in PREEMPTED or ENDED

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
        plan = self._builder.build(runs, chunks, limits)
        for chunk in chain.from_iterable(chunks):
            self._blocks.name(chunk.row)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> DraftCounts:
        """Takes a step's tokens, ends the sequences that they end and wakes the listeners.

        Returns what came of its drafts, without sequences that have ended meanwhile.
        """
        table, is_speculative = self.table, plan.limits is not None
        table.num_in_flight -= plan.runs
        hand_out_logprobs(plan, result)
        write = write_runs if is_speculative else write_tokens
        new = write(table, plan, result, has_ended=bool(self._leaving))
        self._note_times(new, has_first=plan.agreement.has_extend)
        self._listeners.wake(table.listener.take(new.rows))
        num_dropped = sum(self._apply_stops(row, num_kept) for row, num_kept in new.due)
        if table.has_windows:
            self._blocks.give_back(plan, new.has_token)
        self._free_left_rows()
        self._measures.costs.add(plan, result)
        if is_speculative:
            self.gate.add(len(new.rows), new.num_kept)
            # What one step gives a sequence comes together: no time passes between its tokens.
            num_more = new.num_kept - num_dropped - len(new.rows)
            self._measures.inter_token_s.observe(0.0, num_more)
        return new.drafts

    def preempt(self, row: int) -> None:
        """Takes a sequence off its rank; at once, or when the step that runs it is back."""
        self.table.bound(row).progress.num_preemptions += 1
        self.num_preemptions[self.table.rank_of(row)] += 1
        self.table.status[row] = RowStatus.PREEMPTED
        self._leaving.append(row)
        self._free_left_rows()

    def fail(self, sequence: Sequence, error: RpcError) -> None:
        """Ends a bound sequence with an error, now; its row is free when no step runs it."""
        sequence.error = error
        self._end(sequence)
        self._free_left_rows()

    def abandon(self) -> None:
        """Returns every bound sequence to the waiting queue; the epoch is over."""
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
        if not len(self._waiting) and not np.count_nonzero(table.status == RowStatus.EXTEND):
            return None, []
        num_decodes = table.row_set(runs).num_rows
        self._bind_waiting(num_decodes)
        runs &= table.status == RowStatus.DECODE
        if self._drafting is not None:
            limits = self._drafting.take_turn(runs, has_waiting=len(self._waiting) > 0)
            if limits is not None:
                return limits, []
        chunks = self._take_chunks(num_decodes)
        runs &= table.status == RowStatus.DECODE
        return None, chunks

    def _bind_waiting(self, num_decodes: list[int]) -> None:
        """Binds waiting sequences to ranks that can run them in this step, first come first."""
        if not len(self._waiting):
            return
        deferred = []
        loads = RankLoads(self._shape, self.table, self.caches, num_decodes)
        while (sequence := self._waiting.peek()) is not None:
            if self._waits_for_its_leader(sequence):
                deferred.append(self._waiting.pop())
            elif not self._bind_to_best_rank(sequence, loads):
                self._preempt_for(sequence)
                break
        for sequence in deferred:
            self._waiting.push(sequence)

    def _waits_for_its_leader(self, sequence: Sequence) -> bool:
        """Whether the request's first continuation still runs the prompt that they share."""
        leader = sequence.request.sequences[0]
        is_running = leader.table is not None and leader is not sequence
        return is_running and self.table.status[leader.row] == RowStatus.EXTEND

    def _bind_to_best_rank(self, sequence: Sequence, loads: "RankLoads") -> bool:
        ranks = loads.ranks_with_room()
        if not ranks:
            return False
        num_tokens = len(sequence.tokens)  # once bound, its tokens are a whole row
        hashes = self._reusable_hashes(sequence)
        cached = [cache.match(hashes) for cache in self.caches]
        rank = loads.pick(ranks, num_tokens, cached)
        if rank is None:
            return False
        self._bind(self._waiting.pop(), rank, cached[rank])
        loads.add(rank, num_tokens, cached[rank])
        return True

    def _reusable_hashes(self, sequence: Sequence) -> list[BlockHash]:
        """Names of the blocks that it could share: all full ones but the last token's."""
        if sequence.needs_prompt_logprobs:
            return []
        hashes, tokens, block_size = sequence.block_hashes, sequence.tokens, self._shape.block_size
        extend_block_hashes(hashes, tokens, block_size, sequence.request.cache_salt)
        return hashes[: (len(tokens) - 1) // block_size]

    def _bind(self, sequence: Sequence, rank: int, cached: CachedPrefix) -> None:
        cache = self.caches[rank]
        cache.pool.share(cached.blocks)
        cache.pool.share(cached.window_blocks)
        row, progress = self.table.bind(sequence, rank, cached), sequence.progress
        self._gaps.enter(row, progress.last_token_time)
        if progress.start_time is None:
            progress.start_time = self._clock()
            progress.num_cached_tokens = len(cached.blocks) * self._shape.block_size
            cache.num_queried_tokens += sequence.num_prompt_tokens
            cache.num_hit_tokens += progress.num_cached_tokens
            self._measures.queue_s.observe(progress.start_time - sequence.request.arrival_time)

    def _preempt_for(self, sequence: Sequence) -> None:
        """Preempts a sequence of lower priority, or of a caller that asks for more, for a waiting one."""
        rows = self.table.live_rows()
        if self._leaving or not len(rows):
            return
        victim, request = self.table.last_in_order(rows), sequence.request
        last = self.table.bound(victim).request
        is_less = last.priority < request.priority or last.caller != request.caller
        if is_less and last.priority_key > request.priority_key:
            self.preempt(victim)

    def _take_chunks(self, num_decodes: list[int]) -> list[list[Chunk]]:
        """Returns each rank's chunks of prompts, each with blocks, filled to one level."""
        table, shape = self.table, self._shape
        rows = np.flatnonzero(table.status == RowStatus.EXTEND).tolist()
        num_left = {row: int(table.num_extend[row] - table.num_computed[row]) for row in rows}
        num_left_of_ranks = [0] * shape.dp_size
        for row, count in num_left.items():
            num_left_of_ranks[table.rank_of(row)] += count
        level = fill_level(
            num_decodes,
            num_left_of_ranks,
            max_tokens=shape.max_num_batched_tokens,
            floor=self._settings.min_chunk_tokens,
        )
        tokens_left = [level - num for num in num_decodes]
        logits_left = [shape.max_num_logits - num for num in num_decodes]
        chunks: list[list[Chunk]] = [[] for _ in range(shape.dp_size)]
        for row in sorted(rows, key=table.order_of):
            rank = table.rank_of(row)
            count, num_logits = min(tokens_left[rank], num_left[row]), 1
            if table.scores_prompt[row]:
                count = num_logits = min(count, logits_left[rank])
            if count <= 0 or logits_left[rank] <= 0 or table.status[row] != RowStatus.EXTEND:
                continue
            count = self._blocks.give(rank, row, count)
            if count > 0:
                chunks[rank].append(Chunk(row, count))
                tokens_left[rank] -= count
                logits_left[rank] -= num_logits
        return [[c for c in rank if table.status[c.row] == RowStatus.EXTEND] for rank in chunks]

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
        self._gaps.add(new.has_token, len(new.rows), first_rows, now)

    def _apply_stops(self, row: int, num_new: int) -> int:
        num_dropped = apply_stop_conditions(self.table, row, num_new)
        if (sequence := self.table.bound(row)).is_ended:
            self._end(sequence)
        return num_dropped

    # ---- rows that are given up

    def _end(self, sequence: Sequence) -> None:
        """Lets go of a bound sequence whose finish_reason or error was just set."""
        row = sequence.row
        self._blocks.name(row)
        self._gaps.leave(row)
        self.table.detach(sequence)
        if self.table.status[row] != RowStatus.PREEMPTED:
            self._leaving.append(row)
        self.table.status[row] = RowStatus.ENDED
        self._on_end(sequence)

    def _send_back(self, sequence: Sequence) -> None:
        sequence.progress.last_token_time = self._gaps.leave(sequence.row)
        self.table.detach(sequence)
        if sequence.needs_prompt_logprobs:
            sequence.prompt_logprobs.clear()  # it starts over
        self._waiting.push(sequence)

    def _free_left_rows(self) -> None:
        """Frees the rows that are leaving and that no step in flight runs, with their blocks."""
        table, leaving, self._leaving = self.table, self._leaving, []
        for row in leaving:
            if table.num_in_flight[row] > 0:
                self._leaving.append(row)
                continue
            self._blocks.release(row)
            if table.status[row] == RowStatus.PREEMPTED:
                self._send_back(table.bound(row))
            table.free_row(row)


# ---- balance of the ranks


def fill_level(
    num_decodes: SequenceOf[int], num_prompt_tokens: SequenceOf[int], *, max_tokens: int, floor: int
) -> int:
    """Returns the number of tokens up to which every rank fills its step with prompt tokens.

    A step is as long as its fullest rank, so ranks fill up to one level, as water does. That
    level is what the rank with the least to do can reach; below ``floor`` it does not go, or a
    short prompt on one rank would hold up a long one on another. The level bounds only
    prompts: decodes always run.

    Args:
        num_decodes: [dp_size] tokens that each rank runs anyway.
        num_prompt_tokens: [dp_size] prompt tokens that each rank could run.
        max_tokens: Upper bound of a rank's tokens.
        floor: The least level, unless ``max_tokens`` is below.
    """
    reachable = [
        decodes + prompt
        for decodes, prompt in zip(num_decodes, num_prompt_tokens, strict=True)
        if prompt > 0
    ]
    if not reachable:
        return 0
    return min(max_tokens, max(floor, min(reachable), *num_decodes))


def pick_rank(
    num_cached_tokens: SequenceOf[int], work: SequenceOf[float], candidates: SequenceOf[int]
) -> int:
    """Picks the DP rank for a new sequence: a cached prefix counts for as much as it saves.

    Args:
        num_cached_tokens: [dp_size] prompt tokens that each rank would not have to run.
        work: [dp_size] what each rank carries, in tokens.
        candidates: Ranks that can run the sequence in the next step; at least one.
    """
    return min(
        candidates, key=lambda rank: (work[rank] - num_cached_tokens[rank], work[rank], rank)
    )


class RankLoads:
    """Work and promised blocks of every rank, kept up as sequences are bound.

    Plain lists of numbers: there are few ranks, and each is looked at for each new sequence.

    Args:
        num_decodes: [dp_size] decodes that run in this step.

    Attributes:
        work: [dp_size] tokens to run, and KV to read counted in such tokens.
    """

    def __init__(
        self,
        shape: GroupShape,
        table: SequenceTable,
        caches: list[PrefixCache],
        num_decodes: list[int],
    ) -> None:
        self._shape = shape
        self._table = table
        self._pools = [cache.pool for cache in caches]
        self._max_window_blocks = shape.max_window_blocks
        self._num_tokens = list(num_decodes)
        self._num_promised_blocks = [0] * shape.dp_size
        for row in np.flatnonzero(table.status == RowStatus.EXTEND).tolist():
            rank, num_extend = table.rank_of(row), int(table.num_extend[row])
            self._num_tokens[rank] += num_extend - int(table.num_computed[row])
            num_missing = self._num_missing(num_extend, int(table.num_blocks[row]))
            self._num_promised_blocks[rank] += num_missing
        self.work = [self._work(rank) for rank in range(shape.dp_size)]

    def ranks_with_room(self) -> list[int]:
        """Ranks that could run something of another sequence in this step."""
        max_tokens = self._shape.max_num_batched_tokens
        return [
            rank
            for rank, num_tokens in enumerate(self._num_tokens)
            if num_tokens < max_tokens and self._table.has_free_row(rank)
        ]

    def _fits(self, rank: int, num_tokens: int, cached: CachedPrefix) -> bool:
        """Whether the rank's pool has place for all known tokens of a sequence and one more.

        Beyond that, one free column is left for each sequence that the rank already has, which
        will want it soon. An empty rank takes any sequence that the model's length admits.
        """
        num_next = self._table.num_bound(rank) * self._table.num_lists
        if num_next == 0:
            return True
        pool = self._pools[rank]
        num_taken = self._num_missing(num_tokens, len(cached.blocks))
        num_taken += sum(pool.num_unused(block_ids) for block_ids in cached if len(block_ids))
        return num_taken + num_next <= pool.num_available - self._num_promised_blocks[rank]

    def pick(
        self, ranks: SequenceOf[int], num_tokens: int, cached: SequenceOf[CachedPrefix]
    ) -> int | None:
        """Picks the rank for a sequence.

        Args:
            ranks: Ranks that have room for another sequence.
            num_tokens: Known tokens of the sequence.
            cached: [dp_size] its prefix in each rank's cache.

        Returns:
            One of ``ranks`` into whose pool it fits; None if there is none.
        """
        fitting = [rank for rank in ranks if self._fits(rank, num_tokens, cached[rank])]
        if not fitting:
            return None
        block_size = self._shape.block_size
        num_cached_tokens = [len(prefix.blocks) * block_size for prefix in cached]
        return pick_rank(num_cached_tokens, self.work, fitting)

    def add(self, rank: int, num_tokens: int, cached: CachedPrefix) -> None:
        """Counts a sequence that was just bound."""
        self._num_tokens[rank] += num_tokens - len(cached.blocks) * self._shape.block_size
        self._num_promised_blocks[rank] += self._num_missing(num_tokens, len(cached.blocks))
        self.work[rank] = self._work(rank)

    def _work(self, rank: int) -> float:
        num_kv_tokens = self._pools[rank].num_used * self._shape.block_size
        return self._num_tokens[rank] + KV_WORK * num_kv_tokens

    def _num_missing(self, num_tokens: int, num_held: int) -> int:
        """Blocks for this many tokens and the one that they lead to, where a row holds so many."""
        num_missing = num_tokens // self._shape.block_size + 1 - num_held
        return num_missing + min(num_missing, self._max_window_blocks)
