"""Prefix cache of one DP rank: KV blocks by the prefix that they hold.

A full block is named by a hash over its tokens and the hash of the block before it, so one name
stands for a whole prefix, and the longest cached prefix is a walk along the names.
"""

from hashlib import blake2b
from itertools import compress

import numpy as np

from router.requests.request import Int32Array
from router.scheduling.block_pool import BlockIds, BlockPool

BlockHash = bytes

NEW_HASH = blake2b(digest_size=16)
NO_BLOCKS: BlockIds = np.zeros(0, dtype=np.int32)


def extend_block_hashes(hashes: list[BlockHash], tokens: Int32Array, block_size: int) -> None:
    """Appends the hashes of the full blocks of ``tokens`` that ``hashes`` does not have yet.

    128 bits: among 2**40 blocks, two of different prefixes share a name with probability 2**-49.
    """
    parent = hashes[-1] if hashes else b""
    data = tokens[len(hashes) * block_size :].tobytes()
    width = block_size * tokens.itemsize
    for start in range(0, len(data) - width + 1, width):
        name = NEW_HASH.copy()  # faster than a call with an argument
        name.update(parent + data[start : start + width])
        parent = name.digest()
        hashes.append(parent)


class PrefixCache:
    """The named blocks of one rank, and the pool that they are in."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, on_evict=self._forget)
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of = [b""] * num_blocks  # only of blocks that the pool keeps
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens of all sequences that was found here, 0 to 1."""
        return self.num_hit_tokens / max(1, self.num_queried_tokens)

    def match(self, hashes: list[BlockHash]) -> BlockIds:
        """Returns the blocks of the longest cached prefix. Takes no reference."""
        if not hashes or hashes[0] not in self._block_of:
            return NO_BLOCKS
        block_ids = []
        for name in hashes:
            block_id = self._block_of.get(name)
            if block_id is None:
                break
            block_ids.append(block_id)
        return np.array(block_ids, dtype=np.int32)

    def insert(self, hashes: list[BlockHash], block_ids: BlockIds) -> None:
        """Names used blocks without a name. A name that another has stays with that one."""
        if not hashes:
            return
        ids = block_ids.tolist()
        owners = list(map(self._block_of.setdefault, hashes, ids))
        if owners != ids:  # others have some of the names
            is_owner = [owner == block_id for owner, block_id in zip(owners, ids, strict=True)]
            hashes, ids = list(compress(hashes, is_owner)), list(compress(ids, is_owner))
            block_ids = block_ids[is_owner]
        hash_of = self._hash_of
        for name, block_id in zip(hashes, ids, strict=True):
            hash_of[block_id] = name
        self.pool.keep(block_ids)

    def _forget(self, block_ids: BlockIds) -> None:
        block_of, hash_of = self._block_of, self._hash_of
        for block_id in block_ids.tolist():
            del block_of[hash_of[block_id]]
