"""Step requests as columns: one rank's part of a step, read by a table and checked whole.

    limits       what a step must fit in, and how far each row has come
    starts       rows that begin: their sampling parameters, and the tokens that they start from
    agreement    what all ranks have alike: every rank's counts, the padding, the graph
    part         this rank's sequences

A step either passes every check or leaves the executor as it was: nothing here changes any state.
executor.proto defines what a step may contain; the field names are its.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from executor.batch.columns import (
    UINT8,
    BoolArray,
    Column,
    ColumnReader,
    Float32Array,
    Int64Array,
    check_unique,
)
from executor.budget.capture_sizes import GraphSizes
from executor.budget.speculation import SpeculationPlan
from executor.budget.token_budget import TokenBudget
from executor.errors import InvalidStep
from executor.parallel.layout import DpLayout, DpPaddingMode, Place, Topology
from protos.executor.sampling_fields import (
    FLOAT32,
    MAX_BANNED,
    MAX_BANNED_LEN,
    MAX_LOGPROB_IDS,
    SAMPLING_FIELDS,
    SEED,
)
from protos.executor.v1 import executor_pb2 as pb

NO_GRAPHS = GraphSizes()


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """What a step of this executor must fit in.

    Attributes:
        place: Where this executor stands.
        budget: The most that one step may carry. The block table has ``max_num_seqs`` rows.
        num_kv_blocks: Blocks that the router hands out, and the scratch block.
        kv_window: Tokens that layers see whose blocks are a second list of each row; 0: there is one.
        block_size: Tokens per block.
        vocab_size: Token ids are below this.
        max_model_len: Tokens of one sequence.
        graph_sizes: Sizes for which a graph was captured.
        speculation: How the draft model drafts; None without one.
        takes_grammars: Whether rows may have grammars.
    """

    place: Place
    budget: TokenBudget
    num_kv_blocks: int
    block_size: int
    vocab_size: int
    max_model_len: int
    graph_sizes: GraphSizes = NO_GRAPHS
    speculation: SpeculationPlan | None = None
    kv_window: int = 0
    takes_grammars: bool = False

    def __post_init__(self) -> None:
        sizes = (self.topology.dp_size, self.topology.attn_tp_size)
        if sizes[0] > self.budget.dp_size or sizes[1] != self.budget.attn_tp_size:
            raise ValueError(
                f"the budget is for dp_size={self.budget.dp_size} and attn_tp_size="
                f"{self.budget.attn_tp_size}, the executor's coordinates for {sizes[0]} and "
                f"{sizes[1]}"
            )

    @property
    def topology(self) -> Topology:
        """Where this executor stands now."""
        return self.place.topology

    @cached_property
    def bounds(self) -> dict[str, int]:
        """The largest values that columns may have, by the names that their tables use."""
        plan = self.speculation
        return {
            "row": self.budget.max_num_seqs - 1,
            "token_id": self.vocab_size - 1,
            "block_id": self.num_kv_blocks - 1,
            "vocab_size": self.vocab_size,
            "num_draft_tokens": 0 if plan is None else plan.num_draft_tokens,
            "max_num_batched_tokens": self.budget.max_num_batched_tokens,
            "max_num_logits": self.budget.max_num_logits,
            "max_model_len": self.max_model_len,
            "max_blocks_per_row": -(-self.max_model_len // self.block_size),
        }


@dataclass(frozen=True, slots=True)
class RowProgress:
    """What the host knows of each row since it started.

    Attributes:
        is_live: bool [R], rows that have started in this epoch. The worker writes it.
        has_sampled: bool [R], rows that have a last token. The worker writes it.
        num_blocks: int64 [R], blocks that each row holds. The KV pool writes it.
        num_tokens: int64 [R], tokens that each row has, the last sampled one included. The worker
            writes it where there is a draft model: only it knows how many drafts were accepted.
        is_followed: bool [R], rows of which a draft model with KV has run every token. The worker
            writes it.
    """

    is_live: BoolArray
    has_sampled: BoolArray
    num_blocks: Int64Array
    num_tokens: Int64Array
    is_followed: BoolArray

    @classmethod
    def empty(cls, num_blocks: Int64Array) -> "RowProgress":
        """Returns the progress of rows of which none has started."""
        return cls(
            np.zeros_like(num_blocks, np.bool_),
            np.zeros_like(num_blocks, np.bool_),
            num_blocks,
            np.zeros_like(num_blocks),
            np.ones_like(num_blocks, np.bool_),
        )

    def start(self, rows: Int64Array) -> None:
        """Notes that rows begin."""
        self.is_live[rows] = True
        self.has_sampled[rows] = False
        self.is_followed[rows] = True

    def reset(self) -> None:
        """Forgets all rows."""
        self.is_live[:] = False
        self.has_sampled[:] = False


# A row's sampling parameters as the device keeps them: the seed, then four bytes each.
PARAMETERS = np.dtype([(field.name, field.dtype) for field in (SEED, *SAMPLING_FIELDS)], align=True)
PARAMETER_WIDTH = PARAMETERS.itemsize // 8  # int64 entries

_STARTS = (
    Column("rows", most="row"),
    Column("scores_output", most=1, default=0, dtype=UINT8),
    Column("num_top_logprobs", most="vocab_size", default=0),
    Column("suppressed_until", default=0),
    Column("num_suppressed_ids", default=0),
    Column("suppressed_ids", length="num_suppressed_ids", most="token_id"),
    Column("num_biases", default=0),
    Column("bias_ids", length="num_biases", most="token_id"),
    Column("num_prompt_ids", default=0),
    Column("prompt_ids", length="num_prompt_ids", most="token_id"),
    Column("num_output_ids", default=0),
    Column("output_ids", length="num_output_ids", most="token_id"),
    Column("grammar_of", default=0),
    Column("num_begin_ids", default=0),
    Column("begin_ids", length="num_begin_ids", most="token_id"),
)
_RARE_STARTS = (
    Column("num_allowed_ids", default=0),
    Column("allowed_ids", length="num_allowed_ids", most="token_id"),
    Column("num_banned", most=MAX_BANNED, default=0),
    Column("banned_lens", length="num_banned", least=2, most=MAX_BANNED_LEN),
    Column("banned_ids", length="banned_lens", most="token_id"),
    Column("num_logprob_ids", most=MAX_LOGPROB_IDS, default=0),
    Column("logprob_ids", length="num_logprob_ids", most="token_id"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowStarts:
    """Rows that begin, A of them: RowStarts of executor.proto, checked.

    Attributes:
        parameters: PARAMETERS [A].
        num_suppressed_ids, num_biases, num_prompt_ids, num_output_ids: [A] entries of each row in
            the columns after them, end to end.
        grammars: Each once.
        grammar_of: [A] 1 and up: the grammar of each row; 0: it has none.
        num_begin_ids: [A] entries of each row in begin_ids, behind which its grammar begins.
        num_allowed_ids: [A] as above; 0: all tokens are allowed.
        num_banned: [A] sequences that each row shall not have; banned_lens has their lengths.
        num_logprob_ids: [A] as above.
    """

    rows: Int64Array
    parameters: npt.NDArray[Any]
    scores_output: BoolArray
    num_top_logprobs: Int64Array
    suppressed_until: Int64Array
    num_suppressed_ids: Int64Array
    suppressed_ids: Int64Array
    num_biases: Int64Array
    bias_ids: Int64Array
    biases: Float32Array
    num_prompt_ids: Int64Array
    prompt_ids: Int64Array
    num_output_ids: Int64Array
    output_ids: Int64Array
    grammars: tuple[str, ...]
    grammar_of: Int64Array
    num_begin_ids: Int64Array
    begin_ids: Int64Array
    num_allowed_ids: Int64Array
    allowed_ids: Int64Array
    num_banned: Int64Array
    banned_lens: Int64Array
    banned_ids: Int64Array
    num_logprob_ids: Int64Array
    logprob_ids: Int64Array

    @property
    def is_penalized(self) -> BoolArray:
        """bool [A], rows whose logits depend on the tokens that they have."""
        penalties = [field for field in SAMPLING_FIELDS if field.is_penalty]
        differs = [self.parameters[field.name] != field.default for field in penalties]
        is_penalized: BoolArray = np.logical_or.reduce(differs)
        return is_penalized

    @property
    def packed_parameters(self) -> Int64Array:
        """int64 [A * PARAMETER_WIDTH], the bytes of ``parameters``."""
        return self.parameters.view(np.int64)


def read_starts(message: pb.RowStarts, limits: StepLimits) -> RowStarts:
    """Reads and checks the rows that begin.

    Raises:
        InvalidStep: With the field at fault, its value and what fits.
    """
    read = ColumnReader(message, "ranks[0].starts", _STARTS, limits.bounds)
    check_unique(read, "rows")
    columns = read.columns
    if any(getattr(message, column.name) for column in _RARE_STARTS):
        for column in _RARE_STARTS:
            columns[column.name] = read.read(column)
    else:  # hardly ever is there one
        zeros = np.zeros_like(columns["rows"])
        columns |= {c.name: zeros if c.length == "rows" else zeros[:0] for c in _RARE_STARTS}
    parameters = np.zeros(len(columns["rows"]), PARAMETERS)
    for field in (SEED, *SAMPLING_FIELDS):
        if not getattr(message, field.name):
            parameters[field.name] = field.default
            continue
        values = read.entries(field.name, field.dtype, len(parameters))
        is_valid = field.contains(values)
        if not is_valid.all():
            raise read.error(field.name, f"has {values[~is_valid][0]}; it must be {field.range}")
        parameters[field.name] = values
    biases = read.entries("biases", FLOAT32, len(columns["bias_ids"])).astype(np.float32)
    if not np.isfinite(biases).all():
        raise read.error("biases", f"has {biases[~np.isfinite(biases)][0]}; it must be finite")
    grammars = tuple(message.grammars)
    if columns["grammar_of"].max(initial=0) > len(grammars):
        problem = f"has {columns['grammar_of'].max()}; there are {len(grammars)} grammars"
        raise read.error("grammar_of", problem)
    if grammars and not limits.takes_grammars:
        raise read.error("grammars", "this executor takes none: it has no tokenizer that fits")
    return RowStarts(
        parameters=parameters,
        biases=biases,
        grammars=grammars,
        scores_output=columns.pop("scores_output").astype(np.bool_),
        **columns,
    )


PADDING_MODES = {
    pb.DP_PADDING_MODE_MAX_LEN: DpPaddingMode.MAX_LEN,
    pb.DP_PADDING_MODE_SUM_LEN: DpPaddingMode.SUM_LEN,
}


class Agreement(NamedTuple):
    """The agreement as it was read. The attributes are those of ``StepColumns``."""

    layout: DpLayout
    draft_counts: tuple[int, ...]
    num_sampled: tuple[int, ...]


def read_width(message: pb.StepAgreement, limits: StepLimits) -> int:
    """Returns the tokens that each sequence runs in a speculative step, 0 in any other.

    Raises:
        InvalidStep: This executor takes no step of such a width.
    """
    width, plan = message.num_draft_tokens, limits.speculation
    if not width:
        return 0
    if plan is None:
        problem = "this executor has no draft model: start it with --draft-model"
    elif width != plan.num_draft_tokens:
        problem = f"need {plan.num_draft_tokens}, or 0 for a step that is not speculative"
    elif message.has_extend:
        problem = "with has_extend: a step that runs prompts is not speculative"
    else:
        return width
    raise _agreement_error("num_draft_tokens", f"num_draft_tokens={width}: {problem}")


def read_agreement(message: pb.StepAgreement, limits: StepLimits) -> Agreement:
    """Reads the agreement and checks it against the limits, which all ranks have alike.

    Raises:
        InvalidStep: With the field at fault, its value and what fits.
    """
    width, budget = message.num_draft_tokens, limits.budget
    most_tokens, most_logits = budget.max_num_batched_tokens, budget.max_num_logits
    if width:
        most_tokens = most_logits = budget.max_num_seqs * width
    counts = _read_counts(message, "global_num_tokens", most_tokens, limits)
    _read_counts(message, "global_num_tokens_for_logprob", most_logits, limits)
    draft_counts, num_sampled = _read_draft_counts(message, limits)
    return Agreement(_read_layout(message, counts, limits), draft_counts, num_sampled)


def check_own_counts(message: pb.StepAgreement, own: dict[str, int], part: pb.RankStep) -> None:
    """Checks that the agreement tells of this executor's part what it is.

    Args:
        message: The agreement.
        own: This part's count in each field of counts.
        part: This executor's.

    Raises:
        InvalidStep: With the field that tells otherwise.
    """
    for field, count in own.items():
        told = getattr(message, field)[part.dp_rank]
        if told != count:
            raise _agreement_error(
                field, f"{field} says {told} for this executor's part, which has {count}"
            )
    if part.forward_mode == pb.FORWARD_MODE_EXTEND and not message.has_extend:
        raise _agreement_error(
            "has_extend", "has_extend is not set, but this part's forward_mode is EXTEND"
        )


def _agreement_error(field: str, problem: str) -> InvalidStep:
    return InvalidStep(problem, field=f"agreement.{field}")


def _read_counts(
    message: pb.StepAgreement, field: str, most: int, limits: StepLimits
) -> tuple[int, ...]:
    counts = tuple(getattr(message, field))
    if len(counts) != limits.topology.dp_size:
        raise _agreement_error(
            field, f"{field} has {len(counts)} entries; dp_size is {limits.topology.dp_size}"
        )
    if max(counts) > most:
        raise _agreement_error(field, f"{field} has {max(counts)}; the budget is {most}")
    width = message.num_draft_tokens
    if width and (odd := [count for count in counts if count % width]):
        raise _agreement_error(field, f"{field} has {odd[0]}; each sequence has {width}")
    return counts


def _read_draft_counts(
    message: pb.StepAgreement, limits: StepLimits
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns every DP rank's tokens of the draft model, and its sequences that sample.

    Both are empty where the draft model runs nothing behind the step, or the same rows for each
    sequence.
    """
    most = {
        "global_num_tokens_for_draft": limits.budget.max_tokens_per_rank,
        "global_num_sampled": limits.budget.max_num_seqs,
    }
    given = [field for field in most if getattr(message, field)]
    if not given:  # the router does without drafts, or they need no counts
        return (), ()
    plan = limits.speculation
    if plan is None or not plan.extends or message.num_draft_tokens:
        raise _agreement_error(
            given[0],
            f"{given[0]} is set: only a step that is not speculative has it, and only where the "
            f"draft model keeps KV of its own",
        )
    tokens, sampled = (_read_counts(message, *item, limits) for item in most.items())
    return tokens, sampled


def _read_layout(
    message: pb.StepAgreement, counts: tuple[int, ...], limits: StepLimits
) -> DpLayout:
    """Returns the layout, which fits every buffer with what padding and a graph add."""
    if message.padding_mode not in PADDING_MODES:
        raise _agreement_error(
            "padding_mode", f"padding_mode={message.padding_mode}: need MAX_LEN or SUM_LEN"
        )
    graph_size, graph = None, ""
    if message.HasField("graph_size"):
        width = message.num_draft_tokens or 1
        _check_graph_size(message, [count // width for count in counts], limits)
        graph_size, graph = message.graph_size * width, f" of graph_size={message.graph_size}"
    most = limits.budget.max_tokens_per_rank
    if (num_rows := graph_size or max(counts)) > most:
        raise InvalidStep(
            f"the step{graph} has {num_rows} rows on a DP rank; the budget is {most}",
            field="agreement",
        )
    return DpLayout(
        counts,
        PADDING_MODES[message.padding_mode],
        limits.topology.dp_rank,
        graph_size,
        message.has_extend,
        limits.topology.attn_tp_rank,
        limits.topology.attn_tp_size,
    )


def _check_graph_size(message: pb.StepAgreement, counts: list[int], limits: StepLimits) -> None:
    kind = "extend" if message.has_extend else "decode"
    captured: tuple[int, ...] = getattr(limits.graph_sizes, kind)
    size = message.graph_size
    if size not in captured:
        sizes = (
            f"the {kind} graphs are {list(captured)}" if captured else f"there is no {kind} graph"
        )
        problem = f"is not captured: {sizes}"
    elif size < max(counts):
        problem = f"is below the {max(counts)} tokens of a rank"
    elif message.has_extend and min(counts) == 0:
        problem = "with has_extend, but a rank has no tokens: then every rank runs eagerly"
    elif message.padding_mode != pb.DP_PADDING_MODE_MAX_LEN:
        problem = "needs padding_mode MAX_LEN: a captured collective has one size"
    else:
        return
    raise _agreement_error("graph_size", f"graph_size={size} {problem}")


LAST_SAMPLED = -1  # in token_ids: the token that the row sampled last

_ROWS = Column("rows", most="row")
_NUM_COMPUTED_TOKENS = Column("num_computed_tokens")
_BLOCKS = (
    Column("num_new_blocks", default=0),
    Column("new_block_ids", length="num_new_blocks", least=1, most="block_id"),
)
# 0 stands in columns that lie wholly before the window of the first token to run.
_WINDOW_BLOCKS = Column("new_window_block_ids", length="num_new_blocks", most="block_id")
_PART = (
    _ROWS,
    Column("num_tokens", least=1, default=1, most_in_all="max_num_batched_tokens"),
    _NUM_COMPUTED_TOKENS,
    Column("token_ids", "num_tokens", least=-1, most="token_id", default=LAST_SAMPLED),
    *_BLOCKS,
    Column("samples", most=1, default=1, dtype=UINT8),
    Column("num_scored", default=0),
    Column("scored_ids", length="num_scored", most="token_id"),
)
_SPECULATIVE_PART = (
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
        new_block_ids: [sum(num_new_blocks)]; with a second list twice as many, those of
            ``new_window_block_ids`` behind.
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
    table = _SPECULATIVE_PART if width else _PART
    read = ColumnReader(part.sequences, "ranks[0].sequences", table, limits.bounds)
    check_unique(read, "rows")
    columns = read.columns
    if width:
        _add_speculative_columns(read, part.sequences, width)
    rows, token_ids = columns["rows"], columns["token_ids"]
    num_query_tokens = np.full(len(rows), width) if width else columns["num_tokens"]
    first_tokens = np.cumsum(num_query_tokens) - num_query_tokens
    is_starting = _check_rows(read, starts, progress, is_speculative=width > 0)
    is_fresh = is_starting | ~progress.has_sampled[rows]
    _check_last_tokens(read, num_query_tokens, is_fresh, "has not sampled a token")
    if not width:
        is_more = (num_query_tokens > 1) | (columns["samples"] == 0)
        _check_last_tokens(read, num_query_tokens, is_more, "runs more than it, or does not sample")
    num_computed_tokens = _read_num_computed(read, first_tokens, limits, progress)
    held = np.where(is_starting, 0, progress.num_blocks[rows])
    num_kept_blocks = _check_blocks(read, num_computed_tokens, held, is_starting, limits)
    if limits.kv_window or part.sequences.new_window_block_ids:
        _add_window_blocks(read, num_kept_blocks, num_computed_tokens, limits)
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
    read: ColumnReader, num_query_tokens: Int64Array, is_barred: BoolArray, problem: str
) -> None:
    """Checks that none of some sequences, bool [B], goes on from its last token."""
    if not is_barred.any():
        return
    is_wrong = (read.columns["token_ids"] < 0) & np.repeat(is_barred, num_query_tokens)
    if is_wrong.any():
        row = np.repeat(read.columns["rows"], num_query_tokens)[is_wrong][0]
        raise read.error("token_ids", f"-1 for row {row}, which {problem}")


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


def _add_window_blocks(
    read: ColumnReader, num_kept: Int64Array, num_computed: Int64Array, limits: StepLimits
) -> None:
    """Adds the second list of new blocks, which has one for each token that this step may read.

    Args:
        read: The columns.
        num_kept: [B] blocks of each row that stay.
        num_computed: [B] tokens that are in blocks already.
        limits: The window and the block size.
    """
    name, window = _WINDOW_BLOCKS.name, limits.kv_window
    if not window:
        raise read.error(name, "must be empty: this executor's kv_window is 0")
    ids = read.read(_WINDOW_BLOCKS)
    read.columns["new_block_ids"] = np.concatenate((read.columns["new_block_ids"], ids))
    if (ids > 0).all():
        return
    counts = read.columns["num_new_blocks"]
    starts = np.cumsum(counts) - counts
    columns = np.arange(len(ids)) + np.repeat(num_kept - starts, counts)
    first_seen = np.repeat(num_computed + 1 - window, counts)
    is_missing = (ids == 0) & ((columns + 1) * limits.block_size > first_seen)
    if is_missing.any():
        at = int(is_missing.argmax())
        row = read.columns["rows"][int(np.searchsorted(starts, at, side="right")) - 1]
        raise read.error(
            name,
            f"0 in column {columns[at]} of row {row}, whose first token sees position "
            f"{max(first_seen[at], 0)} and all behind; only columns before may have none",
        )


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
