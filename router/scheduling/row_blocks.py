"""KV blocks of a table's rows: how a row gets them, and which sequence is preempted for them.

A row that runs short takes free and cached blocks first. Then the sequence last in order is
preempted, and waits again. Drafts take only blocks that no sequence needs next, and preempt nobody.
A row cannot give them back while it runs: an executor only ever appends blocks to a row, and may be
writing into them. So their number is bounded: beyond the blocks for its tokens, by the upper bound
of its length, a row holds the blocks for one step's drafts and keeps them for its next steps; and
`reserve` leaves a block for the next token of every sequence of the rank.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from router.requests.request import Int32Array
from router.scheduling.block_pool import BlockPool, PrefixCache, extend_block_hashes
from router.scheduling.sequence_table import Rows, RowStatus, SequenceTable, spread


class RowBlocks:
    """The blocks behind the rows of one table.

    Args:
        table: Its `num_blocks`, `block_table` and `num_named_blocks` change here.
        caches: [dp_size] of each rank.
        preempt: Takes the sequence of a row off its rank.
    """

    def __init__(
        self, table: SequenceTable, caches: list[PrefixCache], preempt: Callable[[int], None]
    ) -> None:
        self._table = table
        self._caches = caches
        self._pools = [cache.pool for cache in caches]
        self._preempt = preempt

    # ---- getting blocks

    def grow(self, rows: Rows) -> bool:
        """Gives each decoding row one block, as far as the ranks' pools and preemption allow.

        Returns whether all of them got one without preemption.
        """
        table = self._table
        cuts = table.cuts_of(rows)
        counts = [end - start for start, end in pairwise(cuts)]
        pools = self._pools
        had_room = all(map(BlockPool.can_acquire, pools, counts))
        if not had_room:
            parts = [
                self._make_room(rank, rows[start:end])
                for rank, (start, end) in enumerate(pairwise(cuts))
            ]
            rows, counts = np.concatenate(parts), [len(part) for part in parts]
        block_ids = [
            pool.acquire(count) for pool, count in zip(pools, counts, strict=True) if count
        ]
        if not block_ids:
            return False
        ends = (table.block_starts + table.num_blocks).take(rows)
        table.flat_blocks[ends] = np.concatenate(block_ids)
        table.num_blocks[rows] += 1
        return had_room

    def give(self, rank: int, row: int, num_tokens: int) -> int:
        """Gives a row blocks for its next tokens. Returns for how many tokens there are some."""
        table, pool = self._table, self._pools[rank]
        start, held = int(table.num_computed[row]), int(table.num_blocks[row])
        num_new = -(-(start + num_tokens) // table.block_size) - held
        if num_new > pool.num_available and not self._find(rank, num_new, row):
            if table.status[row] != RowStatus.EXTEND:
                return 0
            num_new = pool.num_available
        block_ids = pool.acquire(max(0, num_new))
        table.block_table[row, held : held + len(block_ids)] = block_ids
        table.num_blocks[row] += len(block_ids)
        return min(num_tokens, (held + len(block_ids)) * table.block_size - start)

    def reserve(self, ends: Int32Array) -> None:
        """Gives rows blocks for drafts, if there are more than all sequences need next.

        Args:
            ends: int32 [R], tokens for which each row wants blocks; 0: none. Those beyond its
                `max_len` need none.
        """
        table = self._table
        num_missing = self._num_missing(ends)
        rows = np.flatnonzero(num_missing > 0)
        if not len(rows):
            return
        num_missing = num_missing.take(rows)
        is_granted = np.zeros(len(rows), dtype=np.bool_)
        block_ids = []
        for rank, (start, end) in enumerate(pairwise(table.cuts_of(rows))):
            pool = self._pools[rank]
            sums = num_missing[start:end].cumsum()
            count = int(sums.searchsorted(pool.num_available - table.num_bound(rank), side="right"))
            if count:
                is_granted[start : start + count] = True
                block_ids.append(pool.acquire(int(sums[count - 1])))
        if block_ids:
            rows, num_missing = rows[is_granted], num_missing[is_granted]
            places = spread((table.block_starts + table.num_blocks).take(rows), num_missing)
            table.flat_blocks[places] = np.concatenate(block_ids)
            table.num_blocks[rows] += num_missing

    def can_reserve(self, ends: Int32Array) -> bool:
        """Whether `reserve` would give all rows what they want, and no bound prompt's blocks."""
        table = self._table
        num_wanted = np.maximum(self._num_missing(ends), 0)
        for_prompts = table.num_extend // table.block_size + 1 - table.num_blocks
        num_wanted += np.where(table.status == RowStatus.EXTEND, for_prompts, 0)
        sums = num_wanted.reshape(table.dp_size, -1).sum(axis=1).tolist()
        return all(
            count + table.num_bound(rank) <= pool.num_available
            for rank, (pool, count) in enumerate(zip(self._pools, sums, strict=True))
        )

    def _num_missing(self, ends: Int32Array) -> Int32Array:
        """Returns int32 [R], blocks that each row lacks for so many tokens; below 0: it has more."""
        table = self._table
        return -(-np.minimum(ends, table.max_len) // table.block_size) - table.num_blocks

    def _make_room(self, rank: int, rows: Rows) -> Rows:
        """Preempts until there is a block for each of the rows that it returns."""
        granted: list[int] = []
        for row in sorted(rows.tolist(), key=self._table.order_of):
            if self._table.status[row] != RowStatus.DECODE:
                continue  # preempted for one before it
            if self._find(rank, len(granted) + 1, row):
                granted.append(row)
        still_there = [row for row in granted if self._table.status[row] == RowStatus.DECODE]
        return np.array(still_there, dtype=np.int64)

    def _find(self, rank: int, count: int, row: int) -> bool:
        """Preempts sequences that come after ``row``, itself last, until ``count`` are there.

        Returns False if they are not, or not yet: blocks that a step in flight uses come later.
        """
        pool = self._pools[rank]
        while pool.num_available < count:
            if pool.num_available + self._num_leaving_blocks(rank) >= count:
                return False
            rows = self._table.live_rows()
            victim = self._table.last_in_order(rows[rows // self._table.rows_per_rank == rank])
            self._preempt(victim)
            if victim == row:
                return False
        return True

    # ---- giving them up

    def release(self, row: int) -> None:
        """Names the row's full blocks and drops its references to all of its blocks."""
        self.name(row)
        self._pools[self._table.rank_of(row)].release(self._table.blocks_of(row))

    def name(self, row: int) -> None:
        """Lets others find the full blocks of a row whose tokens are known and handed out.

        A step in flight may still compute the last known token's keys and values; a sequence that
        finds its block runs after that step. Drafts lie behind it, in slots that are written again
        before they are read.
        """
        table = self._table
        sequence = table.sequences[row]
        if sequence is None:
            return  # named when it ended
        num_known = int(min(table.num_tokens[row], table.num_computed[row]))
        first, end = int(table.num_named_blocks[row]), num_known // table.block_size
        if first == end:
            return
        hashes = sequence.block_hashes
        if len(hashes) < end:
            tokens, salt = table.tokens[row, :num_known], sequence.request.cache_salt
            extend_block_hashes(hashes, tokens, table.block_size, salt)
        cache = self._caches[table.rank_of(row)]
        cache.insert(hashes[first:end], table.block_table[row, first:end])
        table.num_named_blocks[row] = end

    def _num_leaving_blocks(self, rank: int) -> int:
        """Blocks that come back once the steps in flight that use them are back."""
        table = self._table
        rows = slice(*table.first_rows[rank : rank + 2])
        is_leaving = table.status[rows] >= RowStatus.PREEMPTED
        return int(table.num_blocks[rows][is_leaving].sum())
