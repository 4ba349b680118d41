"""How long each sequence waited between two of its tokens, counted without a look at each.

Ranks step together, so nearly every sequence that gains a token in a step gained one in the step
before: all of these waited as long as the step took, and count as one value. Only those that
were left out of a step, or lost their place, are looked at.
"""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from protos.telemetry.metrics import Histogram


class TokenGaps:
    """The gaps of one table's rows.

    Args:
        num_rows: Rows of the table.
        histogram: Gets every gap, in seconds.
    """

    def __init__(self, num_rows: int, histogram: Histogram) -> None:
        self._histogram = histogram
        self._had_token = np.zeros(num_rows, dtype=np.bool_)  # in the last commit, and still there
        self._num_had = 0  # how many
        self._time = 0.0  # of the last commit
        self._away: dict[int, float] = {}  # other rows with tokens, and when the last one came

    def enter(self, row: int, last_token_time: float | None) -> None:
        """A sequence is bound to a row; None if it has no token yet."""
        if last_token_time is not None:
            self._away[row] = last_token_time

    def leave(self, row: int) -> float | None:
        """A sequence gives up its row. Returns when its last token came, if it ever had one."""
        if not self._had_token[row]:
            return self._away.pop(row, None)
        self._had_token[row] = False
        self._num_had -= 1
        return self._time

    def add(
        self,
        has_token: npt.NDArray[np.bool_],
        num_tokens: int,
        first_rows: Collection[int],
        now: float,
    ) -> None:
        """Counts the gaps that a commit ended.

        Args:
            has_token: [R] rows that gained a token; belongs to this object from now on.
            num_tokens: How many those are.
            first_rows: Those for which it was the first.
            now: When.
        """
        num_going_on = num_tokens - len(first_rows)
        if self._away:
            for row in [row for row in self._away if has_token[row]]:
                self._histogram.observe(now - self._away.pop(row))
                num_going_on -= 1
        if num_going_on:
            self._histogram.observe(now - self._time, num_going_on)
        if num_going_on < self._num_had:
            left_out = np.flatnonzero(self._had_token > has_token).tolist()
            self._away.update(dict.fromkeys(left_out, self._time))
        self._had_token, self._num_had, self._time = has_token, num_tokens, now
