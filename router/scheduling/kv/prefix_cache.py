"""Prefix cache of one DP rank: names of its full KV blocks, by which a prompt's beginning is found.

A full block is named by a hash over its tokens and the hash of the block before it, so one name
stands for a whole prefix, and the longest cached prefix is a walk along the names. Before the first
block stands a salt: requests of another salt have other names for equal tokens.
"""

from bisect import bisect_left
from hashlib import blake2b
from itertools import compress
from typing import NamedTuple

import numpy as np

from router.requests.request import Int32Array
from router.scheduling.kv.block_log import BlockLog
from router.scheduling.kv.block_pool import NO_BLOCKS, BlockIds, BlockPool

BlockHash = bytes

NEW_HASH = blake2b(digest_size=16)
WINDOW = b"w"  # at the end of a block's name: it holds the keys and values of windowed layers


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
