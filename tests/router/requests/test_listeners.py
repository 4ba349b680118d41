"""If these fail, a client waits for ever, or the router spends its time waking those who do not."""

import asyncio

import numpy as np
import pytest

from router.requests.request import FEW, NO_LISTENER, Listener, Listeners


def wake(listeners: Listeners, *having_news: Listener | int) -> None:
    rows = [r if isinstance(r, int) else r.index for r in having_news]
    listeners.wake(np.array(rows, dtype=np.int32), np.ones(len(rows), dtype=np.bool_))


def is_woken(listener: Listener) -> bool:
    return listener._has_news


async def test_news_before_a_wait_is_not_missed() -> None:
    listeners = Listeners(max_listeners=2)
    listener = listeners.open()
    wake(listeners, listener)
    await listener.wait()
    assert not is_woken(listener)


async def test_a_waiting_listener_is_woken_once_per_wait() -> None:
    listeners = Listeners(max_listeners=2)
    listener = listeners.open()
    waiting = asyncio.ensure_future(listener.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    wake(listeners, listener, listener, listener)
    await waiting
    assert not is_woken(listener)
    wake(listeners, listener)
    assert is_woken(listener)


@pytest.mark.parametrize("num_others", [0, 3 * FEW])
def test_only_the_listeners_with_news_are_woken(num_others: int) -> None:
    listeners = Listeners(max_listeners=3 + num_others)
    one, two, three = (listeners.open() for _ in range(3))
    others = [listeners.open() for _ in range(num_others)]
    wake(listeners, one, three, NO_LISTENER)
    assert [is_woken(listener) for listener in (one, two, three)] == [True, False, True]
    wake(listeners, two)
    assert is_woken(two)
    assert not any(map(is_woken, others))


@pytest.mark.parametrize("num_others", [0, 3 * FEW])
def test_rows_without_news_wake_nobody(num_others: int) -> None:
    listeners = Listeners(max_listeners=2 + num_others)
    one, two, *_ = [listeners.open() for _ in range(2 + num_others)]
    rows = np.array([one.index, two.index, one.index], dtype=np.int32)
    listeners.wake(rows, np.array([False, False, False]))
    assert not is_woken(one)
    assert not is_woken(two)
    listeners.wake(rows, np.array([False, True, False]))
    assert [is_woken(listener) for listener in (one, two)] == [False, True]


def test_a_listener_that_has_not_looked_yet_costs_no_second_wake() -> None:
    listeners = Listeners(max_listeners=1)
    listener = listeners.open()
    wake(listeners, listener)
    listener._has_news = False  # as if it had begun to look, but does not wait again yet
    wake(listeners, listener)
    assert not is_woken(listener)


async def test_old_news_does_not_wake_a_listener_again() -> None:
    listeners = Listeners(max_listeners=2)
    one, two = listeners.open(), listeners.open()
    wake(listeners, one)
    await one.wait()
    wake(listeners, two)
    assert not is_woken(one)


def test_an_index_is_given_out_again_only_after_it_came_back() -> None:
    listeners = Listeners(max_listeners=2)
    one, two = listeners.open(), listeners.open()
    assert listeners.num_free == 0
    assert len({one.index, two.index, NO_LISTENER}) == 3
    listeners.close(one)
    assert listeners.num_free == 1
    again = listeners.open()
    assert again.index == one.index
    wake(listeners, again)
    assert is_woken(again)
    assert not is_woken(one)


def test_a_listener_is_closed_once() -> None:
    listeners = Listeners(max_listeners=1)
    listener = listeners.open()
    listeners.close(listener)
    with pytest.raises(AssertionError):
        listeners.close(listener)
