"""Listeners: one per call, woken when one of its sequences has news.

A step may touch thousands of sequences, and most listeners are one step behind or not waiting at
all. So the engine marks listeners in one array operation and wakes only the waiting ones; tokens
stay in the SequenceTable until their listener comes for them. A slow listener thus costs nobody
anything, and what it has not read is bounded by its own max_tokens.
"""

import asyncio
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from router.requests.request import Sequence

NO_LISTENER = 0  # index 0 is never given out, so that an empty row of a table wakes nobody


class Listener:
    """One call's side of its sequences. Made by `Listeners.open`, given back by `Listeners.close`.

    Attributes:
        index: What the table's `listener` column holds for its sequences.
        ended: Sequences that ended since the owner last looked; it takes them from the left.
    """

    def __init__(self, index: int, is_waiting: npt.NDArray[np.bool_]) -> None:
        self.index = index
        self.ended: deque[Sequence] = deque()
        self._is_waiting = is_waiting
        self._news = asyncio.Event()
        is_waiting[index] = True

    async def wait(self) -> None:
        """Returns once there was news since the last call."""
        await self._news.wait()
        self._news.clear()
        self._is_waiting[self.index] = True

    def wake(self) -> None:
        """Says that there is news."""
        self._is_waiting[self.index] = False
        self._news.set()


class Listeners:
    """Every open listener, and which of them wait, as one array."""

    def __init__(self, max_listeners: int) -> None:
        self._is_waiting = np.zeros(max_listeners + 1, dtype=np.bool_)
        self._has_news = np.zeros(max_listeners + 1, dtype=np.bool_)
        self._listeners: list[Listener | None] = [None] * (max_listeners + 1)
        self._free = list(range(max_listeners, NO_LISTENER, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_open(self) -> int:
        return len(self._listeners) - 1 - len(self._free)

    def open(self) -> Listener:
        """Returns a new listener. The caller has seen that `num_free` is not 0."""
        index = self._free.pop()
        listener = Listener(index, self._is_waiting)
        self._listeners[index] = listener
        return listener

    def close(self, listener: Listener) -> None:
        """Forgets a listener whose sequences have all ended."""
        assert self._listeners[listener.index] is listener
        self._listeners[listener.index] = None
        self._is_waiting[listener.index] = False
        self._free.append(listener.index)

    def wake(self, indices: npt.NDArray[np.int64]) -> None:
        """Wakes the listeners of these indices that wait. Indices may repeat."""
        self._has_news[:] = False
        self._has_news[indices] = True
        self._has_news &= self._is_waiting
        for index in np.flatnonzero(self._has_news).tolist():
            listener = self._listeners[index]
            assert listener is not None, "a live sequence keeps its listener open"
            listener.wake()

    def wake_all(self) -> None:
        """Wakes every open listener."""
        for listener in self._listeners:
            if listener is not None:
                listener.wake()
