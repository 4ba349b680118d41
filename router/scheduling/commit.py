"""Commit of a step's answer: tokens and log probabilities, written where they belong."""

import numpy as np
import numpy.typing as npt

from router.requests.request import Int32Array, TokenLogprob
from router.scheduling.sequence_table import Rows, SequenceTable, spread
from router.scheduling.step import RankBatch, RankResult, StepResult


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


def hand_out_logprobs(batch: RankBatch, result: RankResult) -> None:
    """Appends to `prompt_logprobs` and `logprobs` of the sequences in ``batch.scorings``.

    A sequence that ended meanwhile drops them, as it drops the step's token.
    """
    position, top_position, first_tokens = 0, 0, None
    if result.num_next_tokens is not None:  # who is scored gains one token, others may gain more
        first_tokens = result.num_next_tokens.cumsum() - result.num_next_tokens
    for scoring in batch.scorings:
        num_top = scoring.sequence.request.output.top_logprobs
        token_ids = scoring.scored_ids.tolist()
        if scoring.sample_index is not None:
            place = scoring.sample_index
            place = place if first_tokens is None else int(first_tokens[place])
            token_ids.append(int(result.next_token_ids[place]))
        entries = []
        for token_id in token_ids:
            top = slice(top_position, top_position + num_top)
            logprob = float(result.logprobs[position])
            entries.append(
                TokenLogprob(token_id, logprob, result.top_ids[top], result.top_logprobs[top])
            )
            position, top_position = position + 1, top.stop
        if not scoring.sequence.is_ended:
            num_scored = len(scoring.scored_ids)
            scoring.sequence.prompt_logprobs += entries[:num_scored]
            scoring.sequence.logprobs += entries[num_scored:]
