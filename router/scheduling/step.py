"""Steps and groups as data: a group's sizes, the plan of a step, and its result.

The parts of each rank in each step are named tuples: made in a third of a dataclass's time.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum, auto
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from protos.settings import above, setting
from router.requests.request import Float32Array, Int32Array, Sequence
from router.scheduling.columns import Mask, Rows, RowSet

# ---- steps


class BatchMode(IntEnum):
    """What one DP rank runs in a step; ForwardMode in executor.proto."""

    IDLE = 0  # no sequences, but every collective call
    DECODE = 1  # the last known token of each sequence; with drafts, some behind it
    EXTEND = 2  # some sequence runs more of a prompt


class PaddingMode(Enum):
    """Layout of all ranks' rows in a collective; DpPaddingMode in executor.proto."""

    MAX_LEN = auto()  # pad every rank to the largest, then all-gather
    SUM_LEN = auto()  # lay ranks end to end, then all-reduce


class GraphMiss(StrEnum):
    """Why a step replays no graph."""

    NOT_CAPTURED = auto()  # the executors have no graph of its kind
    TOO_LARGE = auto()  # it is larger than the largest graph
    MOSTLY_PADDING = auto()  # more than half of the smallest graph that fits would be padding
    IDLE_RANK = auto()  # a rank without tokens cannot replay an extend


@dataclass(frozen=True, slots=True)
class RowStart:
    """A row that begins with this step: what the executor must know beyond its tokens."""

    row: int
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Scoring:
    """Log probabilities that a sequence gets from a step.

    Attributes:
        scored_ids: Prompt tokens that are scored; may be empty.
        sample_index: Place of its sampled token among the rank's, if that is scored too.
    """

    sequence: Sequence
    scored_ids: Int32Array
    sample_index: int | None


class RankBatch(NamedTuple):
    """One DP rank's part of a step, in columns; B sequences. See SequenceColumns.

    In a plan, a rank has one for its chunks; decodes are a part of the DecodeColumns.

    Attributes:
        rows: [B] rows of this rank's block table.
        num_computed_tokens: [B]; upper bounds where an earlier step with drafts is not back.
        token_ids: [sum(num_tokens)], -1 for the row's last sampled token; None: -1 each.
        num_tokens: [B]; None: 1 each. In a speculative step, the only kind of DECODE that has
            it, the most tokens that each sequence may gain.
        num_new_blocks: [B]; None: none.
        new_block_ids: [sum(num_new_blocks)].
        new_window_block_ids: As many; None: none, or the group has no windows.
        samples: [B]; None: all of them.
        num_scored: [B]; None: none.
        scored_ids: [sum(num_scored)].
        starts: Rows that begin.
        scorings: Sequences that get log probabilities, in batch order.
    """

    mode: BatchMode
    rows: Int32Array
    num_computed_tokens: Int32Array
    token_ids: Int32Array | None = None
    num_tokens: Int32Array | None = None
    num_new_blocks: Int32Array | None = None
    new_block_ids: Int32Array | None = None
    new_window_block_ids: Int32Array | None = None
    samples: npt.NDArray[np.uint8] | None = None
    num_scored: Int32Array | None = None
    scored_ids: Int32Array | None = None
    starts: SequenceOf[RowStart] = ()
    scorings: SequenceOf[Scoring] = ()


LAST_SAMPLED = -1  # a known token that is none: the one that the row sampled last
NOTHING = np.zeros(0, dtype=np.int32)


class DecodeColumns(NamedTuple):
    """All ranks' decodes in columns, ranks end to end. See RankBatch.

    Attributes:
        row_set: The rows, D of them.
        num_computed_tokens: [D].
        num_tokens: [D]; None: 1 each.
        num_new_blocks: [D]; None: none.
        new_block_ids: [sum(num_new_blocks)]; likewise the one that follows.
        new_window_block_ids: None without windows.
        block_cuts: [dp_size + 1] where each rank's new blocks begin, and their number.
    """

    row_set: RowSet
    num_computed_tokens: Int32Array
    num_tokens: Int32Array | None
    num_new_blocks: Int32Array | None
    new_block_ids: Int32Array
    new_window_block_ids: Int32Array | None
    block_cuts: list[int]

    def batch(self, rank: int) -> RankBatch:
        """Returns one rank's decodes."""
        part = slice(*self.row_set.cuts[rank : rank + 2])
        blocks = slice(*self.block_cuts[rank : rank + 2])
        num_new = None if blocks.start == blocks.stop else self.num_new_blocks
        window_ids = None if num_new is None else self.new_window_block_ids
        return RankBatch(
            BatchMode.IDLE if part.start == part.stop else BatchMode.DECODE,
            np.frombuffer(self.row_set.local_rows[rank], np.int32),
            self.num_computed_tokens[part],
            num_tokens=None if self.num_tokens is None else self.num_tokens[part],
            num_new_blocks=None if num_new is None else num_new[part],
            new_block_ids=None if num_new is None else self.new_block_ids[blocks],
            new_window_block_ids=None if window_ids is None else window_ids[blocks],
        )


@dataclass(frozen=True, slots=True, eq=False)  # hashed by identity: by value it takes 5 us
class Agreement:
    """What every rank must do alike; StepAgreement in executor.proto.

    Attributes:
        graph_miss: Why ``graph_size`` is None; for statistics, not sent.
        num_draft_tokens: Tokens that each sequence verifies; 0: the step is not speculative.
        global_num_tokens_for_draft: [dp_size] rows that the draft model runs behind a step that
            is not speculative; empty where it runs none.
        global_num_sampled: [dp_size] sequences that sample; as empty.
    """

    global_num_tokens: tuple[int, ...]
    global_num_tokens_for_logprob: tuple[int, ...]
    has_extend: bool
    padding_mode: PaddingMode
    graph_size: int | None
    graph_miss: GraphMiss | None = None
    num_draft_tokens: int = 0
    global_num_tokens_for_draft: tuple[int, ...] = ()
    global_num_sampled: tuple[int, ...] = ()


class StepPlan(NamedTuple):
    """A step of all DP ranks.

    Attributes:
        decodes: All ranks'.
        chunks: By DP rank, what runs of prompts behind its decodes, if anything.
        scorings: By DP rank, who gets log probabilities, if anybody, in batch order.
        runs: bool [R], rows of the sequence table that take part.
        sampled_rows: Rows of the sequence table that sample, ranks in order, in batch order; None:
            those of the decodes.
        num_sampled: [dp_size] how many of these each rank has.
        limits: int32, of each decode, the most tokens that it may gain; None: 1 each.
        kv_tokens: int64 [dp_size], computed tokens of each rank's decodes, whose KV they read.
        num_pairs: float64 [dp_size], query-key pairs of each rank's chunks; None: all decode.
    """

    agreement: Agreement
    decodes: DecodeColumns
    chunks: Mapping[int, RankBatch]
    scorings: Mapping[int, SequenceOf[Scoring]]
    runs: Mask
    sampled_rows: Rows | None
    num_sampled: SequenceOf[int]
    limits: Int32Array | None
    kv_tokens: Rows
    num_pairs: npt.NDArray[np.float64] | None = None

    def batch(self, rank: int) -> RankBatch:
        """Returns one DP rank's part, made for each call."""
        batch = join_batches(self.decodes.batch(rank), self.chunks.get(rank))
        return batch._replace(scorings=self.scorings.get(rank, ()))

    @property
    def batches(self) -> list[RankBatch]:
        """Each DP rank's part, made for each call."""
        return [self.batch(rank) for rank in range(len(self.num_sampled))]


def join_batches(decodes: RankBatch, chunks: RankBatch | None) -> RankBatch:
    """Returns a rank's decodes followed by its chunks."""
    num_decodes = len(decodes.rows)
    if chunks is None or not num_decodes:
        return chunks or decodes
    zeros, ones = np.zeros(num_decodes, dtype=np.int32), np.ones(num_decodes, dtype=np.int32)
    ahead: Iterable[Any] = (
        decodes.rows,
        decodes.num_computed_tokens,
        np.full(num_decodes, LAST_SAMPLED, dtype=np.int32),
        ones,
        zeros if decodes.num_new_blocks is None else decodes.num_new_blocks,
        NOTHING if decodes.new_block_ids is None else decodes.new_block_ids,
        NOTHING if decodes.new_window_block_ids is None else decodes.new_window_block_ids,
        ones.astype(np.uint8),
        zeros,
        NOTHING,
    )
    columns: Iterable[Any] = (
        None if second is None else np.concatenate((first, second))
        for first, second in zip(ahead, chunks[1:11], strict=True)
    )
    return RankBatch._make((chunks.mode, *columns, chunks.starts, ()))


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Settings of steps for the engine and the group."""

    step_timeout_s: float = setting(60.0, above(0))
    """Seconds for the answer to a step; past it, the executor counts as lost, and a group that has
    work and has made no step for so long does not serve."""


@dataclass(slots=True)
class InFlight:
    """A step that has not come back. Times are of time.perf_counter.

    Attributes:
        begun: When its planning began.
        planned: When it was planned.
        is_late: Whether that was put off until the step before it was nearly over.
        sent: When it had been sent.
        step_id: Its number in the epoch, from its sending on.
        requests: Each DP rank's StepRequest, serialised, from its sending on.
        agreement_crc32: Of the agreement in them, which every executor answers.
    """

    plan: StepPlan
    begun: float
    planned: float
    is_late: bool = False
    sent: float = 0.0
    step_id: int = 0
    requests: SequenceOf[bytes] = ()
    agreement_crc32: int = 0


NO_FLOATS = np.zeros(0, dtype=np.float32)


class Scores(NamedTuple):
    """Log probabilities that a DP rank's part of a step gave; RankResult in executor.proto.

    Attributes:
        given_logprobs: Of the tokens that rows name, as many as each names for each of its scores.
    """

    logprobs: Float32Array = NO_FLOATS
    top_ids: Int32Array = NOTHING
    top_logprobs: Float32Array = NO_FLOATS
    given_logprobs: Float32Array = NO_FLOATS


class RowFailure(NamedTuple):
    """A row of a DP rank that cannot keep to its grammar, and why."""

    rank: int
    row: int
    problem: str


class StepResult(NamedTuple):
    """What a step gave, ranks end to end; S sequences that sample.

    Attributes:
        token_ids: [sum(gains)], of sequences end to end.
        gains: [S] tokens of each; None: 1 each.
        queued_ns: [dp_size] nanoseconds from its arrival at each rank until the one before was done.
        forward_ns: [dp_size] nanoseconds that each rank took.
        failures: Of grammars.
        scores: By DP rank, of those that give log probabilities.
    """

    token_ids: Int32Array
    gains: Int32Array | None
    queued_ns: SequenceOf[int]
    forward_ns: SequenceOf[int]
    failures: SequenceOf[RowFailure] = ()
    scores: Mapping[int, Scores] = MappingProxyType({})


# ---- groups


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The model as every executor described it.

    Attributes:
        name: What a request's `model` may say.
        architecture: First entry of `architectures` in the checkpoint's config.json.
        fingerprint: Of configuration and tensors; equal on equal checkpoints.
        vocab_size: Token ids are 0 to vocab_size - 1.
        max_model_len: Prompt and output tokens of one sequence together.
        eos_token_ids: Tokens that end an output unless a request ignores them.
        supports_constraints: Whether outputs can be constrained.
        engine: Release, and digest of the settings that executors share: what sums are rounded by.
        draws_drafts: Whether drafts of outputs that are sampled are accepted by chance.
    """

    name: str
    architecture: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    supports_constraints: bool = False
    engine: str = ""
    draws_drafts: bool = False

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that leaves room for an output token."""
        return self.max_model_len - 1


@dataclass(frozen=True, slots=True)
class CapturedSizes:
    """Captured sizes, ascending: sequences for decode, tokens for extend, and what replays those."""

    decode: tuple[int, ...] = ()
    extend: tuple[int, ...] = ()
    extend_runner: str = ""


NO_GRAPHS = CapturedSizes()


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationShape:
    """What the executors of a group can do with a draft model; Speculation in executor.proto.

    Attributes:
        algorithm: Which runners draft; for people.
        num_draft_tokens: Tokens that a sequence verifies: its last one, and drafts.
        num_draft_steps: Drafts on the longest path.
        topk: Drafts that each draft step goes on from; 1 is a chain.
        num_reserved_tokens: KV slots that a speculative step writes, from its first token on.
        kv_lookahead: KV slots that any other step writes beyond the tokens of a sequence that
            samples.
        extends: Whether the draft model runs over every token that the model runs.
    """

    algorithm: str
    num_draft_tokens: int
    num_draft_steps: int
    topk: int = 1
    num_reserved_tokens: int
    kv_lookahead: int = 0
    extends: bool = True

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 2:
            raise ValueError(
                f"speculation.num_draft_tokens={self.num_draft_tokens}: a sequence verifies its "
                f"last token and a draft at least, so need 2 or more"
            )
        if not 1 <= self.num_draft_steps < self.num_draft_tokens:
            raise ValueError(
                f"speculation.num_draft_steps={self.num_draft_steps}: of num_draft_tokens="
                f"{self.num_draft_tokens}, one is not a draft, so need 1 to "
                f"{self.num_draft_tokens - 1}"
            )
        if self.topk < 1:
            raise ValueError(f"speculation.topk={self.topk}: need 1, which is a chain, or more")
        if self.num_reserved_tokens < self.max_gain:
            raise ValueError(
                f"speculation.num_reserved_tokens={self.num_reserved_tokens}: a step may add "
                f"{self.max_gain} tokens to a sequence, so it writes as many KV slots at least"
            )

    @property
    def max_gain(self) -> int:
        """The most tokens that a sequence gains in a step: a whole path, and what follows it."""
        return self.num_draft_steps + 1


def window_reach(kv_window: int, block_size: int) -> int:
    """Returns how many blocks before a position's own its window may reach into."""
    return -(-max(0, kv_window - 1) // block_size)


def sequence_capacity(num_blocks: int, block_size: int, kv_window: int) -> int:
    """Returns how many tokens a sequence can have that has a KV pool for itself.

    With windows it needs, beside a block for each block_size tokens, as many again or those of its
    window: the block that is written, and those before it.
    """
    columns = num_blocks - 1  # without the scratch block
    if kv_window:
        columns = max(columns // 2, columns - 1 - window_reach(kv_window, block_size))
    return columns * block_size


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupShape:
    """What the scheduler must know of a group; the same on every DP rank but for the blocks.

    Attributes:
        dp_size: DP ranks.
        num_blocks: [dp_size] KV blocks of each rank, the scratch block included.
        block_size: Tokens per block.
        rows_per_rank: Sequences that can be live on a rank.
        max_num_batched_tokens: Tokens of a rank in one step.
        max_num_logits: Rows of logits of a rank in one step.
        max_model_len: Tokens of one sequence.
        attn_tp_size: Executors that share one DP rank's attention, and its rows between.
        graph_sizes: What the executors have captured.
        speculation: What they can draft; None without a draft model.
        kv_window: Tokens that windowed layers see, for which rows have a second block list; 0: none.
    """

    dp_size: int
    num_blocks: tuple[int, ...]
    block_size: int
    rows_per_rank: int
    max_num_batched_tokens: int
    max_num_logits: int
    max_model_len: int
    attn_tp_size: int = 1
    graph_sizes: CapturedSizes = NO_GRAPHS
    speculation: SpeculationShape | None = None
    kv_window: int = 0

    def __post_init__(self) -> None:
        if len(self.num_blocks) != self.dp_size:
            raise ValueError(
                f"num_blocks has {len(self.num_blocks)} entries for dp_size={self.dp_size}"
            )
        capacity = sequence_capacity(min(self.num_blocks), self.block_size, self.kv_window)
        if not 0 < self.max_model_len <= capacity:
            raise ValueError(
                f"max_model_len={self.max_model_len}: the smallest KV pool holds {capacity} tokens; "
                f"raise the executors' KV cache or lower their max_model_len"
            )
        for name in ("max_num_batched_tokens", "max_num_logits"):
            if getattr(self, name) < self.rows_per_rank:
                raise ValueError(
                    f"{name}={getattr(self, name)} is below max_num_seqs={self.rows_per_rank}: "
                    f"a step of decodes would not fit"
                )

    @property
    def max_window_blocks(self) -> int:
        """Blocks beyond those of its tokens that a row of a prompt may hold; 0 without windows.

        Those of its window, and all of two steps' chunks: the first is not answered yet when the
        second gets its blocks.
        """
        if not self.kv_window:
            return 0
        num_chunk_blocks = -(-self.max_num_batched_tokens // self.block_size)
        return window_reach(self.kv_window, self.block_size) + 1 + 2 * num_chunk_blocks

    def check(self, agreement: Agreement) -> None:
        """Checks that a step is within what the executors have room for. They would refuse it."""
        num_tokens = max(agreement.global_num_tokens)
        num_logits = max(agreement.global_num_tokens_for_logprob)
        most_tokens, most_logits = self.max_num_batched_tokens, self.max_num_logits
        if agreement.num_draft_tokens:  # for which there is room beside the budget
            most_tokens = most_logits = self.rows_per_rank * agreement.num_draft_tokens
        assert num_tokens <= most_tokens, (
            f"planned {num_tokens} tokens on a rank; the budget is {most_tokens}"
        )
        assert num_logits <= most_logits, (
            f"planned {num_logits} rows of logits on a rank; the budget is {most_logits}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupInfo:
    """A group that has formed.

    Attributes:
        addresses: [dp_size] where each DP rank's first executor listens.
        kv_ids: [dp_size] which KV is behind each DP rank's block ids: the same as in an earlier epoch
            if nobody but that epoch's steps has written there; "" if that is not known.
    """

    epoch: int
    model: ServedModel
    shape: GroupShape
    addresses: tuple[str, ...]
    kv_ids: tuple[str, ...] = ()
