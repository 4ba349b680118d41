"""Who waits for tokens: one Reader per call, woken when one of its sequences has news.

A step may touch thousands of sequences, and most readers are one step behind or not waiting at
all. So the engine marks readers in one array operation and wakes only those that wait; tokens
stay in the SequenceTable until their reader comes for them. A slow reader thus costs nobody
anything, and what it has not read is bounded by its own max_tokens.
"""

import asyncio
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from router.requests.request import Sequence

NO_READER = 0  # index 0 is never given out, so that an empty row of a table wakes nobody


class Reader:
    """One call's side of its sequences. Made by `Readers.open`, given back by `Readers.close`.

    Attributes:
        index: What the table's `reader` column holds for its sequences.
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


class Readers:
    """Every open reader, and which of them wait, as one array."""

    def __init__(self, max_readers: int) -> None:
        self._is_waiting = np.zeros(max_readers + 1, dtype=np.bool_)
        self._has_news = np.zeros(max_readers + 1, dtype=np.bool_)
        self._readers: list[Reader | None] = [None] * (max_readers + 1)
        self._free = list(range(max_readers, NO_READER, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_open(self) -> int:
        return len(self._readers) - 1 - len(self._free)

    def open(self) -> Reader:
        """Returns a new reader. The caller has seen that `num_free` is not 0."""
        index = self._free.pop()
        reader = Reader(index, self._is_waiting)
        self._readers[index] = reader
        return reader

    def close(self, reader: Reader) -> None:
        """Forgets a reader whose sequences have all ended."""
        assert self._readers[reader.index] is reader
        self._readers[reader.index] = None
        self._is_waiting[reader.index] = False
        self._free.append(reader.index)

    def wake(self, indices: npt.NDArray[np.int64]) -> None:
        """Wakes those of these readers that wait. Indices may repeat."""
        self._has_news[:] = False
        self._has_news[indices] = True
        self._has_news &= self._is_waiting
        for index in np.flatnonzero(self._has_news).tolist():
            reader = self._readers[index]
            assert reader is not None, "a live sequence keeps its reader open"
            reader.wake()

    def wake_all(self) -> None:
        """Wakes every open reader."""
        for reader in self._readers:
            if reader is not None:
                reader.wake()
