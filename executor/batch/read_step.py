"""Reads a rank's part of a step out of its columns, and refuses what does not fit.

Nothing here changes any state: a step either passes every check or leaves the executor as it
was. What a step may contain is defined in executor.proto; the field names are its.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from executor.batch.columns import INT32, BoolArray, ColumnReader, Int64Array
from executor.batch.limits import RowProgress, StepLimits
from executor.batch.read_agreement import (
    check_padded,
    counts_by_rank,
    read_draft_counts,
    read_layout,
)
from executor.batch.read_starts import read_starts
from executor.batch.step_blocks import read_blocks
from executor.errors import InvalidStep
from executor.model.sampling.sampler import RowStarts
from executor.parallel.layout import DpLayout
from protos.executor.v1 import executor_pb2 as pb

LAST_SAMPLED = -1  # in token_ids: the token that the row sampled last


@dataclass(frozen=True, kw_only=True, slots=True)
class StepColumns:
    """One rank's part of a step, checked. B sequences, T tokens, L rows of logits, S sampled.

    Attributes:
        layout: Every rank's token count.
        draft_counts: [dp_size] tokens that the draft model runs on each DP rank behind this step;
            empty if it runs none, or the same rows for every sequence of a speculative step. A
            draft model with KV that runs none is not brought up to the step's tokens.
        num_sampled: [dp_size] sequences that sample, where there are such counts.
        starts: Rows that begin; None if there are none.
        rows: [B] row of each sequence.
        num_draft_tokens: Tokens that each sequence runs in a speculative step, N; else 0.
        num_tokens: [B] tokens to run; in a speculative step the most to gain.
        num_rows: [B] token rows that run: ``num_tokens``, or N each.
        num_computed_tokens: [B] position of the first of them.
        token_ids: [T], sequences end to end; -1 is the row's last sampled token, or a draft.
        num_kept_blocks: [B] blocks that stay at the front of the row.
        num_new_blocks: [B] blocks to write after them.
        new_block_ids: [sum(num_new_blocks)].
        logits_indices: [L] token whose logits each row of logits holds: per sequence first its
            scored tokens, then the one it samples after.
        logits_sequence: [L] sequence of each row of logits.
        is_sampled: bool [L], rows of logits to sample from; the others are scored.
        scored_ids: [L - S] tokens whose log probabilities are asked for.
    """

    layout: DpLayout
    draft_counts: tuple[int, ...]
    num_sampled: tuple[int, ...]
    starts: RowStarts | None
    num_draft_tokens: int
    rows: Int64Array
    num_tokens: Int64Array
    num_rows: Int64Array
    num_computed_tokens: Int64Array
    token_ids: Int64Array
    num_kept_blocks: Int64Array
    num_new_blocks: Int64Array
    new_block_ids: Int64Array
    logits_indices: Int64Array
    logits_sequence: Int64Array
    is_sampled: BoolArray
    scored_ids: Int64Array


def read_step(request: pb.StepRequest, limits: StepLimits, progress: RowProgress) -> StepColumns:
    """Reads and checks this executor's part of a step.

    Raises:
        InvalidStep: With the field at fault, its value and what fits.
    """
    if len(request.ranks) != 1:
        raise InvalidStep(
            f"the step has {len(request.ranks)} parts: this executor takes exactly 1", field="ranks"
        )
    part = request.ranks[0]
    if part.dp_rank != limits.topology.dp_rank:
        raise InvalidStep(
            f"dp_rank={part.dp_rank}: this executor is DP rank {limits.topology.dp_rank}",
            field="ranks[0].dp_rank",
        )
    starts = None
    if part.HasField("starts"):
        starts = read_starts(part.starts, num_rows=limits.num_rows, vocab_size=limits.vocab_size)
    columns = _read_sequences(request, starts, limits, progress)
    _check_mode(part, columns)
    _check_agreement(request.agreement, part, columns, limits)
    return columns


def _read_sequences(
    request: pb.StepRequest, starts: RowStarts | None, limits: StepLimits, progress: RowProgress
) -> StepColumns:
    message = request.ranks[0].sequences
    read = ColumnReader(message, "ranks[0].sequences")
    rows = read.ids("rows", len(message.rows) // INT32.itemsize, below=limits.num_rows)
    count = len(rows)
    read.unique("rows", rows, limits.num_rows)
    read.at_most("rows", count, limits.budget.max_num_seqs, "max_num_seqs")

    width = _read_width(request.agreement, limits)
    if width:
        _check_followed(read, rows, progress)
    num_tokens = read.counts("num_tokens", count, least=1, most=width or None, default=width or 1)
    num_rows = np.full(count, width) if width else num_tokens
    ends = np.cumsum(num_rows)
    total = int(ends[-1]) if count else 0
    if not width:
        read.at_most(
            "num_tokens", total, limits.budget.max_num_batched_tokens, "max_num_batched_tokens"
        )
    num_computed = read.counts("num_computed_tokens", count)
    read.at_most(
        "num_computed_tokens",
        int((num_computed + num_tokens).max(initial=0)),
        limits.max_model_len,
        "max_model_len",
    )

    is_starting = _starting(read, rows, starts, progress)
    is_fresh = is_starting | ~progress.has_sampled[rows]
    token_ids = _read_token_ids(read, rows, num_rows, total, is_fresh, limits)
    if limits.speculation is not None:
        goes_on = token_ids[ends - num_rows] < 0
        num_computed = _resolve(read, rows, num_computed, goes_on, progress)
    held = np.where(is_starting, -1, progress.num_blocks[rows])
    blocks = read_blocks(read, rows, num_computed, num_computed + num_tokens, held, limits)
    logits = _read_logits(read, message, num_rows, ends, width, limits)
    draft_counts, num_sampled = read_draft_counts(request.agreement, limits)
    return StepColumns(
        layout=read_layout(request.agreement, limits),
        draft_counts=draft_counts,
        num_sampled=num_sampled,
        starts=starts,
        num_draft_tokens=width,
        rows=rows,
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_computed_tokens=num_computed,
        token_ids=token_ids,
        num_kept_blocks=blocks.num_kept,
        num_new_blocks=blocks.num_new,
        new_block_ids=blocks.new_ids,
        logits_indices=logits.indices,
        logits_sequence=logits.sequence,
        is_sampled=logits.is_sampled,
        scored_ids=logits.scored_ids,
    )


def _check_followed(read: ColumnReader, rows: Int64Array, progress: RowProgress) -> None:
    """Checks that the draft model has run all tokens of the rows that are to draft."""
    is_followed = progress.is_followed[rows]
    if not is_followed.all():
        raise read.error(
            "rows",
            f"row {rows[~is_followed][0]} cannot draft: the draft model ran nothing behind a step "
            f"of it, whose global_num_tokens_for_draft was empty",
        )


def _starting(
    read: ColumnReader, rows: Int64Array, starts: RowStarts | None, progress: RowProgress
) -> BoolArray:
    """Returns which sequences start: bool [B]. The others must have started before."""
    is_starting = np.zeros(len(rows), dtype=np.bool_)
    if starts is not None:
        is_starting = np.isin(rows, starts.rows)
        if is_starting.sum() < len(starts.rows):
            raise read.error("rows", "a row starts without a sequence in this step")
    is_unknown = ~(is_starting | progress.is_live[rows])
    if is_unknown.any():
        raise read.error(
            "rows", f"row {rows[is_unknown][0]} runs without having started in this epoch"
        )
    return is_starting


def _read_token_ids(
    read: ColumnReader,
    rows: Int64Array,
    num_rows: Int64Array,
    total: int,
    is_fresh: BoolArray,
    limits: StepLimits,
) -> Int64Array:
    """Returns the tokens to run, [T].

    Args:
        num_rows: [B] token rows of each sequence.
        total: Their sum.
        is_fresh: [B] sequences that have no last sampled token to go on from.
    """
    token_ids = read.ids(
        "token_ids", total, least=-1, below=limits.vocab_size, default=LAST_SAMPLED
    )
    if is_fresh.any():
        is_wrong = (token_ids < 0) & np.repeat(is_fresh, num_rows)
        if is_wrong.any():
            row = np.repeat(rows, num_rows)[is_wrong][0]
            raise read.error("token_ids", f"-1 for row {row}, which has not sampled a token")
    return token_ids


class _Logits(NamedTuple):
    """Rows of logits, as in ``StepColumns``: [L], [L], [L] and [L - S]."""

    indices: Int64Array
    sequence: Int64Array
    is_sampled: BoolArray
    scored_ids: Int64Array


def _read_logits(
    read: ColumnReader,
    message: pb.SequenceColumns,
    num_rows: Int64Array,
    ends: Int64Array,
    width: int,
    limits: StepLimits,
) -> _Logits:
    """Returns which rows' logits a step computes, and what for.

    Args:
        num_rows: [B] token rows of each sequence.
        ends: [B] their cumulative sum.
        width: Rows of each sequence in a speculative step, all of which have logits; else 0.
    """
    count = len(num_rows)
    if width:
        if message.samples or message.num_scored or message.token_ids:
            raise read.error(
                "samples",
                "a speculative step has no samples, num_scored or token_ids: every "
                "sequence goes on from its last token",
            )
        samples, num_scored = np.ones(count, np.bool_), num_rows - 1
    else:
        samples = read.flags("samples", count, default=True)
        num_scored = read.counts("num_scored", count, default=0)
    if (num_scored > num_rows).any():
        raise read.error("num_scored", "a sequence has fewer tokens than are to be scored")
    num_logits = num_scored + samples
    if not width:
        read.at_most(
            "num_scored", int(num_logits.sum()), limits.budget.max_num_logits, "max_num_logits"
        )
    scored_ids = read.ids(
        "scored_ids", 0 if width else int(num_scored.sum()), below=limits.vocab_size
    )
    sequence = np.repeat(np.arange(count), num_logits)
    place = np.arange(len(sequence)) - (np.cumsum(num_logits) - num_logits)[sequence]
    is_sampled = place == num_scored[sequence]
    last, first = ends - 1, ends - num_rows
    indices = np.where(is_sampled, last[sequence], first[sequence] + place)
    return _Logits(indices, sequence, is_sampled, scored_ids)


def _read_width(agreement: pb.StepAgreement, limits: StepLimits) -> int:
    """Returns the tokens that each sequence runs in a speculative step, 0 in any other."""
    width, plan = agreement.num_draft_tokens, limits.speculation
    problem = None
    if plan is None:
        if width:
            problem = "this executor has no draft model: start it with --draft-model"
    elif width not in (0, plan.num_draft_tokens):
        problem = f"need {plan.num_draft_tokens}, or 0 for a step that is not speculative"
    elif width and agreement.has_extend:
        problem = "with has_extend: a step that runs prompts is not speculative"
    if problem is not None:
        raise InvalidStep(
            f"num_draft_tokens={width}: {problem}", field="agreement.num_draft_tokens"
        )
    return width


def _resolve(
    read: ColumnReader,
    rows: Int64Array,
    num_computed: Int64Array,
    goes_on: BoolArray,
    progress: RowProgress,
) -> Int64Array:
    """Returns the true number of computed tokens of each sequence.

    Args:
        num_computed: [B] as the router sent it.
        goes_on: [B] sequences that go on from their last token, of which that is an upper bound.
    """
    own = progress.num_tokens[rows] - 1
    is_below = goes_on & (num_computed < own)
    if is_below.any():
        at = int(is_below.argmax())
        raise read.error(
            "num_computed_tokens",
            f"{num_computed[at]} for row {rows[at]}, which has computed {own[at]}",
        )
    return np.where(goes_on, own, num_computed)


def _check_mode(part: pb.RankStep, columns: StepColumns) -> None:
    """Checks that the forward mode says what the columns say."""
    mode, count = part.forward_mode, len(columns.rows)
    if mode not in (
        pb.FORWARD_MODE_IDLE,
        pb.FORWARD_MODE_DECODE,
        pb.FORWARD_MODE_EXTEND,
    ):
        raise InvalidStep(
            f"forward_mode={mode}: need IDLE, DECODE or EXTEND", field="ranks[0].forward_mode"
        )
    if (mode == pb.FORWARD_MODE_IDLE) != (count == 0):
        raise InvalidStep(
            f"forward_mode is {pb.ForwardMode.Name(mode)} with {count} sequences: IDLE if and only "
            f"if there are none",
            field="ranks[0].forward_mode",
        )
    is_decode = columns.num_draft_tokens > 0 or (
        columns.is_sampled.all() and len(columns.is_sampled) == columns.num_tokens.sum()
    )
    if mode == pb.FORWARD_MODE_DECODE and not is_decode:
        raise InvalidStep(
            "forward_mode is DECODE: every sequence runs 1 token and samples, and none is scored",
            field="ranks[0].forward_mode",
        )


def _check_agreement(
    agreement: pb.StepAgreement, part: pb.RankStep, columns: StepColumns, limits: StepLimits
) -> None:
    """Checks that what all ranks were told fits this rank's part."""
    num_tokens, num_logits = len(columns.token_ids), len(columns.is_sampled)
    budget = limits.budget
    most_tokens, most_logits = budget.max_num_batched_tokens, budget.max_num_logits
    if columns.num_draft_tokens:
        most_tokens = most_logits = budget.max_num_seqs * columns.num_draft_tokens
    expected = [
        ("global_num_tokens", num_tokens, most_tokens),
        ("global_num_tokens_for_logprob", num_logits, most_logits),
    ]
    if columns.draft_counts:
        num_sampled = int(columns.is_sampled.sum())
        num_rows = num_tokens + num_sampled - int((columns.token_ids < 0).sum())
        expected.append(("global_num_tokens_for_draft", num_rows, budget.max_tokens_per_rank))
        expected.append(("global_num_sampled", num_sampled, budget.max_num_seqs))
    for field, mine, most in expected:
        counts = counts_by_rank(agreement, field, limits)
        problem = None
        if max(counts) > most:  # first, so that all executors say the same
            problem = f"has {max(counts)}; the budget is {most}"
        elif counts[limits.topology.dp_rank] != mine:
            problem = (
                f"says {counts[limits.topology.dp_rank]} for this executor's part, which has {mine}"
            )
        if problem is not None:
            raise InvalidStep(f"{field} {problem}", field=f"agreement.{field}")
    check_padded(columns.layout, budget)
    if part.forward_mode == pb.FORWARD_MODE_EXTEND and not agreement.has_extend:
        raise InvalidStep(
            "has_extend is not set, but this part's forward_mode is EXTEND",
            field="agreement.has_extend",
        )
