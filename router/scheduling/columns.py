"""Arrays of a table's rows: their types, and what numpy lacks for them."""

from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from router.requests.request import Int32Array

T = TypeVar("T", bound=np.generic)
Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

INT32_BYTES = 4
ROWS_PER_SPAN = 256  # at least, on average: below, a mask takes less time than slices


class MaskedRows:
    """Rows of a mask [R], ascending, in and out of columns [R].

    Where nearly all rows run, they are few slices: copied in a fraction of what a mask takes.

    Args:
        mask: bool [R]. Who changes it makes others of these.
    """

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        self._spans: list[slice] | None = None
        edges = (mask[1:] != mask[:-1]).nonzero()[0]
        if ROWS_PER_SPAN * len(edges) < 2 * len(mask):
            bounds = [0, *(edges + 1).tolist(), len(mask)]
            if not mask[0]:
                del bounds[0]
            self._spans = list(map(slice, bounds[::2], bounds[1::2]))

    def take(self, column: npt.NDArray[T]) -> npt.NDArray[T]:
        """Returns the rows' values, end to end."""
        if not self._spans:
            return column[self.mask]
        return np.concatenate([column[span] for span in self._spans])

    def put(self, column: npt.NDArray[T], values: npt.NDArray[T]) -> None:
        """Sets the rows' values, which are given end to end."""
        if self._spans is None:
            column[self.mask] = values
            return
        end = 0
        for span in self._spans:
            start, end = end, end + span.stop - span.start
            column[span] = values[start:end]

    def copy(self, source: npt.NDArray[T], column: npt.NDArray[T]) -> None:
        """Sets the rows' values to those of another column."""
        if self._spans is None:
            np.copyto(column, source, where=self.mask)
            return
        for span in self._spans:
            column[span] = source[span]

    def count(self, column: Int32Array) -> None:
        """Adds one to the rows' values."""
        if self._spans is None:
            column += self.mask
            return
        for span in self._spans:
            column[span] += 1


class RowSet(NamedTuple):
    """Some rows of a table, ascending, and where they lie.

    Attributes:
        masked: The rows, by a mask that is read only.
        num_rows: [dp_size] how many of them each rank has.
        cuts: [dp_size + 1] where each rank's part of them begins, and their number.
        local_rows: [dp_size] each rank's part as the rank numbers its rows: int32, as it travels.
    """

    masked: MaskedRows
    num_rows: list[int]
    cuts: list[int]
    local_rows: list[bytes]

    @property
    def mask(self) -> Mask:
        """bool [R], read only."""
        return self.masked.mask

    @property
    def rows(self) -> Rows:
        """int64 [n], found at each call."""
        return np.flatnonzero(self.masked.mask)


class Growth(NamedTuple):
    """A block that each of some rows got for its next token, N of them.

    Attributes:
        mask: bool [R], the rows.
        rows: int64 [N], the same.
        block_ids: int32 [N].
        window_block_ids: int32 [N], for windowed layers; None without any.
        cuts: [dp_size + 1] where each rank's part begins, and N.
    """

    mask: Mask
    rows: Rows
    block_ids: Int32Array
    window_block_ids: Int32Array | None
    cuts: list[int]


def spread(starts: Rows, counts: npt.NDArray[np.integer[Any]]) -> Rows:
    """Returns ``counts[i]`` indices from ``starts[i]`` on, for each i, end to end."""
    if not np.count_nonzero(counts != 1):
        return starts
    offsets = np.cumsum(counts) - counts
    indices: Rows = np.repeat(starts - offsets, counts)
    indices += np.arange(len(indices))
    return indices


def offsets(counts: npt.NDArray[np.integer[Any]], cuts: list[int]) -> list[int]:
    """Returns the sum of all counts before each cut."""
    sums = np.zeros(len(counts) + 1, dtype=np.int64)
    counts.cumsum(out=sums[1:])
    starts: list[int] = sums.take(cuts).tolist()
    return starts
