"""If these fail, a client waits for ever, or the router spends its time waking those who do not."""

import asyncio

import numpy as np
import pytest

from router.requests.listeners import NO_READER, Reader, Readers


def indices(*readers: Reader | int) -> np.ndarray:
    return np.array([r if isinstance(r, int) else r.index for r in readers], dtype=np.int32)


def is_woken(reader: Reader) -> bool:
    return reader._news.is_set()


async def test_news_before_a_wait_is_not_missed() -> None:
    readers = Readers(max_readers=2)
    reader = readers.open()
    readers.wake(indices(reader))
    async with asyncio.timeout(60):
        await reader.wait()
    assert not is_woken(reader)


async def test_a_waiting_reader_is_woken_once_per_wait() -> None:
    readers = Readers(max_readers=2)
    reader = readers.open()
    waiting = asyncio.ensure_future(reader.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    readers.wake(indices(reader, reader, reader))
    async with asyncio.timeout(60):
        await waiting
    assert not is_woken(reader)
    readers.wake(indices(reader))
    assert is_woken(reader)


def test_only_the_readers_with_news_are_woken() -> None:
    readers = Readers(max_readers=3)
    one, two, three = (readers.open() for _ in range(3))
    readers.wake(indices(one, three, NO_READER))
    assert [is_woken(reader) for reader in (one, two, three)] == [True, False, True]
    readers.wake(indices(two))
    assert is_woken(two)


def test_a_reader_that_has_not_looked_yet_costs_no_second_wake() -> None:
    readers = Readers(max_readers=1)
    reader = readers.open()
    readers.wake(indices(reader))
    reader._news.clear()  # as if it had begun to look, but does not wait again yet
    readers.wake(indices(reader))
    assert not is_woken(reader)


async def test_old_news_does_not_wake_a_reader_again() -> None:
    readers = Readers(max_readers=2)
    one, two = readers.open(), readers.open()
    readers.wake(indices(one))
    async with asyncio.timeout(60):
        await one.wait()
    readers.wake(indices(two))
    assert not is_woken(one)


def test_an_index_is_given_out_again_only_after_it_came_back() -> None:
    readers = Readers(max_readers=2)
    one, two = readers.open(), readers.open()
    assert readers.num_free == 0
    assert len({one.index, two.index, NO_READER}) == 3
    readers.close(one)
    assert readers.num_free == 1
    again = readers.open()
    assert again.index == one.index
    readers.wake(indices(again))
    assert is_woken(again)
    assert not is_woken(one)


def test_a_reader_is_closed_once() -> None:
    readers = Readers(max_readers=1)
    reader = readers.open()
    readers.close(reader)
    with pytest.raises(AssertionError):
        readers.close(reader)
