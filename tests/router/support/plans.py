"""Plans of steps from each DP rank's part, and results from each rank's answer."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from router.requests.request import Int32Array
from router.scheduling.columns import RowSet
from router.scheduling.step import (
    Agreement,
    BatchMode,
    DecodeColumns,
    PaddingMode,
    RankBatch,
    RowFailure,
    Scores,
    StepPlan,
    StepResult,
)

NOTHING = np.zeros(0, dtype=np.int32)
NO_ROWS = np.zeros(0, dtype=np.int64)
NO_RUNS = np.zeros(0, dtype=np.bool_)
NO_DECODES = RankBatch(BatchMode.IDLE, NOTHING, NOTHING)


class RankResult(NamedTuple):
    """What one DP rank's part of a step gave; see StepResult."""

    token_ids: Int32Array
    gains: Int32Array | None = None
    queued_ns: int = 0
    forward_ns: int = 0
    scores: Scores | None = None
    failures: Sequence[tuple[int, str]] = ()


def join_results(parts: Sequence[RankResult]) -> StepResult:
    """Returns the result of a step from all ranks' parts."""
    gains = [np.ones_like(p.token_ids) if p.gains is None else p.gains for p in parts]
    return StepResult(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate(gains) if any(part.gains is not None for part in parts) else None,
        [part.queued_ns for part in parts],
        [part.forward_ns for part in parts],
        [RowFailure(rank, *fail) for rank, part in enumerate(parts) for fail in part.failures],
        {rank: part.scores for rank, part in enumerate(parts) if part.scores is not None},
    )


def join_batches(batches: Sequence[RankBatch], **agreement: Any) -> StepPlan:
    """Returns a plan of all ranks' parts, those that only decode in its columns."""
    chunks = {rank: batch for rank, batch in enumerate(batches) if not _only_decodes(batch)}
    parts = [NO_DECODES if rank in chunks else batch for rank, batch in enumerate(batches)]
    num_tokens = tuple(
        len(batch.rows if batch.token_ids is None else batch.token_ids) for batch in batches
    )
    fields = {
        "global_num_tokens": num_tokens,
        "global_num_tokens_for_logprob": num_tokens,
        "has_extend": False,
        "padding_mode": PaddingMode.MAX_LEN,
        "graph_size": None,
        **agreement,
    }
    limits = [
        batch.num_tokens
        for batch in batches
        if batch.mode is BatchMode.DECODE and batch.num_tokens is not None
    ]
    samples = [np.ones_like(b.rows) if b.samples is None else b.samples for b in batches]
    return StepPlan(
        agreement=Agreement(**fields),
        decodes=_columns(parts),
        chunks=chunks,
        scorings={rank: batch.scorings for rank, batch in chunks.items() if batch.scorings},
        runs=NO_RUNS,
        sampled_rows=None,
        num_sampled=[int(column.sum()) for column in samples],
        limits=np.concatenate(limits) if limits else None,
        kv_tokens=NO_ROWS,
    )


def _only_decodes(batch: RankBatch) -> bool:
    is_plain = batch.token_ids is None and batch.samples is None
    return is_plain and not batch.starts and not batch.scorings


def _columns(parts: Sequence[RankBatch]) -> DecodeColumns:
    num_rows = [len(part.rows) for part in parts]
    new_blocks = [part.new_block_ids for part in parts]
    num_blocks = [0 if ids is None else len(ids) for ids in new_blocks]
    local_rows = [part.rows.tobytes() for part in parts]
    row_set = RowSet(NO_RUNS, num_rows, [0, *accumulate(num_rows)], local_rows)
    return DecodeColumns(
        row_set,
        np.concatenate([part.num_computed_tokens for part in parts]),
        _joined([part.num_tokens for part in parts]),
        _joined(
            [np.zeros_like(p.rows) if p.num_new_blocks is None else p.num_new_blocks for p in parts]
        ),
        np.concatenate([NOTHING, *(ids for ids in new_blocks if ids is not None)]),
        _joined([part.new_window_block_ids for part in parts]),
        [0, *accumulate(num_blocks)],
    )


def _joined(columns: Sequence[Int32Array | None]) -> Int32Array | None:
    given = [column for column in columns if column is not None]
    return np.concatenate(given) if given else None
