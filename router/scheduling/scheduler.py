"""Who runs in the next step and with which blocks, and what a step's tokens mean for them.

One Scheduler drives all DP ranks of a group through one epoch. `schedule` hands out work and
counts it as computed at once, so that the next step is planned before this one is back; `commit`
takes the tokens. What is known of a sequence is in the SequenceTable, what is known of a block
in its rank's PrefixCache, and the engine's task alone touches either.
"""

from collections.abc import Callable
from itertools import chain

import numpy as np
import numpy.typing as npt

from protos.transport.errors import RpcError
from router.requests.listeners import Listeners
from router.requests.request import FinishReason, Int32Array, Sequence
from router.requests.waiting_queue import WaitingLine
from router.scheduling.block_pool import BlockIds
from router.scheduling.commit import gains_of, hand_out_logprobs, write_runs
from router.scheduling.counters import GroupMeasures, TokenGaps
from router.scheduling.planner import RankLoads, fill_level, pick_rank
from router.scheduling.prefix_cache import BlockHash, PrefixCache, extend_block_hashes
from router.scheduling.row_blocks import RowBlocks
from router.scheduling.sequence_table import NO_TOKEN, RowStatus, SequenceTable
from router.scheduling.speculation import NO_DRAFTS, DraftCounts, DraftGate, Drafting, DraftSettings
from router.scheduling.step import GroupShape, StepPlan, StepResult
from router.scheduling.step_builder import Chunk, build_plan


class Scheduler:
    """Continuous batching for the DP ranks of one group, decodes first, then prompts.

    Args:
        shape: The group's sizes.
        admission: Where waiting sequences come from and preempted ones go.
        listeners: Woken at each commit.
        min_chunk_tokens: Prompts run at least this far in a step, however unequal the ranks.
        clock: The event loop's time, in seconds.
        on_end: Told of each bound sequence that ends, after its row has let go of it.
        measures: Gets the sequences' times; None: nobody asks for them.
        drafts: When steps are speculative, if the group can draft; None: the defaults.

    Attributes:
        num_preemptions: [dp_size] sequences that lost their blocks to others.
        gate: Knows whether drafts pay.
    """

    def __init__(
        self,
        shape: GroupShape,
        admission: WaitingLine,
        listeners: Listeners,
        *,
        min_chunk_tokens: int,
        clock: Callable[[], float],
        on_end: Callable[[Sequence], None],
        measures: GroupMeasures | None = None,
        drafts: DraftSettings | None = None,
    ) -> None:
        self.table = SequenceTable(
            dp_size=shape.dp_size,
            rows_per_rank=shape.rows_per_rank,
            max_model_len=shape.max_model_len,
            block_size=shape.block_size,
        )
        self.caches = [PrefixCache(num_blocks) for num_blocks in shape.num_blocks]
        self._blocks = RowBlocks(self.table, self.caches, self._send_back)
        self.num_preemptions = self._blocks.num_preemptions
        self.gate = DraftGate(drafts or DraftSettings())
        self._shape = shape
        self._speculation = shape.speculation if self.gate.settings.is_on else None
        self._drafting = (
            None
            if self._speculation is None
            else Drafting(self.table, self._blocks, self._speculation, self.gate)
        )
        self._admission = admission
        self._listeners = listeners
        self._min_chunk_tokens = min_chunk_tokens
        self._clock = clock
        self._on_end = on_end
        self._sampled = np.full(len(self.table.status), NO_TOKEN, dtype=np.int32)
        self._measures = measures or GroupMeasures()
        self._gaps = TokenGaps(len(self.table.status), self._measures.inter_token_s)

    # ---- the two verbs

    def schedule(self) -> StepPlan | None:
        """Hands out the next step; None if there is nothing to run."""
        table, num_preemptions = self.table, sum(self.num_preemptions)
        drafting = self._drafting
        runs = self._take_decodes()
        chunks: list[list[Chunk]] = []
        if len(self._admission) or (table.status == RowStatus.EXTEND).any():
            num_decodes = table.row_set(runs).num_rows
            self._bind_waiting(num_decodes)
            if drafting is None or not drafting.takes_turn(
                runs, has_waiting=len(self._admission) > 0
            ):
                chunks = self._take_chunks(num_decodes)
            # Whoever came after them may have taken the place of some decodes.
            runs &= table.status == RowStatus.DECODE
        decodes = table.row_set(runs)
        if not any(chunks) and not len(decodes.rows):
            # Whoever was preempted for a waiting sequence left nothing to run: that one's turn.
            has_lost = sum(self.num_preemptions) > num_preemptions
            has_place = has_lost and not self._blocks.has_leaving
            return self.schedule() if has_place else None
        shape, limits = self._shape, None
        if drafting is not None:
            limits = drafting.prepare(decodes, runs, chunks)
        plan = build_plan(
            table,
            decodes,
            runs,
            chunks,
            shape.graph_sizes,
            shape.attn_tp_size,
            speculation=self._speculation,
            limits=limits,
        )
        shape.check(plan.agreement)
        for chunk in chain.from_iterable(chunks):
            self._blocks.name(chunk.row)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> DraftCounts:
        """Takes a step's tokens, ends what they end and wakes who waits for them.

        Returns what came of its drafts, but for those of sequences that have ended meanwhile.
        """
        table = self.table
        table.num_in_flight -= plan.runs
        for batch, rank_result in zip(plan.batches, result, strict=True):
            if batch.scorings:
                hand_out_logprobs(batch, rank_result)
        drafts = NO_DRAFTS
        if plan.limits is None:
            self._take_tokens(plan, result)
        else:
            drafts = self._take_runs(plan, plan.limits, result)
        self._blocks.release_leaving()
        return drafts

    def _take_tokens(self, plan: StepPlan, result: StepResult) -> None:
        """Takes the tokens of a step in which each row that samples gained one."""
        table = self.table
        rows = plan.sampled_rows
        tokens = np.concatenate([part.next_token_ids for part in result])
        if self._blocks.has_leaving:
            is_live = table.status.take(rows) != RowStatus.ENDED
            rows, tokens = rows[is_live], tokens[is_live]
        table.flat_tokens[(table.row_starts + table.num_tokens).take(rows)] = tokens

        # From here on, columns of the whole table: without gathers they cost a third.
        sampled = self._sampled
        sampled.fill(NO_TOKEN)
        sampled[rows] = tokens
        has_token = sampled != NO_TOKEN
        np.copyto(table.last_token, sampled, where=has_token)
        now, first_rows = self._clock(), list[int]()
        if plan.agreement.has_extend:  # only what ran a prompt's end samples a first token
            first_rows = np.flatnonzero(has_token & (table.num_tokens == table.num_prompt)).tolist()
            for row in first_rows:
                sequence = table.bound(row)
                sequence.progress.first_token_time = now
                self._measures.first_token_s.observe(now - sequence.request.arrival_time)
        self._gaps.add(has_token, len(rows), first_rows, now)
        table.num_tokens += has_token
        is_event = (table.stop_ids[: table.num_stop_ids] == sampled).any(axis=0)
        is_event &= table.num_tokens >= table.min_len
        is_event |= table.num_tokens >= table.max_len
        is_event |= table.is_inspected
        is_event &= has_token

        self._listeners.wake(table.listener.take(rows))
        for row in np.flatnonzero(is_event).tolist():
            self._finish_if_due(row, int(sampled[row]))

    def _take_runs(self, plan: StepPlan, limits: Int32Array, result: StepResult) -> DraftCounts:
        """Takes the tokens of a speculative step, and takes back what was computed in vain."""
        table = self.table
        rows, gains = plan.sampled_rows, gains_of(result)
        tokens = np.concatenate([part.next_token_ids for part in result])
        table.num_computed[rows] -= limits - gains
        table.num_drafts[rows] += limits - 1
        table.num_accepted[rows] += gains - 1
        if self._blocks.has_leaving:
            is_live = table.status.take(rows) != RowStatus.ENDED
            tokens = tokens[np.repeat(is_live, gains)]
            rows, gains, limits = rows[is_live], gains[is_live], limits[is_live]
        drafts = DraftCounts(1, int(limits.sum()) - len(rows), int(gains.sum()) - len(rows))
        kept, is_due = write_runs(table, rows, tokens, gains)
        if len(rows):  # what comes behind an end is nobody's gain
            self.gate.add(len(rows), int(kept.sum()))
        lens = table.num_tokens.take(rows)
        has_token = np.zeros(len(table.status), dtype=np.bool_)
        has_token[rows] = True
        self._gaps.add(has_token, len(rows), (), self._clock())

        self._listeners.wake(table.listener.take(rows))
        is_inspected = table.is_inspected.take(rows)
        for place in np.flatnonzero(is_due | is_inspected).tolist():
            row, end = int(rows[place]), int(lens[place])
            begin = end - int(kept[place]) if is_inspected[place] else end - 1
            sequence = table.bound(row)
            for position in range(begin, end):
                table.num_tokens[row] = position + 1
                self._finish_if_due(row, int(table.tokens[row, position]))
                if sequence.is_ended:
                    break
        # What one step gives a sequence comes together: no time passes between its tokens.
        num_kept = int((table.num_tokens.take(rows) - lens + kept).sum())
        self._measures.inter_token_s.observe(0.0, num_kept - len(rows))
        return drafts

    # ---- ends

    def end(self, sequence: Sequence) -> None:
        """Lets go of a bound sequence whose finish_reason or error was just set."""
        row = sequence.row
        self._blocks.name(row)
        self._gaps.leave(row)
        self.table.detach(sequence)
        self._blocks.end(row)
        self._on_end(sequence)

    def fail(self, sequence: Sequence, error: RpcError) -> None:
        """Ends a bound sequence with an error, now; its row is free when no step runs it."""
        sequence.error = error
        self.end(sequence)
        self._blocks.release_leaving()

    def abandon(self) -> list[Sequence]:
        """Returns every bound sequence to the waiting line; the epoch is over. Returns them."""
        bound = [sequence for sequence in self.table.sequences if sequence is not None]
        for sequence in bound:
            self._send_back(sequence)
        return bound

    def _finish_if_due(self, row: int, token: int) -> None:
        sequence = self.table.bound(row)
        stop = sequence.request.stop
        may_stop = sequence.num_output_tokens >= stop.min_tokens
        if stop.has_stop_strings:
            assert sequence.text is not None
            sequence.stop_string = sequence.text.feed(
                np.array([token], dtype=np.int32), may_stop=may_stop
            )
        if sequence.stop_string is not None:
            sequence.finish_reason = FinishReason.STOP
        elif may_stop and token in stop.stop_token_ids:
            sequence.finish_reason = FinishReason.STOP
            sequence.stop_token_id = int(token)
        elif self.table.num_tokens[row] >= self.table.max_len[row]:
            sequence.finish_reason = FinishReason.LENGTH
        if sequence.is_ended:
            self.end(sequence)

    # ---- decodes

    def _take_decodes(self) -> npt.NDArray[np.bool_]:
        """Returns bool [R]: rows that decode in this step, each with a block for its next token."""
        table = self.table
        # A row at max_computed has its last token in flight.
        can_run: npt.NDArray[np.bool_] = table.status == RowStatus.DECODE
        can_run &= table.num_computed < table.max_computed
        is_full = table.num_computed == table.num_blocks * table.block_size
        is_full &= can_run
        if is_full.any() and not self._blocks.grow(np.flatnonzero(is_full)):
            can_run &= table.num_computed < table.num_blocks * table.block_size
            can_run &= table.status == RowStatus.DECODE
        return can_run

    # ---- waiting sequences

    def _bind_waiting(self, num_decodes: list[int]) -> None:
        """Binds waiting sequences to ranks that can run them in this step, first come first."""
        if len(self._admission) == 0:
            return
        deferred = []
        loads = RankLoads(self._shape, self.table, self.caches, num_decodes)
        while (sequence := self._admission.peek()) is not None:
            if self._waits_for_its_leader(sequence):
                deferred.append(self._admission.pop())
            elif not self._bind_to_best_rank(sequence, loads):
                break
        for sequence in deferred:
            self._admission.push(sequence)

    def _waits_for_its_leader(self, sequence: Sequence) -> bool:
        """Whether the request's first continuation still runs the prompt that they share."""
        leader = sequence.request.sequences[0]
        is_running = leader.table is not None and leader is not sequence
        return is_running and self.table.status[leader.row] == RowStatus.EXTEND

    def _bind_to_best_rank(self, sequence: Sequence, loads: RankLoads) -> bool:
        num_tokens = len(sequence.tokens)  # once bound, its tokens are a whole row
        ranks = loads.ranks_with_room()
        if not ranks:
            self._preempt_for(sequence)
            return False
        hashes = self._reusable_hashes(sequence)
        cached = [cache.match(hashes) for cache in self.caches]
        ranks = [rank for rank in ranks if loads.fits(rank, num_tokens, cached[rank])]
        if not ranks:
            self._preempt_for(sequence)
            return False
        num_cached_tokens = [len(blocks) * self._shape.block_size for blocks in cached]
        rank = pick_rank(num_cached_tokens, loads.work, ranks)
        self._bind(self._admission.pop(), rank, cached[rank])
        loads.add(rank, num_tokens, cached[rank])
        return True

    def _bind(self, sequence: Sequence, rank: int, cached_blocks: BlockIds) -> None:
        cache = self.caches[rank]
        cache.pool.share(cached_blocks)
        row, progress = self.table.bind(sequence, rank, cached_blocks), sequence.progress
        self._gaps.enter(row, progress.last_token_time)
        if progress.start_time is None:
            progress.start_time = self._clock()
            progress.num_cached_tokens = len(cached_blocks) * self._shape.block_size
            cache.num_queried_tokens += sequence.num_prompt_tokens
            cache.num_hit_tokens += progress.num_cached_tokens
            self._measures.queue_s.observe(progress.start_time - sequence.request.arrival_time)

    def _reusable_hashes(self, sequence: Sequence) -> list[BlockHash]:
        """Names of the blocks that it could share: all full ones but the last token's."""
        if sequence.needs_prompt_logprobs:
            return []
        extend_block_hashes(sequence.block_hashes, sequence.tokens, self._shape.block_size)
        return sequence.block_hashes[: (len(sequence.tokens) - 1) // self._shape.block_size]

    def _preempt_for(self, sequence: Sequence) -> None:
        """Makes place for a waiting sequence at the cost of one of lower priority, if any."""
        if self._blocks.has_leaving:
            return
        rows = self._blocks.live_rows()
        if len(rows) == 0:
            return
        victim, request = max(rows.tolist(), key=self._blocks.standing), sequence.request
        last = self.table.bound(victim).request
        if last.priority < request.priority and last.turn > request.turn:
            self._blocks.preempt(victim)

    # ---- prompts

    def _take_chunks(self, num_decodes: list[int]) -> list[list[Chunk]]:
        """Returns each rank's chunks of prompts, each with blocks, filled to one level."""
        table, shape = self.table, self._shape
        chunks: list[list[Chunk]] = [[] for _ in range(shape.dp_size)]
        rows = np.flatnonzero(table.status == RowStatus.EXTEND)
        if len(rows) == 0:
            return chunks
        left_of = dict(
            zip(
                rows.tolist(),
                (table.num_extend[rows] - table.num_computed[rows]).tolist(),
                strict=True,
            )
        )
        num_left = [0] * shape.dp_size
        for row, left in left_of.items():
            num_left[table.rank_of(row)] += left
        level = fill_level(
            num_decodes,
            num_left,
            max_tokens=shape.max_num_batched_tokens,
            floor=self._min_chunk_tokens,
        )
        tokens_left = [level - num for num in num_decodes]
        logits_left = [shape.max_num_logits - num for num in num_decodes]
        for row in sorted(left_of, key=self._blocks.standing):
            rank = table.rank_of(row)
            count = min(tokens_left[rank], left_of[row])
            num_logits = 1
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

    def _send_back(self, sequence: Sequence) -> None:
        sequence.progress.last_token_time = self._gaps.leave(sequence.row)
        self.table.detach(sequence)
        if sequence.needs_prompt_logprobs:
            sequence.prompt_logprobs.clear()  # it starts over
        self._admission.push(sequence)
