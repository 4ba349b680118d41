"""If these fail, a client waits for ever, or the router spends its time waking those who do not."""

import asyncio

import numpy as np
import pytest

from router.requests.request import NO_LISTENER, Listener, Listeners


def indices(*listeners: Listener | int) -> np.ndarray:
    return np.array([r if isinstance(r, int) else r.index for r in listeners], dtype=np.int32)


def is_woken(listener: Listener) -> bool:
    return listener._has_news


async def test_news_before_a_wait_is_not_missed() -> None:
    listeners = Listeners(max_listeners=2)
    listener = listeners.open()
    listeners.wake(indices(listener))
    await listener.wait()
    assert not is_woken(listener)


async def test_a_waiting_listener_is_woken_once_per_wait() -> None:
    listeners = Listeners(max_listeners=2)
    listener = listeners.open()
    waiting = asyncio.ensure_future(listener.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    listeners.wake(indices(listener, listener, listener))
    await waiting
    assert not is_woken(listener)
    listeners.wake(indices(listener))
    assert is_woken(listener)


def test_only_the_listeners_with_news_are_woken() -> None:
    listeners = Listeners(max_listeners=3)
    one, two, three = (listeners.open() for _ in range(3))
    listeners.wake(indices(one, three, NO_LISTENER))
    assert [is_woken(listener) for listener in (one, two, three)] == [True, False, True]
    listeners.wake(indices(two))
    assert is_woken(two)


def test_a_listener_that_has_not_looked_yet_costs_no_second_wake() -> None:
    listeners = Listeners(max_listeners=1)
    listener = listeners.open()
    listeners.wake(indices(listener))
    listener._has_news = False  # as if it had begun to look, but does not wait again yet
    listeners.wake(indices(listener))
    assert not is_woken(listener)


async def test_old_news_does_not_wake_a_listener_again() -> None:
    listeners = Listeners(max_listeners=2)
    one, two = listeners.open(), listeners.open()
    listeners.wake(indices(one))
    await one.wait()
    listeners.wake(indices(two))
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
    listeners.wake(indices(again))
    assert is_woken(again)
    assert not is_woken(one)


def test_a_listener_is_closed_once() -> None:
    listeners = Listeners(max_listeners=1)
    listener = listeners.open()
    listeners.close(listener)
    with pytest.raises(AssertionError):
        listeners.close(listener)
