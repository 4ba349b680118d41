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


@pytest.mark.parametrize("seed", range(200))
def test_counts_are_those_of_measuring_each_sequence(seed: int):
    rng, rows = random.Random(seed), Rows()
    away: list[float | None] = []  # sequences that lost their place
    for _ in range(60):
        for row in range(NUM_ROWS):
            if row in rows.last_times and rng.random() < 0.15:
                last_time = rows.leave(row)
                if rng.random() < 0.5:
                    away.append(last_time)
            if row not in rows.last_times and rng.random() < 0.3:  # perhaps left just now
                rows.enter(row, away.pop(0) if away else None)
        rows.commit(*[row for row in rows.last_times if rng.random() < 0.9])
    rows.check()
    assert rows.measured
