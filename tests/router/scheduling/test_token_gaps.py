"""Gaps are counted by the step, so rows that miss one must not be counted with the rest."""

import random

import numpy as np
import pytest

from protos.telemetry.metrics import Histogram
from router.scheduling.counters import TokenGaps

BOUNDS = (0.5, 1.5, 2.5, 3.5, 4.5)
NUM_ROWS = 6


class Rows:
    """Six rows, and a list of every gap as one would measure it sequence by sequence."""

    def __init__(self) -> None:
        self.histogram = Histogram(BOUNDS)
        self.gaps = TokenGaps(NUM_ROWS, self.histogram)
        self.last_times: dict[int, float | None] = {}  # of the rows that are taken
        self.measured: list[float] = []
        self.now = 0.0

    def enter(self, row: int, last_token_time: float | None = None) -> None:
        self.gaps.enter(row, last_token_time)
        self.last_times[row] = last_token_time

    def leave(self, row: int) -> float | None:
        known = self.last_times.pop(row)
        last_time = self.gaps.leave(row)
        assert last_time == known
        return known

    def commit(self, *rows: int) -> None:
        self.now += 1.0
        has_token = np.isin(np.arange(NUM_ROWS), rows)
        first_rows = [row for row in rows if self.last_times[row] is None]
        self.gaps.add(has_token, len(rows), first_rows, self.now)
        for row in rows:
            last_time = self.last_times[row]
            if last_time is not None:
                self.measured.append(self.now - last_time)
            self.last_times[row] = self.now

    def check(self) -> None:
        expected = Histogram(BOUNDS)
        for gap in self.measured:
            expected.observe(gap)
        assert self.histogram.counts == expected.counts
        assert self.histogram.total == pytest.approx(expected.total)


def test_a_first_token_ends_no_gap():
    rows = Rows()
    rows.enter(0)
    rows.commit(0)
    assert sum(rows.histogram.counts) == 0
    rows.commit(0)
    assert rows.histogram.counts == [0, 1, 0, 0, 0, 0]


def test_a_row_that_misses_a_step_has_one_long_gap():
    rows = Rows()
    rows.enter(0)
    rows.enter(1)
    rows.commit(0, 1)
    rows.commit(0)
    rows.commit(0, 1)
    assert rows.histogram.counts == [0, 2, 1, 0, 0, 0]


def test_a_row_that_is_taken_at_once_by_another_sequence_has_no_gap_between_the_two():
    rows = Rows()
    rows.enter(3)
    rows.commit(3)
    rows.leave(3)
    rows.enter(3)
    rows.commit(3)
    assert sum(rows.histogram.counts) == 0


def test_a_sequence_that_comes_back_in_another_row_has_waited_since_its_last_token():
    rows = Rows()
    rows.enter(3)
    rows.enter(0)
    rows.commit(0, 3)
    last_time = rows.leave(3)
    rows.commit(0)
    rows.commit(0)
    rows.enter(5, last_time)
    rows.commit(0, 5)
    assert rows.histogram.counts == [0, 3, 0, 1, 0, 0]


@pytest.mark.parametrize("seed", range(200))
def test_counts_are_those_of_measuring_each_sequence(seed: int):
    rng, rows = random.Random(seed), Rows()
    away: list[float | None] = []  # sequences that lost their place
    for _ in range(60):
        for row in range(NUM_ROWS):
            is_taken = row in rows.last_times
            if is_taken and rng.random() < 0.15:
                last_time = rows.leave(row)
                if rng.random() < 0.5:
                    away.append(last_time)
            elif not is_taken and rng.random() < 0.3:
                rows.enter(row, away.pop() if away else None)
        rows.commit(*[row for row in rows.last_times if rng.random() < 0.9])
    rows.check()
    assert rows.measured
