"""Block pools: which of each DP rank's KV blocks are free, used or cached, by reference counts.

They know no names: those are the prefix cache's. No tensors.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
NO_BLOCKS: BlockIds = np.zeros(0, dtype=np.int32)

SCRATCH_BLOCK = 0  # padded rows read and write here; never handed out

# A pool that runs short evicts this share of itself at once: one block costs as much as many.
EVICTED_SHARE = 1 / 64

QUEUE_LEN = 4  # times the blocks


class BlockPool:
    """Tracks which KV blocks are free, used or cached.

    Every block except the scratch block is in exactly one state:

               acquire                       release
        free ──────────▶ used ──────────────────────────▶ free
                          │ ▲                    (kept)
                  release │ │ share                ▼
                  (kept)  ▼ │
                         cached ──(acquire runs short: least recently used first)──▶ free

    ``share`` on a used block adds a reference. A block is kept from `keep` until it is evicted;
    ``on_evict`` is told. Cached blocks stand in a queue, in the order of their release:

        queue     [ evicted | 5  8 (5) 3 | unused ]     a block that was shared and released
                             head          tail         again since has a later index, and
        index_of  {5: .., 8: .., 3: ..}                 its old entry counts for nothing

    Args:
        num_blocks: The scratch block included.
        on_evict: Told of blocks that were cached and are free.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[BlockIds], None]) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: need the scratch block and one more")
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._free = np.arange(num_blocks - 1, 0, -1, dtype=np.int32)  # a stack, top at the end
        self._num_free = np.array([num_blocks - 1])
        self._num_cached = np.array([0])
        # A free block's count is 1 already, so that `acquire`, called for every rank in most
        # steps, has nothing to write.
        self._ref_counts = np.ones(num_blocks, dtype=np.int32)
        self._is_kept = np.zeros(num_blocks, dtype=np.bool_)
        self._queue = np.zeros(QUEUE_LEN * num_blocks, dtype=np.int32)
        self._indices = np.arange(len(self._queue), dtype=np.int32)
        self._index_of = np.full(num_blocks, -1, dtype=np.int32)  # -1: not cached
        self._head = 0
        self._tail = np.array([0])

    def move(self, places: dict[str, npt.NDArray[Any]]) -> None:
        """Goes on in the parts of a group's arrays that are its own, by their names here."""
        for name, place in places.items():
            column = getattr(self, name)
            place[: len(column)] = column
            setattr(self, name, place)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return int(self._num_free[0])

    @property
    def num_cached(self) -> int:
        """Blocks that hold something reusable and that nobody uses."""
        return int(self._num_cached[0])

    @property
    def num_available(self) -> int:
        """Blocks that `acquire` can hand out."""
        return self.num_free + self.num_cached

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_free - self.num_cached

    def num_unused(self, block_ids: BlockIds) -> int:
        """How many of these blocks `share` would take out of `num_available`."""
        if not len(block_ids):
            return 0
        return len(block_ids) - int(np.count_nonzero(self._ref_counts[block_ids]))

    def acquire(self, count: int) -> BlockIds:
        """Takes ``count`` blocks, evicting the least recently used cached ones if needed."""
        self.make_free(count)
        num_left = self.num_free - count
        self._num_free[0] = num_left
        return self._free[num_left : num_left + count].copy()

    def make_free(self, count: int) -> None:
        """Evicts until ``count`` blocks are free, of those that are available."""
        num_free = self.num_free
        if num_free < count:
            assert count <= self.num_available, "the scheduler looks before it takes"
            self._evict(count - num_free + int(self.num_blocks * EVICTED_SHARE))

    def share(self, block_ids: BlockIds) -> None:
        """Adds a reference to used or cached blocks, none of them twice."""
        if len(block_ids) == 0:
            return
        counts = self._ref_counts[block_ids]
        self._num_cached[0] -= len(block_ids) - int(np.count_nonzero(counts))
        self._index_of[block_ids] = -1
        self._ref_counts[block_ids] = counts + 1

    def keep(self, block_ids: BlockIds) -> None:
        """Makes used blocks go to the cache, not to the free ones, when they are released."""
        self._is_kept[block_ids] = True

    def give_up(self, is_void: Mask) -> BlockIds:
        """Has blocks of a mask, which are used, not be kept. Returns those that were."""
        kept = np.flatnonzero(self._is_kept & is_void).astype(np.int32)
        self._is_kept[kept] = False
        return kept

    def discard(self, block_ids: BlockIds) -> None:
        """Makes kept blocks hold nothing reusable: cached ones are free at once."""
        self._is_kept[block_ids] = False
        cached = block_ids[self._index_of[block_ids] >= 0]
        self._index_of[cached] = -1
        self._num_cached[0] -= len(cached)
        self.free_up(cached)

    def release(self, block_ids: BlockIds) -> None:
        """Drops a reference of each, none of them twice.

        The last of the list becomes the first to be evicted: without its predecessors a block
        of a prefix is worth nothing, without its successors it is worth all the same.
        """
        counts = self._ref_counts.take(block_ids) - 1
        self._ref_counts[block_ids] = counts
        if np.count_nonzero(counts):
            block_ids = block_ids[counts == 0]
        is_kept = self._is_kept.take(block_ids)
        cached = block_ids[is_kept]
        if len(cached) < len(block_ids):
            self.free_up(block_ids[~is_kept])
        self._line_up(cached[::-1])

    def release_each(self, block_ids: BlockIds) -> None:
        """Drops a reference for each entry: a block that several share may be there several times."""
        counts = self._ref_counts[block_ids]
        if (
            counts + self._is_kept[block_ids]
        ).max() == 1:  # as nearly always, in a third of the time
            self.free_up(block_ids)
            return
        if counts.max() > 1:
            block_ids, num_times = np.unique(block_ids, return_counts=True)
            self._ref_counts[block_ids] -= (num_times - 1).astype(np.int32)
        self.release(block_ids)

    def evict_all(self) -> int:
        """Makes all cached blocks free. Returns how many there were."""
        num_evicted = self.num_cached
        self._evict(num_evicted)
        return num_evicted

    def free_up(self, block_ids: BlockIds) -> None:
        """Makes blocks free that nobody uses and that hold nothing reusable."""
        self._ref_counts[block_ids] = 1
        num_free = self.num_free
        self._free[num_free : num_free + len(block_ids)] = block_ids
        self._num_free[0] = num_free + len(block_ids)

    def _line_up(self, block_ids: BlockIds) -> None:
        if int(self._tail[0]) + len(block_ids) > len(self._queue):
            self.close_up()
        start = int(self._tail[0])
        self._tail[0] = end = start + len(block_ids)
        self._queue[start:end] = block_ids
        self._index_of[block_ids] = self._indices[start:end]
        self._num_cached[0] += len(block_ids)

    def close_up(self) -> None:
        """Moves the queue to the front of its array, without entries that count for nothing."""
        cached = self._cached_between(self._head, int(self._tail[0]))
        self._queue[: len(cached)] = cached
        self._index_of[cached] = self._indices[: len(cached)]
        self._head, self._tail[0] = 0, len(cached)

    def _evict(self, count: int) -> None:
        """Makes ``count`` cached blocks free, or all that there are."""
        tail = int(self._tail[0])
        while count > 0 and self._head < tail:
            end = min(self._head + count, tail)
            block_ids = self._cached_between(self._head, end)
            self._head = end
            if len(block_ids) == 0:
                continue
            self._is_kept[block_ids] = False
            self._index_of[block_ids] = -1
            self._num_cached[0] -= len(block_ids)
            self._on_evict(block_ids)
            self.free_up(block_ids)
            count -= len(block_ids)

    def _cached_between(self, start: int, end: int) -> BlockIds:
        """Returns the blocks whose index is in this part of the queue, in order."""
        entries = self._queue[start:end]
        block_ids: BlockIds = entries[self._index_of[entries] == self._indices[start:end]]
        return block_ids


class BlockPools:
    """The pools of all ranks of a group, of which one operation takes blocks for every rank.

    The stacks of free blocks stand in one array, and so do the counts:

        free   [ 9 8 7 6 . . . . . | 9 8 7 6 5 4 3 2 . | 9 8 7 . . . . . . ]
                         ▲ top                     ▲ top      ▲ top

    Args:
        pools: [dp_size] of each rank; they go on in these arrays.
    """

    def __init__(self, pools: SequenceOf[BlockPool]) -> None:
        self._pools = pools
        self._sizes = sizes = np.array([pool.num_blocks for pool in pools])
        self._first = sizes.cumsum() - sizes
        num_blocks = int(sizes.sum())
        self._free, self._ref_counts, self._index_of = np.zeros((3, num_blocks), dtype=np.int32)
        self._is_kept = np.zeros(num_blocks, dtype=np.bool_)
        self._queue = np.zeros(QUEUE_LEN * num_blocks, dtype=np.int32)
        self._num_free, self._num_cached, self._tail = np.zeros((3, len(pools)), dtype=np.int64)
        for rank, (pool, first) in enumerate(zip(pools, self._first.tolist(), strict=True)):
            end, places = first + pool.num_blocks, dict[str, npt.NDArray[Any]]()
            for name in ("_free", "_ref_counts", "_index_of", "_is_kept"):
                places[name] = getattr(self, name)[first:end]
            for name in ("_num_free", "_num_cached", "_tail"):
                places[name] = getattr(self, name)[rank : rank + 1]
            pool.move(places | {"_queue": self._queue[QUEUE_LEN * first : QUEUE_LEN * end]})

    def __getitem__(self, rank: int) -> BlockPool:
        return self._pools[rank]

    @property
    def num_available(self) -> Counts:
        """int64 [dp_size], blocks that each rank can hand out."""
        return self._num_free + self._num_cached

    @property
    def num_used(self) -> Counts:
        """int64 [dp_size]."""
        return self._sizes - 1 - self._num_free - self._num_cached

    def make_free(self, counts: Counts) -> bool:
        """Evicts until each rank has so many free blocks; False if one has not so many available."""
        is_short = self._num_free < counts
        if np.count_nonzero(is_short):
            if np.count_nonzero(self.num_available < counts):
                return False
            for rank in np.flatnonzero(is_short).tolist():
                self._pools[rank].make_free(int(counts[rank]))
        return True

    def acquire(self, counts: Counts, before: Counts) -> BlockIds:
        """Takes free blocks of each rank. Returns them, ranks end to end.

        Args:
            counts: int64 [dp_size], how many.
            before: int64 [dp_size], how many the ranks before each take.
        """
        self._num_free -= counts
        # Of rank r, those from first[r] + num_free[r] on.
        places = (self._first + self._num_free - before).repeat(counts)
        places += np.arange(len(places))
        block_ids: BlockIds = self._free.take(places)
        return block_ids

    def release(self, block_ids: BlockIds, counts: Counts) -> None:
        """Drops a reference for each entry: so many of each rank, ranks end to end.

        Of each rank, the first becomes the first to be evicted. A block that several rows share may be
        there several times: its last place counts.
        """
        ranks = np.arange(len(counts)).repeat(counts)
        places = block_ids + self._first.take(ranks)
        if self._ref_counts.take(places).max(initial=1) == 1:
            self._ref_counts[places] = 0
        else:
            np.subtract.at(self._ref_counts, places, 1)
            unused = np.flatnonzero(self._ref_counts.take(places) == 0)[::-1]
            unused = np.sort(unused[np.unique(places[unused], return_index=True)[1]])
            places, ranks, block_ids = places[unused], ranks[unused], block_ids[unused]
        is_kept = self._is_kept.take(places)
        self._line_up(places[is_kept], block_ids[is_kept], ranks[is_kept])
        is_freed = ~is_kept
        self._free_up(places[is_freed], block_ids[is_freed], ranks[is_freed])

    def _line_up(self, places: Counts, block_ids: BlockIds, ranks: Counts) -> None:
        counts = np.bincount(ranks, minlength=len(self._pools))
        for rank in (self._tail + counts > QUEUE_LEN * self._sizes).nonzero()[0].tolist():
            self._pools[rank].close_up()
        starts = self._tail - (counts.cumsum() - counts)
        self._tail += counts
        indices = np.arange(len(ranks)) + starts.take(ranks)
        self._queue[QUEUE_LEN * self._first.take(ranks) + indices] = block_ids
        self._index_of[places] = indices
        self._num_cached += counts

    def _free_up(self, places: Counts, block_ids: BlockIds, ranks: Counts) -> None:
        counts = np.bincount(ranks, minlength=len(self._pools))
        # To the tops of the stacks: of rank r, from first[r] + num_free[r] on.
        tops = self._first + self._num_free - (counts.cumsum() - counts)
        self._free[tops.take(ranks) + np.arange(len(ranks))] = block_ids
        self._ref_counts[places] = 1
        self._num_free += counts
