"""Binding of waiting sequences to rows of ranks: who is next, who waits for whom, who gives way."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from itertools import chain

from router.requests.request import Sequence
from router.requests.waiting_queue import SequenceQueue
from router.scheduling.counters import GroupMeasures, TokenGaps
from router.scheduling.kv.prefix_cache import NO_PREFIX, CachedPrefix
from router.scheduling.kv.row_blocks import RowBlocks
from router.scheduling.prompts.common_parts import CommonParts
from router.scheduling.prompts.lookup import Found, PrefixLookup
from router.scheduling.prompts.order import PromptOrder
from router.scheduling.prompts.rank_choice import RankLoads
from router.scheduling.sequence_table import RowStatus, SequenceTable
from router.scheduling.step import GroupShape
from router.scheduling.step_budget import Prompt

ROWS_PER_KEPT = 128  # of a group: so seldom one stays free for a flow that has none
MAX_LOOKUPS = 512  # in vain, in a plan after a loss: the rest of the line waits behind so many


class Outcome(Enum):
    """What came of binding a sequence."""

    BOUND = auto()
    NO_RANK = auto()  # no rank has a row, blocks and time for it
    DEFERRED = auto()  # another runs first what they have in common
    LOOKED_UP = auto()  # deferred, too, but it took a lookup to know


class Binder:
    """Gives waiting sequences rows, in the line's order, where they can run in this step.

    Args:
        shape: The group's sizes.
        table: Its rows.
        blocks: Theirs.
        waiting: The sequences that wait.
        lookup: Finds what is cached of them.
        order: Says their turns.
        gaps: Of the table's rows.
        measures: Gets the sequences' times.
        clock: In seconds.
        preempt: Takes the sequence of a row off its rank.
    """

    def __init__(
        self,
        shape: GroupShape,
        table: SequenceTable,
        blocks: RowBlocks,
        waiting: SequenceQueue,
        lookup: PrefixLookup,
        order: PromptOrder,
        gaps: TokenGaps,
        measures: GroupMeasures,
        clock: Callable[[], float],
        preempt: Callable[[int], None],
    ) -> None:
        self._shape = shape
        self._table = table
        self._pools = blocks.pools
        self._waiting, self._line = waiting, waiting.line
        self._lookup = lookup
        self._order = order
        self._gaps = gaps
        self._measures = measures
        self._clock = clock
        self._preempt = preempt
        self._is_first = True  # binding of this epoch
        self._since = clock()  # see `bind`

    def bind(
        self, prompts: list[list[Prompt]], num_decodes: list[int], chunk: int, since: float
    ) -> int:
        """Binds waiting sequences, in order, to ranks that can run them in this step.

        If the first that finds no row or no KV comes before one that is bound, that one gives way.

        Args:
            prompts: [dp_size] bound prompts of each rank, in order. Those that are bound are added.
            num_decodes: [dp_size] decodes that run in this step.
            chunk: Prompt tokens that a rank may run in this step if all have some.
            since: From when on new sequences could have been bound.

        Returns:
            How many wait for rows or KV, of which the first finds none.
        """
        if not len(self._waiting):
            return 0
        num_stuck, self._since = 0, since
        prices, kv_ids = self._order.prices, self._lookup.kv_ids
        loads = RankLoads(
            self._shape, self._table, self._pools, prompts, num_decodes, chunk, prices
        )
        if self._is_first:
            self._is_first = False
            if any(each.progress.has_kept_kv(kv_ids) for each in self._waiting):
                self._bind_kept(loads)
        common, num_lookups = None, 0
        with self._putting_back() as deferred:
            while num_lookups < MAX_LOOKUPS and (sequence := self._waiting.peek()) is not None:
                if common is None and sequence.is_interrupted:
                    rows = (prompt.row for prompt in chain.from_iterable(prompts))
                    common = CommonParts(self._table, self._order, map(self._table.bound, rows))
                outcome = self._bind_in_turn(sequence, loads, common)
                if outcome is Outcome.NO_RANK:
                    if loads.is_stuck:
                        num_stuck = len(self._waiting)
                        self._preempt_for(sequence)
                    break
                if outcome is not Outcome.BOUND:
                    deferred.append(self._waiting.pop(is_aside=True))
                    num_lookups += outcome is Outcome.LOOKED_UP
                elif common is not None:
                    common.note(sequence)
        return num_stuck

    @contextmanager
    def _putting_back(self) -> Iterator[list[Sequence]]:
        """Puts back in the end what was taken out and is not bound, also if the router fails meanwhile."""
        taken: list[Sequence] = []
        try:
            yield taken
        finally:
            for sequence in taken:
                if sequence.table is None:
                    self._waiting.push(sequence, is_back=True)

    def _waits_for_its_leader(self, sequence: Sequence) -> bool:
        """Whether the request's first continuation still runs the prompt that they share."""
        leader = sequence.request.sequences[0]
        is_running = leader.table is not None and leader is not sequence
        return is_running and self._table.status[leader.row] == RowStatus.EXTEND

    def _is_kept_out(self, sequence: Sequence) -> bool:
        """Whether what rows are free are kept for flows that have none.

        Who gives way leaves a row when the step that runs it is back; who comes beside a flood need
        not wait for that, and the flood need not compute again what gave way.
        """
        if not (self._line.are_many and sequence.flow.num_held):
            return False
        num_rows = len(self._table.sequences)
        return num_rows - int(self._table.num_bound_rows.sum()) <= num_rows // ROWS_PER_KEPT

    def _bind_kept(self, loads: RankLoads) -> None:
        """Binds what ranks have KV of since before a loss, until others take rows and blocks there."""
        with self._putting_back() as others:
            while (sequence := self._waiting.peek()) is not None:
                found = self._lookup.find(sequence)
                if found.home is None or self._pick(sequence, loads, found) != found.home:
                    others.append(self._waiting.pop(is_aside=True))
                else:
                    self._bind_to(found.home, sequence, loads, found)

    def _bind_in_turn(
        self, sequence: Sequence, loads: RankLoads, common: CommonParts | None
    ) -> Outcome:
        """Binds the first of the line to its best rank, unless it is better to wait."""
        if self._waits_for_its_leader(sequence):
            return Outcome.DEFERRED
        common = common if sequence.is_interrupted else None
        if common is not None and common.must_wait_like_another(sequence):
            return Outcome.DEFERRED
        found = self._lookup.find(sequence)
        if common is not None and common.must_wait(sequence, found):
            return Outcome.LOOKED_UP
        if self._is_kept_out(sequence):
            loads.is_stuck = True
            return Outcome.NO_RANK
        rank = self._pick(sequence, loads, found)
        if rank is None:
            return Outcome.NO_RANK
        if common is not None and common.must_wait(sequence, found, rank):
            return Outcome.LOOKED_UP
        self._bind_to(rank, sequence, loads, found)
        return Outcome.BOUND

    def _pick(self, sequence: Sequence, loads: RankLoads, found: Found) -> int | None:
        turn, num_tokens = self._order.turn(sequence), len(sequence.tokens)
        is_interrupted, home = sequence.is_interrupted, found.home
        return loads.pick(
            turn, num_tokens, found.prefixes, is_interrupted=is_interrupted, home=home
        )

    def _bind_to(self, rank: int, sequence: Sequence, loads: RankLoads, found: Found) -> None:
        self._waiting.pop()
        try:  # as `_putting_back`, which takes longer
            row = self._enter(sequence, rank, found.prefixes.get(rank, NO_PREFIX))
        except BaseException:
            if sequence.table is None:
                self._waiting.push(sequence, is_back=True)
            raise
        loads.add(rank, self._order.prompt(row))

    def _enter(self, sequence: Sequence, rank: int, cached: CachedPrefix) -> int:
        """Gives a sequence a row of a rank, which it returns."""
        cache = self._lookup.caches[rank]
        cache.use(cached)
        row, progress = self._table.bind(sequence, rank, cached), sequence.progress
        num_cached = cached.num_tokens(self._shape.block_size)
        is_new = progress.start_time is None
        self._line.take(sequence, (sequence.num_tokens - num_cached) * is_new)
        self._table.flow[row] = sequence.flow.number
        self._gaps.enter(row, progress.last_token_time)
        if is_new:
            since = max(self._since, sequence.request.arrival_time)
            progress.start_time = min(self._clock(), since)
            progress.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens)
            cache.num_queried_tokens += sequence.num_prompt_tokens
            cache.num_hit_tokens += progress.num_cached_tokens
            self._measures.queue_s.observe(progress.start_time - sequence.request.arrival_time)
        if progress.num_computed_tokens:
            is_kept = progress.has_kept_kv(self._lookup.kv_ids)
            self._measures.kept_kv.add(progress.num_computed_tokens, num_cached, is_kept=is_kept)
            progress.num_computed_tokens = 0
        return row

    def _preempt_for(self, sequence: Sequence) -> None:
        """Preempts the last sequence of another flow, or of lower priority, for a waiting one before it."""
        table, rows = self._table, self._table.live_rows()
        if (table.status >= RowStatus.PREEMPTED).any() or not len(rows):
            return  # what leaves makes place before long
        flow, priority = self._line.flow_of(sequence.request.caller), sequence.request.priority
        last = table.bound(table.last_in_order(rows))
        if last.flow is not flow and last.order < (*flow.next_key, *sequence.turn):
            rows = rows[table.flow.take(rows) == flow.number]
            if not len(rows):
                return
            last = table.bound(table.last_in_order(rows))
        is_less = last.request.priority < priority and last.turn > sequence.turn
        if last.flow is not flow or is_less:
            self._preempt(last.row)
