"""Which KV block of one DP rank holds which prefix.

A full block is named by a hash over its tokens and the hash of the block before it, so one name
stands for a whole prefix, and the longest cached prefix is a walk along the names.
"""

from hashlib import blake2b

import numpy as np

from router.block_pool import BlockIds, BlockPool
from router.request import Int32Array

BlockHash = bytes


def extend_block_hashes(hashes: list[BlockHash], tokens: Int32Array, block_size: int) -> None:
    """Appends the hashes of the full blocks of ``tokens`` that ``hashes`` does not have yet.

    128 bits: among 2**40 blocks, two of different prefixes share a name with probability 2**-49.
    """
    parent = hashes[-1] if hashes else b""
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        block = tokens[start : start + block_size].tobytes()
        parent = blake2b(parent + block, digest_size=16).digest()
        hashes.append(parent)


class PrefixCache:
    """The named blocks of one rank, and the pool that they are in."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, on_evict=self._forget)
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens of all sequences that was found here, 0 to 1."""
        return self.num_hit_tokens / max(1, self.num_queried_tokens)

    def match(self, hashes: list[BlockHash]) -> BlockIds:
        """Returns the blocks of the longest cached prefix. Takes no reference."""
        block_ids = []
        for name in hashes:
            block_id = self._block_of.get(name)
            if block_id is None:
                break
            block_ids.append(block_id)
        return np.array(block_ids, dtype=np.int32)

    def insert(self, hashes: list[BlockHash], block_ids: BlockIds) -> None:
        """Names used blocks. A name that another block has already stays with that one."""
        for name, block_id in zip(hashes, block_ids.tolist(), strict=True):
            if name not in self._block_of and block_id not in self._hash_of:
                self._block_of[name] = block_id
                self._hash_of[block_id] = name
                self.pool.keep(block_id)

    def check(self) -> None:
        """Asserts that names and blocks are one to one. For tests."""
        self.pool.check()
        assert self._block_of == {name: block for block, name in self._hash_of.items()}

    def _forget(self, block_id: int) -> None:
        del self._block_of[self._hash_of.pop(block_id)]
