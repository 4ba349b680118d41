"""What several tokens for each row mean for a table: where they go, and where a stop cuts them."""

import numpy as np
import numpy.typing as npt

from router.requests.request import Int32Array
from router.scheduling.sequence_table import Rows, SequenceTable, spread
from router.scheduling.step import StepResult


def gains_of(result: StepResult) -> Int32Array:
    """Returns int32 [S], how many tokens each sequence that sampled gained, ranks in order."""
    gains = [
        np.ones(len(part.next_token_ids), dtype=np.int32)
        if part.num_next_tokens is None
        else part.num_next_tokens
        for part in result
    ]
    return np.concatenate(gains)


def write_runs(
    table: SequenceTable, rows: Rows, tokens: Int32Array, gains: Int32Array
) -> tuple[Int32Array, npt.NDArray[np.bool_]]:
    """Writes tokens behind those that the rows have, and adds them up to the first that stops.

    What comes behind a stop is not counted in `num_tokens`, so that nobody ever sees it. Stop
    conditions that only Python can check (`is_inspected`) are the caller's.

    Args:
        rows: int64 [S].
        tokens: int32 [sum(gains)], rows end to end.
        gains: int32 [S], at least 1 each; no more than `max_len` has room for.

    Returns:
        int32 [S], how many of its tokens each row keeps, and bool [S], whether it has come to one
        of its stop ids or to its `max_len`.
    """
    old = table.num_tokens.take(rows)
    table.flat_tokens[spread(table.row_starts.take(rows) + old, gains)] = tokens
    kept, is_stopped = _cut(table, rows, tokens, gains)
    lens = old + kept
    table.num_tokens[rows] = lens
    is_stopped |= lens >= table.max_len.take(rows)
    table.last_token[rows] = table.flat_tokens.take(table.row_starts.take(rows) + lens - 1)
    return kept, is_stopped


def _cut(
    table: SequenceTable, rows: Rows, tokens: Int32Array, gains: Int32Array
) -> tuple[Int32Array, npt.NDArray[np.bool_]]:
    """Returns for each row how many tokens it has up to its first stop id, and whether it has one."""
    is_stopped = np.zeros(len(rows), dtype=np.bool_)
    if not table.num_stop_ids:
        return gains, is_stopped
    places = np.repeat(np.arange(len(rows)), gains)  # of each token's row in `rows`
    stop_ids = table.stop_ids[: table.num_stop_ids].take(rows, axis=1)
    stops = np.flatnonzero((stop_ids.take(places, axis=1) == tokens).any(axis=0))
    if not len(stops):
        return gains, is_stopped
    places = places[stops]
    num_until = stops + 1 - (gains.cumsum() - gains)[places]  # tokens of the row, the stop included
    row_of = rows[places]
    counts = table.num_tokens[row_of] + num_until >= table.min_len[row_of]
    places, first = np.unique(places[counts], return_index=True)
    kept = gains.copy()
    kept[places] = num_until[counts][first]
    is_stopped[places] = True
    return kept, is_stopped
