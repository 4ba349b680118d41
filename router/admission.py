"""The waiting line of one group: bounded, ordered by priority and then by arrival."""

import heapq
from itertools import count

from router.errors import QueueFull
from router.request import Request, Sequence


class Admission:
    """Sequences that no rank runs yet, or runs no more because others needed its blocks.

    A sequence that ended while it waited stays in the heap, uncounted, until it comes up.

    Args:
        max_sequences: Waiting at most; more are refused.
        max_tokens: Prompt tokens waiting at most. One request that is longer by itself may
            still wait alone.
    """

    def __init__(self, *, max_sequences: int, max_tokens: int) -> None:
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._heap: list[tuple[int, int, int, Sequence]] = []
        self._waiting: set[Sequence] = set()
        self._arrivals = count(1)
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Lines up all continuations of a new request, or none.

        Raises:
            QueueFull: There is no room.
        """
        num_sequences = len(self) + len(request.sequences)
        if num_sequences > self._max_sequences:
            raise QueueFull(
                f"{len(self)} sequences wait and {len(request.sequences)} more would exceed "
                f"max_waiting_sequences={self._max_sequences}: try again in a second",
                retry_delay_s=1.0,
            )
        num_tokens = len(request.prompt) * len(request.sequences)
        if self._waiting and self.num_tokens + num_tokens > self._max_tokens:
            raise QueueFull(
                f"{self.num_tokens} prompt tokens wait and {num_tokens} more would exceed "
                f"max_waiting_tokens={self._max_tokens}: try again in a second",
                retry_delay_s=1.0,
            )
        request.order = next(self._arrivals)
        for sequence in request.sequences:
            self.push(sequence)

    def push(self, sequence: Sequence) -> None:
        """Lines up a sequence at the place of its arrival. Preempted ones are never refused."""
        request = sequence.request
        self._waiting.add(sequence)
        self.num_tokens += len(sequence.tokens)
        heapq.heappush(self._heap, (-request.priority, request.order, sequence.index, sequence))

    def peek(self) -> Sequence | None:
        """Returns the first in line."""
        while self._heap and self._heap[0][-1] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def pop(self) -> Sequence:
        """Takes the first in line; `peek` has just returned it."""
        sequence = heapq.heappop(self._heap)[-1]
        self._leave(sequence)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Takes a sequence out of the line, if it is there."""
        if sequence in self._waiting:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        self.num_tokens -= len(sequence.tokens)
