"""Step requests as columns: one rank's part of a step, read by a table and checked whole.

A step either passes every check or leaves the executor as it was: nothing here changes any state.
executor.proto defines what a step may contain; the field names are its.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from executor.batch.columns import UINT8, BoolArray, Column, ColumnReader, Int64Array, check_unique
from executor.batch.limits import RowProgress, StepLimits
from executor.batch.read_agreement import check_own_counts, read_agreement, read_width
from executor.batch.row_starts import RowStarts, read_starts
from executor.errors import InvalidStep
from executor.parallel.layout import DpLayout
from protos.executor.v1 import executor_pb2 as pb

LAST_SAMPLED = -1  # in token_ids: the token that the row sampled last

_ROWS = Column("rows", most="row")
_NUM_COMPUTED_TOKENS = Column("num_computed_tokens")
_BLOCKS = (
    Column("num_new_blocks", default=0),
    Column("new_block_ids", length="num_new_blocks", least=1, most="block_id"),
)
_TABLE = (
    _ROWS,
    Column("num_tokens", least=1, default=1, most_in_all="max_num_batched_tokens"),
    _NUM_COMPUTED_TOKENS,
    Column("token_ids", "num_tokens", least=-1, most="token_id", default=LAST_SAMPLED),
    *_BLOCKS,
    Column("samples", most=1, default=1, dtype=UINT8),
    Column("num_scored", default=0),
    Column("scored_ids", length="num_scored", most="token_id"),
)
_SPECULATIVE_TABLE = (
    _ROWS,
    Column("num_tokens", least=1, most="num_draft_tokens", default="num_draft_tokens"),
    _NUM_COMPUTED_TOKENS,
    *_BLOCKS,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepColumns:
    """One rank's part of a step, checked. B sequences, T tokens, L rows of logits, S sampled.

    Attributes:
        layout: Every rank's token count.
        draft_counts: [dp_size] tokens that the draft model runs on each DP rank behind this step;
            empty if it runs none, or the same number for every sequence of a speculative step. A
            draft model with KV that runs none lacks the step's tokens from then on.
        num_sampled: [dp_size] sequences that sample, where there are such counts.
        starts: Rows that begin; None if there are none.
        num_draft_tokens: Tokens that each sequence runs in a speculative step, N; else 0.
        rows: [B] row of each sequence.
        num_tokens: [B] tokens to run; in a speculative step the most to gain.
        num_query_tokens: [B] tokens that run: ``num_tokens``, or N each.
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
    num_query_tokens: Int64Array
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
    part = _own_part(request, limits.topology.dp_rank)
    starts = read_starts(part.starts, limits) if part.HasField("starts") else None
    width = read_width(request.agreement, limits)
    table = _SPECULATIVE_TABLE if width else _TABLE
    read = ColumnReader(part.sequences, "ranks[0].sequences", table, limits.bounds)
    check_unique(read, "rows")
    columns = read.columns
    if width:
        _add_speculative_columns(read, part.sequences, width)
    rows, token_ids = columns["rows"], columns["token_ids"]
    num_query_tokens = np.full(len(rows), width) if width else columns["num_tokens"]
    first_tokens = np.cumsum(num_query_tokens) - num_query_tokens
    is_starting = _check_rows(read, starts, progress, is_speculative=width > 0)
    _check_last_tokens(read, num_query_tokens, is_starting | ~progress.has_sampled[rows])
    num_computed_tokens = _read_num_computed(read, first_tokens, limits, progress)
    held = np.where(is_starting, 0, progress.num_blocks[rows])
    num_kept_blocks = _check_blocks(read, num_computed_tokens, held, is_starting, limits)
    indices, sequence, is_sampled = _locate_logits(read, num_query_tokens, first_tokens)
    if not width:
        read.check_at_most("num_scored", len(indices), "max_num_logits")
    is_decode = width > 0 or (len(indices) == len(token_ids) and bool(is_sampled.all()))
    _check_mode(part, len(rows), is_decode=is_decode)
    agreement = read_agreement(request.agreement, limits)
    own = {"global_num_tokens": len(token_ids), "global_num_tokens_for_logprob": len(indices)}
    if agreement.draft_counts:
        num_sampled = int(is_sampled.sum())
        num_known = int((token_ids >= 0).sum())
        own |= {"global_num_tokens_for_draft": num_known + num_sampled}
        own |= {"global_num_sampled": num_sampled}
    check_own_counts(request.agreement, own, part)
    del columns["samples"], columns["num_scored"]
    read_columns: dict[str, Any] = columns | agreement._asdict()
    return StepColumns(
        **read_columns | {"num_computed_tokens": num_computed_tokens},
        starts=starts,
        num_draft_tokens=width,
        num_query_tokens=num_query_tokens,
        num_kept_blocks=num_kept_blocks,
        logits_indices=indices,
        logits_sequence=sequence,
        is_sampled=is_sampled,
    )


def _own_part(request: pb.StepRequest, dp_rank: int) -> pb.RankStep:
    if len(request.ranks) != 1:
        raise InvalidStep(
            f"the step has {len(request.ranks)} parts: this executor takes exactly 1", field="ranks"
        )
    part = request.ranks[0]
    if part.dp_rank != dp_rank:
        raise InvalidStep(
            f"dp_rank={part.dp_rank}: this executor is DP rank {dp_rank}", field="ranks[0].dp_rank"
        )
    return part


def _add_speculative_columns(
    read: ColumnReader, message: pb.SequenceColumns, num_draft_tokens: int
) -> None:
    """Adds the columns that a speculative step has by its nature and so must not send."""
    for name in ("token_ids", "samples", "num_scored", "scored_ids"):
        if getattr(message, name):
            raise read.error(
                name, "a speculative step has none: every sequence goes on from its last token"
            )
    count = len(read.columns["rows"])
    read.columns |= {
        "token_ids": np.full(count * num_draft_tokens, LAST_SAMPLED),
        "samples": np.ones(count, np.int64),
        "num_scored": np.full(count, num_draft_tokens - 1),
        "scored_ids": np.zeros(0, np.int64),
    }


def _check_rows(
    read: ColumnReader, starts: RowStarts | None, progress: RowProgress, *, is_speculative: bool
) -> BoolArray:
    """Returns which sequences start, bool [B]. The others must have started before."""
    rows = read.columns["rows"]
    is_starting = np.zeros(len(rows), dtype=np.bool_)
    if starts is not None:
        is_starting = np.isin(rows, starts.rows)
        if is_starting.sum() < len(starts.rows):
            raise read.error("rows", "a row starts without a sequence in this step")
    is_known = is_starting | progress.is_live[rows]
    if not is_known.all():
        raise read.error(
            "rows", f"row {rows[~is_known][0]} runs without having started in this epoch"
        )
    if is_speculative and not progress.is_followed[rows].all():
        raise read.error(
            "rows",
            f"row {rows[~progress.is_followed[rows]][0]} cannot draft: the draft model ran nothing "
            f"behind a step of it, whose global_num_tokens_for_draft was empty",
        )
    return is_starting


def _check_last_tokens(
    read: ColumnReader, num_query_tokens: Int64Array, is_fresh: BoolArray
) -> None:
    """Checks that no sequence goes on from a last token that it does not have: ``is_fresh`` [B]."""
    if not is_fresh.any():
        return
    is_wrong = (read.columns["token_ids"] < 0) & np.repeat(is_fresh, num_query_tokens)
    if is_wrong.any():
        row = np.repeat(read.columns["rows"], num_query_tokens)[is_wrong][0]
        raise read.error("token_ids", f"-1 for row {row}, which has not sampled a token")


def _read_num_computed(
    read: ColumnReader, first_tokens: Int64Array, limits: StepLimits, progress: RowProgress
) -> Int64Array:
    """Returns the position of each sequence's first token.

    With a draft model, the router's is an upper bound where a sequence goes on from its last token.
    """
    rows, num_computed = read.columns["rows"], read.columns["num_computed_tokens"]
    longest = int((num_computed + read.columns["num_tokens"]).max(initial=0))
    read.check_at_most("num_computed_tokens", longest, "max_model_len")
    if limits.speculation is None:
        return num_computed
    goes_on = read.columns["token_ids"][first_tokens] < 0
    own = progress.num_tokens[rows] - 1
    is_below = goes_on & (num_computed < own)
    if is_below.any():
        at = int(is_below.argmax())
        raise read.error(
            "num_computed_tokens",
            f"{num_computed[at]} for row {rows[at]}, which has computed {own[at]}",
        )
    return np.where(goes_on, own, num_computed)


def _check_blocks(
    read: ColumnReader,
    num_computed: Int64Array,
    held: Int64Array,
    is_starting: BoolArray,
    limits: StepLimits,
) -> Int64Array:
    """Returns how many blocks each row keeps.

    Without a draft model the router knows each sequence's length: new blocks go behind those that
    hold its tokens. With one it knows a bound: new blocks go behind all that the row holds.

    Args:
        read: The columns.
        num_computed: [B] tokens that are in blocks already.
        held: [B] blocks of each row; 0 if it starts.
        is_starting: [B].
        limits: The block size.
    """
    rows, num_new = read.columns["rows"], read.columns["num_new_blocks"]
    needed = -(-(num_computed + read.columns["num_tokens"]) // limits.block_size)
    filled = np.where(is_starting, 0, -(-num_computed // limits.block_size))
    if limits.speculation is None:
        kept = needed - num_new
        is_wrong = (kept > held) | (kept < filled)
    else:
        kept = held
        is_wrong = kept + num_new < needed
        most = int((kept + num_new).max(initial=0))
        read.check_at_most("num_new_blocks", most, "max_blocks_per_row")
    if is_wrong.any():
        at = int(is_wrong.argmax())
        raise read.error(
            "num_new_blocks",
            f"row {rows[at]} holds {held[at]} blocks and {num_new[at]} came; it needs "
            f"{needed[at]} in all, of which the first {filled[at]} stay",
        )
    return kept


def _locate_logits(
    read: ColumnReader, num_query_tokens: Int64Array, first_tokens: Int64Array
) -> tuple[Int64Array, Int64Array, BoolArray]:
    """Returns ``logits_indices``, ``logits_sequence`` and ``is_sampled`` of the step, each [L]."""
    samples, num_scored = read.columns["samples"], read.columns["num_scored"]
    if (num_scored > num_query_tokens).any():
        raise read.error("num_scored", "a sequence has fewer tokens than are to be scored")
    last_tokens = first_tokens + num_query_tokens - 1
    if samples.all() and not num_scored.any():  # every decode's way, which is the shortest
        count = len(last_tokens)
        return last_tokens, np.arange(count), np.ones(count, np.bool_)
    num_logits = num_scored + samples
    sequence = np.repeat(np.arange(len(num_logits)), num_logits)
    nth = np.arange(len(sequence)) - (np.cumsum(num_logits) - num_logits)[sequence]
    is_sampled = nth == num_scored[sequence]
    indices = np.where(is_sampled, last_tokens[sequence], first_tokens[sequence] + nth)
    return indices, sequence, is_sampled


def _check_mode(part: pb.RankStep, num_sequences: int, *, is_decode: bool) -> None:
    """Checks that the forward mode says what the columns say."""
    mode = part.forward_mode
    if mode not in (pb.FORWARD_MODE_IDLE, pb.FORWARD_MODE_DECODE, pb.FORWARD_MODE_EXTEND):
        problem = f"forward_mode={mode}: need IDLE, DECODE or EXTEND"
    elif (mode == pb.FORWARD_MODE_IDLE) != (num_sequences == 0):
        problem = (
            f"forward_mode is {pb.ForwardMode.Name(mode)} with {num_sequences} sequences: IDLE if "
            f"and only if there are none"
        )
    elif mode == pb.FORWARD_MODE_DECODE and not is_decode:
        problem = "forward_mode is DECODE: every sequence runs 1 token and samples, none is scored"
    else:
        return
    raise InvalidStep(problem, field="ranks[0].forward_mode")
