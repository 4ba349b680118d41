"""Step builder: the rows that run as the columns that travel, and the ranks' agreement on the step.

Decodes are columns of all ranks at once: most steps have nothing else, and nobody cuts these before
they are sent. The chunks of prompts of a rank that has some are a batch, which goes behind its decodes.
Rows are marked as handed out.
"""

from bisect import bisect_left
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.requests.request import Int32Array, Sequence
from router.scheduling.columns import Growth, Mask, Rows, RowSet, insert, offsets, spread
from router.scheduling.sequence_table import RowStatus, SequenceTable
from router.scheduling.step import (
    NO_GRAPHS,
    NOTHING,
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
    join_batches,
)


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
        self._kv_tokens: tuple[RowSet, Rows] | None = None  # of the step that is built next
        self._num_rows = np.zeros(table.dp_size, dtype=np.int64)  # of the same rows
        self._last_decodes: RowSet | None = None  # of the last step with nothing else
        self._last_agreement: Agreement

    def build(
        self,
        runs: Mask,
        chunks: SequenceOf[SequenceOf[Chunk]],
        limits: Int32Array | None = None,
        growth: Growth | None = None,
    ) -> StepPlan:
        """Builds the step that runs the next token of each decode and all of each chunk.

        With limits it is speculative: each decode verifies drafts behind its next token.

        Args:
            runs: bool [R], rows that decode, each with a block for its next token. The plan keeps
                it, with the rows of the chunks added.
            chunks: [dp_size] chunks of each rank, each with blocks for its tokens; or none at all.
            limits: int32, of each decode, the most tokens that it may gain, each with a block; then
                there are no chunks. None: the step is not speculative.
            growth: All blocks of the decodes that executors do not know; None: not known, look for them.
        """
        table, speculation = self._table, self._speculation
        decodes, has_chunks, num_draft_tokens = table.row_set(runs), any(chunks), 0
        kv_tokens, self._kv_tokens = self.kv_tokens(decodes), None
        if speculation is None:  # else answers take back some of what was computed
            self._kv_tokens = decodes, kv_tokens + self._num_rows  # if the same rows go on
        num_pairs, has_extend = None, False
        if has_chunks:
            runs[[chunk.row for chunk in chain.from_iterable(chunks)]] = True
            has_extend = self._has_prompts(chunks)
            if has_extend:
                num_pairs = self._num_pairs(chunks)
            else:
                kv_tokens = table.kv_tokens(runs)
        columns, sampled_rows = self._decode_columns(decodes, limits, growth), None
        batches: dict[int, RankBatch] = {}
        scorings: dict[int, list[Scoring]] = {}
        num_rows = num_tokens = decodes.num_rows
        if limits is not None:
            assert speculation is not None
            assert not has_chunks
            num_draft_tokens = speculation.num_draft_tokens
            num_tokens = [num_draft_tokens * count for count in num_rows]
        counts = Counts(num_rows, num_tokens, num_tokens, num_rows, num_rows)
        if has_chunks:
            counts = Counts(*map(list[int], counts))
            mode = BatchMode.EXTEND if has_extend else BatchMode.DECODE
            batches, sampled_rows = self._take_chunks(chunks, mode, decodes, counts)
        if table.num_scored:
            scorings = self._scorings(columns, batches)
        same = decodes if not has_chunks and limits is None else None
        agreement = self._agree(same, counts, has_extend=has_extend, num_drafts=num_draft_tokens)
        parts, sampled = (columns, batches, scorings), (sampled_rows, counts.sampled)
        return StepPlan(agreement, *parts, runs, *sampled, limits, kv_tokens, num_pairs)

    def kv_tokens(self, decodes: RowSet) -> Rows:
        """Returns int64 [dp_size], what each rank's decodes read in the step that is built next."""
        if self._kv_tokens is None or self._kv_tokens[0] is not decodes:
            self._kv_tokens = decodes, self._table.kv_tokens(decodes.mask)
            self._num_rows = np.array(decodes.num_rows)
        return self._kv_tokens[1]

    def _agree(
        self, decodes: RowSet | None, counts: Counts, *, has_extend: bool, num_drafts: int
    ) -> Agreement:
        """Returns the agreement; the last one, where the same rows only decode again.

        Args:
            decodes: All that the step runs, one token each; None: it is another kind of step.
            counts: Of all that it runs.
            has_extend: Whether that has prompts.
            num_drafts: Tokens that each sequence verifies.
        """
        if decodes is not None and decodes is self._last_decodes:
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
        if decodes is not None:
            self._last_decodes, self._last_agreement = decodes, agreement
        return agreement

    def _has_prompts(self, chunks: SequenceOf[SequenceOf[Chunk]]) -> bool:
        """Returns whether some chunk is more than the last known token of its sequence.

        A sequence whose other tokens have kept their KV decodes at once: the step replays a graph.
        """
        table = self._table
        return any(
            table.num_extend[row] - table.num_computed[row] > 1
            for row, _ in chain.from_iterable(chunks)
        )

    def _num_pairs(self, chunks: SequenceOf[SequenceOf[Chunk]]) -> npt.NDArray[np.float64]:
        """Returns float64 [dp_size], the pairs of tokens for which chunks work out attention."""
        pairs = np.zeros(self._table.dp_size)
        for rank, rank_chunks in enumerate(chunks):
            for row, count in rank_chunks:
                pairs[rank] += count * (int(self._table.num_computed[row]) + count / 2)
        return pairs

    # ---- steps without prompts

    def _decode_columns(
        self, decodes: RowSet, limits: Int32Array | None, growth: Growth | None
    ) -> DecodeColumns:
        """Returns every rank's decodes."""
        table, mask = self._table, decodes.mask
        computed = table.num_computed[mask]
        if limits is None:
            table.num_computed += mask
        else:
            table.num_computed[mask] = computed + limits
        if growth is not None:
            has_grown, rows, block_ids, window_ids, cuts = growth
            num_new = None
            if len(rows):
                table.num_sent_blocks[rows] = table.num_blocks.take(rows)
                num_new = has_grown[mask].astype(np.int32)
            return DecodeColumns(decodes, computed, limits, num_new, block_ids, window_ids, cuts)
        num_new = table.num_blocks - table.num_sent_blocks
        has_new = num_new != 0
        has_new &= mask
        if not np.count_nonzero(has_new):
            no_cuts = [0] * (table.dp_size + 1)
            return DecodeColumns(decodes, computed, limits, None, NOTHING, None, no_cuts)
        grown = has_new.nonzero()[0]
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

    # ---- prompts

    def _take_chunks(
        self,
        chunks: SequenceOf[SequenceOf[Chunk]],
        mode: BatchMode,
        decodes: RowSet,
        counts: Counts,
    ) -> tuple[dict[int, RankBatch], Rows]:
        """Returns the chunks of each rank that has some, and all rows that sample, ranks in order.

        The last chunk of a prompt makes its row DECODE. They are columns of all ranks at once, which are
        then cut.

        Args:
            chunks: [dp_size] chunks of each rank.
            mode: Of each rank that has some.
            decodes: Rows that sample before them.
            counts: Of these; the chunks are added.
        """
        table = self._table
        rows = np.array([chunk.row for rank in chunks for chunk in rank])
        num_tokens = np.array([c.num_tokens for rank in chunks for c in rank], dtype=np.int32)
        starts, is_first = table.num_computed.take(rows), table.num_sent_blocks.take(rows) == 0
        ends = starts + num_tokens
        num_new, block_ids, window_ids = self._take_new_blocks(rows)
        ends_prompt = ends == table.num_extend.take(rows)
        table.num_computed[rows] = ends
        table.set_status(rows[ends_prompt], RowStatus.DECODE)
        sequences = [table.bound(row) for row in rows.tolist()]
        spans = list(zip(sequences, starts.tolist(), ends.tolist(), strict=True))
        token_ids = np.concatenate([each.tokens[start:end] for each, start, end in spans])
        scored_ids = self._scored_ids(rows, spans)
        cuts = list(accumulate(map(len, chunks), initial=0))
        local_rows = (rows % table.rows_per_rank).astype(np.int32)
        samples = ends_prompt.view(np.uint8)
        begun = _starts(local_rows, sequences, is_first)
        token_cuts, block_cuts = offsets(num_tokens, cuts), offsets(num_new, cuts)
        sampled_cuts = offsets(ends_prompt, cuts)
        batches = {}
        for rank, (first, last) in enumerate(pairwise(cuts)):
            if first == last:
                continue
            part = slice(first, last)
            blocks = slice(block_cuts[rank], block_cuts[rank + 1])
            scored = scored_ids[part] if any(map(len, scored_ids[part])) else []
            batches[rank] = RankBatch(
                mode,
                local_rows[part],
                starts[part],
                token_ids[token_cuts[rank] : token_cuts[rank + 1]],
                num_tokens[part],
                num_new[part],
                block_ids[blocks],
                None if window_ids is None else window_ids[blocks],
                samples[part],
                np.array(list(map(len, scored)), dtype=np.int32) if scored else None,
                np.concatenate(scored) if scored else None,
                [start for start in begun[part] if start is not None],
            )
            tokens = token_cuts[rank + 1] - token_cuts[rank]
            sampled = sampled_cuts[rank + 1] - sampled_cuts[rank]
            counts.sequences[rank] += last - first
            counts.tokens[rank] += tokens
            counts.logits[rank] += sampled + sum(map(len, scored))
            counts.draft_rows[rank] += tokens + sampled
            counts.sampled[rank] += sampled
        sampled_rows = rows[ends_prompt]
        places = np.array(decodes.cuts).take(sampled_rows // table.rows_per_rank + 1)
        return batches, insert(decodes.rows, places, sampled_rows)

    def _scored_ids(self, rows: Rows, spans: list[tuple[Sequence, int, int]]) -> list[Int32Array]:
        """Returns the prompt tokens that each chunk, from its start to before its end, scores."""
        scored_ids = [NOTHING] * len(rows)
        for i in np.flatnonzero(self._table.scores_prompt.take(rows)).tolist():
            sequence, start, end = spans[i]
            scored_ids[i] = sequence.tokens[start + 1 : min(end + 1, sequence.num_prompt_tokens)]
        return scored_ids

    def _scorings(
        self, decodes: DecodeColumns, chunks: Mapping[int, RankBatch]
    ) -> dict[int, list[Scoring]]:
        """Returns who gets log probabilities, of the ranks that have any."""
        table, scorings = self._table, dict[int, list[Scoring]]()
        for rank in range(table.dp_size):
            batch = join_batches(decodes.batch(rank), chunks.get(rank))
            rows = batch.rows + table.first_rows[rank]
            samples = np.ones(len(rows), np.uint8) if batch.samples is None else batch.samples
            sample_indices = samples.cumsum() - 1
            is_sampled = table.scores_output.take(rows) & (samples != 0)
            num_scored, scored_ids = batch.num_scored, batch.scored_ids
            if num_scored is None or scored_ids is None:
                num_scored, scored_ids = np.zeros_like(batch.rows), NOTHING
            ends = num_scored.cumsum()
            of_rank = [
                Scoring(
                    table.bound(int(rows[i])),
                    scored_ids[ends[i] - num_scored[i] : ends[i]],
                    int(sample_indices[i]) if is_sampled[i] else None,
                )
                for i in np.flatnonzero(is_sampled | (num_scored > 0)).tolist()
            ]
            if of_rank:
                scorings[rank] = of_rank
        return scorings


def _starts(
    local_rows: Int32Array, sequences: SequenceOf[Sequence], is_first: Mask
) -> list[RowStart | None]:
    """Returns what executors are told of each sequence at its first chunk; None at others."""
    return [
        RowStart(row, sequence) if is_new else None
        for row, sequence, is_new in zip(
            local_rows.tolist(), sequences, is_first.tolist(), strict=True
        )
    ]


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
