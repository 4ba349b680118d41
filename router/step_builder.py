"""Turns the rows that run into the columns that travel, and marks them as handed out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from router.planner import agree
from router.request import Int32Array
from router.sequence_table import Rows, RowStatus, SequenceTable
from router.step import ForwardMode, RankBatch, RowStart, Scoring, StepPlan

LAST_SAMPLED = -1  # stands for the token that the row sampled last

NOTHING = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Known tokens of a sequence to run: ``num_tokens`` from its first uncomputed one on."""

    row: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Captured sizes, ascending: sequences for decode, tokens for extend."""

    decode: tuple[int, ...] = ()
    extend: tuple[int, ...] = ()


NO_GRAPHS = GraphSizes()


def build_plan(
    table: SequenceTable,
    decodes: Rows,
    chunks: Sequence[Sequence[Chunk]],
    graph_sizes: GraphSizes,
) -> StepPlan:
    """Builds the step that runs the next token of each decode and all of each chunk.

    Args:
        decodes: Rows in DECODE, ascending, each with a block for its next token.
        chunks: [dp_size] chunks of each rank, each with blocks for its tokens.
        graph_sizes: What the executors have captured.
    """
    batches = _decode_batches(table, decodes)
    rows, sampled = decodes, decodes
    num_tokens = [len(batch.rows) for batch in batches]
    num_logits = list(num_tokens)
    has_extend = any(chunks)
    if has_extend:
        for rank, rank_chunks in enumerate(chunks):
            if rank_chunks:
                batch = batches[rank] = _join(batches[rank], _chunk_batch(table, rank_chunks))
                assert batch.samples is not None
                num_tokens[rank] = len(batch.token_ids)
                num_scored = sum(len(scoring.scored_ids) for scoring in batch.scorings)
                num_logits[rank] = int(batch.samples.sum()) + num_scored
        rows, sampled = _rows_in_order(table, batches)
    table.num_in_flight[rows] += 1
    agreement = agree(
        num_tokens,
        num_logits,
        has_extend=has_extend,
        num_sequences=[len(batch.rows) for batch in batches],
        decode_graph_sizes=graph_sizes.decode,
        extend_graph_sizes=graph_sizes.extend,
    )
    return StepPlan(agreement, tuple(batches), rows, sampled)


def _decode_batches(table: SequenceTable, decodes: Rows) -> list[RankBatch]:
    """Returns every rank's decodes: columns of all ranks at once, then cut by rank."""
    computed = table.num_computed[decodes]
    token_ids = np.full(len(decodes), LAST_SAMPLED, dtype=np.int32)
    known = np.flatnonzero(table.num_tokens[decodes] > computed)
    token_ids[known] = table.tokens[decodes[known], computed[known]]
    num_blocks = table.num_blocks[decodes]
    num_new_blocks = num_blocks - table.num_sent_blocks[decodes]
    growing = np.flatnonzero(num_new_blocks)
    assert num_new_blocks.max(initial=0) <= 1
    new_block_ids = table.block_table[decodes[growing], num_blocks[growing] - 1]
    table.num_sent_blocks[decodes] = num_blocks
    table.num_computed[decodes] = computed + 1
    local_rows = (decodes % table.rows_per_rank).astype(np.int32)
    scored = table.scores_output[decodes]
    has_scores = bool(scored.any())

    first_rows = np.arange(table.dp_size + 1) * table.rows_per_rank
    cuts = np.searchsorted(decodes, first_rows).tolist()
    block_cuts = np.searchsorted(growing, cuts).tolist()
    batches = []
    for rank in range(table.dp_size):
        start, end = cuts[rank], cuts[rank + 1]
        if start == end:
            batches.append(RankBatch(ForwardMode.IDLE, NOTHING, NOTHING, NOTHING))
            continue
        batch = RankBatch(
            ForwardMode.DECODE, local_rows[start:end], computed[start:end], token_ids[start:end]
        )
        block_start, block_end = block_cuts[rank], block_cuts[rank + 1]
        if block_start < block_end:
            batch.num_new_blocks = num_new_blocks[start:end]
            batch.new_block_ids = new_block_ids[block_start:block_end]
        if has_scores:
            batch.scorings = _decode_scorings(table, decodes[start:end], scored[start:end])
        batches.append(batch)
    return batches


def _decode_scorings(
    table: SequenceTable, rows: Rows, is_scored: npt.NDArray[np.bool_]
) -> list[Scoring]:
    return [
        Scoring(table.bound(rows[index]), NOTHING, index)
        for index in np.flatnonzero(is_scored).tolist()
    ]


def _chunk_batch(table: SequenceTable, chunks: Sequence[Chunk]) -> RankBatch:
    """Returns one rank's chunks, which move their rows on; the last of a row makes it DECODE."""
    num_chunks = len(chunks)
    local_rows, computed, num_tokens, num_new_blocks, num_scored = np.zeros(
        (5, num_chunks), dtype=np.int32
    )
    samples = np.zeros(num_chunks, dtype=np.uint8)
    token_ids, new_block_ids, scored_ids = [], [], []
    starts, scorings = [], []
    for i, chunk in enumerate(chunks):
        row = chunk.row
        sequence = table.bound(row)
        start = int(table.num_computed[row])
        end = start + chunk.num_tokens
        num_sent, num_blocks = table.num_sent_blocks[row], table.num_blocks[row]
        local_rows[i] = row % table.rows_per_rank
        computed[i] = start
        num_tokens[i] = chunk.num_tokens
        token_ids.append(table.tokens[row, start:end])
        num_new_blocks[i] = num_blocks - num_sent
        new_block_ids.append(table.block_table[row, num_sent:num_blocks])
        if num_sent == 0:
            starts.append(RowStart(int(local_rows[i]), sequence))
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
            sample_index = int(samples[:i].sum()) if scores_output else None
            scorings.append(Scoring(sequence, scored, sample_index))
        table.num_sent_blocks[row] = num_blocks
        table.num_computed[row] = end
    return RankBatch(
        ForwardMode.EXTEND,
        local_rows,
        computed,
        np.concatenate(token_ids),
        num_tokens=num_tokens,
        num_new_blocks=num_new_blocks,
        new_block_ids=np.concatenate(new_block_ids),
        samples=samples,
        num_scored=num_scored if scored_ids else None,
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
    ones = np.ones(num_decodes, dtype=np.int32)
    zeros = np.zeros(num_decodes, dtype=np.int32)
    return RankBatch(
        ForwardMode.EXTEND,
        np.concatenate((decodes.rows, chunks.rows)),
        np.concatenate((decodes.num_computed_tokens, chunks.num_computed_tokens)),
        np.concatenate((decodes.token_ids, chunks.token_ids)),
        num_tokens=np.concatenate((ones, chunks.num_tokens)),
        num_new_blocks=_concatenate((decodes.num_new_blocks, chunks.num_new_blocks), zeros),
        new_block_ids=_concatenate((decodes.new_block_ids, chunks.new_block_ids), NOTHING),
        samples=np.concatenate((ones.astype(np.uint8), chunks.samples)),
        num_scored=(
            None if chunks.num_scored is None else np.concatenate((zeros, chunks.num_scored))
        ),
        scored_ids=chunks.scored_ids,
        starts=chunks.starts,
        scorings=decodes.scorings + [_behind(num_decodes, s) for s in chunks.scorings],
    )


def _behind(num_decodes: int, scoring: Scoring) -> Scoring:
    if scoring.sample_index is None:
        return scoring
    return replace(scoring, sample_index=scoring.sample_index + num_decodes)


def _concatenate(columns: Iterable[Int32Array | None], default: Int32Array) -> Int32Array:
    return np.concatenate([default if column is None else column for column in columns])


def _rows_in_order(table: SequenceTable, batches: Sequence[RankBatch]) -> tuple[Rows, Rows]:
    """Returns the table's rows of all batches in wire order, and those of them that sample."""
    rows, sampled = [], []
    for rank, batch in enumerate(batches):
        rank_rows = batch.rows.astype(np.int64) + rank * table.rows_per_rank
        rows.append(rank_rows)
        is_sampled = batch.samples
        sampled.append(rank_rows if is_sampled is None else rank_rows[is_sampled == 1])
    return np.concatenate(rows), np.concatenate(sampled)
