"""Invariants of the block pool and the prefix cache, O(number of blocks)."""

import numpy as np

from router.scheduling.kv.block_pool import SCRATCH_BLOCK, BlockPool
from router.scheduling.kv.prefix_cache import PrefixCache


def kept_blocks(pool: BlockPool) -> list[int]:
    """The blocks that hold something reusable, used or not."""
    return list(np.flatnonzero(pool._is_kept).tolist())


def check_pool(pool: BlockPool) -> None:
    """Asserts that every block is in exactly one state."""
    free = pool._free[: pool.num_free]
    assert (pool._ref_counts[free] == 1).all()
    is_used = pool._ref_counts > 0
    is_used[SCRATCH_BLOCK] = is_used[free] = False
    cached = np.flatnonzero(pool._index_of >= 0)
    states = [*free.tolist(), *cached.tolist(), *np.flatnonzero(is_used).tolist()]
    assert sorted(states) == list(range(1, pool.num_blocks))
    assert not pool._is_kept[free].any()
    assert pool._is_kept[cached].all()
    assert (pool._ref_counts >= 0).all()
    assert len(cached) == pool.num_cached
    indices = pool._index_of[cached]
    assert (pool._queue[indices] == cached).all()
    assert ((pool._head <= indices) & (indices < pool._tail)).all()


def check_cache(cache: PrefixCache) -> None:
    """Asserts that names and blocks are one to one, and kept, and tails are of kept blocks without."""
    check_pool(cache.pool)
    kept = kept_blocks(cache.pool)
    named = {cache._hash_of[block_id]: block_id for block_id in kept if cache._hash_of[block_id]}
    assert cache._block_of == named
    tails = cache._tails
    in_tails = np.flatnonzero(tails._number_of).tolist()
    assert len(tails) == len(in_tails)
    assert set(in_tails) <= set(kept) - set(named.values())
    assert all(tail.key == key for key, (_, tail) in tails.by_key.items())
