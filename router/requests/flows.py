"""Flows of one group, which share it by what they were given: whose sequence is next, and whose gives way.

A flow is what one caller sends. Its counter grows by its prompts as they are bound and by its output as
steps are answered. It holds a slot for each sequence that is bound, and a slot's key is what the counter was:

    key of a flow's slots     first (0, counter), then (1, counter), (1, counter) ...
    next                      the flow whose next slot has the least key; its first sequence by turn
    gives way                 the flow whose last slot has the greatest key; its last sequence by turn

So the order of giving way is that of service, backwards. A slot given up keeps its key for the next of its
flow; it is given up for a lesser key, or for a lesser turn of its own flow. So with each preemption of a
plan what is held only becomes less, plans end, and nothing that gave way goes before what it made way for.

Flows that always wait get equal shares, by their weights, whatever they ask for. A flow that comes back
starts just before the least of those that wait, or where none does, the one that was served last: idleness
earns nothing, and costs nothing. As a flow's first slot goes before others' further ones, it finds a place at
once beside a flood. With one flow, nothing is counted.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024; slots are of start-time fair
queueing, Goyal et al., SIGCOMM 1996.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from protos.transport.interceptors import Caller

if TYPE_CHECKING:
    from router.requests.request import Sequence

OUTPUT_WEIGHT = 2.0  # of an output token, in prompt tokens
MIN_FORGET = 64  # flows, before idle ones are forgotten; entries, before those of nothing are
MAX_IDLE = 256  # idle flows that are remembered as ahead of others; those that are most so
MAX_COUNTED = 32  # flows with counts of their own, the first that come
OTHERS = "other"
MIN_RESUMED_TOKENS = 256  # that a resumed sequence counts for, which takes memory by itself

Key = tuple[bool, float]


@dataclass(slots=True)
class FlowCounts:
    """What a flow has now, and was given so far: prompt and output tokens."""

    num_waiting: int = 0
    num_running: int = 0
    num_served_tokens: int = 0


class Flow:
    """One flow.

    Attributes:
        number: Of its rows in the sequence table.
        served: Its counter, in prompt tokens over its weight.
        counts: Where its tokens are counted.
        num_held: Its slots, which are as many as its bound sequences.
        num_waiting: Its sequences that wait.
        num_tokens: Their tokens.
        num_urgent: Of these, the tokens of requests whose priority is not below 0.
        num_let_in: Of its sequences that wait, those that limits are not for, as they were let in before.
        num_let_in_tokens: Their tokens.
        num_resumed_tokens: Of these, what resumed requests count for (`resumed_size`).
        heap: These sequences by turn; ended ones stay until they come up, or are most.
        entry: Number of its entry in the line; 0 while it has none.
    """

    def __init__(self, number: int, served: float, counts: FlowCounts) -> None:
        self.number = number
        self.counts = counts
        self.served = served
        self.weight = 1.0
        self.num_held = self.num_waiting = self.num_tokens = self.num_urgent = self.entry = 0
        self.num_let_in = self.num_let_in_tokens = self.num_resumed_tokens = 0
        self.heap: list[tuple[float, int, int, Sequence]] = []
        self._grants: deque[float] = deque()  # ascending: of slots held, then of those given up
        self._standing = (0, served)

    @property
    def next_key(self) -> Key:
        """The key of the slot that it would get."""
        is_returned = self.num_held < len(self._grants)
        return self.num_held > 0, self._grants[self.num_held] if is_returned else self.served

    @property
    def last_key(self) -> Key:
        """The key of the last slot that it holds."""
        return self.num_held > 1, self._grants[self.num_held - 1] if self.num_held else 0.0

    @property
    def is_idle(self) -> bool:
        return not self.num_held and not self.num_waiting

    def count(self, sequence: "Sequence", sign: int) -> None:
        """Counts a sequence that waits, or with -1 one that waits no more."""
        num_tokens = sign * len(sequence.tokens)
        self.num_waiting += sign
        self.num_tokens += num_tokens
        self.num_urgent += sign * num_urgent(sequence)
        if sequence.was_let_in:
            self.num_let_in += sign
            self.num_let_in_tokens += num_tokens
        self.num_resumed_tokens += sign * resumed_size(sequence)

    def take(self) -> None:
        """Notes that one of its sequences is bound."""
        if self.num_held == len(self._grants):
            self._grants.append(self.served)
        self.num_held += 1

    def give_back(self) -> None:
        """Notes that one of them gave way."""
        self.num_held -= 1

    def end(self) -> None:
        """Notes that one of them has ended. What it holds counts as got last."""
        self._grants.popleft()
        self.num_held -= 1

    def forget_returned(self) -> None:
        """Forgets slots that nothing waits for any more."""
        while len(self._grants) > self.num_held:
            self._grants.pop()

    def standing(self, plan: int) -> float:
        """Returns what its counter was when it was first asked for in a plan."""
        if self._standing[0] != plan:
            self._standing = plan, self.served
        return self._standing[1]


NO_FLOW = Flow(0, 0.0, FlowCounts())


def num_urgent(sequence: "Sequence") -> int:
    """Returns a waiting sequence's tokens, if its priority is not below 0."""
    return len(sequence.tokens) if sequence.request.priority >= 0 else 0


def resumed_size(sequence: "Sequence") -> int:
    """Returns the tokens that a waiting sequence counts for among resumed ones; 0: it is none."""
    return max(len(sequence.tokens), MIN_RESUMED_TOKENS) if sequence.request.attempt else 0


class Line:
    """All flows of a group, and the order among their waiting sequences.

    Args:
        waiting: The sequences that wait. Those that are not there are passed over.
        weight_of: Says a caller's weight.

    Attributes:
        plan: Number of the plan that is being made.
    """

    def __init__(
        self, waiting: "Collection[Sequence]", weight_of: Callable[[Caller], float]
    ) -> None:
        self._waiting = waiting
        self._weight_of = weight_of
        self._flows: dict[Caller, Flow] = {}
        self._only: Flow | None = None  # while there is no second one
        self._counts: dict[str, FlowCounts] = {}
        self._by_number: list[Flow] = []
        self._free: list[int] = []
        self._heap: list[tuple[Key, tuple[float, int, int], int, Flow]] = []
        self._num_entries = 0
        self._level = 0.0  # at which flows come back
        self._lowest = self._last = NO_FLOW  # that stood there as it waited; that was served last
        self._forget_at = MIN_FORGET
        self.plan = 0

    @property
    def are_many(self) -> bool:
        """Whether there was ever more than one, and still is: idle ones are forgotten late."""
        return len(self._flows) > 1

    @property
    def are_rivals(self) -> bool:
        """Whether sequences of more than one flow wait or run."""
        busy = (flow for flow in self._flows.values() if not flow.is_idle)
        return self.are_many and len(list(islice(busy, 2))) > 1

    def __iter__(self) -> Iterator[tuple[Caller, Flow]]:
        return iter(self._flows.items())

    def flow_of(self, caller: Caller) -> Flow:
        """Returns a caller's flow, which is made where there is none."""
        flow = self._flows.get(caller)
        if flow is None:
            if len(self._flows) >= self._forget_at:
                self._forget_idle()
            number = self._free.pop() if self._free else len(self._by_number)
            flow = self._flows[caller] = Flow(number, self._level, self._counts_of(caller))
            flow.weight = self._weight_of(caller)
            self._by_number[number:] = [flow, *self._by_number[number + 1 :]]
            if self._only is not None:
                self._enter(self._only)
            self._only = flow if len(self._flows) == len(self._by_number) == 1 else None
        return flow

    def _counts_of(self, caller: Caller) -> FlowCounts:
        name = "/".join(caller)
        if name not in self._counts and len(self._counts) >= MAX_COUNTED:
            name = OTHERS
        return self._counts.setdefault(name, FlowCounts())

    def counts(self) -> dict[str, FlowCounts]:
        """Returns copies of all counts by flow, where there is more than one flow."""
        if not self.are_many:
            return {}
        for counts in self._counts.values():
            counts.num_waiting = counts.num_running = 0
        for flow in self._flows.values():
            flow.counts.num_waiting += flow.num_waiting
            flow.counts.num_running += flow.num_held
        return {name: replace(counts) for name, counts in self._counts.items()}

    def _forget_idle(self) -> None:
        """Forgets flows that would come back as new ones do, or nearly so where many are idle."""
        idle = [(flow.served, caller) for caller, flow in self._flows.items() if flow.is_idle]
        idle.sort(reverse=True)
        for place, (served, caller) in enumerate(idle):
            if served <= self._level or place >= MAX_IDLE:
                self._free.append(self._flows.pop(caller).number)
        self._forget_at = max(MIN_FORGET, 2 * len(self._flows))

    # ---- waiting sequences

    def push(self, sequence: "Sequence", *, is_back: bool = False) -> None:
        """Adds a sequence that waits; `is_back`: it was taken aside, and its flow is no other for it."""
        flow = sequence.flow = self.flow_of(sequence.request.caller)
        if not (flow.num_waiting or is_back):
            self._raise_level()
            flow.served = max(flow.served, math.nextafter(self._level, 0.0))
        flow.count(sequence, 1)
        heapq.heappush(flow.heap, (*sequence.turn, sequence))
        if flow is not self._only and (flow.num_waiting == 1 or flow.heap[0][-1] is sequence):
            self._enter(flow)

    def _raise_level(self) -> None:
        if self._lowest.num_waiting and self._lowest.served <= self._level:
            return  # else each of thousands that come would look at all of them
        waiting = (flow for flow in self._flows.values() if flow.num_waiting)
        self._lowest = min(waiting, key=attrgetter("served"), default=self._last)
        self._level = max(self._level, self._lowest.served)

    def leave(self, sequence: "Sequence", *, is_aside: bool = False) -> None:
        """Notes that a sequence waits no more; `is_aside`: it will be back at once."""
        flow = sequence.flow
        flow.count(sequence, -1)
        if not (flow.num_waiting or is_aside):
            flow.forget_returned()
        if len(flow.heap) > 2 * flow.num_waiting + MIN_FORGET:
            left = {entry[-1] for entry in flow.heap}.intersection(self._waiting)
            flow.heap = sorted((*sequence.turn, sequence) for sequence in left)

    def peek(self) -> "Sequence | None":
        """Returns the first of all."""
        if self._only is not None:
            return self._first_of(self._only)
        while self._heap:
            key, turn, entry, flow = self._heap[0]
            first = self._first_of(flow)
            if entry != flow.entry or first is None:
                heapq.heappop(self._heap)
            elif (key, turn) < (flow.next_key, first.turn):
                heapq.heapreplace(self._heap, (flow.next_key, first.turn, entry, flow))
            else:
                return first
        return None

    def _first_of(self, flow: Flow) -> "Sequence | None":
        heap = flow.heap
        while heap and heap[0][-1] not in self._waiting:
            heapq.heappop(heap)
        return heap[0][-1] if heap else None

    def pop(self) -> "Sequence":
        """Takes the first, which `peek` has just returned."""
        flow = self._only or self._heap[0][-1]
        return heapq.heappop(flow.heap)[-1]

    def _enter(self, flow: Flow) -> None:
        """Gives a flow its place, which may be before the one that it had."""
        first = self._first_of(flow)
        if first is not None:
            self._num_entries += 1
            flow.entry = self._num_entries
            heapq.heappush(self._heap, (flow.next_key, first.turn, flow.entry, flow))
        if len(self._heap) > 2 * len(self._flows) + MIN_FORGET:
            entries = [entry for entry in self._heap if entry[2] == entry[3].entry]
            self._heap = sorted(entry for entry in entries if entry[3].num_waiting)

    def backlog(self, most: float) -> float:
        """Returns the urgent tokens that wait, counting of each flow no more than its share of so many.

        Where there is one flow, all. What a flood has waiting beyond its share is its own delay, and
        makes nobody's steps longer.
        """
        if self._only is not None:
            return self._only.num_urgent
        active = [flow for flow in self._flows.values() if not flow.is_idle]
        share = most / (sum(flow.weight for flow in active) or 1.0)
        return sum(min(flow.num_urgent, share * flow.weight) for flow in active)

    def place_of(self, sequence: "Sequence") -> tuple[Key, tuple[float, int, int]]:
        """Sorts sequences that are first of their flows."""
        return self.flow_of(sequence.request.caller).next_key, sequence.turn

    # ---- slots

    def take(self, sequence: "Sequence", num_tokens: int) -> None:
        """Notes that a sequence is bound that has so many tokens to run that never ran before."""
        flow = sequence.flow = self.flow_of(sequence.request.caller)
        flow.take()
        self._last = flow
        if self.are_many:
            flow.served += num_tokens / flow.weight
            flow.counts.num_served_tokens += num_tokens

    def give_back(self, sequence: "Sequence") -> None:
        """Notes that a bound sequence gave way."""
        sequence.flow.give_back()
        if sequence.flow is not self._only:
            self._enter(sequence.flow)

    def give_back_all(self) -> None:
        """Notes that nothing is bound any more, whatever became of it."""
        for flow in self._flows.values():
            flow.num_held = 0
            flow.forget_returned()
            self._enter(flow)

    def end(self, sequence: "Sequence") -> None:
        """Notes that a bound sequence has ended."""
        flow = sequence.flow
        if flow is self._only:
            flow.end()
            return
        key = flow.next_key
        flow.end()
        if flow.next_key < key:
            self._enter(flow)

    def charge_outputs(self, numbers: npt.NDArray[np.int32]) -> None:
        """Counts tokens, each by its flow's number."""
        for number, count in enumerate(np.bincount(numbers).tolist()):
            if count:
                flow = self._by_number[number]
                flow.served += OUTPUT_WEIGHT * count / flow.weight
                flow.counts.num_served_tokens += count
