"""If these fail, a request waits behind those it should precede, or the router's memory fills."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from router.errors import QueueFull
from router.requests.callers import CallerSettings
from router.requests.flow_limits import read_flow_limits
from router.requests.request import Listeners, Request
from router.requests.waiting_queue import WaitingQueue
from tests.router.support.requests import make_request

READER = Listeners(max_listeners=1).open()
NUMBERS = itertools.count()


FLOOD, OTHER = ("flood",), ("other",)


def new_request(num_tokens: int = 3, **fields: Any) -> Request:
    return make_request([1] * num_tokens, READER, 1, request_id=str(next(NUMBERS)), **fields)


def drain(admission: WaitingQueue) -> list[Request]:
    requests = []
    while admission.peek() is not None:
        requests.append(admission.pop().request)
    return requests


def test_priority_comes_before_arrival() -> None:
    admission = WaitingQueue(max_sequences=10, max_tokens=100)
    low, first, second, high = (new_request(priority=p) for p in (-1, 0, 0, 7))
    for request in (low, first, second, high):
        admission.submit(request)
    assert drain(admission) == [high, first, second, low]


def test_a_preempted_sequence_goes_back_to_the_place_of_its_arrival() -> None:
    admission = WaitingQueue(max_sequences=2, max_tokens=6)
    first, second = new_request(), new_request()
    admission.submit(first)
    preempted = admission.pop()
    admission.submit(second)
    admission.submit(new_request())
    admission.push(preempted)  # never refused, though the line is full
    assert admission.peek() is preempted
    assert len(admission) == 3


def test_continuations_are_lined_up_together_or_not_at_all() -> None:
    admission = WaitingQueue(max_sequences=4, max_tokens=100)
    admission.submit(new_request(n=2))
    with pytest.raises(QueueFull, match="max_waiting_sequences=4") as error:
        admission.submit(new_request(n=3))
    assert error.value.retry_delay_s is not None
    assert len(admission) == 2
    second = new_request(n=2)
    admission.submit(second)
    assert drain(admission)[2:] == [second, second]


def test_too_many_waiting_tokens_are_refused_with_the_numbers() -> None:
    admission = WaitingQueue(max_sequences=10, max_tokens=10)
    admission.submit(new_request(6))
    with pytest.raises(QueueFull, match=r"6 prompt tokens wait and 5 more .*max_waiting_tokens=10"):
        admission.submit(new_request(5))
    admission.submit(new_request(4))


def test_one_prompt_longer_than_the_line_may_wait_alone() -> None:
    admission = WaitingQueue(max_sequences=10, max_tokens=10)
    admission.submit(new_request(50))
    with pytest.raises(QueueFull):
        admission.submit(new_request(1))


def test_a_discarded_sequence_leaves_at_once_and_never_comes_up() -> None:
    admission = WaitingQueue(max_sequences=1, max_tokens=10)
    cancelled, other = new_request(), new_request()
    admission.submit(cancelled)
    admission.discard(cancelled.sequences[0])
    admission.discard(cancelled.sequences[0])
    assert len(admission) == admission.num_tokens == 0
    admission.submit(other)
    assert drain(admission) == [other]


@pytest.mark.parametrize("seed", range(20))
def test_the_line_is_sorted_and_counted_under_random_use(seed: int) -> None:
    rng = random.Random(seed)
    admission = WaitingQueue(max_sequences=12, max_tokens=60)
    waiting, running = [], []
    for _ in range(300):
        match rng.choice(["submit", "pop", "push", "discard"]):
            case "submit":
                request = new_request(
                    rng.randint(1, 20), n=rng.randint(1, 3), priority=rng.randint(-1, 1)
                )
                try:
                    admission.submit(request)
                    waiting += request.sequences
                except QueueFull:
                    assert waiting
            case "pop" if admission.peek() is not None:
                sequence = admission.pop()
                expected = min(waiting, key=lambda s: s.turn)
                assert sequence is expected
                waiting.remove(sequence)
                running.append(sequence)
            case "push" if running:
                waiting.append(running.pop(rng.randrange(len(running))))
                admission.push(waiting[-1])
            case "discard" if waiting:
                admission.discard(waiting.pop(rng.randrange(len(waiting))))
        assert len(admission) == len(waiting)
        assert admission.num_tokens == sum(len(s.tokens) for s in waiting)


def submitted(admission: WaitingQueue, arrival_time: float, priority: int) -> Request:
    request = new_request(priority=priority)
    request.arrival_time = arrival_time
    admission.submit(request)
    return request


def test_a_level_of_priority_is_worth_a_head_start() -> None:
    admission = WaitingQueue(max_sequences=10, max_tokens=100, priority_step_s=10.0)
    early = submitted(admission, 0.0, priority=0)
    late = submitted(admission, 16.0, priority=0)
    overtaken = submitted(admission, 9.0, priority=1)
    too_late = submitted(admission, 10.5, priority=1)
    far_ahead = submitted(admission, 50.0, priority=6)
    assert drain(admission) == [far_ahead, overtaken, early, too_late, late]


def test_without_a_head_start_priority_changes_nothing() -> None:
    admission = WaitingQueue(max_sequences=10, max_tokens=100, priority_step_s=0.0)
    low, high = submitted(admission, 1.0, priority=-100), submitted(admission, 2.0, priority=100)
    assert drain(admission) == [low, high]


@pytest.mark.parametrize("is_given", [True, False])
def test_a_flow_fills_its_share_and_others_the_rest(is_given: bool) -> None:
    """Nine tenths of the queue, or what the settings say."""
    settings = {"max_flow_waiting_sequences": 5, "max_flow_waiting_tokens": 50}
    callers, most = CallerSettings(**(settings if is_given else {})), 5 if is_given else 9
    admission = WaitingQueue(max_sequences=10, max_tokens=100, callers=callers)
    for request in (new_request(n=most - 2, caller=FLOOD), new_request(n=2, caller=FLOOD)):
        admission.submit(request)
    words = rf"{most} sequences of the flow flood .* 1 more .* max_flow_waiting_sequences={most}:"
    with pytest.raises(QueueFull, match=words) as caught:
        admission.submit(new_request(caller=FLOOD))
    numbers = {"value": str(most + 1), "limit": str(most)}
    assert caught.value.metadata == {"flow": "flood", **numbers}
    admission.submit(new_request(num_tokens=40, caller=OTHER))
    if is_given:
        with pytest.raises(QueueFull, match=r"40 tokens of the flow other .* 11 more"):
            admission.submit(new_request(num_tokens=11, caller=OTHER))
        admission.submit(new_request(n=4))  # of nobody who is told apart

    assert admission.peek() is not None
    admission.pop()  # which gives its place back
    admission.submit(new_request(caller=FLOOD))


@pytest.mark.parametrize(
    ("caller", "most", "settings"),
    [
        ((), {"max_sequences": 16}, {}),
        ((), {"max_tokens": 48}, {}),
        (FLOOD, {}, {"max_flow_waiting_sequences": 16}),
        (FLOOD, {}, {"max_flow_waiting_tokens": 48}),
        (FLOOD, {"max_sequences": 18}, {}),
    ],
    ids=["sequences", "tokens", "a flow's sequences", "a flow's tokens", "a flow's share"],
)
def test_there_is_much_room_until_an_eighth_of_some_limit_waits(
    caller: tuple[str, ...], most: dict[str, int], settings: dict[str, int]
) -> None:
    sizes = {"max_sequences": 1000, "max_tokens": 1000, **most}
    admission = WaitingQueue(**sizes, callers=CallerSettings(**settings))
    assert admission.has_much_room
    for has_much_room in (True, True, False):
        admission.submit(new_request(caller=caller))
        assert admission.has_much_room == has_much_room


def test_a_flows_first_request_may_be_larger_than_its_share() -> None:
    settings = CallerSettings(max_flow_waiting_sequences=1, max_flow_waiting_tokens=10)
    admission = WaitingQueue(max_sequences=10, max_tokens=100, callers=settings)
    for _ in range(2):
        admission.submit(new_request(num_tokens=20, n=3, caller=FLOOD))
        drain(admission)


def test_a_line_of_the_limits_says_what_one_flow_gets(tmp_path: Path) -> None:
    file = tmp_path / "limits"
    file.write_text("# who\nother weight=2.5 max_waiting_sequences=1\nx-user=me max_priority=7\n")
    settings = CallerSettings(flow_limits=file, max_priority=3)
    assert [settings.max_priority_of(flow) for flow in (FLOOD, OTHER, (*OTHER, "x-user=me"))] == [
        3,
        3,
        7,
    ]
    admission = WaitingQueue(max_sequences=10, max_tokens=100, callers=settings)
    admission.submit(new_request(caller=OTHER))
    with pytest.raises(QueueFull, match="1 sequences of the flow other"):
        admission.submit(new_request(caller=OTHER))
    assert admission.line.flow_of(OTHER).weight == 2.5


def test_a_flow_has_its_weight_from_its_first_resumed_request_on(tmp_path: Path) -> None:
    """As after a restart, when nobody sends new ones yet."""
    file = tmp_path / "limits"
    file.write_text("other weight=0.25\n")
    callers = CallerSettings(flow_limits=file)
    admission = WaitingQueue(max_sequences=10, max_tokens=100, callers=callers)
    request = new_request(caller=OTHER)
    request.attempt = 1
    admission.submit(request)
    assert request.sequences[0].flow.weight == 0.25


@pytest.mark.parametrize(
    "line",
    [
        "a weight",
        "a weight=0",
        "a wait=1",
        "a max_priority=x",
        "a\na",
        *[f"a weight={x}" for x in ("nan", "-1", "1e-300", "inf")],
        *[f"a max_priority={x}" for x in (-101, 101)],
        "a max_waiting_sequences=-1",
        "a max_waiting_tokens=-1",
    ],
)
def test_a_line_that_makes_no_sense_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "limits"
    file.write_text(f"b weight=1\n\n{line}\n")
    with pytest.raises(ValueError, match=r"limits, line [34]: "):
        read_flow_limits(file)


def test_there_is_room_until_sequences_or_tokens_are_too_many() -> None:
    admission = WaitingQueue(max_sequences=2, max_tokens=10)
    assert admission.has_room
    admission.submit(new_request(50))  # alone in line
    assert not admission.has_room
    assert admission.peek() is not None
    admission.pop()
    admission.submit(new_request(4))
    assert admission.has_room
    admission.submit(new_request(4))
    assert not admission.has_room
