"""Waiting queue of one group: bounded, ordered by arrival and priority.

Priority is a head start in time. A request goes before all requests that came less than
`priority_step_s` earlier for each level of priority that it has above theirs:

    time of arrival            0 s         4 s          10 s        16 s
    priority 0              ───a────────────────────────────────────b───▶
    priority 1                           ───────────────c────────────────▶   c, a, b  at 11 s a level
                                                                             a, c, b  at 9 s

A high priority thus means a short wait, and no priority means an endless one: a request that has
waited for as long as all levels are worth goes before all that come. The order of two requests never
changes, so that the queue is a heap, and it is the order on the ranks too: no sequence is preempted
for a request that would have had to wait for it.
"""

import heapq
from collections.abc import Iterator
from itertools import count
from typing import Protocol

from router.errors import QueueFull
from router.requests.request import Request, Sequence

PRIORITY_STEP_S = 10.0
RETRY_DELAY_S = 1.0

_ARRIVALS = count(1)  # at any group: a request that moves keeps its place


class SequenceQueue(Protocol):
    """What the scheduler sees of the sequences that wait."""

    def __len__(self) -> int: ...

    def peek(self) -> Sequence | None:
        """Returns the next sequence, if any may begin."""
        ...

    def pop(self) -> Sequence:
        """Takes out the sequence that `peek` has just returned."""
        ...

    def push(self, sequence: Sequence) -> None:
        """Queues a sequence that has lost its place on a rank."""
        ...


class WaitingQueue:
    """Sequences that no rank runs yet, or runs no more because others needed its blocks.

    A sequence that ended while it waited stays in the heap, uncounted, until it comes up.

    Args:
        max_sequences: Waiting at most; more are refused.
        max_tokens: Prompt tokens waiting at most. One request that is longer by itself may
            still wait where no other does.
        priority_step_s: Seconds of waiting that one level of priority is worth; the same at every
            group. 0 is the order of arrival.
    """

    def __init__(
        self, *, max_sequences: int, max_tokens: int, priority_step_s: float = PRIORITY_STEP_S
    ) -> None:
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._priority_step_s = priority_step_s
        self._heap: list[tuple[float, int, int, Sequence]] = []
        self._waiting: set[Sequence] = set()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """Every sequence that waits, in no order."""
        return iter(tuple(self._waiting))

    @property
    def has_room(self) -> bool:
        """Whether one continuation of a prompt of one token would fit."""
        return not self._waiting or (
            len(self) < self._max_sequences and self.num_tokens < self._max_tokens
        )

    def submit(self, request: Request) -> None:
        """Queues all continuations of a new request, or none.

        Raises:
            QueueFull: There is no room.
        """
        num_new = len(request.sequences)
        if len(self) + num_new > self._max_sequences:
            raise QueueFull(
                f"{len(self)} sequences wait and {num_new} more would exceed "
                f"max_waiting_sequences={self._max_sequences}: try again in a second",
                retry_delay_s=RETRY_DELAY_S,
            )
        num_tokens = len(request.prompt) * num_new
        if self._waiting and self.num_tokens + num_tokens > self._max_tokens:
            raise QueueFull(
                f"{self.num_tokens} prompt tokens wait and {num_tokens} more would exceed "
                f"max_waiting_tokens={self._max_tokens}: try again in a second",
                retry_delay_s=RETRY_DELAY_S,
            )
        head_start_s = request.priority * self._priority_step_s
        request.priority_key = (request.arrival_time - head_start_s, next(_ARRIVALS))
        for sequence in request.sequences:
            self.push(sequence)

    def push(self, sequence: Sequence) -> None:
        """Queues a sequence by its request's priority. Preempted ones are never refused."""
        self._waiting.add(sequence)
        self.num_tokens += len(sequence.tokens)
        heapq.heappush(self._heap, (*sequence.request.priority_key, sequence.index, sequence))

    def peek(self) -> Sequence | None:
        """Returns the first of the queue."""
        while self._heap and self._heap[0][-1] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def pop(self) -> Sequence:
        """Takes the first of the queue; `peek` has just returned it."""
        sequence = heapq.heappop(self._heap)[-1]
        self._leave(sequence)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Takes a sequence out of the queue, if it is there."""
        if sequence in self._waiting:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        self.num_tokens -= len(sequence.tokens)
