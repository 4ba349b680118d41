"""If these fail, one caller's flood delays another, or two take each other's place for ever."""

import itertools
import random

import numpy as np
import pytest

from protos.transport.interceptors import Caller
from router.requests.flows import MAX_COUNTED, MAX_IDLE, MIN_FORGET, OTHERS
from router.requests.request import Listeners, Sequence
from router.requests.waiting_queue import WaitingQueue
from tests.router.support.requests import make_request

READER = Listeners(max_listeners=1).open()
FLOOD, OTHER = ("flood",), ("other",)


class Rows:
    """Rows that sequences are bound to, and given up as the scheduler does."""

    def __init__(self, count: int = 1000) -> None:
        self.queue = WaitingQueue(max_sequences=10_000, max_tokens=1_000_000)
        self.line = self.queue.line
        self.count = count
        self.bound: list[Sequence] = []
        self._numbers = itertools.count()

    def submit(self, caller: Caller, num: int = 1, num_tokens: int = 10, **fields: int) -> None:
        for _ in range(num):
            number = next(self._numbers)
            request = make_request(
                [1] * num_tokens,
                READER,
                request_id=str(number),
                caller=caller,
                arrival_time=float(number),
                **fields,
            )
            self.queue.submit(request)

    def bind(self) -> Sequence:
        """Binds the first, which has never run."""
        assert self.queue.peek() is not None
        sequence = self.queue.pop()
        self.line.take(sequence, sequence.num_prompt_tokens)
        self.bound.append(sequence)
        return sequence

    def bind_callers(self, count: int) -> list[Caller]:
        return [self.bind().request.caller for _ in range(count)]

    def plan(self) -> int:
        """Binds all that there are rows for. Returns how many gave way for it."""
        num_preempted = 0
        while (first := self.queue.peek()) is not None:
            if len(self.bound) == self.count:
                place = (*first.flow.next_key, *first.turn)
                last = max(self.bound, key=lambda sequence: sequence.order)
                if last.flow is first.flow or last.order < place:
                    break
                self.bound.remove(last)
                self.line.give_back(last)
                self.queue.push(last)
                assert self.line.place_of(last) > self.line.place_of(first)
                assert self.queue.peek() is first
                num_preempted += 1
            self.bind()
        return num_preempted

    def end(self, sequence: Sequence) -> None:
        self.bound.remove(sequence)
        self.line.end(sequence)

    def check(self) -> None:
        """Counters are what their sums say."""
        for caller, flow in self.line:
            assert flow.num_held == sum(s.request.caller == caller for s in self.bound)
            own = [s for s in self.queue if s.request.caller == caller]
            assert flow.num_waiting == len(own)
            assert flow.num_tokens == sum(len(s.tokens) for s in own)


def test_the_flow_that_was_given_least_is_next_and_idleness_earns_nothing() -> None:
    rows = Rows()
    rows.submit(FLOOD, 20)
    rows.submit(OTHER, 3)
    # Other's first goes before the flood's second, then it is turn about.
    assert rows.bind_callers(8) == [FLOOD, *[OTHER, FLOOD] * 3, FLOOD]
    rows.submit(OTHER, 5)
    assert rows.bind_callers(4) == [OTHER, FLOOD, OTHER, FLOOD]
    flow = rows.line.flow_of(OTHER)
    rows.line.charge_outputs(np.full(14, flow.number, np.int32))
    assert rows.bind_callers(4) == [FLOOD, FLOOD, FLOOD, OTHER]


def test_flows_that_always_wait_are_served_by_their_weights() -> None:
    rows = Rows()
    rows.submit(FLOOD, 200)
    rows.submit(OTHER, 200)
    rows.line.flow_of(OTHER).weight = 3.0
    for _ in range(2):  # so that neither's first counts
        rows.bind()
    assert rows.bind_callers(80).count(OTHER) == 60


def test_what_a_flow_was_given_before_puts_no_other_behind_one_that_waits() -> None:
    """Its next request goes first by its slot, and is not where those that come stand."""
    rows, heavy = Rows(), ("heavy",)
    rows.submit(FLOOD, 200)
    rows.submit(heavy)
    rows.bind_callers(2)
    rows.line.charge_outputs(np.full(1000, rows.line.flow_of(heavy).number, np.int32))
    rows.end(rows.bound[1])
    rows.submit(heavy)
    assert rows.bind_callers(1) == [heavy]
    rows.submit(OTHER, 200)
    assert rows.bind_callers(80).count(OTHER) == 40


def test_who_comes_is_not_ahead_of_a_flow_for_what_that_was_given_meanwhile() -> None:
    """Of what was bound before, the output counts as well: most of long answers comes later."""
    rows, heavy = Rows(), ("heavy",)
    rows.submit(FLOOD)
    rows.submit(heavy, 2)
    rows.bind_callers(3)
    rows.end(rows.bound[0])
    rows.line.charge_outputs(np.full(1000, rows.line.flow_of(heavy).number, np.int32))
    rows.submit(FLOOD, 200)
    rows.submit(heavy, 200)
    assert rows.bind_callers(80).count(heavy) == 40


def test_the_first_sequence_of_a_flow_takes_the_place_of_anothers_last() -> None:
    rows = Rows(4)
    rows.submit(FLOOD, 10)
    assert rows.plan() == 0
    rows.submit(OTHER, 10)
    assert rows.plan() == 1
    assert [s.request.caller for s in rows.bound].count(OTHER) == 1
    rows.end(rows.bound[0])
    assert rows.plan() == 0
    # Who gave way is the next of its flow, by the slot that it had.
    assert [s.request.turn[0] for s in rows.bound] == [1.0, 2.0, 10.0, 3.0]


@pytest.mark.parametrize("seed", range(10))
def test_with_each_that_gives_way_what_is_held_becomes_less_so_that_plans_end(seed: int) -> None:
    rng = random.Random(seed)
    rows = Rows(rng.choice([1, 3, 10]))
    callers = [(str(number),) for number in range(rng.choice([2, 3, 20]))]
    num_preempted = num_bound = 0
    for _ in range(300):
        match rng.choice(["submit", "end", "decode", "discard", "plan"]):
            case "submit":
                rows.submit(rng.choice(callers), rng.randint(1, 6), rng.randint(1, 30))
            case "end" if rows.bound:
                rows.end(rng.choice(rows.bound))
            case "decode" if rows.bound:
                rows.line.charge_outputs(
                    np.array([s.flow.number for s in rows.bound for _ in range(4)])
                )
            case "discard" if len(rows.queue):
                rows.queue.discard(rng.choice(sorted(rows.queue, key=lambda s: s.turn)))
            case "plan":
                num_preempted += rows.plan()
                num_bound += 1
                assert rows.plan() == 0
        rows.check()
    assert num_preempted < 5 * num_bound


def test_who_is_taken_aside_in_a_plan_costs_its_flow_nothing() -> None:
    """Neither the slots that it was given back, nor the lead of who was served less."""
    rows = Rows()
    rows.submit(OTHER)
    rows.submit(FLOOD, 40)
    rows.plan()
    for sequence in rows.bound:
        rows.line.give_back(sequence)
        rows.queue.push(sequence)
    assert rows.queue.peek() is rows.bound[0]
    key = rows.bound[0].flow.next_key
    aside = rows.queue.pop(is_aside=True)
    assert rows.queue.peek() is rows.bound[1]
    rows.queue.push(aside, is_back=True)
    assert rows.queue.peek() is aside
    assert aside.flow.next_key == key


def test_flows_that_are_gone_are_forgotten() -> None:
    rows = Rows()
    rows.submit(FLOOD, 2000)
    for number in range(10 * MIN_FORGET):
        rows.submit((str(number),))
        for _ in range(3):
            rows.end(rows.bind())
    assert len(list(rows.line)) <= 2 * MIN_FORGET
    rows.check()
    counts = rows.line.counts()
    assert len(counts) == MAX_COUNTED + 1
    assert sum(flow.num_waiting for flow in counts.values()) == len(rows.queue)
    assert sum(flow.num_running for flow in counts.values()) == len(rows.bound)
    assert counts[OTHERS].num_served_tokens == 10 * (10 * MIN_FORGET - MAX_COUNTED + 1)


def test_callers_of_one_request_each_are_forgotten():
    """Else memory grows with all users that there ever were, and each step's time with it."""
    rows = Rows()
    for number in range(8 * MAX_IDLE):
        rows.submit((f"user {number}",))
        rows.end(rows.bind())
    assert len(list(rows.line)) <= 2 * MAX_IDLE + 1


@pytest.mark.parametrize("caller", [FLOOD, OTHER])
def test_what_was_cancelled_is_forgotten_while_it_is_not_its_turn(caller: Caller):
    rows = Rows()
    rows.submit(FLOOD)
    [first] = rows.queue
    for _ in range(8 * MIN_FORGET):
        rows.submit(caller)
        [new] = set(rows.queue) - {first}
        rows.queue.discard(new)
    flows = dict(rows.line)
    assert len(flows[caller].heap) + len(rows.line._heap) <= 3 * MIN_FORGET
    assert rows.bind() is first
    assert rows.queue.peek() is None
