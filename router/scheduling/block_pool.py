"""Block pool of one DP rank: reference counts of its KV blocks, and the prefixes that they hold.

A full block is named by a hash over its tokens and the hash of the block before it, so one name
stands for a whole prefix, and the longest cached prefix is a walk along the names. Before the first
block stands a salt: requests of another salt have other names for equal tokens. `BlockPool` counts
references and knows no names, `PrefixCache` has the names. No tensors.
"""

from bisect import bisect_left
from collections.abc import Callable
from hashlib import blake2b
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.requests.request import Int32Array
from router.scheduling.block_log import BlockLog

BlockIds = npt.NDArray[np.int32]
BlockHash = bytes

NEW_HASH = blake2b(digest_size=16)
WINDOW = b"w"  # at the end of a block's name: it holds the keys and values of windowed layers
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


def extend_block_hashes(
    hashes: list[BlockHash], tokens: Int32Array, block_size: int, salt: bytes
) -> None:
    """Appends the hashes of the full blocks of ``tokens`` that ``hashes`` does not have yet.

    128 bits: among 2**40 blocks, two of different prefixes share a name with probability 2**-49.
    """
    parent = hashes[-1] if hashes else salt
    data = tokens[len(hashes) * block_size :].tobytes()
    width = block_size * tokens.itemsize
    for start in range(0, len(data) - width + 1, width):
        name = NEW_HASH.copy()  # faster than a call with an argument
        name.update(parent + data[start : start + width])
        parent = name.digest()
        hashes.append(parent)


class CachedPrefix(NamedTuple):
    """Blocks of a rank's cache that hold the beginning of a prompt.

    Attributes:
        blocks: Of all of it.
        window_blocks: For windowed layers, the last of it that the next token's window needs.
    """

    blocks: BlockIds
    window_blocks: BlockIds


NO_PREFIX = CachedPrefix(NO_BLOCKS, NO_BLOCKS)


class PrefixCache:
    """The named blocks of one rank, and the pool that they are in.

    Where rows have a second block list for windowed layers, its blocks are in the same pool and
    under the same names, but for a suffix. A prefix then counts as far as the window's blocks at its
    end are there too; those before them are not needed, and were mostly evicted.

    Args:
        num_blocks: Blocks of the pool.
        window_reach: Blocks that a window needs before that of the next token; None: no windows.
        is_logged: Whether somebody may ask what the blocks hold.

    Attributes:
        log: Of what they hold; None where nobody may ask.
    """

    def __init__(
        self, num_blocks: int, window_reach: int | None = None, *, is_logged: bool = False
    ) -> None:
        self._window_reach = window_reach
        self.pool = BlockPool(num_blocks, on_evict=self._forget)
        self._block_of: dict[BlockHash, int] = {}
        self.log = BlockLog(self._block_of, num_blocks) if is_logged else None
        self._hash_of = [b""] * num_blocks  # only of blocks that the pool keeps
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens of all sequences that was found here, 0 to 1."""
        return self.num_hit_tokens / max(1, self.num_queried_tokens)

    def match(self, hashes: list[BlockHash]) -> CachedPrefix:
        """Returns the blocks of the longest cached prefix. Takes no reference."""
        if not hashes or hashes[0] not in self._block_of:
            return NO_PREFIX
        block_ids = []
        for name in hashes:
            block_id = self._block_of.get(name)
            if block_id is None:
                break
            block_ids.append(block_id)
        if self._window_reach is None:
            return CachedPrefix(np.array(block_ids, dtype=np.int32), NO_BLOCKS)
        end = start = len(block_ids)
        while start > 0 and end - start < self._window_reach:
            start -= 1
            if hashes[start] + WINDOW not in self._block_of:
                end = start
        window_ids = [self._block_of[name + WINDOW] for name in hashes[start:end]]
        return CachedPrefix(
            np.array(block_ids[:end], dtype=np.int32), np.array(window_ids, dtype=np.int32)
        )

    def estimate(self, hashes: list[BlockHash]) -> int:
        """Returns about how many blocks `match` would find: it looks at few, by halving."""
        return bisect_left(hashes, True, key=lambda name: name not in self._block_of)

    def insert(self, hashes: list[BlockHash], block_ids: BlockIds) -> list[bool] | None:
        """Names used blocks without a name. A name that another has stays with that one.

        Returns which blocks got their name; None: all of them.
        """
        if not hashes:
            return None
        ids, is_owner = block_ids.tolist(), None
        owners = list(map(self._block_of.setdefault, hashes, ids))
        if owners != ids:  # others have some of the names
            is_owner = [owner == block_id for owner, block_id in zip(owners, ids, strict=True)]
            hashes, ids = list(compress(hashes, is_owner)), list(compress(ids, is_owner))
            block_ids = block_ids[is_owner]
        hash_of = self._hash_of
        for name, block_id in zip(hashes, ids, strict=True):
            hash_of[block_id] = name
        self.pool.keep(block_ids)
        return is_owner

    @property
    def num_named(self) -> int:
        """Blocks that a prompt may find, whether in use or not."""
        return len(self._block_of)

    def _forget(self, block_ids: BlockIds) -> None:
        block_of, hash_of = self._block_of, self._hash_of
        names = [hash_of[block_id] for block_id in block_ids.tolist()]
        for name in names:
            del block_of[name]
        if self.log is not None:
            self.log.forget(names)
