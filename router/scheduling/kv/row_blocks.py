"""KV blocks of a table's rows: how a row gets them, and which sequence is preempted for them.

A row that runs short takes free and cached blocks first. Then the sequence last in order is
preempted, and waits again. Drafts take only blocks that no sequence needs next, and preempt nobody.
A row cannot give them back while it runs: an executor only ever appends blocks to a row, and may be
writing into them. So their number is bounded: beyond the blocks for its tokens, by the upper bound
of its length, a row holds the blocks for one step's drafts and keeps them for its next steps; and
`reserve` leaves a block for the next token of every sequence of the rank.

Where the model has windowed layers, a row takes two blocks for each column, one for either list. At
each answer `give_back` returns those of the second that lie before the row's window, and one more at
most, so that the window before the row's last full block is there for the prefix cache. All tokens
of a prompt's chunk are written, so a chunk takes more than the window until it is answered: where that
is not there, the chunk is shorter and nobody is preempted for it.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from router.requests.request import Int32Array, Sequence
from router.scheduling.columns import Growth, Mask, Rows, offsets, spread
from router.scheduling.kv.block_log import BlockRun
from router.scheduling.kv.block_pool import NO_BLOCKS, BlockIds, BlockPools
from router.scheduling.kv.prefix_cache import (
    WINDOW,
    BlockHash,
    PrefixCache,
    Wanted,
    extend_block_hashes,
    part_name,
)
from router.scheduling.kv.tails import Tail
from router.scheduling.sequence_table import RowStatus, SequenceTable
from router.scheduling.step import StepPlan

FEW_ROWS = 3  # that end in a step: each by itself takes less time than all at once


class RowBlocks:
    """The blocks behind the rows of one table.

    Args:
        table: Its columns and tables of blocks change here.
        caches: [dp_size] of each rank.
        preempt: Takes the sequence of a row off its rank.
        max_window_blocks: See GroupShape.

    Attributes:
        pools: Of all ranks.
    """

    def __init__(
        self,
        table: SequenceTable,
        caches: list[PrefixCache],
        preempt: Callable[[int], None],
        max_window_blocks: int = 0,
    ) -> None:
        self._table = table
        self._caches = caches
        self.pools = BlockPools([cache.pool for cache in caches])
        self._preempt = preempt
        self._max_window_blocks = max_window_blocks
        # Rows of prompts that nobody has asked for, by `Tail.key`, and their keys.
        self._unnamed: dict[bytes, int] = {}
        self._unnamed_keys: dict[int, bytes] = {}

    # ---- getting blocks

    def grow(self, mask: Mask) -> Growth | None:
        """Gives each decoding row of a mask one column, as far as the ranks' pools and preemption allow.

        Returns what they got; None if it took preemption.
        """
        rows = mask.nonzero()[0]
        if columns := self._add_columns(rows):
            return Growth(mask, rows, *columns)
        self._add_columns(self._make_rooms(rows))
        return None

    def _add_columns(self, rows: Rows) -> tuple[Int32Array, Int32Array | None, list[int]] | None:
        """Gives each of these rows one column if there are enough blocks without preemption.

        Returns the blocks, those for windowed layers, and where each rank's part begins, see Growth.
        """
        table, num_lists = self._table, self._table.num_lists
        if not len(rows):
            return NO_BLOCKS, None, [0] * (table.dp_size + 1)
        cuts = rows.searchsorted(table.first_rows)
        counts = cuts[1:] - cuts[:-1]
        if not self.pools.make_free(num_lists * counts):
            return None
        columns, window_ids = table.num_blocks.take(rows), None
        places = table.block_starts.take(rows) + columns
        if table.has_windows:
            window_ids = self.pools.acquire(counts, cuts[:-1])
            table.flat_window_blocks[places] = window_ids
        table.flat_blocks[places] = block_ids = self.pools.acquire(counts, cuts[:-1])
        table.num_blocks[rows] = columns + 1
        return block_ids, window_ids, cuts.tolist()

    def give_all(self, rows: Rows, num_tokens: Int32Array) -> bool:
        """Gives rows, ranks in order, blocks for so many next tokens if that takes no preemption.

        Returns whether it did; otherwise it gave none.
        """
        table, num_lists = self._table, self._table.num_lists
        held, ends = table.num_blocks.take(rows), table.num_computed.take(rows) + num_tokens
        num_new = np.maximum(-(-ends // table.block_size) - held, 0)
        counts = np.zeros(table.dp_size, np.int64)
        np.add.at(counts, rows // table.rows_per_rank, num_new)
        if not self.pools.make_free(num_lists * counts):
            return False
        places, before = (
            spread(table.block_starts.take(rows) + held, num_new),
            counts.cumsum() - counts,
        )
        if table.has_windows:
            table.flat_window_blocks[places] = self.pools.acquire(counts, before)
        table.flat_blocks[places] = self.pools.acquire(counts, before)
        table.num_blocks[rows] = held + num_new
        return True

    def give(self, rank: int, row: int, num_tokens: int) -> int:
        """Gives a row blocks for its next tokens. Returns for how many tokens there are some."""
        table, pool, num_lists = self._table, self.pools[rank], self._table.num_lists
        start, held = int(table.num_computed[row]), int(table.num_blocks[row])
        num_new = max(0, -(-(start + num_tokens) // table.block_size) - held)
        if num_new * num_lists > pool.num_available:
            if table.has_windows:
                num_new = max(1, pool.num_available // num_lists)
            if not self._find(rank, num_new * num_lists, row):
                if table.status[row] != RowStatus.EXTEND:
                    return 0
                num_new = pool.num_available // num_lists
        block_ids, columns = pool.acquire(num_new * num_lists), slice(held, held + num_new)
        table.block_table[row, columns] = block_ids[:num_new]
        if table.has_windows:
            table.window_block_table[row, columns] = block_ids[num_new:]
        table.num_blocks[row] += num_new
        return min(num_tokens, (held + num_new) * table.block_size - start)

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
            pool = self.pools[rank]
            sums = num_missing[start:end].cumsum()
            num_spare = pool.num_available // table.num_lists - table.num_bound(rank)
            count = int(sums.searchsorted(num_spare, side="right"))
            if count:
                is_granted[start : start + count] = True
                block_ids.append(pool.acquire(int(sums[count - 1]) * table.num_lists))
        if block_ids:
            rows, num_missing = rows[is_granted], num_missing[is_granted]
            places = spread((table.block_starts + table.num_blocks).take(rows), num_missing)
            self._put(places, block_ids)
            table.num_blocks[rows] += num_missing

    def can_reserve(self, ends: Int32Array) -> bool:
        """Whether `reserve` would give all rows what they want, and no bound prompt's blocks."""
        table = self._table
        num_lists = table.num_lists
        num_wanted = np.maximum(self._num_missing(ends), 0) * num_lists
        for_prompts = table.num_extend // table.block_size + 1 - table.num_blocks
        for_prompts += np.minimum(for_prompts, self._max_window_blocks)
        num_wanted += np.where(table.status == RowStatus.EXTEND, for_prompts, 0)
        num_wanted = num_wanted.reshape(table.dp_size, -1).sum(axis=1)
        num_wanted += num_lists * table.num_bound_rows
        return bool((num_wanted <= self.pools.num_available).all())

    def _num_missing(self, ends: Int32Array) -> Int32Array:
        """Returns int32 [R], blocks that each row lacks for so many tokens; below 0: it has more."""
        table = self._table
        return -(-np.minimum(ends, table.max_len) // table.block_size) - table.num_blocks

    def _put(self, places: Rows, block_ids: list[BlockIds]) -> None:
        """Writes blocks of each rank into columns of its rows: `num_lists` for each column."""
        table = self._table
        if table.has_windows:
            halves = [ids[len(ids) // 2 :] for ids in block_ids]
            table.flat_window_blocks[places] = np.concatenate(halves)
            block_ids = [ids[: len(ids) // 2] for ids in block_ids]
        table.flat_blocks[places] = np.concatenate(block_ids)

    def _make_rooms(self, rows: Rows) -> Rows:
        """Preempts until there is a column for each of the rows that it returns, ascending."""
        cuts = self._table.cuts_of(rows)
        parts = (rows[start:end] for start, end in pairwise(cuts))
        granted = [self._make_room(rank, part) for rank, part in enumerate(parts)]
        return np.sort(np.concatenate(granted))

    def _make_room(self, rank: int, rows: Rows) -> Rows:
        """Preempts until there is a column for each of the rows that it returns."""
        granted: list[int] = []
        for row in sorted(rows.tolist(), key=self._table.order_of):
            if self._table.status[row] != RowStatus.DECODE:
                continue  # preempted for one before it
            if self._find(rank, (len(granted) + 1) * self._table.num_lists, row):
                granted.append(row)
        still_there = [row for row in granted if self._table.status[row] == RowStatus.DECODE]
        return np.array(still_there, dtype=np.int64)

    def _find(self, rank: int, count: int, row: int) -> bool:
        """Preempts sequences that come after ``row``, itself last, until ``count`` are there.

        Returns False if they are not, or not yet: blocks that a step in flight uses come later.
        """
        pool = self.pools[rank]
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

    def release(self, rows: list[int]) -> None:
        """Names the rows' full blocks and drops their references to all of their blocks."""
        for row in rows:
            if self._table.sequences[row] is not None:  # else it was named when it ended
                self.name(row)
        self.drop(rows)

    def drop(self, rows: list[int]) -> None:
        """Drops the rows' references, without a name more than there are.

        Of a prefix's blocks, the last is to be evicted first: without its predecessors it is worth
        nothing, without its successors all the same. And the window's last of all: they are few, and
        without them the others are worth nothing.
        """
        table = self._table
        if len(rows) <= FEW_ROWS and not table.has_windows:
            for row in sorted(rows):
                self.pools[table.rank_of(row)].release(table.blocks_of(row))
            return
        backwards = np.array(sorted(rows, reverse=True), dtype=np.int64)
        num_blocks, ranks = table.num_blocks.take(backwards), backwards // table.rows_per_rank
        counts = np.bincount(ranks, num_blocks, table.dp_size).astype(np.int64)
        places = spread(table.block_starts.take(backwards), num_blocks)[::-1]
        self.pools.release(table.flat_blocks.take(places), counts)
        if table.has_windows:
            for row in rows:
                self.pools[table.rank_of(row)].release(table.window_blocks_of(row))

    def give_back(self, plan: StepPlan, has_token: Mask) -> None:
        """Drops the references to windows' blocks that no step reads any more, now that one is back.

        What runs of a row from here on, or is in flight, begins behind what the answered step ran
        of it: at its last known token, however many drafts may be accepted, or at the prompt's next
        chunk. Blocks of a prompt were named when they were handed out; those of outputs are named
        when the sequence ends, and its last window is there then.

        Args:
            plan: The step, whose tokens are written.
            has_token: bool [R], rows that gained some.
        """
        table = self._table
        starts, is_due = table.num_tokens - 1, has_token.copy()
        if plan.agreement.has_extend:
            for rank, batch in plan.chunks.items():
                if batch.samples is not None and batch.num_tokens is not None:
                    is_part = batch.samples == 0
                    rows = batch.rows[is_part] + table.first_rows[rank]
                    starts[rows] = (batch.num_computed_tokens + batch.num_tokens)[is_part]
                    is_due[rows] = True
        num_past = starts // table.block_size - table.window_reach
        is_due &= num_past > table.num_past_blocks
        is_due &= table.status <= RowStatus.DECODE  # others give up all that they have
        rows = np.flatnonzero(is_due)
        if not len(rows):
            return
        first, num_past = table.num_past_blocks.take(rows), num_past.take(rows)
        counts = num_past - first
        places = spread(table.block_starts.take(rows) + first, counts)
        block_ids = table.flat_window_blocks.take(places)
        table.num_past_blocks[rows] = num_past
        cuts = offsets(counts, table.cuts_of(rows))
        for rank, (start, end) in enumerate(pairwise(cuts)):
            if start < end:
                self.pools[rank].release_each(block_ids[start:end])

    def show(self, rows: list[int]) -> None:
        """Lets others find the full blocks of prompts, as far as they are handed out.

        A step in flight may still compute them; a sequence that finds a block runs after that step.
        If the step is lost instead, salvage.py takes the names back. To name blocks takes hashing and
        entering each, and most prompts are nobody else's: one that found nothing itself has its first
        block noted, and has names once another begins alike.
        """
        table, size = self._table, self._table.block_size
        num_named, num_computed = table.num_named_blocks.take(rows), table.num_computed.take(rows)
        is_unnamed, is_full = (num_named == 0).tolist(), (num_computed >= size).tolist()
        for row, may_wait, has_block in zip(rows, is_unnamed, is_full, strict=True):
            sequence = table.bound(row)
            names, cache = sequence.block_hashes, self._caches[sequence.dp_rank]
            was_looked_up = may_wait and len(names) == 1
            if not was_looked_up or cache.log is not None or table.has_windows:
                self.name(row)
            elif has_block:
                key = sequence.request.cache_salt + sequence.tokens[:size].tobytes()
                other = self._unnamed.setdefault(key, row)
                if other == row:
                    self._unnamed_keys[row] = key
                else:
                    self.name(other)
                if other != row or cache.has_first(names[0], key):
                    self.name(row)

    def name_wanted(self, wanted: Wanted) -> None:
        """Names the blocks of a prompt that begins as a wanted one does, if one runs."""
        row = self._unnamed.get(wanted.key(0)) if len(wanted) else None
        if row is not None:
            self.name(row)

    def name(self, row: int) -> None:
        """Names the full blocks of a row whose tokens are known and handed out.

        Drafts lie behind these, in slots that are written again before they are read.
        """
        table = self._table
        self._hide(row)
        num_known = min(int(table.num_tokens[row]), int(table.num_computed[row]))
        first, end = int(table.num_named_blocks[row]), num_known // table.block_size
        if first == end:
            return
        self._name(row, self._hashes_of(row, end), first, end)
        table.num_named_blocks[row] = end

    def _hide(self, row: int) -> None:
        """Forgets that a row's prompt has no names."""
        key = self._unnamed_keys.pop(row, None)
        if key is not None:
            del self._unnamed[key]

    def _hashes_of(self, row: int, end: int) -> list[BlockHash]:
        """Returns the names of a row's blocks, at least of those before ``end``."""
        table = self._table
        sequence = table.bound(row)
        if len(sequence.block_hashes) < end:
            tokens, salt = table.tokens.of(row), sequence.request.cache_salt
            tokens = tokens[: end * table.block_size]
            extend_block_hashes(sequence.block_hashes, tokens, table.block_size, salt)
        return sequence.block_hashes

    def _name(self, row: int, hashes: list[BlockHash], first: int, end: int) -> None:
        """Names a row's blocks from ``first`` to before ``end``, in both lists."""
        table = self._table
        cache, block_ids = self._caches[table.rank_of(row)], table.block_table[row, first:end]
        is_new = cache.insert(hashes[first:end], block_ids)
        if cache.log is not None:
            salt, size = table.bound(row).request.cache_salt, table.block_size
            names = hashes[first - 1 : end] if first else [salt, *hashes[:end]]
            tokens = table.tokens.of(row)[first * size : end * size].copy().reshape(-1, size)
            run = BlockRun(salt, first, names, block_ids.copy(), tokens)
            for part in (run,) if is_new is None else run.parts(is_new):
                cache.log.store(part)
        if table.has_windows:
            self._name_windows(row, hashes, first, end)

    def _name_windows(self, row: int, hashes: list[BlockHash], first: int, end: int) -> None:
        table = self._table
        held = max(first, int(table.num_past_blocks[row]))
        names = [name + WINDOW for name in hashes[held:end]]
        cache = self._caches[table.rank_of(row)]
        cache.insert(names, table.window_block_table[row, held:end])

    def name_missing(self, row: int, end: int) -> None:
        """Names those of a row's blocks before ``end`` whose names no block has."""
        hashes, cache = self._hashes_of(row, end), self._caches[self._table.rank_of(row)]
        is_missing = np.array([False, *map(cache.is_missing, hashes[:end]), False])
        edges = np.flatnonzero(is_missing[1:] != is_missing[:-1]).tolist()
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            self._name(row, hashes, start, stop)
        if self._table.has_windows:
            self._name_windows(row, hashes, 0, end)

    def name_part(self, row: int, end: int) -> None:
        """Names a row's block that ends with computed tokens before it is full, if there is one.

        Not where there are windowed layers, whose blocks would have to be there, too.
        """
        table = self._table
        first, num_tokens = divmod(end, table.block_size)
        if num_tokens and not table.has_windows:
            sequence, hashes = table.bound(row), self._hashes_of(row, first)
            parent = hashes[first - 1] if first else sequence.request.cache_salt
            tokens = table.tokens.of(row)[end - num_tokens : end]
            name = part_name(parent, tokens, sequence.turn)
            cache = self._caches[table.rank_of(row)]
            cache.insert([name], table.block_table[row, first : first + 1])

    def leave(self, sequence: Sequence) -> None:
        """Lets others find the full blocks of a row whose sequence ends; they need no names for it.

        The sequence gives up its row's tokens.
        """
        table, size, row = self._table, self._table.block_size, sequence.row
        cache = self._caches[sequence.dp_rank]
        end = min(int(table.num_tokens[row]), int(table.num_computed[row])) // size
        if cache.log is not None or table.has_windows or len(sequence.block_hashes) >= end:
            self.name(row)
        else:
            self._hide(row)
        start = int(table.num_named_blocks[row])
        block_ids = table.block_table[row, start:end].copy()
        table.detach(sequence)
        if start < end:
            cache.pool.keep(block_ids)
            parent = sequence.block_hashes[start - 1] if start else sequence.request.cache_salt
            tokens = sequence.tokens[start * size : end * size].reshape(-1, size)
            tokens = tokens.copy() if start else tokens  # what is before them is not held
            cache.leave(Tail(parent, tokens, block_ids))

    def _num_leaving_blocks(self, rank: int) -> int:
        """Blocks that come back once the steps in flight that use them are back."""
        table = self._table
        rows = slice(*table.first_rows[rank : rank + 2])
        is_leaving, num_blocks = table.status[rows] >= RowStatus.PREEMPTED, table.num_blocks[rows]
        num_leaving = int(num_blocks[is_leaving].sum())
        if table.has_windows:
            # Where drafts are refused, less comes back; but then the row also needs no more yet.
            num_past = table.num_computed[rows] // table.block_size - table.window_reach
            num_past = np.where(is_leaving, num_blocks, num_past)
            num_back = np.maximum(num_past - table.num_past_blocks[rows], 0)
            num_leaving += int(num_back[table.status[rows] != RowStatus.FREE].sum())
        return num_leaving
