"""Block pool of one DP rank: which of its KV blocks are free, used or cached, by reference counts.

It knows no names: those are the prefix cache's. No tensors.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int32]
NO_BLOCKS: BlockIds = np.zeros(0, dtype=np.int32)

SCRATCH_BLOCK = 0  # padded rows read and write here; never handed out

# A pool that runs short evicts this share of itself at once: one block costs as much as many.
EVICTED_SHARE = 1 / 256


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

    Attributes:
        num_free: Blocks that hold nothing.
        num_cached: Blocks that hold something reusable and that nobody uses.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[BlockIds], None]) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: need the scratch block and one more")
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._free = np.arange(num_blocks - 1, 0, -1, dtype=np.int32)  # a stack, top at the end
        self.num_free = num_blocks - 1
        # A free block's count is 1 already, so that `acquire`, called for every rank in most
        # steps, has nothing to write.
        self._ref_counts = np.ones(num_blocks, dtype=np.int32)
        self._is_kept = np.zeros(num_blocks, dtype=np.bool_)
        self.num_cached = 0
        self._queue = np.zeros(4 * num_blocks, dtype=np.int32)
        self._indices = np.arange(len(self._queue), dtype=np.int32)
        self._index_of = np.full(num_blocks, -1, dtype=np.int32)  # -1: not cached
        self._head = self._tail = 0

    @property
    def num_available(self) -> int:
        """Blocks that `acquire` can hand out."""
        return self.num_free + self.num_cached

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_free - self.num_cached

    def num_unused(self, block_ids: BlockIds) -> int:
        """How many of these blocks `share` would take out of `num_available`."""
        return len(block_ids) - int(np.count_nonzero(self._ref_counts[block_ids]))

    def can_acquire(self, count: int) -> bool:
        return count <= self.num_free + self.num_cached

    def acquire(self, count: int) -> BlockIds:
        """Takes ``count`` blocks, evicting the least recently used cached ones if needed."""
        if self.num_free < count:
            assert self.can_acquire(count), "the scheduler looks before it takes"
            self._evict(count - self.num_free + int(self.num_blocks * EVICTED_SHARE))
        self.num_free -= count
        return self._free[self.num_free : self.num_free + count].copy()

    def share(self, block_ids: BlockIds) -> None:
        """Adds a reference to used or cached blocks, none of them twice."""
        if len(block_ids) == 0:
            return
        counts = self._ref_counts[block_ids]
        self.num_cached -= len(block_ids) - int(np.count_nonzero(counts))
        self._index_of[block_ids] = -1
        self._ref_counts[block_ids] = counts + 1

    def keep(self, block_ids: BlockIds) -> None:
        """Makes used blocks go to the cache, not to the free ones, when they are released."""
        assert self._ref_counts[block_ids].all()
        self._is_kept[block_ids] = True

    def release(self, block_ids: BlockIds) -> None:
        """Drops a reference of each, none of them twice.

        The last of the list becomes the first to be evicted: without its predecessors a block
        of a prefix is worth nothing, without its successors it is worth all the same.
        """
        counts = self._ref_counts[block_ids] - 1
        assert counts.min(initial=0) >= 0
        self._ref_counts[block_ids] = counts
        unused = block_ids[counts == 0]
        is_kept = self._is_kept[unused]
        self._free_up(unused[~is_kept])
        self._line_up(unused[is_kept][::-1])

    def release_each(self, block_ids: BlockIds) -> None:
        """Drops a reference for each entry: a block that several share may be there several times."""
        counts = self._ref_counts[block_ids]
        if (
            counts + self._is_kept[block_ids]
        ).max() == 1:  # as nearly always, in a third of the time
            self._free_up(block_ids)
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

    def _free_up(self, block_ids: BlockIds) -> None:
        self._ref_counts[block_ids] = 1
        self._free[self.num_free : self.num_free + len(block_ids)] = block_ids
        self.num_free += len(block_ids)

    def _line_up(self, block_ids: BlockIds) -> None:
        if self._tail + len(block_ids) > len(self._queue):
            self._close_up()
        end = self._tail + len(block_ids)
        self._queue[self._tail : end] = block_ids
        self._index_of[block_ids] = self._indices[self._tail : end]
        self._tail = end
        self.num_cached += len(block_ids)

    def _close_up(self) -> None:
        """Moves the queue to the front of its array, without entries that count for nothing."""
        cached = self._cached_between(self._head, self._tail)
        self._queue[: len(cached)] = cached
        self._index_of[cached] = self._indices[: len(cached)]
        self._head, self._tail = 0, len(cached)

    def _evict(self, count: int) -> None:
        """Makes ``count`` cached blocks free, or all that there are."""
        while count > 0 and self._head < self._tail:
            end = min(self._head + count, self._tail)
            block_ids = self._cached_between(self._head, end)
            self._head = end
            if len(block_ids) == 0:
                continue
            self._is_kept[block_ids] = False
            self._index_of[block_ids] = -1
            self.num_cached -= len(block_ids)
            self._on_evict(block_ids)
            self._free_up(block_ids)
            count -= len(block_ids)

    def _cached_between(self, start: int, end: int) -> BlockIds:
        """Returns the blocks whose index is in this part of the queue, in order."""
        entries = self._queue[start:end]
        block_ids: BlockIds = entries[self._index_of[entries] == self._indices[start:end]]
        return block_ids
