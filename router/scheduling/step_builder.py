"""Step builder: the rows that run as the columns that travel, marked as handed out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, pairwise

import numpy as np
import numpy.typing as npt

from router.requests.request import Int32Array
from router.scheduling.planner import agree
from router.scheduling.sequence_table import Rows, RowSet, RowStatus, SequenceTable, spread
from router.scheduling.step import (
    BatchMode,
    CapturedSizes,
    RankBatch,
    RowStart,
    Scoring,
    SpeculationShape,
    StepPlan,
)

LAST_SAMPLED = -1  # in a batch with chunks: the token that the row of a decode sampled last

NOTHING = np.zeros(0, dtype=np.int32)
NewBlocks = tuple[Int32Array | None, Int32Array | None]
NO_NEW_BLOCKS: NewBlocks = (None, None)
IDLE = RankBatch(BatchMode.IDLE, NOTHING, NOTHING)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Known tokens of a sequence to run: ``num_tokens`` from its first uncomputed one on."""

    row: int
    num_tokens: int


def build_plan(
    table: SequenceTable,
    decodes: RowSet,
    runs: npt.NDArray[np.bool_],
    chunks: Sequence[Sequence[Chunk]],
    graph_sizes: CapturedSizes,
    attn_tp_size: int = 1,
    *,
    speculation: SpeculationShape | None = None,
    limits: Int32Array | None = None,
) -> StepPlan:
    """Builds the step that runs the next token of each decode and all of each chunk.

    With limits it is speculative: each decode verifies drafts behind its next token.

    Args:
        decodes: Rows that decode, each with a block for its next token.
        runs: bool [R], the same rows. The plan keeps it, with the rows of the chunks added.
        chunks: [dp_size] chunks of each rank, each with blocks for its tokens; or none at all.
        graph_sizes: What the executors have captured.
        attn_tp_size: Executors that share a rank's rows.
        speculation: What the executors can draft; None: nothing, or no step ever does, and then
            the draft model runs nothing either.
        limits: int32, of each decode, the most tokens that it may gain, each with a block; then
            there are no chunks. None: the step is not speculative.
    """
    batches = _decode_batches(table, decodes, runs, limits, grows_by_one=speculation is None)
    sampled = decodes.rows
    num_sequences = num_tokens = num_logits = num_draft_rows = num_sampled = decodes.num_rows
    num_draft_tokens = 0
    if limits is not None:
        assert speculation is not None
        assert not any(chunks)
        num_draft_tokens = speculation.num_draft_tokens
        num_tokens = num_logits = [num_draft_tokens * count for count in num_sequences]
    has_extend = any(chunks)
    if has_extend:
        num_tokens, num_logits, num_draft_rows, num_sampled = (
            list(decodes.num_rows) for _ in range(4)
        )
        sampled_parts, sampled_end = [], 0
        for rank, rank_chunks in enumerate(chunks):
            if not rank_chunks:
                continue
            batch = _chunk_batch(table, rank_chunks)
            assert batch.samples is not None
            assert batch.token_ids is not None
            samples = batch.samples.tolist()
            rank_end = decodes.parts[rank].stop
            sampled_parts.append(decodes.rows[sampled_end:rank_end])
            sampled_parts.append(_rows_of(compress(rank_chunks, samples)))
            sampled_end = rank_end
            num_scored = sum(len(scoring.scored_ids) for scoring in batch.scorings)
            num_tokens[rank] += len(batch.token_ids)
            num_logits[rank] += sum(samples) + num_scored
            num_draft_rows[rank] += len(batch.token_ids) + sum(samples)
            num_sampled[rank] += sum(samples)
            batches[rank] = _join(batches[rank], batch)
        sampled = np.concatenate((*sampled_parts, decodes.rows[sampled_end:]))
        runs[_rows_of(chain.from_iterable(chunks))] = True
        num_sequences = [len(batch.rows) for batch in batches]
    table.num_in_flight += runs
    if speculation is None or not speculation.extends or limits is not None:
        num_draft_rows = num_sampled = []  # no draft-extend of its own follows
    agreement = agree(
        num_tokens,
        num_logits,
        has_extend=has_extend,
        num_sequences=num_sequences,
        attn_tp_size=attn_tp_size,
        decode_graph_sizes=graph_sizes.decode,
        extend_graph_sizes=graph_sizes.extend,
        num_draft_tokens=num_draft_tokens,
        num_draft_rows=num_draft_rows,
        num_sampled=num_sampled,
    )
    return StepPlan(agreement, tuple(batches), runs, sampled, limits)


def _rows_of(chunks: Iterable[Chunk]) -> Rows:
    return np.array([chunk.row for chunk in chunks], dtype=np.int64)


def _decode_batches(
    table: SequenceTable,
    decodes: RowSet,
    runs: npt.NDArray[np.bool_],
    limits: Int32Array | None,
    *,
    grows_by_one: bool,
) -> list[RankBatch]:
    """Returns every rank's decodes: columns of all ranks at once, then cut by rank."""
    computed = table.num_computed.take(decodes.rows)
    if limits is None:
        table.num_computed += runs
    else:
        table.num_computed[decodes.rows] = computed + limits
    new_blocks = [NO_NEW_BLOCKS] * table.dp_size
    has_grown = table.num_blocks != table.num_sent_blocks
    has_grown &= runs
    if has_grown.any():
        new_blocks = _new_blocks(table, decodes, has_grown, grows_by_one=grows_by_one)
    batches = [
        RankBatch(
            BatchMode.DECODE,
            local_rows,
            computed[part],
            None,
            None if limits is None else limits[part],
            *blocks,
        )
        if len(local_rows)
        else IDLE
        for local_rows, part, blocks in zip(
            decodes.local_rows, decodes.parts, new_blocks, strict=True
        )
    ]
    is_scored = table.scores_output & runs
    if is_scored.any():
        _add_scorings(batches, table, decodes, is_scored)
    return batches


def _new_blocks(
    table: SequenceTable,
    decodes: RowSet,
    has_grown: npt.NDArray[np.bool_],
    *,
    grows_by_one: bool,
) -> list[NewBlocks]:
    """Returns each rank's `num_new_blocks` and `new_block_ids`, of its grown rows in order."""
    grown = np.flatnonzero(has_grown)
    cuts = table.cuts_of(grown)
    places = (table.block_starts + table.num_sent_blocks).take(grown)
    if grows_by_one:
        table.num_sent_blocks += has_grown
        num_new = has_grown.take(decodes.rows).astype(np.int32)
    else:  # drafts may take a row over several blocks' ends
        num_unsent = np.where(has_grown, table.num_blocks - table.num_sent_blocks, 0)
        num_new = num_unsent.take(decodes.rows)
        table.num_sent_blocks += num_unsent
        counts = num_unsent.take(grown)
        places = spread(places, counts)
        cuts = np.concatenate(([0], counts.cumsum())).take(cuts).tolist()
    block_ids = table.flat_blocks.take(places)
    return [
        (num_new[part], block_ids[start:end]) if start < end else NO_NEW_BLOCKS
        for part, (start, end) in zip(decodes.parts, pairwise(cuts), strict=True)
    ]


def _add_scorings(
    batches: list[RankBatch],
    table: SequenceTable,
    decodes: RowSet,
    is_scored: npt.NDArray[np.bool_],
) -> None:
    """Adds the decodes that get log probabilities."""
    for rank, part in enumerate(decodes.parts):
        scorings = [
            Scoring(table.bound(row), NOTHING, index)
            for index, row in enumerate(decodes.rows[part].tolist())
            if is_scored[row]
        ]
        if scorings:
            batches[rank] = batches[rank]._replace(scorings=scorings)


def _chunk_batch(table: SequenceTable, chunks: Sequence[Chunk]) -> RankBatch:
    """Returns one rank's chunks, which move their rows on; the last of a row makes it DECODE."""
    num_chunks = len(chunks)
    computed, num_new_blocks, num_scored, samples = ([0] * num_chunks for _ in range(4))
    token_ids, new_block_ids, scored_ids = [], [], []
    starts, scorings = [], []
    for i, chunk in enumerate(chunks):
        row = chunk.row
        sequence = table.bound(row)
        start = int(table.num_computed[row])
        end = start + chunk.num_tokens
        num_sent, num_blocks = int(table.num_sent_blocks[row]), int(table.num_blocks[row])
        computed[i] = start
        token_ids.append(table.tokens[row, start:end])
        num_new_blocks[i] = num_blocks - num_sent
        new_block_ids.append(table.block_table[row, num_sent:num_blocks])
        if num_sent == 0:
            starts.append(RowStart(row % table.rows_per_rank, sequence))
        if end == table.num_extend[row]:
            samples[i] = 1
            table.status[row] = RowStatus.DECODE
        scored = NOTHING
        if table.scores_prompt[row]:
            scored = table.tokens[row, start + 1 : min(end + 1, sequence.num_prompt_tokens)]
            num_scored[i] = len(scored)
            scored_ids.append(scored)
        scores_output = samples[i] and table.scores_output[row]
        if len(scored) or scores_output:
            sample_index = sum(samples[:i]) if scores_output else None
            scorings.append(Scoring(sequence, scored, sample_index))
        table.num_sent_blocks[row] = num_blocks
        table.num_computed[row] = end
    return RankBatch(
        BatchMode.EXTEND,
        _int32([chunk.row % table.rows_per_rank for chunk in chunks]),
        _int32(computed),
        np.concatenate(token_ids),
        num_tokens=_int32([chunk.num_tokens for chunk in chunks]),
        num_new_blocks=_int32(num_new_blocks),
        new_block_ids=np.concatenate(new_block_ids),
        samples=np.array(samples, dtype=np.uint8),
        num_scored=_int32(num_scored) if scored_ids else None,
        scored_ids=np.concatenate(scored_ids) if scored_ids else None,
        starts=starts,
        scorings=scorings,
    )


def _join(decodes: RankBatch, chunks: RankBatch) -> RankBatch:
    """Returns a rank's decodes followed by its chunks."""
    num_decodes = len(decodes.rows)
    if num_decodes == 0:
        return chunks
    assert chunks.num_tokens is not None
    assert chunks.num_new_blocks is not None
    assert chunks.samples is not None
    assert chunks.token_ids is not None
    ones = np.ones(num_decodes, dtype=np.int32)
    zeros = np.zeros(num_decodes, dtype=np.int32)
    return RankBatch(
        BatchMode.EXTEND,
        np.concatenate((decodes.rows, chunks.rows)),
        np.concatenate((decodes.num_computed_tokens, chunks.num_computed_tokens)),
        np.concatenate((np.full_like(decodes.rows, LAST_SAMPLED), chunks.token_ids)),
        num_tokens=np.concatenate((ones, chunks.num_tokens)),
        num_new_blocks=_concatenate((decodes.num_new_blocks, chunks.num_new_blocks), zeros),
        new_block_ids=_concatenate((decodes.new_block_ids, chunks.new_block_ids), NOTHING),
        samples=np.concatenate((ones.astype(np.uint8), chunks.samples)),
        num_scored=(
            None if chunks.num_scored is None else np.concatenate((zeros, chunks.num_scored))
        ),
        scored_ids=chunks.scored_ids,
        starts=chunks.starts,
        scorings=[*decodes.scorings, *(_behind(num_decodes, s) for s in chunks.scorings)],
    )


def _behind(num_decodes: int, scoring: Scoring) -> Scoring:
    if scoring.sample_index is None:
        return scoring
    return replace(scoring, sample_index=scoring.sample_index + num_decodes)


def _int32(values: list[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)


def _concatenate(columns: Iterable[Int32Array | None], default: Int32Array) -> Int32Array:
    return np.concatenate([default if column is None else column for column in columns])
