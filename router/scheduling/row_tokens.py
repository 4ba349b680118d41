"""Tokens of a table's rows: what is known of each sequence, and the columns of the last steps.

A step gives thousands of rows one token each, and where these belong lies far apart: written there
at once, each would wait for memory. So a step's tokens are one column first, and each step moves the
last columns of some of the rows:

                 row 0    row 1    row 2    row 3
    recent  0  [  17    |  4     |  9     |  9    ]
            1  [  3     |  (none)|  12    |  5    ]     of LATEST steps
            2  [  8     |  6     |  40    |  7    ]
                          ▼ moved together
    tokens     [ ...    | prompt ... 4 6 |  ...       ]
"""

from collections.abc import Collection

import numpy as np

from router.requests.request import Int32Array
from router.scheduling.columns import Mask, Rows, spread

LATEST = 64  # steps whose tokens are columns: the more, the fewer rows are moved in a step
MIN_MOVED = 1024  # rows at a time
CACHE_LINE = 16  # tokens
NO_TOKEN = -2  # in a column, where a row has none; -1 in `stop_ids` never equals it


class RowTokens:
    """The known tokens of R rows.

    Args:
        num_tokens: int32 [R], how many each row has; the table's own column.
        max_len: Tokens of a row at most. Untouched pages of them take no memory.

    Attributes:
        last: int32 [R], the last one of each row.
    """

    def __init__(self, num_tokens: Int32Array, max_len: int) -> None:
        num_rows = len(num_tokens)
        self.last = np.zeros(num_rows, dtype=np.int32)
        self._num_tokens = num_tokens
        self._rows = np.zeros((num_rows, max_len), dtype=np.int32)
        self._flat = self._rows.reshape(-1)
        self._starts = np.arange(num_rows) * max_len
        self._num_settled = num_tokens.copy()  # of each row, at its last turn or beginning
        self._recent = np.full((LATEST, num_rows), NO_TOKEN, dtype=np.int32)
        self._oldest = 0  # of these columns, and the next that is written
        self._num_recent = 0  # of these columns, before the next one, that have tokens
        self._settled_rows: Collection[int] = ()  # rows that have none there, by `settle_for_now`
        self._num_moved = max(MIN_MOVED, -(-num_rows // LATEST))
        self._moves_every = LATEST // -(-num_rows // self._num_moved)  # steps
        # A step's tokens there do not begin a page apart, as rows are read across: in an eighth of the time.
        self._moved = np.zeros((LATEST, self._num_moved + CACHE_LINE), dtype=np.int32)
        # As many tokens as there are columns, wherever they begin: moved as one item of numpy.
        num_places, size = max(0, len(self._flat) - LATEST + 1), self._flat.itemsize
        self._item = np.dtype((np.void, LATEST * size))
        self._items = np.ndarray(num_places, self._item, self._flat, strides=(size,))

    def begin(self, row: int, tokens: Int32Array) -> Int32Array:
        """Gives a row the tokens of a sequence, in place of all that it had.

        Returns where they are, and room for more.
        """
        self._recent[:, row] = NO_TOKEN
        place: Int32Array = self._rows[row]
        place[: len(tokens)] = tokens
        self._num_settled[row] = len(tokens)
        self.last[row] = tokens[-1]
        return place

    def add(self, has_token: Mask, tokens: Int32Array) -> Int32Array:
        """Adds a token to each row of a mask [R], and counts it.

        Returns int32 [R], the step's tokens, NO_TOKEN for other rows; valid until the next step.
        """
        self._settled_rows = ()
        column: Int32Array = self._recent[self._oldest]
        self.last[has_token] = tokens
        column[:] = self.last  # and then out of it: in two thirds of the time
        column[~has_token] = NO_TOKEN
        self._num_tokens += has_token
        self._num_recent = min(self._num_recent + 1, LATEST)
        turn, is_over = divmod(self._oldest, self._moves_every)
        self._oldest = (self._oldest + 1) % LATEST
        if not is_over:
            self._move(turn * self._num_moved, (turn + 1) * self._num_moved)
        return column

    def add_runs(self, rows: Rows, tokens: Int32Array, counts: Int32Array) -> None:
        """Adds several tokens to each of some rows, end to end; `keep` counts them."""
        self.settle_all()
        starts = self._starts.take(rows) + self._num_tokens.take(rows)
        self._flat[spread(starts, counts)] = tokens

    def keep(self, rows: Rows, counts: Int32Array) -> None:
        """Counts the first so many, at least one, of those that each row was given by `add_runs`."""
        ends = self._num_tokens.take(rows) + counts
        self._num_tokens[rows] = self._num_settled[rows] = ends
        self.last[rows] = self._flat.take(self._starts.take(rows) + ends - 1)

    def of(self, row: int) -> Int32Array:
        """Returns a row's tokens; no copy."""
        end = int(self._num_tokens[row])
        tokens: Int32Array = self._rows[row, :end]
        if not self._num_recent or row in self._settled_rows:
            return tokens
        recent = np.concatenate([part[:, row] for part in self._last_columns()])
        recent = recent[recent != NO_TOKEN]
        tokens[end - len(recent) :] = recent
        return tokens

    def newest_of(self, row: int, count: int) -> Int32Array:
        """Returns the last so many tokens of a row."""
        if count == 1:
            return self.last[row : row + 1].copy()
        tokens = self.of(row)
        return tokens[len(tokens) - count :].copy()

    def newest(self, rows: Rows, counts: Int32Array) -> Int32Array:
        """Returns the last so many tokens of each row, end to end."""
        if counts.max(initial=1) == 1:
            return self.last.take(rows)
        self.settle(rows)
        starts = self._starts.take(rows) + self._num_tokens.take(rows) - counts
        return self._flat.take(spread(starts, counts))

    def settle(self, rows: Rows) -> None:
        """Writes the recent tokens of rows to where they belong; to be there twice does no harm."""
        columns = np.concatenate([part.take(rows, axis=1) for part in self._last_columns()])
        has_token = columns != NO_TOKEN
        num_left = has_token[::-1].cumsum(axis=0)[::-1]  # of the row, from this column on
        places = self._starts.take(rows) + self._num_tokens.take(rows) - num_left
        self._flat[places[has_token]] = columns[has_token]

    def settle_for_now(self, rows: list[int]) -> None:
        """The same, of rows that `of` is asked for before the next step."""
        if len(rows) > 1:  # one by itself takes less
            self.settle(np.array(rows))
            self._settled_rows = frozenset(rows)

    def settle_all(self) -> None:
        """Writes all recent tokens to where they belong."""
        if self._num_recent:
            self.settle(np.arange(len(self._starts)))
            self._num_recent = 0

    def _last_columns(self) -> list[Int32Array]:
        """Returns the columns that have tokens, the earliest first, in one part or two."""
        first = self._oldest - self._num_recent
        newest = self._recent[max(0, first) : self._oldest]
        return [newest] if first >= 0 else [self._recent[first:], newest]

    def _move(self, start: int, end: int) -> None:
        """Settles rows from ``start`` to before ``end``, nearly all of which gain a token in each step."""
        rows, num_tokens = slice(start, end), self._num_tokens[start:end]
        is_full = num_tokens - self._num_settled[rows] == LATEST
        self._num_settled[rows] = num_tokens
        if self._num_recent < LATEST:
            self.settle(np.arange(start, start + len(is_full)))
            return
        columns = self._moved[:, : len(is_full)]
        np.concatenate([part[:, rows] for part in self._last_columns()], out=columns)
        full = np.flatnonzero(is_full)
        items = np.ascontiguousarray(columns.T).view(self._item).reshape(-1)
        places = self._starts[rows] + num_tokens - LATEST
        self._items[places.take(full)] = items.take(full)
        if len(full) < len(is_full):
            self.settle(np.flatnonzero(~is_full) + start)
