"""Reference counts of the KV blocks of one DP rank. Holds no tensors and no tokens."""

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int32]

SCRATCH_BLOCK = 0  # padded rows read and write here; never handed out


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
    ``on_evict`` is told.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: need the scratch block and one more")
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._free = np.arange(num_blocks - 1, 0, -1, dtype=np.int32)  # a stack, top at the end
        self._num_free = num_blocks - 1
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._ref_counts = np.zeros(num_blocks, dtype=np.int32)
        self._is_kept = np.zeros(num_blocks, dtype=np.bool_)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Blocks that hold something reusable and that nobody uses."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `acquire` can hand out."""
        return self._num_free + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - self.num_available

    def num_unused(self, block_ids: BlockIds) -> int:
        """How many of these blocks `share` would take out of `num_available`."""
        return int((self._ref_counts[block_ids] == 0).sum())

    def acquire(self, count: int) -> BlockIds:
        """Takes ``count`` blocks, evicting the least recently used cached ones if needed."""
        assert count <= self.num_available, "the scheduler looks before it takes"
        while self._num_free < count:
            self._evict_oldest()
        self._num_free -= count
        block_ids = self._free[self._num_free : self._num_free + count].copy()
        self._ref_counts[block_ids] = 1
        return block_ids

    def share(self, block_ids: BlockIds) -> None:
        """Adds a reference to used or cached blocks, none of them twice."""
        if self._cached:
            for block_id in block_ids[self._ref_counts[block_ids] == 0].tolist():
                del self._cached[block_id]
        self._ref_counts[block_ids] += 1

    def keep(self, block_id: int) -> None:
        """Makes a used block go to the cache, not to the free ones, when it is released."""
        assert self._ref_counts[block_id] > 0
        self._is_kept[block_id] = True

    def release(self, block_ids: BlockIds) -> None:
        """Drops a reference of each, none of them twice.

        The last of the list becomes the first to be evicted: without its predecessors a block
        of a prefix is worth nothing, without its successors it is worth all the same.
        """
        assert (self._ref_counts[block_ids] > 0).all()
        self._ref_counts[block_ids] -= 1
        unused = block_ids[self._ref_counts[block_ids] == 0]
        is_kept = self._is_kept[unused]
        free = unused[~is_kept]
        self._free[self._num_free : self._num_free + len(free)] = free
        self._num_free += len(free)
        for block_id in unused[is_kept][::-1].tolist():
            self._cached[block_id] = None

    def check(self) -> None:
        """Asserts that every block is in exactly one state. O(num_blocks); for tests."""
        used = np.flatnonzero(self._ref_counts > 0).tolist()
        states = [*self._free[: self._num_free].tolist(), *self._cached, *used]
        assert sorted(states) == list(range(1, self.num_blocks))
        assert not self._is_kept[self._free[: self._num_free]].any()
        assert (self._ref_counts >= 0).all()

    def _evict_oldest(self) -> None:
        block_id, _ = self._cached.popitem(last=False)
        self._is_kept[block_id] = False
        self._on_evict(block_id)
        self._free[self._num_free] = block_id
        self._num_free += 1
