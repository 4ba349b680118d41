"""Reads a rank's part of a step out of its columns, and refuses what does not fit.

Nothing here changes any state: a step either passes every check or leaves the executor as it
was. What a step may contain is defined in executor.proto; the field names are its.
"""

from dataclasses import dataclass

import numpy as np

from executor.budget import TokenBudget
from executor.columns import INT32, UINT64, BoolArray, ColumnReader, Int64Array
from executor.dp_layout import DpLayout, DpPaddingMode
from executor.errors import InvalidStep
from executor.graph.capture_sizes import GraphSizes
from executor.sampler import RowStarts
from executor.topology import Topology
from protos.executor.v1 import executor_pb2 as pb

LAST_SAMPLED = -1  # in token_ids: the token that the row sampled last

NO_GRAPHS = GraphSizes()
PADDING_MODES = {
    pb.DP_PADDING_MODE_MAX_LEN: DpPaddingMode.MAX_LEN,
    pb.DP_PADDING_MODE_SUM_LEN: DpPaddingMode.SUM_LEN,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLimits:
    """What a step of this executor must fit in.

    Attributes:
        topology: This executor's place in its group.
        budget: The most that one step may carry.
        num_rows: Lines of the block table.
        num_kv_blocks: Blocks of the KV pool, the scratch block included.
        block_size: Tokens per block.
        vocab_size: Token ids are below this.
        max_model_len: Tokens of one sequence.
        graph_sizes: What is captured.
    """

    topology: Topology
    budget: TokenBudget
    num_rows: int
    num_kv_blocks: int
    block_size: int
    vocab_size: int
    max_model_len: int
    graph_sizes: GraphSizes = NO_GRAPHS

    def __post_init__(self) -> None:
        sizes = (self.topology.dp_size, self.topology.attn_tp_size)
        if sizes != (self.budget.dp_size, self.budget.attn_tp_size):
            raise ValueError(
                f"the budget is for dp_size={self.budget.dp_size} and attn_tp_size="
                f"{self.budget.attn_tp_size}, the executor's place for {sizes[0]} and {sizes[1]}"
            )


@dataclass(frozen=True, slots=True)
class RowProgress:
    """What is known on the host of each row since it started.

    Attributes:
        is_live: bool [R], rows that have started in this epoch. The worker writes it.
        has_sampled: bool [R], rows that have a last token. The worker writes it.
        num_blocks: int64 [R], blocks that each row holds. The KV pool writes it.
    """

    is_live: BoolArray
    has_sampled: BoolArray
    num_blocks: Int64Array

    @classmethod
    def empty(cls, num_blocks: Int64Array) -> "RowProgress":
        """Returns the progress of rows of which none has started."""
        return cls(
            np.zeros_like(num_blocks, np.bool_), np.zeros_like(num_blocks, np.bool_), num_blocks
        )

    def reset(self) -> None:
        """Forgets all rows."""
        self.is_live[:] = False
        self.has_sampled[:] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StepColumns:
    """One rank's part of a step, checked. B sequences, T tokens, L rows of logits, S sampled.

    Attributes:
        layout: Every rank's token count.
        starts: Rows that begin; None if there are none.
        rows: [B] row of each sequence.
        num_tokens: [B] tokens to run.
        num_computed_tokens: [B] position of the first of them.
        token_ids: [T], sequences end to end; -1 is the row's last sampled token.
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
    starts: RowStarts | None
    rows: Int64Array
    num_tokens: Int64Array
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
    starts = read_starts(part.starts, limits) if part.HasField("starts") else None
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

    num_tokens = read.counts("num_tokens", count, least=1, default=1)
    total = int(num_tokens.sum())
    read.at_most(
        "num_tokens", total, limits.budget.max_num_batched_tokens, "max_num_batched_tokens"
    )
    num_computed = read.counts("num_computed_tokens", count)
    seq_lens = num_computed + num_tokens
    read.at_most(
        "num_computed_tokens", int(seq_lens.max(initial=0)), limits.max_model_len, "max_model_len"
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
        is_wrong = (token_ids < 0) & np.repeat(is_fresh, num_tokens)
        if is_wrong.any():
            row = np.repeat(rows, num_tokens)[is_wrong][0]
            raise read.error("token_ids", f"-1 for row {row}, which has not sampled a token")

    num_new = read.counts("num_new_blocks", count, default=0)
    block_ids = read.ids("new_block_ids", int(num_new.sum()), least=1, below=limits.num_kv_blocks)
    kept = -(-seq_lens // limits.block_size) - num_new
    held = np.where(is_starting, -1, progress.num_blocks[rows])
    _check_blocks(read, rows, num_computed, num_new, kept, held, limits.block_size)

    samples = read.flags("samples", count, default=True)
    num_scored = read.counts("num_scored", count, default=0)
    if (num_scored > num_tokens).any():
        raise read.error("num_scored", "a sequence has fewer tokens than are to be scored")
    num_logits = num_scored + samples
    read.at_most(
        "num_scored", int(num_logits.sum()), limits.budget.max_num_logits, "max_num_logits"
    )
    scored_ids = read.ids("scored_ids", int(num_scored.sum()), below=limits.vocab_size)

    sequence = np.repeat(np.arange(count), num_logits)
    place = np.arange(len(sequence)) - (np.cumsum(num_logits) - num_logits)[sequence]
    is_sampled = place == num_scored[sequence]
    ends = np.cumsum(num_tokens)
    first = ends - num_tokens
    return StepColumns(
        layout=_read_layout(request.agreement, limits),
        starts=starts,
        rows=rows,
        num_tokens=num_tokens,
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
    is_decode = columns.is_sampled.all() and len(columns.is_sampled) == columns.num_tokens.sum()
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
    for field, mine, most in (
        ("global_num_tokens", num_tokens, budget.max_num_batched_tokens),
        ("global_num_tokens_for_logprob", num_logits, budget.max_num_logits),
    ):
        counts = _counts_by_rank(agreement, field, limits)
        problem = None
        if max(counts) > most:  # first, so that all executors say the same
            problem = f"has {max(counts)}; the budget is {most}"
        elif counts[limits.topology.dp_rank] != mine:
            problem = (
                f"says {counts[limits.topology.dp_rank]} for this executor's part, which has {mine}"
            )
        if problem is not None:
            raise InvalidStep(f"{field} {problem}", field=f"agreement.{field}")
    _check_padded(columns.layout, budget)
    if part.forward_mode == pb.FORWARD_MODE_EXTEND and not agreement.has_extend:
        raise InvalidStep(
            "has_extend is not set, but this part's forward_mode is EXTEND",
            field="agreement.has_extend",
        )


def _check_padded(layout: DpLayout, budget: TokenBudget) -> None:
    """Checks that the step fits every buffer, with what padding and a graph add to its tokens.

    The rows of the DP rank that has most bound the others: those of executors, those gathered.
    """
    rows = layout.max_num_tokens if layout.graph_size is None else layout.graph_size
    most = budget.max_tokens_per_rank
    if rows > most:
        graph = "" if layout.graph_size is None else f" of graph_size={layout.graph_size}"
        raise InvalidStep(
            f"the step{graph} has {rows} rows on a DP rank; the budget is {most}",
            field="agreement",
        )


def _read_layout(agreement: pb.StepAgreement, limits: StepLimits) -> DpLayout:
    if agreement.padding_mode not in PADDING_MODES:
        raise InvalidStep(
            f"padding_mode={agreement.padding_mode}: need MAX_LEN or SUM_LEN",
            field="agreement.padding_mode",
        )
    counts = _counts_by_rank(agreement, "global_num_tokens", limits)
    graph_size = None
    if agreement.HasField("graph_size"):
        graph_size = agreement.graph_size
        _check_graph_size(agreement, counts, limits)
    mode = PADDING_MODES[agreement.padding_mode]
    topology = limits.topology
    return DpLayout(
        counts,
        mode,
        topology.dp_rank,
        graph_size,
        agreement.has_extend,
        topology.attn_tp_rank,
        topology.attn_tp_size,
    )


def _check_graph_size(
    agreement: pb.StepAgreement, counts: tuple[int, ...], limits: StepLimits
) -> None:
    kind, captured = "decode", limits.graph_sizes.decode
    if agreement.has_extend:
        kind, captured = "extend", limits.graph_sizes.extend
    size, problem = agreement.graph_size, None
    if size not in captured:
        sizes = (
            f"the {kind} graphs are {list(captured)}" if captured else f"there is no {kind} graph"
        )
        problem = f"is not captured: {sizes}"
    elif size < max(counts):
        problem = f"is below the {max(counts)} tokens of a rank"
    elif agreement.has_extend and min(counts) == 0:
        problem = "with has_extend, but a rank has no tokens: then every rank runs eagerly"
    elif agreement.padding_mode != pb.DP_PADDING_MODE_MAX_LEN:
        problem = "needs padding_mode MAX_LEN: a captured collective has one size"
    if problem is not None:
        raise InvalidStep(f"graph_size={size} {problem}", field="agreement.graph_size")


def _counts_by_rank(agreement: pb.StepAgreement, field: str, limits: StepLimits) -> tuple[int, ...]:
    counts = tuple(getattr(agreement, field))
    if len(counts) != limits.topology.dp_size:
        raise InvalidStep(
            f"{field} has {len(counts)} entries; dp_size is {limits.topology.dp_size}",
            field=f"agreement.{field}",
        )
    return counts


def read_starts(message: pb.RowStarts, limits: StepLimits) -> RowStarts:
    read = ColumnReader(message, "ranks[0].starts")
    rows = read.ids("rows", len(message.rows) // INT32.itemsize, below=limits.num_rows)
    count = len(rows)
    read.unique("rows", rows, limits.num_rows)

    def ragged(lengths_name: str, ids_name: str) -> tuple[Int64Array, Int64Array]:
        lengths = read.counts(lengths_name, count, default=0)
        return lengths, read.ids(ids_name, int(lengths.sum()), below=limits.vocab_size)

    num_suppressed_ids, suppressed_ids = ragged("num_suppressed_ids", "suppressed_ids")
    num_biases, bias_ids = ragged("num_biases", "bias_ids")
    num_prompt_ids, prompt_ids = ragged("num_prompt_ids", "prompt_ids")
    num_output_ids, output_ids = ragged("num_output_ids", "output_ids")
    return RowStarts(
        rows=rows,
        temperature=read.floats("temperature", count, default=0.0, least=0.0),
        top_k=read.counts("top_k", count, default=0),
        top_p=read.floats("top_p", count, default=1.0, above=0.0, most=1.0),
        min_p=read.floats("min_p", count, default=0.0, least=0.0, most=1.0),
        repetition_penalty=read.floats("repetition_penalty", count, default=1.0, above=0.0),
        presence_penalty=read.floats("presence_penalty", count, default=0.0),
        frequency_penalty=read.floats("frequency_penalty", count, default=0.0),
        seed=read.column("seed", UINT64, count, default=0).astype(np.uint64).view(np.int64),
        scores_output=read.flags("scores_output", count, default=False),
        num_top_logprobs=read.counts("num_top_logprobs", count, default=0, most=limits.vocab_size),
        suppressed_until=read.counts("suppressed_until", count, default=0),
        num_suppressed_ids=num_suppressed_ids,
        suppressed_ids=suppressed_ids,
        num_biases=num_biases,
        bias_ids=bias_ids,
        biases=read.floats("biases", len(bias_ids)),
        num_prompt_ids=num_prompt_ids,
        prompt_ids=prompt_ids,
        num_output_ids=num_output_ids,
        output_ids=output_ids,
    )
