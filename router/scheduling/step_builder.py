"""Step builder: the rows that run as the columns that travel, and the ranks' agreement on the step.

Decodes are columns of all ranks at once: most steps have nothing else, and nobody cuts these before
they are sent. A rank with chunks of prompts has a batch of its own, with the chunks behind its decodes.
Rows are marked as handed out.
"""

from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from router.requests.request import Int32Array
from router.scheduling.columns import Mask, Rows, RowSet, offsets, spread
from router.scheduling.sequence_table import RowStatus, SequenceTable
from router.scheduling.step import (
    NO_GRAPHS,
    Agreement,
    BatchMode,
    CapturedSizes,
    DecodeColumns,
    GraphMiss,
    GroupShape,
    PaddingMode,
    RankBatch,
    RowStart,
    Scoring,
    SpeculationShape,
    StepPlan,
)

LAST_SAMPLED = -1  # in a batch with chunks: the token that the row of a decode sampled last

NOTHING = np.zeros(0, dtype=np.int32)


class Chunk(NamedTuple):
    """Known tokens of a sequence to run: ``num_tokens`` from its first uncomputed one on."""

    row: int
    num_tokens: int


class Counts(NamedTuple):
    """Each rank's part of a step in numbers, all [dp_size].

    Attributes:
        logits: Rows of logits.
        draft_rows: Rows that the draft model runs behind a step that is not speculative; empty
            where it runs none.
        sampled: Sequences that sample; empty likewise.
    """

    sequences: list[int]
    tokens: list[int]
    logits: list[int]
    draft_rows: list[int]
    sampled: list[int]


class StepBuilder:
    """Builds the steps of one table.

    Args:
        table: Rows that run are marked as handed out.
        shape: The group's sizes.
        speculation: What the executors can draft; None: nothing, or no step ever does, and then the
            draft model runs nothing either.
    """

    def __init__(
        self, table: SequenceTable, shape: GroupShape, speculation: SpeculationShape | None
    ) -> None:
        self._table = table
        self._shape = shape
        self._speculation = speculation
        self._last_decodes: RowSet | None = None  # of the last step with nothing else
        self._last_agreement: Agreement

    def build(
        self, runs: Mask, chunks: SequenceOf[SequenceOf[Chunk]], limits: Int32Array | None = None
    ) -> StepPlan:
        """Builds the step that runs the next token of each decode and all of each chunk.

        With limits it is speculative: each decode verifies drafts behind its next token.

        Args:
            runs: bool [R], rows that decode, each with a block for its next token. The plan keeps
                it, with the rows of the chunks added.
            chunks: [dp_size] chunks of each rank, each with blocks for its tokens; or none at all.
            limits: int32, of each decode, the most tokens that it may gain, each with a block; then
                there are no chunks. None: the step is not speculative.
        """
        table, speculation = self._table, self._speculation
        decodes, has_extend, num_draft_tokens = table.row_set(runs), any(chunks), 0
        kv_tokens = table.kv_tokens(runs)
        num_pairs = self._num_pairs(chunks) if has_extend else None
        columns, sampled_rows = self._decode_columns(decodes, limits), None
        mixed: dict[int, RankBatch] = {}
        num_rows = num_tokens = decodes.num_rows
        if limits is not None:
            assert speculation is not None
            assert not has_extend
            num_draft_tokens = speculation.num_draft_tokens
            num_tokens = [num_draft_tokens * count for count in num_rows]
        counts = Counts(num_rows, num_tokens, num_tokens, num_rows, num_rows)
        if has_extend:
            counts = Counts(*map(list[int], counts))
            sampled_rows = self._add_chunks(mixed, counts, columns, chunks)
            runs[[chunk.row for chunk in chain.from_iterable(chunks)]] = True
        if table.num_scored:
            self._add_scorings(mixed, columns)
        agreement = self._agree(decodes, counts, has_extend=has_extend, num_drafts=num_draft_tokens)
        sampled = sampled_rows, counts.sampled
        return StepPlan(agreement, columns, mixed, runs, *sampled, limits, kv_tokens, num_pairs)

    def _agree(
        self, decodes: RowSet, counts: Counts, *, has_extend: bool, num_drafts: int
    ) -> Agreement:
        """Returns the agreement; the last one, where the same rows only decode again."""
        is_plain = not has_extend and not num_drafts
        if is_plain and decodes is self._last_decodes:
            return self._last_agreement
        shape, speculation = self._shape, self._speculation
        # A speculative step has no draft-extend of its own behind it.
        if speculation is None or not speculation.extends or num_drafts:
            counts = Counts(*counts[:3], [], [])
        agreement = agree(
            counts,
            has_extend=has_extend,
            attn_tp_size=shape.attn_tp_size,
            graph_sizes=shape.graph_sizes,
            num_draft_tokens=num_drafts,
        )
        shape.check(agreement)
        if is_plain:
            self._last_decodes, self._last_agreement = decodes, agreement
        return agreement

    def _num_pairs(self, chunks: SequenceOf[SequenceOf[Chunk]]) -> npt.NDArray[np.float64]:
        """Returns float64 [dp_size], the pairs of tokens for which chunks work out attention."""
        pairs = np.zeros(self._table.dp_size)
        for rank, rank_chunks in enumerate(chunks):
            for row, count in rank_chunks:
                pairs[rank] += count * (int(self._table.num_computed[row]) + count / 2)
        return pairs

    # ---- steps without prompts

    def _decode_columns(self, decodes: RowSet, limits: Int32Array | None) -> DecodeColumns:
        """Returns every rank's decodes."""
        table, mask = self._table, decodes.mask
        computed = table.num_computed[mask]
        if limits is None:
            table.num_computed += mask
        else:
            table.num_computed[mask] = computed + limits
        num_new = table.num_blocks - table.num_sent_blocks
        has_new = num_new != 0
        has_new &= mask
        if not np.count_nonzero(has_new):
            no_cuts = [0] * (table.dp_size + 1)
            return DecodeColumns(decodes, computed, limits, None, NOTHING, None, no_cuts)
        grown = np.flatnonzero(has_new)
        counts, block_ids, window_ids = self._take_new_blocks(grown)
        cuts = table.cuts_of(grown)
        if len(block_ids) > len(grown):  # drafts may take a row over several blocks' ends
            cuts = offsets(counts, cuts)
        columns = limits, num_new[mask], block_ids, window_ids
        return DecodeColumns(decodes, computed, *columns, cuts)

    def _take_new_blocks(self, rows: Rows) -> tuple[Int32Array, Int32Array, Int32Array | None]:
        """Returns how many blocks each row has that its executor does not know, and the blocks.

        The third are those for windowed layers; None without any.
        """
        table = self._table
        num_sent, num_blocks = table.num_sent_blocks.take(rows), table.num_blocks.take(rows)
        num_new = num_blocks - num_sent
        first = table.block_starts.take(rows) + num_sent
        places = spread(first, num_new)
        window_ids = table.flat_window_blocks.take(places) if table.has_windows else None
        table.num_sent_blocks[rows] = num_blocks
        return num_new, table.flat_blocks.take(places), window_ids

    def _add_chunks(
        self,
        mixed: dict[int, RankBatch],
        counts: Counts,
        decodes: DecodeColumns,
        chunks: SequenceOf[SequenceOf[Chunk]],
    ) -> Rows:
        """Adds each rank's chunks behind its decodes. Returns all rows that sample, ranks in order."""
        table = self._table
        sampled_parts = np.split(decodes.row_set.rows, decodes.row_set.cuts[1:-1])
        for rank, rank_chunks in enumerate(chunks):
            if not rank_chunks:
                continue
            batch = self._chunk_batch(rank_chunks)
            assert batch.samples is not None
            assert batch.token_ids is not None
            sampled = batch.rows[batch.samples != 0] + table.first_rows[rank]
            num_scored = 0 if batch.scored_ids is None else len(batch.scored_ids)
            counts.sequences[rank] += len(batch.rows)
            counts.tokens[rank] += len(batch.token_ids)
            counts.logits[rank] += len(sampled) + num_scored
            counts.draft_rows[rank] += len(batch.token_ids) + len(sampled)
            counts.sampled[rank] += len(sampled)
            sampled_parts[rank] = np.concatenate((sampled_parts[rank], sampled))
            mixed[rank] = _join(decodes.batch(rank), batch)
        return np.concatenate(sampled_parts)

    def _chunk_batch(self, chunks: SequenceOf[Chunk]) -> RankBatch:
        """Returns one rank's chunks. The last one of a prompt makes its row DECODE."""
        table = self._table
        columns, starts = [], []
        for chunk in chunks:
            row, start = chunk.row, int(table.num_computed[chunk.row])
            end, local_row = start + chunk.num_tokens, row % table.rows_per_rank
            num_sent, num_blocks = int(table.num_sent_blocks[row]), int(table.num_blocks[row])
            new_blocks = table.block_table[row, num_sent:num_blocks]
            window_blocks = table.window_block_table[row, num_sent:num_blocks]
            ends_prompt = end == table.num_extend[row]
            tokens, scored_ids = table.bound(row).tokens, NOTHING
            if table.scores_prompt[row]:
                scored_ids = tokens[start + 1 : min(end + 1, int(table.num_prompt[row]))]
            if num_sent == 0:
                starts.append(RowStart(local_row, table.bound(row)))
            counts = chunk.num_tokens, len(new_blocks), ends_prompt, len(scored_ids)
            ids = tokens[start:end], new_blocks, window_blocks, scored_ids
            columns.append((local_row, start, *counts, *ids))
            table.num_sent_blocks[row] = num_blocks
            table.num_computed[row] = end
            if ends_prompt:
                table.status[row] = RowStatus.DECODE
        rows, computed, num_tokens, num_new, samples, num_scored, *values = zip(
            *columns, strict=True
        )
        token_ids, block_ids, window_ids, scores = map(np.concatenate, values)
        return RankBatch(
            BatchMode.EXTEND,
            np.array(rows, dtype=np.int32),
            np.array(computed, dtype=np.int32),
            token_ids,
            num_tokens=np.array(num_tokens, dtype=np.int32),
            num_new_blocks=np.array(num_new, dtype=np.int32),
            new_block_ids=block_ids,
            new_window_block_ids=window_ids if table.has_windows else None,
            samples=np.array(samples, dtype=np.uint8),
            num_scored=np.array(num_scored, dtype=np.int32) if len(scores) else None,
            scored_ids=scores if len(scores) else None,
            starts=starts,
        )

    def _add_scorings(self, mixed: dict[int, RankBatch], decodes: DecodeColumns) -> None:
        """Adds the sequences that get log probabilities."""
        table = self._table
        for rank in range(table.dp_size):
            batch = mixed.get(rank) or decodes.batch(rank)
            rows = batch.rows + table.first_rows[rank]
            samples = np.ones(len(rows), np.uint8) if batch.samples is None else batch.samples
            sample_indices = samples.cumsum() - 1
            is_sampled = table.scores_output.take(rows) & (samples != 0)
            num_scored, scored_ids = batch.num_scored, batch.scored_ids
            if num_scored is None or scored_ids is None:
                num_scored, scored_ids = np.zeros_like(batch.rows), NOTHING
            ends = num_scored.cumsum()
            scorings = [
                Scoring(
                    table.bound(int(rows[i])),
                    scored_ids[ends[i] - num_scored[i] : ends[i]],
                    int(sample_indices[i]) if is_sampled[i] else None,
                )
                for i in np.flatnonzero(is_sampled | (num_scored > 0)).tolist()
            ]
            if scorings:
                mixed[rank] = batch._replace(scorings=scorings)


def _join(decodes: RankBatch, chunks: RankBatch) -> RankBatch:
    """Returns a rank's decodes followed by its chunks."""
    num_decodes = len(decodes.rows)
    if num_decodes == 0:
        return chunks
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
    return RankBatch._make((BatchMode.EXTEND, *columns, chunks.starts, ()))


# ---- agreement of all ranks


def agree(
    counts: Counts,
    *,
    has_extend: bool,
    attn_tp_size: int = 1,
    graph_sizes: CapturedSizes = NO_GRAPHS,
    num_draft_tokens: int = 0,
) -> Agreement:
    """Decides padding and graph from each DP rank's counts.

    A rank that replayed another graph, or laid out its gather otherwise, would leave the rest
    waiting in a collective. Only the router sees every rank, so it decides and nobody votes.

    Args:
        counts: Of all ranks, at least one token among them. They are sent as they are: rounding up
            for attention TP is every executor's own arithmetic.
        has_extend: Whether any rank runs prompt tokens.
        attn_tp_size: Executors that share a rank's rows.
        graph_sizes: What the executors have captured.
        num_draft_tokens: Tokens that each sequence verifies, and `counts.tokens` has them all; 0:
            the step is not speculative.
    """
    num_tokens = counts.tokens
    assert max(num_tokens) > 0, "an idle system takes no step"
    if has_extend:
        picked = pick_extend_graph_size(num_tokens, graph_sizes.extend)
    else:
        picked = pick_graph_size(max(counts.sequences), graph_sizes.decode)
    if isinstance(picked, GraphMiss):
        graph_size, graph_miss = None, picked
        padding_mode = pick_padding_mode(
            num_tokens, has_extend=has_extend, attn_tp_size=attn_tp_size
        )
    else:  # a captured collective has one size
        graph_size, graph_miss, padding_mode = picked, None, PaddingMode.MAX_LEN
    return Agreement(
        tuple(num_tokens),
        tuple(counts.logits),
        has_extend,
        padding_mode,
        graph_size,
        graph_miss,
        num_draft_tokens,
        tuple(counts.draft_rows),
        tuple(counts.sampled),
    )


def pick_graph_size(size: int, captured: SequenceOf[int]) -> int | GraphMiss:
    """Returns the smallest captured size that fits, or why none does."""
    if not captured:
        return GraphMiss.NOT_CAPTURED
    index = bisect_left(captured, size)
    return captured[index] if index < len(captured) else GraphMiss.TOO_LARGE


def pick_extend_graph_size(
    num_tokens: SequenceOf[int], captured: SequenceOf[int]
) -> int | GraphMiss:
    """Returns the graph for an extend, or why running eagerly is the better choice.

    A rank without tokens has nothing to lay into a graph's attention metadata, and more than
    half a graph of padding costs more than its launches save.
    """
    picked = pick_graph_size(max(num_tokens), captured)
    if isinstance(picked, GraphMiss):
        return picked
    if min(num_tokens) == 0:
        return GraphMiss.IDLE_RANK
    return GraphMiss.MOSTLY_PADDING if picked > 2 * max(num_tokens) else picked


def pick_padding_mode(
    num_tokens: SequenceOf[int], *, has_extend: bool, attn_tp_size: int = 1
) -> PaddingMode:
    """Picks the gather that moves fewer bytes.

    An all-reduce sends each row twice and an all-gather once, so MAX_LEN wins until more than
    half of its rows are padding. Prompts are too uneven to bet on that. What is gathered are the
    equal shards of ``attn_tp_size`` executors, so a rank's rows count as their next multiple.

    Source: SGLang, srt/layers/dp_attention.py, PaddingMode.get_dp_padding_mode.
    """
    if len(num_tokens) == 1:
        return PaddingMode.MAX_LEN
    if has_extend:
        return PaddingMode.SUM_LEN
    if attn_tp_size > 1:
        num_tokens = [-(-count // attn_tp_size) for count in num_tokens]  # a common factor less
    if 2 * sum(num_tokens) < max(num_tokens) * len(num_tokens):
        return PaddingMode.SUM_LEN
    return PaddingMode.MAX_LEN
