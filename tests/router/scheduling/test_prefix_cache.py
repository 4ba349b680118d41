"""A wrong hit makes a client's answer continue another's prompt; a missed one costs a prefill."""

import random

import numpy as np
import pytest

from router.scheduling.prefix_cache import PrefixCache, extend_block_hashes
from tests.router.support.block_checks import check_cache

BLOCK_SIZE = 4


def hashes_of(tokens: list[int], block_size: int = BLOCK_SIZE) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, np.array(tokens, dtype=np.int32), block_size)
    return hashes


def test_only_full_blocks_have_a_name() -> None:
    assert [len(hashes_of(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("cuts", [(4,), (5, 9), (1, 2, 3, 11), (12,)])
def test_names_do_not_depend_on_how_the_tokens_came(cuts: tuple[int, ...]) -> None:
    tokens = np.arange(7, 23, dtype=np.int32)
    hashes: list[bytes] = []
    for cut in (*cuts, len(tokens)):
        extend_block_hashes(hashes, tokens[:cut], BLOCK_SIZE)
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
    assert cache.match(hashes).tolist() == blocks.tolist()
    assert cache.match(hashes[1:]).tolist() == blocks[1:].tolist()
    assert cache.match(hashes_of([5] * 12)).tolist() == []


def test_a_name_stays_with_the_block_that_had_it_first() -> None:
    cache = PrefixCache(10)
    hashes = hashes_of(list(range(8)))
    first, second = cache.pool.acquire(1), cache.pool.acquire(2)
    cache.insert(hashes[:1], first)
    cache.insert(hashes, second)
    assert cache.match(hashes).tolist() == [first[0], second[1]]
    cache.pool.release(second)
    assert (cache.pool.num_free, cache.pool.num_cached) == (7, 1)
    check_cache(cache)


@pytest.mark.parametrize("seed", range(30))
def test_a_hit_holds_the_tokens_that_were_asked_for(seed: int) -> None:
    """Sequences over two tokens in few blocks, as a scheduler treats them."""
    rng = random.Random(seed)
    cache = PrefixCache(rng.randint(4, 20))
    content: dict[int, tuple[int, ...]] = {}  # block id to the prefix whose last part it holds
    held: list[list[int]] = []
    for _ in range(400):
        if held and rng.random() < 0.45:
            cache.pool.release(np.array(held.pop(rng.randrange(len(held))), dtype=np.int32))
        else:
            tokens = rng.choices(range(2), k=rng.randint(1, 4) * BLOCK_SIZE)
            hashes = hashes_of(tokens)
            hit = cache.match(hashes)
            num_new = len(hashes) - len(hit)
            if num_new > cache.pool.num_available - cache.pool.num_unused(hit):
                continue
            cache.pool.share(hit)
            new = cache.pool.acquire(num_new)
            for i, block in enumerate(hit.tolist()):
                assert content[block] == tuple(tokens[: (i + 1) * BLOCK_SIZE])
            for i, block in enumerate(new.tolist(), start=len(hit)):
                content[block] = tuple(tokens[: (i + 1) * BLOCK_SIZE])
            cache.insert(hashes[len(hit) :], new)
            held.append([*hit.tolist(), *new.tolist()])
        check_cache(cache)
