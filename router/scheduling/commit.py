"""Commit of a step's answer: its tokens, the stop conditions, its log probabilities.

`write_tokens` and `write_runs` find rows that may have ended, for all rows at once: at a stop id, at
their last token, or because Python must look (`is_inspected`). `apply_stop_conditions` decides for
one such row.
"""

from collections.abc import Sequence as SequenceOf
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from router.requests.request import Int32Array, TokenLogprob
from router.scheduling.columns import Mask, Rows
from router.scheduling.sequence_table import RowStatus, SequenceTable
from router.scheduling.speculation import NO_DRAFTS, DraftCounts
from router.scheduling.step import Scores, Scoring, StepPlan, StepResult


class NewTokens(NamedTuple):
    """Tokens that a step gave the rows of a table.

    Attributes:
        has_token: bool [R], rows whose sequences gained some, at least one each.
        num_rows: How many these are.
        num_kept: Tokens up to the first stop id of each row, summed.
        due: Rows that may have ended, and how many of their newest tokens to look at for it.
        drafts: What came of the step's drafts.
    """

    has_token: Mask
    num_rows: int
    num_kept: int
    due: list[tuple[int, int]]
    drafts: DraftCounts = NO_DRAFTS


def write_tokens(
    table: SequenceTable, plan: StepPlan, result: StepResult, *, has_ended: bool
) -> NewTokens:
    """Writes the tokens of a step in which each row that samples gained one.

    Args:
        table: The rows.
        plan: The step.
        result: What its executors answered.
        has_ended: Some rows may have ended meanwhile; their tokens are dropped.
    """
    # Masks, and columns of the whole table: without gathers they cost a third.
    has_token, tokens = plan.decodes.row_set.mask.copy(), result.token_ids
    if plan.sampled_rows is not None:  # chunks stand behind their rank's decodes
        has_token[plan.sampled_rows] = True
        column = np.zeros(len(has_token), dtype=np.int32)
        column[plan.sampled_rows] = tokens
        tokens = column[has_token]
    if has_ended:
        is_live = table.status != RowStatus.ENDED
        tokens = tokens[is_live[has_token]]
        has_token &= is_live
    column = table.tokens.add(has_token, tokens)
    is_due = table.num_tokens >= table.max_len
    if table.num_inspected:
        is_due |= table.is_inspected
    is_due &= has_token
    for stop_ids in table.stop_columns[: table.num_stop_ids]:
        is_stop = stop_ids == column
        if np.count_nonzero(is_stop):
            is_due |= is_stop & (table.num_tokens >= table.min_len)
    due: list[tuple[int, int]] = []
    if np.count_nonzero(is_due):
        due = [(row, 1) for row in is_due.nonzero()[0].tolist()]
    return NewTokens(has_token, len(tokens), len(tokens), due)


def write_runs(
    table: SequenceTable, plan: StepPlan, result: StepResult, *, has_ended: bool
) -> NewTokens:
    """Writes the tokens of a speculative step, and takes back what was computed in vain.

    Arguments as of `write_tokens`. Tokens behind a stop id are not counted in `num_tokens`, so that
    nobody ever sees them. Stop conditions that only Python can check (`is_inspected`) are the
    caller's.
    """
    rows, limits, tokens = plan.decodes.row_set.rows, plan.limits, result.token_ids
    assert limits is not None
    gains = np.ones_like(limits) if result.gains is None else result.gains
    table.num_computed[rows] -= limits - gains
    table.num_drafts[rows] += limits - 1
    table.num_accepted[rows] += gains - 1
    if has_ended:
        is_live = table.status.take(rows) != RowStatus.ENDED
        tokens = tokens[np.repeat(is_live, gains)]
        rows, gains, limits = rows[is_live], gains[is_live], limits[is_live]
    drafts = DraftCounts(1, int(limits.sum()) - len(rows), int(gains.sum()) - len(rows))

    table.tokens.add_runs(rows, tokens, gains)
    kept, is_due = _cut_at_stops(table, rows, tokens, gains)
    table.tokens.keep(rows, kept)
    is_due |= (table.num_tokens >= table.max_len).take(rows)
    is_due |= table.is_inspected.take(rows)
    due = list(zip(rows[is_due].tolist(), kept[is_due].tolist(), strict=True))
    has_token = np.zeros(len(table.status), dtype=np.bool_)
    has_token[rows] = True
    return NewTokens(has_token, len(rows), int(kept.sum()), due, drafts)


def _cut_at_stops(
    table: SequenceTable, rows: Rows, tokens: Int32Array, gains: Int32Array
) -> tuple[Int32Array, Mask]:
    """Returns for each row how many new tokens it has up to its first stop id, and if it has one.

    Args:
        rows: int64 [S].
        tokens: int32 [sum(gains)], new tokens of the rows, end to end.
        gains: int32 [S], at least 1 each.
    """
    is_stopped = np.zeros(len(rows), dtype=np.bool_)
    indices = np.repeat(np.arange(len(rows)), gains)  # of each token's row in `rows`
    stop_ids = table.stop_ids[: table.num_stop_ids].take(rows, axis=1)
    stops = np.flatnonzero((stop_ids.take(indices, axis=1) == tokens).any(axis=0))
    if not len(stops):
        return gains, is_stopped
    indices = indices[stops]
    num_until = (
        stops + 1 - (gains.cumsum() - gains)[indices]
    )  # tokens of the row, the stop included
    row_of = rows[indices]
    counts = table.num_tokens[row_of] + num_until >= table.min_len[row_of]
    indices, first = np.unique(indices[counts], return_index=True)
    kept = gains.copy()
    kept[indices] = num_until[counts][first]
    is_stopped[indices] = True
    return kept, is_stopped


def apply_stop_conditions(table: SequenceTable, row: int, num_new: int) -> int:
    """Sets the finish reason of a row's sequence at the first of its newest tokens that ends it.

    Returns how many tokens come behind that one. They leave the table, and nobody sees them.
    """
    sequence, end = table.bound(row), int(table.num_tokens[row])
    tokens = table.tokens.newest_of(row, num_new)
    if num_new == 1:
        sequence.end_at(tokens, end)
        return 0
    for place, length in enumerate(range(end - num_new + 1, end + 1)):
        table.num_tokens[row] = length
        if sequence.end_at(tokens[place : place + 1], length):
            return end - length
    return 0


def hand_out_logprobs(plan: StepPlan, result: StepResult) -> None:
    """Appends to `prompt_logprobs` and `logprobs` of the sequences that asked for them.

    A sequence that ended meanwhile drops them, as it drops the step's token.
    """
    if not result.scores:
        return
    first_tokens = result.token_ids  # of each sequence: a scored one gains one, others maybe more
    if result.gains is not None:
        first_tokens = first_tokens[result.gains.cumsum() - result.gains]
    starts = list(accumulate(plan.num_sampled, initial=0))
    for rank, scores in result.scores.items():
        _hand_out_logprobs(plan.scorings[rank], scores, first_tokens[starts[rank] :])


def _hand_out_logprobs(
    scorings: SequenceOf[Scoring], scores: Scores, first_tokens: Int32Array
) -> None:
    """Hands out one rank's scores.

    Args:
        scorings: Who gets them.
        scores: What the rank answered.
        first_tokens: int32, of each of the rank's sequences that sample, and of ranks behind it.
    """
    position, top_position, given_position = 0, 0, 0
    for scoring in scorings:
        output = scoring.sequence.request.output
        num_top, num_given = output.top_logprobs, len(output.logprob_ids)
        token_ids = scoring.scored_ids.tolist()
        if scoring.sample_index is not None:
            token_ids.append(int(first_tokens[scoring.sample_index]))
        entries = []
        for token_id in token_ids:
            top = slice(top_position, top_position + num_top)
            given = slice(given_position, given_position + num_given)
            logprob = float(scores.logprobs[position])
            of_top = scores.top_ids[top], scores.top_logprobs[top]
            entry = TokenLogprob(token_id, logprob, *of_top, scores.given_logprobs[given])
            entries.append(entry)
            position, top_position, given_position = position + 1, top.stop, given.stop
        if not scoring.sequence.is_ended:
            num_scored = len(scoring.scored_ids)
            scoring.sequence.prompt_logprobs += entries[:num_scored]
            scoring.sequence.logprobs += entries[num_scored:]
