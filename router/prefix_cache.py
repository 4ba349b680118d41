"""Which KV block of one DP rank holds which prefix.

A full block is named by a hash over all tokens up to its end, so one name stands for a whole
prefix, and the longest cached prefix is a walk along the names.
"""

import numpy as np
import numpy.typing as npt

from router.block_pool import BlockIds, BlockPool
from router.request import Int32Array

BlockHash = bytes

NO_BLOCKS: BlockIds = np.zeros(0, dtype=np.int32)


class _PrefixHash:
    """Multilinear hashing: the sum of (token + 1) * weight over a prefix, twice, modulo 2**64.

    The weights are drawn anew by every process and never leave it. Two given prefixes, whatever
    they are, get the same name with probability 2**-88 at most (token ids are below 2**20), so
    nobody can prepare a prompt that is taken for another's. A sum over tokens is one pass of
    numpy for all blocks of a prompt.

    Source: Carter and Wegman, Universal classes of hash functions, 1979; Lemire and Kaser,
    Strongly universal string hashing is fast, 2013, section 2.
    """

    def __init__(self) -> None:
        self._rng = np.random.default_rng()  # seeded by the operating system
        self._weights = self._draw(4096)

    def sums(self, tokens: Int32Array, start: int) -> npt.NDArray[np.int64]:
        """Returns [2, len(tokens)] sums that begin with each token; ``start`` is the first's place."""
        end = start + len(tokens)
        while end > self._weights.shape[1]:
            more = self._draw(self._weights.shape[1])
            self._weights = np.concatenate((self._weights, more), axis=1)
        terms: npt.NDArray[np.int64] = self._weights[:, start:end] * (tokens + 1)
        return terms.cumsum(axis=1, out=terms)

    def _draw(self, count: int) -> npt.NDArray[np.int64]:
        return self._rng.integers(-(2**63), 2**63 - 1, (2, count), dtype=np.int64, endpoint=True)


_prefix_hash = _PrefixHash()


def extend_block_hashes(hashes: list[BlockHash], tokens: Int32Array, block_size: int) -> None:
    """Appends the hashes of the full blocks of ``tokens`` that ``hashes`` does not have yet."""
    start = len(hashes) * block_size
    end = len(tokens) - len(tokens) % block_size
    if start >= end:
        return
    names = _prefix_hash.sums(tokens[start:end], start)[:, block_size - 1 :: block_size].T
    if hashes:
        names = names + np.frombuffer(hashes[-1], dtype=np.int64)
    hashes += np.ascontiguousarray(names).view("V16")[:, 0].tolist()


class PrefixCache:
    """The named blocks of one rank, and the pool that they are in."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, on_evict=self._forget)
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
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
        if owners == ids:
            self.pool.keep(block_ids)
        else:
            named = [i for i, (owner, block_id) in enumerate(zip(owners, ids, strict=True)) if owner == block_id]
            hashes, ids = [hashes[i] for i in named], [ids[i] for i in named]
            self.pool.keep(block_ids[named])
        for name, block_id in zip(hashes, ids, strict=True):
            assert self._hash_of[block_id] is None
            self._hash_of[block_id] = name

    def check(self) -> None:
        """Asserts that names and blocks are one to one, and kept. For tests."""
        self.pool.check()
        named = {name: block for block, name in enumerate(self._hash_of) if name is not None}
        assert self._block_of == named

    def _forget(self, block_ids: BlockIds) -> None:
        for block_id in block_ids.tolist():
            name = self._hash_of[block_id]
            assert name is not None
            del self._block_of[name]
            self._hash_of[block_id] = None
