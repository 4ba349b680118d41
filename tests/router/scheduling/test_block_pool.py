"""A block handed out twice corrupts two users' answers; a block lost shrinks the cache for good."""

import random

import numpy as np
import pytest

from router.scheduling.block_pool import SCRATCH_BLOCK, BlockIds, BlockPool
from tests.router.support.block_checks import check_pool, kept_blocks


def pool_of(num_blocks: int) -> tuple[BlockPool, list[int]]:
    """Returns a pool and the list of all that it evicts."""
    evicted: list[int] = []
    return BlockPool(num_blocks, on_evict=lambda ids: evicted.extend(ids.tolist())), evicted


def ids(*block_ids: int) -> BlockIds:
    return np.array(block_ids, dtype=np.int32)


def test_a_pool_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks=1"):
        pool_of(1)


def test_a_kept_block_is_evicted_only_when_no_block_is_free() -> None:
    pool, evicted = pool_of(4)
    kept = pool.acquire(1)
    pool.keep(kept)
    pool.release(kept)
    assert (pool.num_free, pool.num_cached) == (2, 1)
    pool.acquire(2)
    assert evicted == []
    assert pool.acquire(1).tolist() == kept.tolist() == evicted


def test_the_least_recently_released_block_is_evicted_first() -> None:
    pool, evicted = pool_of(4)
    blocks = pool.acquire(3)
    pool.keep(blocks)
    for block in (blocks[1:2], blocks[2:3], blocks[0:1]):
        pool.release(block)
    pool.share(blocks[1:2])
    pool.release(blocks[1:2])  # used again: now the most recent
    pool.acquire(3)
    assert evicted == [blocks[2], blocks[0], blocks[1]]


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool, evicted = pool_of(4)
    prefix = pool.acquire(3)
    pool.keep(prefix)
    pool.release(prefix)
    pool.acquire(3)
    assert evicted == prefix[::-1].tolist()


@pytest.mark.parametrize("seed", range(40))
def test_every_block_is_in_one_state_under_random_use(seed: int) -> None:
    """Few blocks and much sharing reach odd states sooner than real sizes would."""
    rng = random.Random(seed)
    kept: set[int] = set()

    def on_evict(block_ids: BlockIds) -> None:
        kept.difference_update(block_ids.tolist())

    pool = BlockPool(rng.randint(2, 12), on_evict)
    held: list[list[int]] = []  # one list per owner

    for _ in range(600):
        match rng.choice(["acquire", "share", "keep", "release", "release"]):
            case "acquire" if pool.num_available:
                before = {block for owner in held for block in owner}
                blocks = pool.acquire(rng.randint(1, pool.num_available)).tolist()
                assert len(set(blocks)) == len(blocks)
                assert not set(blocks) & (before | kept | {SCRATCH_BLOCK})
                held.append(blocks)
            case "share":
                live = sorted({block for owner in held for block in owner} | kept)
                if live:
                    blocks = rng.sample(live, rng.randint(1, len(live)))
                    pool.share(ids(*blocks))
                    held.append(blocks)
            case "keep" if held:
                blocks = rng.choice(held)
                pool.keep(ids(*blocks))
                kept.update(blocks)
            case "release" if held:
                pool.release(ids(*held.pop(rng.randrange(len(held)))))
        check_pool(pool)
        used = {block for owner in held for block in owner}
        assert pool.num_used == len(used)
        assert pool.num_cached == pool.num_unused(ids(*used, *(kept - used))) == len(kept - used)
        assert set(kept_blocks(pool)) == kept
