"""If these fail, one request can kill executors for ever, or innocent ones are failed for it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from router.errors import QueueFull
from router.requests import waiting_queue
from router.requests.request import Listeners, Sequence
from router.requests.waiting_queue import (
    FREE_CLEARINGS,
    MAX_PROOF_TOKENS,
    PARTS,
    PROOF_TOKENS,
    Quarantine,
    WaitingQueue,
    note_loss,
)
from tests.router.support.requests import make_request
from tests.router.support.stepper import Stepper, make_shape


class Line:
    """A quarantine whose sequences gain tokens when a test says so."""

    def __init__(
        self, max_sequences: int = 1000, may_try: Callable[[], bool] = lambda: True
    ) -> None:
        waiting = WaitingQueue(max_sequences=max_sequences, max_tokens=10_000)
        self.quarantine = Quarantine(waiting, may_try)
        self._listener = Listeners(1).open()
        self._num_requests = 0

    def submit(self, count: int, **fields: Any) -> list[Sequence]:
        sequences = []
        for _ in range(count):
            self._num_requests += 1
            number = self._num_requests
            request = make_request(
                [1, 2, 3],
                self._listener,
                100,
                request_id=f"r{number}",
                arrival_time=float(number),
                **fields,
            )
            self.quarantine.submit(request)
            sequences += request.sequences
        return sequences

    def take(self) -> list[Sequence]:
        """Everybody who may begin before the next step."""
        self.quarantine.clear_proven()
        taken = []
        while self.quarantine.peek() is not None:
            taken.append(self.quarantine.pop())
            taken[-1].progress.start_time = 0.0
        return taken

    def lose(self, *lost: Sequence, num_ended: int = 0) -> list[Sequence]:
        """They were in the lost steps, beside some that have ended, and wait again. Returns who is guilty."""
        guilty = note_loss(lost, len(lost) + num_ended)
        for sequence in lost:
            self.quarantine.push(sequence)
        self.quarantine.clear_bystanders(lost)
        self.quarantine.set_max_running()
        return guilty


def gain(*sequences: Sequence, count: int = PROOF_TOKENS) -> None:
    for sequence in sequences:
        sequence.tokens = np.append(sequence.tokens, np.zeros(count, np.int32))


def test_after_a_first_loss_all_run_on_at_once_beside_everybody_else():
    line = Line()
    suspects = line.submit(16)
    assert line.take() == suspects
    assert line.lose(*suspects) == []
    new = line.submit(3)

    assert line.take() == [*suspects, *new]


def test_after_a_second_loss_an_eighth_runs_at_a_time_and_nobody_else_begins():
    line = Line()
    suspects = line.submit(16)
    line.take()
    line.lose(*suspects)
    line.take()
    line.lose(*suspects)
    new = line.submit(1)

    assert line.take() == suspects[: 16 // PARTS]
    gain(suspects[0], count=PROOF_TOKENS - 1)
    assert line.take() == []
    gain(suspects[0], count=1)
    assert line.take() == [suspects[2]]
    rest = suspects[1:]
    while rest:
        gain(rest.pop(0))
        taken = line.take()
    assert taken == new


def test_those_lost_a_third_time_run_before_those_that_were_not_tried_again():
    line = Line()
    suspects = line.submit(2 + 2 * PARTS)
    for _ in range(2):
        line.take()
        line.lose(*suspects)
    first, second = line.take()
    line.lose(first, second)

    assert line.take() == [first]
    gain(first)
    assert line.take() == [second]
    gain(second)
    assert line.take() == suspects[2:4]


@pytest.mark.parametrize("num_callers", [1, 3])
def test_a_plan_looks_at_each_suspect_a_few_times_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch, num_callers: int
):
    """Else 4,096 of them hold up the router's loop for seconds, right after a recovery."""
    line, num_looks, look = Line(), 0, waiting_queue._num_losses

    def counted(suspect: Sequence) -> int:
        nonlocal num_looks
        num_looks += 1
        return look(suspect)

    callers = [(f"caller {number}",) for number in range(num_callers)]
    suspects = [suspect for caller in callers for suspect in line.submit(96, caller=caller)]
    for num_taken in (96 * num_callers, 12 * num_callers):
        line.take()
        line.lose(*suspects)
        with monkeypatch.context() as patch:
            patch.setattr(waiting_queue, "_num_losses", counted)
            num_looks = 0
            taken = line.take()
            assert len(taken) == num_taken
            assert num_looks < 16 * num_taken
            for suspect in taken:
                line.quarantine.push(suspect)


@pytest.mark.parametrize(("num_suspects", "parts"), [(65, [8, 1]), (8, [1]), (127, [15, 1])])
def test_a_loss_leaves_less_than_an_eighth_of_the_suspects(num_suspects: int, parts: list[int]):
    """Of 65, an eighth rounded up is nine, of which two run at a time: one executor more is lost."""
    line = Line()
    taken = line.submit(num_suspects)
    assert line.take() == taken
    line.lose(*taken)
    assert line.take() == taken
    for num_taken in parts:
        line.lose(*taken)
        taken = line.take()
        assert len(taken) == num_taken


def test_a_suspect_lost_beside_none_but_proven_ones_is_guilty_when_it_is_then_lost_alone():
    line = Line()
    suspects = line.submit(PARTS)
    for _ in range(2):
        line.take()
        line.lose(*suspects)
    for suspect in suspects[:-1]:
        assert line.take() == [suspect]
        gain(suspect)
    poison = suspects[-1]
    assert line.take() == [poison]
    assert line.lose(*suspects) == []
    assert line.take() == [poison]
    assert line.lose(poison) == [poison]


def blamed(line: Line, suspect: Sequence) -> bool:
    """Whether a loss alone, after the last one, makes it guilty."""
    assert line.take()[:1] == [suspect]
    return line.lose(suspect) == [suspect]


def test_what_was_lost_once_before_is_not_the_only_suspect_beside_proven_ones():
    """Its executor may have been lost by chance, as when others ran beside it."""
    line = Line()
    suspects = line.submit(2)
    line.take()
    line.lose(*suspects)
    assert line.take() == suspects
    gain(suspects[0])
    line.take()
    assert line.lose(*suspects) == []
    assert not blamed(line, suspects[1])


def test_a_suspect_is_not_the_only_one_beside_a_sequence_that_is_new():
    line = Line()
    [suspect] = line.submit(1)
    for _ in range(2):
        line.take()
        line.lose(suspect, num_ended=1)
    [new] = Line().submit(1)  # of another group: what moves here goes behind nobody
    assert line.take() == [suspect]
    assert line.lose(suspect, new) == []
    assert not blamed(line, suspect)


def test_a_suspect_is_not_the_only_one_beside_a_sequence_that_has_ended():
    """As a caller may cancel what kills executors before the loss is known."""
    line = Line()
    [suspect] = line.submit(1)
    for _ in range(3):
        assert line.take() == [suspect]
        assert line.lose(suspect, num_ended=1) == []
    assert not blamed(line, suspect)


def test_the_only_suspect_is_not_guilty_beside_others():
    line = Line()
    proven, suspect = line.submit(2)
    for _ in range(2):
        line.take()
        line.lose(proven, suspect)
    assert line.take() == [proven]
    gain(proven)
    for _ in range(3):  # whatever ends them
        line.take()
        assert line.lose(proven, suspect) == []
        gain(proven)


def test_whoever_is_lost_alone_twice_is_guilty():
    line = Line()
    [poison] = line.submit(1)
    line.take()
    assert line.lose(poison) == []
    assert line.take() == [poison]
    assert line.lose(poison) == [poison]


def test_ten_losses_with_others_make_nobody_guilty():
    sequences = Line().submit(2)
    for _ in range(10):
        assert note_loss(sequences, 2) == []


def test_ten_losses_alone_with_many_tokens_between_them_make_nobody_guilty():
    line = Line()
    [one] = line.submit(1)
    for _ in range(10):
        assert line.take() == [one]
        gain(one, count=MAX_PROOF_TOKENS)
        assert line.lose(one) == []


def test_whoever_is_lost_again_and_again_needs_ever_more_tokens_for_a_proof():
    line = Line()
    [poison] = line.submit(1)
    verdicts: list[list[Sequence]] = []
    while len(verdicts) < FREE_CLEARINGS + 8 and not any(verdicts):
        assert line.take() == [poison]
        gain(poison, count=20 * PROOF_TOKENS)
        verdicts.append(line.lose(poison))
    assert verdicts[-1] == [poison]
    assert len(verdicts) > FREE_CLEARINGS + 2


def test_a_loss_without_a_suspect_takes_its_past_from_it():
    line = Line()
    one, other = line.submit(2)
    for _ in range(10):
        line.take()
        gain(one, other)
        line.lose(one)
        assert one.num_clearings <= 1
        line.lose(other)
    assert one.num_clearings == 0


def test_a_suspect_that_is_cancelled_makes_way_for_the_next():
    line = Line()
    suspects = line.submit(2)
    for _ in range(2):
        line.take()
        line.lose(*suspects)
    [first] = line.take()
    first.error = RuntimeError("cancelled")  # type: ignore[assignment]
    assert line.take() == [suspects[1]]

    line.lose(suspects[1])
    line.quarantine.discard(suspects[1])
    assert line.take() == []
    assert len(line.quarantine) == line.quarantine.num_tokens == 0


def test_waiting_suspects_are_counted_and_listed():
    line = Line()
    suspects = line.submit(9)
    line.take()
    line.lose(*suspects)
    new = line.submit(1)
    assert len(line.quarantine) == 10
    assert line.quarantine.num_tokens == 30
    assert set(line.quarantine) == {*suspects, *new}


def test_only_those_that_never_ran_are_new():
    line = Line()
    suspects = line.submit(9)
    assert line.quarantine.are_new
    for _ in range(2):  # first they wait among the others, then apart
        line.take()
        line.lose(*suspects)
        assert not line.quarantine.are_new


def test_sequences_of_a_lost_step_take_no_room_from_new_ones():
    line = Line(max_sequences=4)
    suspects = line.submit(4)
    line.take()
    for _ in range(2):
        line.lose(*suspects)
        assert line.quarantine.has_room
    line.submit(4)
    assert not line.quarantine.has_room
    with pytest.raises(QueueFull):
        line.submit(1)


def test_a_suspect_does_not_take_the_place_of_whoever_was_given_its_own():
    """Else both would be bound and preempted in turn, and no step would ever run."""
    stepper = Stepper(make_shape(rows_per_rank=1))
    stepper.waiting = line = Quarantine(stepper.admission)
    stepper.begin_epoch(stepper.scheduler.caches)
    low = stepper.submit([1, 2, 3], priority=-5)
    note_loss(low.sequences, 2)
    line.push(stepper.admission.pop())
    stepper.step()
    high = stepper.submit([4, 5, 6], priority=5)

    stepper.step()
    assert high.sequences[0].table is not None
    assert low.sequences[0].table is None


def test_suspects_of_two_losses_wait_while_none_may_be_tried_and_all_others_run():
    may_try = False
    line = Line(may_try=lambda: may_try)
    suspects = line.submit(8)
    assert line.take() == suspects
    line.lose(*suspects)
    assert line.take() == suspects
    line.lose(*suspects)
    others = line.submit(2)
    assert line.take() == others
    assert line.quarantine.holds_suspects
    assert not line.quarantine.wants_border
    may_try = True
    assert line.quarantine.wants_border
    assert line.take() == suspects[:1]
    assert not line.quarantine.holds_suspects


def test_suspects_that_may_be_tried_at_once_need_no_epoch_of_their_own():
    line = Line()
    suspects = line.submit(2)
    for _ in range(2):
        assert line.take() == suspects
        line.lose(*suspects)
    line.submit(2)
    assert line.take() == suspects[:1]
    assert not line.quarantine.wants_border
