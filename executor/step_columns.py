"""Reads a rank's part of a step out of its columns, and refuses what does not fit.

Nothing here changes any state: a step either passes every check or leaves the executor as it
was. What a step may contain is defined in executor.proto; the field names are its.
"""

from dataclasses import dataclass

import numpy as np

from executor.columns import INT32, BoolArray, ColumnReader, Int64Array
from executor.dp_layout import DpLayout
from executor.errors import InvalidStep
from executor.row_starts import read_starts
from executor.sampler import RowStarts
from executor.step_layout import check_padded, counts_by_rank, read_draft_counts, read_layout
from executor.step_limits import RowProgress, StepLimits
from protos.executor.v1 import executor_pb2 as pb

LAST_SAMPLED = -1  # in token_ids: the token that the row sampled last


@dataclass(frozen=True, kw_only=True, slots=True)
class StepColumns:
    """One rank's part of a step, checked. B sequences, T tokens, L rows of logits, S sampled.

    Attributes:
        layout: Every rank's token count.
        draft_counts: [dp_size] tokens that the draft model runs on each DP rank behind this step;
            empty if it runs none, or the same rows for every sequence of a speculative step.
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
    num_tokens = read.counts("num_tokens", count, least=1, most=width or None, default=width or 1)
    num_rows = np.full(count, width) if width else num_tokens
    total = int(num_rows.sum())
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

    is_starting = np.zeros(count, dtype=np.bool_)
    if starts is not None:
        is_starting = np.isin(rows, starts.rows)
        if is_starting.sum() < len(starts.rows):
            raise read.error("rows", "a row starts without a sequence in this step")
    is_unknown = ~(is_starting | progress.is_live[rows])
    if is_unknown.any():
        raise read.error(
            "rows", f"row {rows[is_unknown][0]} runs without having started in this epoch"
        )

    token_ids = read.ids(
        "token_ids", total, least=-1, below=limits.vocab_size, default=LAST_SAMPLED
    )
    is_fresh = is_starting | ~progress.has_sampled[rows]
    if is_fresh.any():
        is_wrong = (token_ids < 0) & np.repeat(is_fresh, num_rows)
        if is_wrong.any():
            row = np.repeat(rows, num_rows)[is_wrong][0]
            raise read.error("token_ids", f"-1 for row {row}, which has not sampled a token")
    if limits.speculation is not None:
        first_ids = token_ids[np.cumsum(num_rows) - num_rows]
        num_computed = _resolve(read, rows, num_computed, first_ids < 0, progress)
    seq_lens = num_computed + num_tokens

    num_new = read.counts("num_new_blocks", count, default=0)
    block_ids = read.ids("new_block_ids", int(num_new.sum()), least=1, below=limits.num_kv_blocks)
    held = np.where(is_starting, -1, progress.num_blocks[rows])
    if limits.speculation is None:
        kept = -(-seq_lens // limits.block_size) - num_new
        _check_blocks(read, rows, num_computed, num_new, kept, held, limits.block_size)
    else:
        kept = np.maximum(held, 0)
        _check_appended_blocks(read, rows, seq_lens, kept + num_new, limits)

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
    ends = np.cumsum(num_rows)
    first = ends - num_rows
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
        num_kept_blocks=kept,
        num_new_blocks=num_new,
        new_block_ids=block_ids,
        logits_indices=np.where(is_sampled, ends[sequence] - 1, first[sequence] + place),
        logits_sequence=sequence,
        is_sampled=is_sampled,
        scored_ids=scored_ids,
    )


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


def _check_appended_blocks(
    read: ColumnReader,
    rows: Int64Array,
    seq_lens: Int64Array,
    num_blocks: Int64Array,
    limits: StepLimits,
) -> None:
    """Checks that rows end up with blocks for all tokens, and not with more than a row holds."""
    needed = -(-seq_lens // limits.block_size)
    is_short = num_blocks < needed
    if is_short.any():
        at = int(is_short.argmax())
        raise read.error(
            "num_new_blocks",
            f"row {rows[at]} comes to {num_blocks[at]} blocks and needs {needed[at]}",
        )
    most = -(-limits.max_model_len // limits.block_size)
    read.at_most("num_new_blocks", int(num_blocks.max(initial=0)), most, "a row's blocks")


def _check_blocks(
    read: ColumnReader,
    rows: Int64Array,
    num_computed: Int64Array,
    num_new: Int64Array,
    kept: Int64Array,
    held: Int64Array,
    block_size: int,
) -> None:
    """Checks that rows end up with blocks for all tokens and lose none that holds some.

    Args:
        held: [B] blocks of each row; -1 for a row that starts, which holds none.
    """
    starts = held < 0
    wrong = np.where(starts, kept != 0, (kept > held) | (kept * block_size < num_computed))
    if not wrong.any():
        return
    at = int(wrong.argmax())
    needed = int(kept[at] + num_new[at])
    if starts[at]:
        raise read.error(
            "num_new_blocks", f"row {rows[at]} starts and needs {needed}; {num_new[at]} came"
        )
    raise read.error(
        "num_new_blocks",
        f"row {rows[at]} holds {held[at]} blocks and {num_new[at]} came; it needs {needed} in all, "
        f"of which the first {-(-int(num_computed[at]) // block_size)} stay",
    )


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
