"""An event loop whose clock jumps to the next timer, so that a simulated hour takes no time."""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Advances the clock where a real selector would sleep."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing is scheduled and nothing is ready: a deadlock"
        self.now += max(0.0, timeout)
        ready: list[Any] = super().select(0)
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """Time passes only while every task waits."""

    def __init__(self) -> None:
        self._jumping_selector = _JumpingSelector()
        super().__init__(self._jumping_selector)

    def time(self) -> float:
        return self._jumping_selector.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on a fresh virtual clock."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)


def on_virtual_clock(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Makes a function of a coroutine function: it runs on a virtual clock of its own."""

    @functools.wraps(test)
    def run_test(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(test(*args, **kwargs))

    return run_test
