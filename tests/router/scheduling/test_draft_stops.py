"""If these fail, a client gets tokens behind a stop, or loses some before it."""

import itertools

import numpy as np
import pytest

from router.errors import Cancelled
from router.requests.request import FinishReason
from router.scheduling.sequence_table import NUM_STOP_IDS
from tests.router.support.fake_rank import VOCAB_SIZE, expected_output
from tests.router.support.stepper import (
    PROMPT,
    assert_right,
    draft_stepper,
    finish,
    limits,
    output_of,
    right_output,
    stop_at,
)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("place", range(7))
@pytest.mark.parametrize("num_unseen", [0, NUM_STOP_IDS])
def test_a_stop_token_ends_the_output_wherever_in_a_run_it_stands(
    num_unseen: int, place: int, depth: int
) -> None:
    world = draft_stepper()
    unseen = tuple(range(VOCAB_SIZE, VOCAB_SIZE + num_unseen))
    request = world.submit(PROMPT, 30, stop_token_ids=(*unseen, stop_at(place)))
    other = world.submit([9, 9, 4], 25)
    world.run(depth)
    assert output_of(request)[0] == expected_output(PROMPT, 1 + place, ())
    assert request.sequences[0].finish_reason is FinishReason.STOP
    assert request.sequences[0].stop_token_id == stop_at(place)
    assert_right(other)
    world.check_idle()


def test_of_two_stop_tokens_in_a_run_the_first_counts() -> None:
    world = draft_stepper()
    request = world.submit(PROMPT, 30, stop_token_ids=(stop_at(4), stop_at(2)))
    world.run()
    assert request.sequences[0].stop_token_id == stop_at(2)
    assert len(output_of(request)[0]) == 3


def test_below_its_least_length_a_sequence_gains_one_token_at_a_time() -> None:
    """Which stop tokens are suppressed changes within a run, and drafts do not know it."""
    world = draft_stepper()
    request = world.submit(PROMPT, 30, min_tokens=3)
    other = world.submit([5, 5], 30)
    world.step()
    assert [limits(world.step()) for _ in range(3)] == [[1, 4], [1, 4], [4, 4]]
    finish(world, request, other)


@pytest.mark.parametrize("min_tokens", [3, 4, 5])
def test_no_stop_token_counts_below_the_least_length_also_inside_a_run(min_tokens: int) -> None:
    world = draft_stepper()
    output = expected_output(PROMPT, 40, ())
    stops = (output[2], output[3], output[4])
    request = world.submit(PROMPT, 30, stop_token_ids=stops, min_tokens=min_tokens)
    world.run()
    assert len(output_of(request)[0]) == min_tokens
    assert_right(request)


class Text:
    """A TextStream that is fed token by token, and stops at the tokens given."""

    def __init__(self, *stops: int) -> None:
        self.fed: list[int] = []
        self._stops = stops

    def feed(self, token_ids: np.ndarray, *, may_stop: bool) -> str | None:
        self.fed += token_ids.tolist()
        return f"<{self.fed[-1]}>" if may_stop and self.fed[-1] in self._stops else None


def test_a_stop_string_cuts_a_run_and_sees_nothing_of_what_follows() -> None:
    world = draft_stepper()
    request = world.submit(PROMPT, 30, has_stop_strings=True)
    text = request.sequences[0].text = Text(stop_at(6))
    world.run(depth=2)
    assert output_of(request)[0] == text.fed == expected_output(PROMPT, 7, ())
    assert request.sequences[0].stop_string == f"<{stop_at(6)}>"
    world.check_idle()


def test_a_listener_gets_each_run_whole_and_nothing_behind_a_stop() -> None:
    world = draft_stepper()
    stopping = world.submit(PROMPT, 30, stop_token_ids=(stop_at(6),), is_columnar=True)
    going_on = world.submit([9, 9, 4], 9, is_columnar=True)
    got: dict[int, list[int]] = {stopping.tag: [], going_on.tag: []}
    sizes = []
    for _ in range(3):
        world.step()
        columns = world.table.take_columns(world.listener.index)
        sizes.append(columns.num_tokens.tolist())
        tokens = iter(columns.token_ids.tolist())
        for tag, count in zip(columns.tags.tolist(), columns.num_tokens.tolist(), strict=True):
            got[tag] += itertools.islice(tokens, count)
    assert sizes == [[1, 1], [4, 4], []]  # both end in the third: the rest comes with the end
    for request in (stopping, going_on):
        got[request.tag] += request.sequences[0].take_tokens().tolist()
        assert got[request.tag] == output_of(request)[0] == right_output(request)[0]


def test_a_cancelled_sequence_gets_nothing_of_a_run_that_comes_later() -> None:
    world = draft_stepper()
    request = world.submit(PROMPT, 30)
    other = world.submit([4, 4], 12)
    world.step()
    world.plan()
    world.scheduler.fail(request.sequences[0], Cancelled("enough"))
    assert len(output_of(request)[0]) == 1
    world.commit()
    assert len(output_of(request)[0]) == 1
    finish(world, other)
