"""If these fail, a rank is believed to have KV that went with its executor, or is made to compute what it has."""

from dataclasses import replace

import numpy as np
import pytest

from router.engine.caches import GroupCaches
from router.scheduling.kv.prefix_cache import PrefixCache
from router.scheduling.step import GroupInfo, ServedModel
from tests.router.support.stepper import make_shape

MODEL = ServedModel(name="m", architecture="M", fingerprint="m", vocab_size=50, max_model_len=48)


def formed(*kv_ids: str) -> GroupInfo:
    shape = make_shape(dp_size=len(kv_ids))
    return GroupInfo(epoch=1, model=MODEL, shape=shape, addresses=kv_ids, kv_ids=kv_ids)


def name_a_block(cache: PrefixCache, name: bytes) -> None:
    blocks = cache.pool.acquire(1)
    cache.insert([name], blocks)
    cache.pool.release(blocks)


def names_of(caches: list[PrefixCache]) -> list[list[bytes]]:
    return [list(cache._block_of) for cache in caches]


@pytest.fixture
def caches() -> GroupCaches:
    """Of a group of two, each of which has a block."""
    caches = GroupCaches(are_logged=True)
    for cache, name in zip(caches.begin_epoch(formed("a", "b")), (b"x", b"y"), strict=True):
        name_a_block(cache, name)
    return caches


@pytest.mark.parametrize(
    ("kv_ids", "names"),
    [
        (("a", "b"), [[b"x"], [b"y"]]),
        (("a", "c"), [[b"x"], []]),
        (("c", "d"), [[], []]),
        (("", "b"), [[], [b"y"]]),
        (("b", "a"), [[b"y"], [b"x"]]),
        (("b",), [[b"y"]]),
        (("c", "a", "b"), [[], [b"x"], [b"y"]]),
        (("a", "a"), [[], []]),
    ],
)
def test_a_rank_has_the_cache_of_its_kv(
    caches: GroupCaches, kv_ids: tuple[str, ...], names: list[list[bytes]]
) -> None:
    assert names_of(caches.begin_epoch(formed(*kv_ids))) == names
    for cache in caches.by_rank:
        assert cache.pool.num_used == 0


def test_kv_of_another_size_or_layout_is_not_taken_for_the_same(caches: GroupCaches) -> None:
    info = formed("a", "b")
    sizes = replace(info.shape, num_blocks=(40, 39))
    assert names_of(caches.begin_epoch(replace(info, shape=sizes))) == [[b"x"], []]
    assert [cache.pool.num_blocks for cache in caches.by_rank] == [40, 39]
    windowed = replace(info, shape=replace(info.shape, kv_window=8))
    assert names_of(caches.begin_epoch(windowed)) == [[], []]


def test_subscribers_are_told_what_is_gone_and_nothing_else(caches: GroupCaches) -> None:
    logs = [cache.log for cache in caches.by_rank]
    for log in filter(None, logs):
        log.begin()
    caches.begin_epoch(formed("a", "c"))
    assert [cache.log for cache in caches.by_rank] == logs
    assert [log._events for log in filter(None, logs)] == [[], [[b"y"]]]


def test_nothing_is_there_where_no_executor_says_which_kv_it_has_or_after_a_drop() -> None:
    caches = GroupCaches(are_logged=False)
    for info, names in (
        (formed(""), [[]]),
        (formed("", ""), [[], []]),
        (formed("", "b"), [[], [b"x"]]),
    ):
        for cache in caches.begin_epoch(info):
            name_a_block(cache, b"x")
        assert names_of(caches.begin_epoch(info)) == names
        caches.drop()
        assert not any(names_of(caches.begin_epoch(info)))


def test_hits_are_counted_by_epoch(caches: GroupCaches) -> None:
    for cache in caches.by_rank:
        cache.num_queried_tokens = cache.num_hit_tokens = 8
    assert [cache.hit_rate for cache in caches.begin_epoch(formed("a", "b"))] == [0, 0]
    assert np.all([cache.pool.num_cached == 1 for cache in caches.by_rank])
