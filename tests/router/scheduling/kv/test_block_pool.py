"""A block handed out twice, or a wrong hit, corrupts answers; a block lost or missed costs speed."""

import random

import numpy as np
import pytest

from router.scheduling.kv.block_pool import SCRATCH_BLOCK, BlockIds, BlockPool, BlockPools
from router.scheduling.kv.prefix_cache import PrefixCache, Wanted, extend_block_hashes
from router.scheduling.kv.tails import Tail
from tests.router.support.block_checks import check_cache, check_pool, kept_blocks

BLOCK_SIZE = 4


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


def test_rows_of_several_ranks_are_released_in_one_go() -> None:
    """A block that two of them share goes with the last, so that what follows it is evicted first."""
    (first, evicted), (second, others) = pool_of(6), pool_of(4)
    pools = BlockPools([first, second])
    prefix, mine, yours = first.acquire(1), first.acquire(2), first.acquire(1)
    first.share(prefix)
    other = second.acquire(2)
    for pool, blocks in ((first, prefix), (first, mine), (first, yours), (second, other[:1])):
        pool.keep(blocks)
    row, neighbour = ids(*mine[::-1], *prefix), ids(*yours, *prefix)
    pools.release(ids(*row, *neighbour, *other[::-1]), np.array([5, 2]))
    check_pool(first)
    check_pool(second)
    assert pools.num_used.tolist() == [0, 0]
    assert (second.num_free, second.num_cached) == (2, 1)
    first.acquire(5)
    second.acquire(3)
    assert evicted == [*mine[::-1], *yours, *prefix]
    assert others == other[:1].tolist()


# ---- prefixes


def hashes_of(tokens: list[int], block_size: int = BLOCK_SIZE) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, np.array(tokens, dtype=np.int32), block_size, b"")
    return hashes


def test_only_full_blocks_have_a_name() -> None:
    assert [len(hashes_of(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("cuts", [(4,), (5, 9), (1, 2, 3, 11), (12,)])
def test_names_do_not_depend_on_how_the_tokens_came(cuts: tuple[int, ...]) -> None:
    tokens = np.arange(7, 23, dtype=np.int32)
    hashes: list[bytes] = []
    for cut in (*cuts, len(tokens)):
        extend_block_hashes(hashes, tokens[:cut], BLOCK_SIZE, b"")
    assert hashes == hashes_of(tokens.tolist())


def test_no_two_prefixes_of_zeros_share_a_name() -> None:
    names = hashes_of([0] * 64)
    assert len(set(names)) == 16


@pytest.mark.parametrize("seed", range(5))
def test_different_prefixes_have_different_names(seed: int) -> None:
    rng = random.Random(seed)
    prefixes = {tuple(rng.choices(range(2), k=BLOCK_SIZE * 3)) for _ in range(2000)}
    names = {hashes_of(list(prefix))[-1] for prefix in prefixes}
    assert len(names) == len(prefixes)


def test_the_longest_cached_prefix_is_found() -> None:
    cache = PrefixCache(10)
    hashes = hashes_of(list(range(12)))
    blocks = cache.pool.acquire(2)
    cache.insert(hashes[:2], blocks)
    assert cache.match(hashes).blocks.tolist() == blocks.tolist()
    assert cache.match(hashes[1:]).blocks.tolist() == blocks[1:].tolist()
    assert cache.match(hashes_of([5] * 12)).blocks.tolist() == []


def test_a_name_stays_with_the_block_that_had_it_first() -> None:
    cache = PrefixCache(10)
    hashes = hashes_of(list(range(8)))
    first, second = cache.pool.acquire(1), cache.pool.acquire(2)
    cache.insert(hashes[:1], first)
    cache.insert(hashes, second)
    assert cache.match(hashes).blocks.tolist() == [first[0], second[1]]
    cache.pool.release(second)
    assert (cache.pool.num_free, cache.pool.num_cached) == (7, 1)
    check_cache(cache)


# ---- tails


def leave(cache: PrefixCache, tokens: list[int], parent: bytes = b"") -> BlockIds:
    """Takes blocks for tokens, and leaves them as an ended sequence does."""
    rows = np.array(tokens, np.int32).reshape(-1, BLOCK_SIZE)
    blocks = cache.pool.acquire(len(rows))
    cache.pool.keep(blocks)
    cache.leave(Tail(parent, rows, blocks))
    cache.pool.release(blocks)
    return blocks


def wanted(tokens: list[int]) -> Wanted:
    return Wanted(hashes_of(tokens), np.array(tokens, np.int32), BLOCK_SIZE, b"")


def test_what_an_ended_sequence_left_is_found_as_far_as_it_is_wanted() -> None:
    cache = PrefixCache(10)
    blocks = leave(cache, [*range(12)])
    assert cache.num_named == 3
    assert cache.estimate(wanted([*range(8), 0, 0, 0, 0])) == 2
    assert cache.find(wanted([*range(8), 0, 0, 0, 0])).blocks.tolist() == blocks[:2].tolist()
    assert cache.find(wanted([0, *range(11)])).blocks.tolist() == []
    check_cache(cache)
    assert cache.find(wanted([*range(16)])).blocks.tolist() == blocks.tolist()
    assert cache.num_named == len(cache._block_of) == 3


def test_of_equal_blocks_that_ended_sequences_left_one_is_kept() -> None:
    cache = PrefixCache(10)
    first = leave(cache, [*range(8), 1, 2, 3, 4])
    second = leave(cache, [*range(8), 5, 6, 7, 8])
    assert cache.num_named == cache.pool.num_cached == 4
    found = cache.find(wanted([*range(8), 5, 6, 7, 8])).blocks.tolist()
    assert found == [*first[:2], second[2]]
    check_cache(cache)


def test_a_tail_is_found_as_far_as_it_was_not_evicted() -> None:
    cache = PrefixCache(5)
    blocks = leave(cache, [*range(16)])
    cache.pool.acquire(2)
    assert cache.num_named == 2
    assert cache.find(wanted([*range(16)])).blocks.tolist() == blocks[:2].tolist()
    cache.pool.acquire(2)
    assert cache.find(wanted([*range(16)])).blocks.tolist() == []
    check_cache(cache)


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_a_hit_holds_the_tokens_that_were_asked_for(seed: int, *, is_left: bool) -> None:
    """Sequences over two tokens in few blocks, as a scheduler treats them."""
    rng = random.Random(seed)
    cache = PrefixCache(rng.randint(4, 20))
    content: dict[int, tuple[int, ...]] = {}  # block id to the prefix whose last part it holds
    held: list[list[int]] = []
    for _ in range(400):
        if held and rng.random() < 0.45:
            cache.pool.release(ids(*held.pop(rng.randrange(len(held)))))
        else:
            tokens = rng.choices(range(2), k=rng.randint(1, 4) * BLOCK_SIZE)
            hashes = hashes_of(tokens)
            hit = cache.find(wanted(tokens)).blocks
            num_new = len(hashes) - len(hit)
            if num_new > cache.pool.num_available - cache.pool.num_unused(hit):
                continue
            cache.pool.share(hit)
            new = cache.pool.acquire(num_new)
            for i, block in enumerate(hit.tolist()):
                assert content[block] == tuple(tokens[: (i + 1) * BLOCK_SIZE])
            for i, block in enumerate(new.tolist(), start=len(hit)):
                content[block] = tuple(tokens[: (i + 1) * BLOCK_SIZE])
            if is_left and len(new):
                rows = np.array(tokens, np.int32).reshape(-1, BLOCK_SIZE)[len(hit) :]
                cache.pool.keep(new)
                cache.leave(Tail(hashes[len(hit) - 1] if len(hit) else b"", rows, new))
            else:
                cache.insert(hashes[len(hit) :], new)
            held.append([*hit.tolist(), *new.tolist()])
        check_cache(cache)
