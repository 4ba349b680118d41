"""A step as a value: what the scheduler decides and what the executors answer. Data only.

What there is of each rank in each step is a named tuple: made in a third of a dataclass's time.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum, auto
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.requests.request import Float32Array, Int32Array, Sequence


class ForwardMode(IntEnum):
    IDLE = 0  # no sequences, but every collective call
    DECODE = 1  # one token per sequence, none of them a prompt's; with drafts, some
    EXTEND = 2  # some sequence runs prompt tokens


class DpPaddingMode(Enum):
    MAX_LEN = auto()  # pad every rank to the largest, then all-gather
    SUM_LEN = auto()  # lay ranks end to end, then all-reduce


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

    Attributes:
        rows: [B] rows of this rank's block table.
        num_computed_tokens: [B]; upper bounds where an earlier step with drafts is not back.
        token_ids: [sum(num_tokens)], -1 for the row's last sampled token; None: -1 each.
        num_tokens: [B]; None: 1 each. In a speculative step, the only kind of DECODE that has
            it, the most tokens that each sequence may gain.
        num_new_blocks: [B]; None: none.
        new_block_ids: [sum(num_new_blocks)].
        samples: [B]; None: all of them.
        num_scored: [B]; None: none.
        scored_ids: [sum(num_scored)].
        starts: Rows that begin.
        scorings: Sequences that get log probabilities, in batch order.
    """

    mode: ForwardMode
    rows: Int32Array
    num_computed_tokens: Int32Array
    token_ids: Int32Array | None = None
    num_tokens: Int32Array | None = None
    num_new_blocks: Int32Array | None = None
    new_block_ids: Int32Array | None = None
    samples: npt.NDArray[np.uint8] | None = None
    num_scored: Int32Array | None = None
    scored_ids: Int32Array | None = None
    starts: SequenceOf[RowStart] = ()
    scorings: SequenceOf[Scoring] = ()


class GraphMiss(StrEnum):
    """Why a step replays no graph."""

    NOT_CAPTURED = auto()  # the executors have no graph of its kind
    TOO_LARGE = auto()  # it is larger than the largest graph
    MOSTLY_PADDING = auto()  # more than half of the smallest graph that fits would be padding
    IDLE_RANK = auto()  # a rank without tokens cannot replay an extend


@dataclass(frozen=True, slots=True)
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
    padding_mode: DpPaddingMode
    graph_size: int | None
    graph_miss: GraphMiss | None = None
    num_draft_tokens: int = 0
    global_num_tokens_for_draft: tuple[int, ...] = ()
    global_num_sampled: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step of all DP ranks.

    Attributes:
        batches: One per DP rank.
        runs: bool [R], rows of the sequence table that take part.
        sampled_rows: Rows of the sequence table that sample, ranks in order, in batch order.
        limits: int32, of each of those rows, the most tokens that it may gain; None: 1 each.
    """

    agreement: Agreement
    batches: tuple[RankBatch, ...]
    runs: npt.NDArray[np.bool_]
    sampled_rows: npt.NDArray[np.int64]
    limits: Int32Array | None = None


NO_FLOATS = np.zeros(0, dtype=np.float32)
NO_INTS = np.zeros(0, dtype=np.int32)


class RankResult(NamedTuple):
    """What one DP rank's part of a step gave; RankResult in executor.proto.

    Attributes:
        next_token_ids: [sum(num_next_tokens)], sequences that sample end to end.
        num_next_tokens: Of each of them; None: 1 each.
    """

    next_token_ids: Int32Array
    logprobs: Float32Array = NO_FLOATS
    top_ids: Int32Array = NO_INTS
    top_logprobs: Float32Array = NO_FLOATS
    queued_ns: int = 0
    forward_ns: int = 0
    num_next_tokens: Int32Array | None = None


StepResult = tuple[RankResult, ...]
