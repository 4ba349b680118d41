"""Table of the sequences that are bound to a group's ranks: a row each, one flat array per fact.

A step touches thousands of sequences and does the same to each, so what changes per step lives
here, for all DP ranks in one array, and one numpy operation serves them all (measured: 24 us
for 16 ranks of 256 sequences where an object per sequence takes 3 ms). Rank r has the rows
r * rows_per_rank to (r + 1) * rows_per_rank - 1; row % rows_per_rank is the executor's row.

    tokens      [ prompt ............ | output ...... | (not known yet) ]
                  0                     num_prompt      num_tokens        max_len
    computed    [ handed out to the executor ......... | ]
                  0                                      num_computed

Where the model has windowed layers, a row has a second list of blocks for them, with the columns of
the first. Blocks at its beginning are given back once no step can read them any more:

    window_block_table  [ 0 0 0 (given back) | held ....................... ]
                          0                    num_past_blocks                num_blocks

With drafts, a step that is not back may have computed fewer tokens than it was allowed to: while it
is in flight, num_computed counts all of them, and is an upper bound.
"""

from collections.abc import Sequence as SequenceOf
from itertools import accumulate
from typing import Final

import numpy as np

from router.requests.request import NO_LISTENER, Columns, Int32Array, Sequence
from router.scheduling.columns import Mask, Rows, RowSet
from router.scheduling.kv.block_pool import BlockIds
from router.scheduling.kv.prefix_cache import CachedPrefix
from router.scheduling.row_tokens import RowTokens
from router.scheduling.step import window_reach

NUM_STOP_IDS = 4  # a sequence with more stop tokens has them looked at one by one
NO_STOP_IDS = (-1,) * NUM_STOP_IDS


class RowStatus:
    """State of a row. Plain integers: looking up an enum's member costs 300 ns.

    FREE ──bind──▶ EXTEND ──last chunk handed out──▶ DECODE
      ▲               └───────────┬────────────────────┘
      │                           ▼
      └──no step in flight── PREEMPTED or ENDED
    """

    FREE: Final = 0
    EXTEND: Final = 1  # some of its known tokens have not been handed out
    DECODE: Final = 2  # one token a step, and drafts
    PREEMPTED: Final = 3  # has to wait again, but a step in flight still runs it
    ENDED: Final = 4  # has its result, but a step in flight still runs it


def _no_rows(dp_size: int, num_rows: int) -> RowSet:
    nothing = np.frombuffer(bytes(num_rows), dtype=np.bool_)
    return RowSet(nothing, [0] * dp_size, [0] * (dp_size + 1), [b""] * dp_size)


class SequenceTable:
    """Arrays of R rows, and how a sequence gets in and out of them.

    Attributes:
        status: uint8 [R], a RowStatus.
        num_tokens: int32 [R], tokens known: prompt and committed output.
        num_prompt: int32 [R], tokens of the prompt.
        num_computed: int32 [R], tokens handed out for computing; an upper bound while a
            speculative step is in flight.
        num_extend: int32 [R], tokens known when it was bound: what EXTEND has to hand out.
        max_len: int32 [R], prompt and output tokens at most.
        max_computed: int32 [R], max_len - 1: the last token is never computed.
        min_len: int32 [R], no stop token ends it below this length.
        num_blocks: int32 [R], blocks in its row of `block_table`.
        num_sent_blocks: int32 [R], blocks of it that the executor knows.
        num_named_blocks: int32 [R], blocks of it that the prefix cache was told of.
        num_taken: int32 [R], tokens that its listener has, prompt included.
        stop_ids: int32 [NUM_STOP_IDS, R], -1 where there are fewer.
        stop_columns: The columns of it, each by itself.
        num_stop_ids: The most of them that any row has had; the rest of `stop_ids` is -1.
        is_inspected: bool [R], each of its tokens is looked at in Python: stop strings,
            many stop tokens.
        takes_drafts: bool [R], it may gain several tokens in a step. Not so where the executor
            needs more than a length for the next one: penalties, bans, log probabilities.
        num_drafts: int64 [R], drafts of its steps that could have been accepted.
        num_accepted: int64 [R], drafts of its steps that were accepted.
        scores_output: bool [R], the executor returns log probabilities of its output.
        scores_prompt: bool [R], and of its prompt.
        listener: int32 [R], index of its listener.
        columnar_listener: int32 [R], the same if that takes its tokens as columns; else NO_LISTENER.
        tag: uint32 [R], what its listener calls it.
        flow: int32 [R], number of its flow.
        block_table: int32 [R, max_blocks].
        window_block_table: int32 [R, max_blocks], for windowed layers; [R, 0] without any.
        num_past_blocks: int32 [R], columns of it that were given back, or that the row never had.
        tokens: The known tokens of each row.
        sequences: The sequence of each row, or None.
        first_rows: int64 [dp_size + 1], the first row of each rank, and R.
        block_starts: int64 [R], where each row begins in `flat_blocks`.
        flat_blocks: `block_table` as one long row.
        flat_window_blocks: `window_block_table` as one long row.
        num_constrained: Bound sequences that have a grammar.
        num_scored: Bound sequences that get log probabilities.
        num_inspected: Bound sequences of `is_inspected`.
        num_bound_rows: int64 [dp_size], sequences that hold a row of each rank.
        has_windows: Whether rows have two lists of blocks.
        num_lists: 2 if so, else 1.
        window_reach: Blocks before that of a token that its window may reach into.
    """

    def __init__(
        self,
        *,
        dp_size: int,
        rows_per_rank: int,
        max_model_len: int,
        block_size: int,
        kv_window: int = 0,
    ) -> None:
        num_rows = dp_size * rows_per_rank
        self.dp_size = dp_size
        self.rows_per_rank = rows_per_rank
        self.block_size = block_size
        self.has_windows = kv_window > 0
        self.num_lists = 2 if self.has_windows else 1
        self.window_reach = window_reach(kv_window, block_size)
        self.status = np.zeros(num_rows, dtype=np.uint8)
        self.num_tokens = np.zeros(num_rows, dtype=np.int32)
        self.num_prompt = np.zeros(num_rows, dtype=np.int32)
        self.num_computed = np.zeros(num_rows, dtype=np.int32)
        self.num_extend = np.zeros(num_rows, dtype=np.int32)
        self.max_len = np.zeros(num_rows, dtype=np.int32)
        self.max_computed = np.zeros(num_rows, dtype=np.int32)
        self.min_len = np.zeros(num_rows, dtype=np.int32)
        self.num_blocks = np.zeros(num_rows, dtype=np.int32)
        self.num_sent_blocks = np.zeros(num_rows, dtype=np.int32)
        self.num_named_blocks = np.zeros(num_rows, dtype=np.int32)
        self.num_taken = np.zeros(num_rows, dtype=np.int32)
        self.num_stop_ids = self.num_constrained = self.num_scored = self.num_inspected = 0
        self.stop_ids = np.full((NUM_STOP_IDS, num_rows), -1, dtype=np.int32)
        self.stop_columns = list(self.stop_ids)
        self.is_inspected = np.zeros(num_rows, dtype=np.bool_)
        self.takes_drafts = np.zeros(num_rows, dtype=np.bool_)
        self.num_drafts = np.zeros(num_rows, dtype=np.int64)
        self.num_accepted = np.zeros(num_rows, dtype=np.int64)
        self.scores_output = np.zeros(num_rows, dtype=np.bool_)
        self.scores_prompt = np.zeros(num_rows, dtype=np.bool_)
        self.listener = np.zeros(num_rows, dtype=np.int32)
        self.columnar_listener = np.zeros(num_rows, dtype=np.int32)
        self.tag = np.zeros(num_rows, dtype=np.uint32)
        self.flow = np.zeros(num_rows, dtype=np.int32)
        max_blocks = -(-max_model_len // block_size)
        self.block_table = np.zeros((num_rows, max_blocks), dtype=np.int32)
        self.window_block_table = np.zeros((num_rows, max_blocks * self.has_windows), np.int32)
        self.num_past_blocks = np.zeros(num_rows, dtype=np.int32)
        self.tokens = RowTokens(self.num_tokens, max_model_len)
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.first_rows = np.arange(dp_size + 1) * rows_per_rank
        self.block_starts = np.arange(num_rows) * max_blocks
        self.flat_blocks = self.block_table.reshape(-1)
        self.flat_window_blocks = self.window_block_table.reshape(-1)
        self._ones = np.ones(num_rows, dtype=np.int32)
        self._ones.flags.writeable = False  # parts of it are handed out
        self._sum_type = np.int32 if rows_per_rank * max_model_len < 1 << 31 else np.int64
        self._prompt_rows: list[int] | None = []  # None: a status has changed
        self._last_mask, self._last_row_set = bytes(num_rows), _no_rows(dp_size, num_rows)
        starts = range(0, num_rows, rows_per_rank)
        self.num_bound_rows = np.zeros(dp_size, dtype=np.int64)
        self._free_rows = [list(range(row, row + rows_per_rank))[::-1] for row in starts]

    def has_free_row(self, dp_rank: int) -> bool:
        return bool(self._free_rows[dp_rank])

    def num_bound(self, dp_rank: int) -> int:
        """Sequences that hold a row of this rank."""
        return int(self.num_bound_rows[dp_rank])

    def rank_of(self, row: int) -> int:
        return row // self.rows_per_rank

    def set_status(self, rows: int | SequenceOf[int] | Rows, status: int) -> None:
        """Gives rows another status: the only way in which one changes."""
        self.status[rows] = status
        self._prompt_rows = None

    @property
    def prompt_rows(self) -> list[int]:
        """The rows in EXTEND, ascending. Asked for again while no status has changed, it costs nothing."""
        if self._prompt_rows is None:
            self._prompt_rows = (self.status == RowStatus.EXTEND).nonzero()[0].tolist()
        return self._prompt_rows

    def row_set(self, mask: Mask) -> RowSet:
        """Returns the rows of a mask [R]. Asked for the same ones again, it costs a comparison."""
        mask_bytes = mask.tobytes()
        if mask_bytes != self._last_mask:
            self._last_mask = mask_bytes
            last, size = self._last_row_set, self.rows_per_rank
            changed = (mask != last.mask).nonzero()[0]
            local_rows, num_rows = last.local_rows.copy(), last.num_rows.copy()
            for rank in set((changed // size).tolist()):
                own = mask[rank * size : (rank + 1) * size].nonzero()[0].astype(np.int32)
                local_rows[rank], num_rows[rank] = own.tobytes(), len(own)
            own_mask = np.frombuffer(mask_bytes, dtype=np.bool_)
            self._last_row_set = RowSet(own_mask, num_rows, [0, *accumulate(num_rows)], local_rows)
        return self._last_row_set

    def kv_tokens(self, mask: Mask) -> Rows:
        """Returns int64 [dp_size], the computed tokens of each rank's rows in a mask [R]."""
        computed = (self.num_computed * mask).reshape(self.dp_size, -1)
        # Without wider numbers than it takes: they would cost twice the time.
        sums: Rows = np.add.reduce(computed, axis=1, dtype=self._sum_type).astype(np.int64)
        return sums

    def cuts_of(self, rows: Rows) -> list[int]:
        """[dp_size + 1] where each rank's part of ascending rows begins, and their number."""
        cuts: list[int] = rows.searchsorted(self.first_rows).tolist()
        return cuts

    def bound(self, row: int) -> Sequence:
        """The sequence of a row that has one."""
        sequence = self.sequences[row]
        assert sequence is not None
        return sequence

    def order_of(self, row: int) -> tuple[bool, float, float, int, int]:
        """Sorts rows: less gives way last."""
        return self.bound(row).order

    def last_in_order(self, rows: Rows) -> int:
        """The row of these, at least one, that is preempted first."""
        last: int = max(rows.tolist(), key=self.order_of)
        return last

    def live_rows(self) -> Rows:
        """Rows whose sequences have neither ended nor been preempted."""
        return np.flatnonzero((self.status == RowStatus.EXTEND) | (self.status == RowStatus.DECODE))

    def bind(self, sequence: Sequence, dp_rank: int, cached: CachedPrefix) -> int:
        """Gives a sequence a row of a rank. The caller holds a reference to the cached blocks."""
        num_cached, num_past = len(cached.blocks), len(cached.blocks) - len(cached.window_blocks)
        row = self._free_rows[dp_rank].pop()
        self.num_bound_rows[dp_rank] += 1
        request, stop = sequence.request, sequence.request.stop
        num_tokens = len(sequence.tokens)
        self.set_status(row, RowStatus.EXTEND)
        self.num_tokens[row] = self.num_extend[row] = num_tokens
        self.num_prompt[row] = sequence.num_prompt_tokens
        num_computed = cached.num_tokens(self.block_size)
        self.num_computed[row] = num_computed
        self.max_len[row] = max_len = sequence.max_len
        self.max_computed[row] = max_len - 1
        self.num_constrained += bool(request.grammar)
        self.min_len[row] = sequence.min_len
        self.num_blocks[row] = num_cached
        self.num_named_blocks[row] = num_computed // self.block_size
        self.num_sent_blocks[row] = 0
        self.num_taken[row] = sequence.num_taken
        has_many_stop_ids = len(stop.stop_token_ids) > NUM_STOP_IDS
        stop_ids = () if has_many_stop_ids else stop.stop_token_ids
        self.num_stop_ids = max(self.num_stop_ids, len(stop_ids))
        self.stop_ids[:, row] = (*stop_ids, *NO_STOP_IDS[len(stop_ids) :])
        self.scores_output[row] = request.output.logprobs
        self.takes_drafts[row] = not (request.output.logprobs or request.sampling.sees_output)
        self.num_drafts[row] = sequence.progress.num_drafts
        self.num_accepted[row] = sequence.progress.num_accepted_drafts
        self.scores_prompt[row] = sequence.needs_prompt_logprobs
        self.num_scored += bool(self.scores_output[row] or self.scores_prompt[row])
        self.is_inspected[row] = has_many_stop_ids or stop.has_stop_strings
        self.num_inspected += bool(self.is_inspected[row])
        self.listener[row] = request.listener.index
        self.columnar_listener[row] = request.listener.index if request.is_columnar else NO_LISTENER
        self.tag[row] = request.tag
        if num_cached:
            self.block_table[row, :num_cached] = cached.blocks
        if self.has_windows:
            self.window_block_table[row, :num_past] = 0
            self.window_block_table[row, num_past:num_cached] = cached.window_blocks
            self.num_past_blocks[row] = num_past
        self.sequences[row] = sequence
        sequence.tokens = self.tokens.begin(row, sequence.tokens)
        sequence.table = self
        sequence.row = row
        sequence.dp_rank = dp_rank
        return row

    def detach(self, sequence: Sequence) -> None:
        """Takes a sequence's tokens out of its row, which stays taken until `free_rows`."""
        row, request = sequence.row, sequence.request
        self.num_scored -= bool(self.scores_output[row] or self.scores_prompt[row])
        self.num_inspected -= bool(self.is_inspected[row])
        self.num_constrained -= bool(request.grammar)
        sequence.tokens = self.tokens.of(row).copy()
        sequence.num_taken = int(self.num_taken[row])
        sequence.progress.num_drafts = int(self.num_drafts[row])
        sequence.progress.num_accepted_drafts = int(self.num_accepted[row])
        sequence.table = self.sequences[row] = None
        self.num_taken[row] = self.num_tokens[row]  # nobody takes any here
        self.listener[row] = self.columnar_listener[row] = NO_LISTENER

    def free_rows(self, rows: list[int]) -> None:
        """Gives rows back. Their sequences are detached and no step in flight runs them."""
        self.set_status(rows, RowStatus.FREE)
        for row in rows:
            assert self.sequences[row] is None
            rank = self.rank_of(row)
            self._free_rows[rank].append(row)
            self.num_bound_rows[rank] -= 1

    def blocks_of(self, row: int) -> BlockIds:
        """The blocks that a row holds, in order."""
        return self.block_table[row, : self.num_blocks[row]]

    def window_blocks_of(self, row: int) -> BlockIds:
        """The blocks that a row holds for windowed layers, in order; none without any."""
        return self.window_block_table[row, self.num_past_blocks[row] : self.num_blocks[row]]

    def take_tokens(self, row: int) -> Int32Array:
        """Returns a row's output tokens since the last call."""
        start, end = int(self.num_taken[row]), int(self.num_tokens[row])
        self.num_taken[row] = end
        return self.tokens.newest_of(row, end - start)

    def take_columns(self, listener: int) -> Columns:
        """Returns the output tokens of a listener's columnar rows since the last call."""
        num_new = self.num_tokens - self.num_taken
        has_new = num_new > 0
        has_new &= self.columnar_listener == listener
        tags = self.tag[has_new]
        if num_new.max() <= 1:  # nobody is behind, of any listener: half the work
            self.num_taken += has_new
            return Columns(tags, self._ones[: len(tags)], self.tokens.last[has_new])
        counts = num_new[has_new]
        np.copyto(self.num_taken, self.num_tokens, where=has_new)
        return Columns(tags, counts, self.tokens.newest(np.flatnonzero(has_new), counts))
