"""One DP rank that keeps numbers where a real one keeps KV, and a model that is a hash.

What a token's keys and values depend on is that token and every one before it. So each KV position
here holds a hash over the tokens up to it, chained through what the position before holds, and a
sequence's next token is a hash over all that its blocks hold. A block that was handed out twice
or shared behind another prefix, a row that kept an old block, or a token that was fed at the wrong
place changes the output, as it would on a real executor. So does a row that begins with another
seed than its sequence has.

Where the group has windows, a position's KV for windowed layers is a number of its own, `window_kv`,
in the block of the row's second list. Whatever a sequence reads of it must be that number: what a
step reads is looked at when it is sent, and once more when it is answered, since until then nothing
that it reads may be given to others.

With a draft model, a random number of drafts is accepted, and what a real executor writes into a
row's blocks for those that are not, and ahead of its tokens, is written here as well.

Numbers outlive an epoch as KV does, but for those that steps wrote which were never answered.
"""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from router.requests.request import Sequence as LiveSequence
from router.scheduling.kv.block_pool import SCRATCH_BLOCK
from router.scheduling.step import Agreement, GroupShape, RankBatch, Scores
from tests.router.support.plans import RankResult

VOCAB_SIZE = 50
EOS = 0
MAX_DEPTH = 3  # steps in flight in any test
RUBBISH = -(1 << 40)


def extend_kv(before: int, token: int) -> int:
    """What a position holds, given what the one before it holds (0 at the start)."""
    return (before * 1_000_003 + int(token) + 1) % (1 << 61)


def window_kv(held: int) -> int:
    """What a position holds for windowed layers, given what it holds for the others."""
    return (held + 1) * 7919 % (1 << 61)


def next_token(kv: Sequence[int], seed: int = 0) -> int:
    """The model: ends a sequence about once in 40 tokens."""
    state = 17 + seed
    for held in kv:
        state = (state * 1_000_003 + held) % (1 << 61)
    return EOS if state % 40 == 0 else 1 + state % (VOCAB_SIZE - 1)


def log_probability(kv: Sequence[int], token: int) -> float:
    """Of a token behind what is held; the likeliest one plays no part."""
    return -(next_token(kv, token) + token % 7) / 4


def expected_output(
    prompt: Sequence[int],
    max_tokens: int,
    stop_ids: Sequence[int],
    seed: int = 0,
    min_tokens: int = 0,
) -> list[int]:
    """What a sequence must give, computed without any router."""
    kv: list[int] = []
    for token in prompt:
        kv.append(extend_kv(kv[-1] if kv else 0, token))
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(next_token(kv, seed))
        if output[-1] in stop_ids and len(output) >= min_tokens:
            break
        kv.append(extend_kv(kv[-1], output[-1]))
    return output


class Ran(NamedTuple):
    """What a step computed of a sequence: positions from ``start`` to ``end``."""

    sequence: LiveSequence
    start: int
    end: int
    is_decode: bool


class Read(NamedTuple):
    """What a step read of a row for windowed layers: from an offset in the first block on."""

    blocks: list[int]
    offset: int
    held: list[int]


@dataclass
class Row:
    """A row of the block table.

    Attributes:
        window_blocks: Of windowed layers, in the same columns.
        num_computed: Positions whose KV is there: the place of the token that it sampled last.
    """

    sequence: LiveSequence
    blocks: list[int] = field(default_factory=list)
    window_blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    last_token: int | None = None


@dataclass
class FakeRank:
    """One DP rank's memory.

    Attributes:
        kv: int64 [num_blocks, block_size], extend_kv of the token whose KV is there, or its window_kv.
        acceptance: Share of drafts that are accepted if those before them are.
        rng: Of the draft model alone.
        ran: What the last step computed.
        reads: Of each step that is not answered, what it read for windowed layers.
        writes: Of each of these, the places in `kv` that it wrote.
    """

    shape: GroupShape
    kv: np.ndarray
    acceptance: float = 0.7
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    rows: dict[int, Row] = field(default_factory=dict)
    ran: list[Ran] = field(default_factory=list)
    reads: deque[list[Read]] = field(default_factory=deque)
    writes: deque[set[tuple[int, int]]] = field(default_factory=deque)

    @classmethod
    def of_group(cls, shape: GroupShape, **fields: object) -> list["FakeRank"]:
        """Returns every rank of a group, with nothing in its KV."""
        return [cls.empty(shape, num_blocks, **fields) for num_blocks in shape.num_blocks]

    @classmethod
    def empty(cls, shape: GroupShape, num_blocks: int, **fields: object) -> "FakeRank":
        """Returns a rank with nothing in its KV."""
        return cls(shape, np.full((num_blocks, shape.block_size), -1, np.int64), **fields)  # type: ignore[arg-type]

    def begin_epoch(self) -> None:
        """Forgets its rows, and keeps its KV but for rubbish where steps wrote that are lost."""
        for block, offset in set().union(*self.writes):
            self.kv[block, offset] = RUBBISH - block * self.shape.block_size - offset
        self.rows.clear()
        self.reads.clear()
        self.writes.clear()

    def run(self, batch: RankBatch, agreement: Agreement) -> RankResult:
        shape, width = self.shape, agreement.num_draft_tokens
        num_seqs = len(batch.rows)

        def column(given: np.ndarray | None, default: int) -> list[int]:
            return [default] * num_seqs if given is None else given.tolist()

        num_tokens, num_new = column(batch.num_tokens, 1), column(batch.num_new_blocks, 0)
        samples, num_scored = column(batch.samples, 1), column(batch.num_scored, 0)
        num_all = sum(num_tokens)
        known_ids = [-1] * num_all if batch.token_ids is None else batch.token_ids.tolist()
        num_computed = batch.num_computed_tokens.tolist()
        assert len(set(batch.rows.tolist())) == num_seqs <= shape.rows_per_rank
        assert num_all == len(known_ids)
        if not width:
            assert num_all <= shape.max_num_batched_tokens
            assert sum(samples) + sum(num_scored) <= shape.max_num_logits
        for start in batch.starts:
            self.rows[start.row] = Row(start.sequence)
        new_blocks = iter([] if batch.new_block_ids is None else batch.new_block_ids.tolist())
        new_window_blocks = self._window_blocks_of(batch)
        token_ids = iter(known_ids)
        gains: list[list[int]] = []
        self.ran = []
        self.reads.append([])
        self.writes.append(set())
        for i, number in enumerate(batch.rows.tolist()):
            row, count, bound = self.rows[number], num_tokens[i], num_computed[i]
            has_begun = len(row.blocks) > 0
            row.blocks += [next(new_blocks) for _ in range(num_new[i])]
            if shape.kv_window:
                new = [next(new_window_blocks) for _ in range(num_new[i])]
                self._check_window_blocks(new, 0 if has_begun else bound)
                row.window_blocks += new
            tokens = [next(token_ids) for _ in range(count)]
            self._check_row(row, bound, bound + count, is_decode=tokens[0] == -1)
            if width:
                gains.append(self._draft(row, count))
                continue
            start = row.num_computed if tokens[0] == -1 else bound
            self._compute(row, start, tokens)
            self._check_windows(row, start)
            if samples[i]:
                gains.append([self._sample(row)])
                self._scribble(row, row.num_computed, self._lookahead)
        assert next(new_blocks, None) is next(new_window_blocks, None) is None
        if width:
            scored = {scoring.sample_index for scoring in batch.scorings}
            assert all(len(gains[index]) == 1 for index in scored if index is not None)
        return self._answer(batch, gains)

    def answered(self) -> None:
        """Notes that the earliest step is back: all that it read was there until now."""
        self.writes.popleft()
        for blocks, offset, held in self.reads.popleft():
            still_held = self.kv[blocks].reshape(-1)[offset:][: len(held)].tolist()
            assert still_held == held, "given back before its answer"

    def _window_blocks_of(self, batch: RankBatch) -> Iterator[int]:
        given = batch.new_window_block_ids
        assert self.shape.kv_window or given is None
        assert (given is None) == (batch.new_block_ids is None) or not self.shape.kv_window
        return iter([] if given is None else given.tolist())

    def _check_window_blocks(self, new: list[int], start: int) -> None:
        """0 stands only before the window of the position at which a row begins."""
        first = max(0, start - self.shape.kv_window + 1) // self.shape.block_size
        assert SCRATCH_BLOCK not in new[first:]

    def _check_windows(self, row: Row, start: int) -> None:
        """Reads what windowed layers read in a step that begins at ``start`` and has computed."""
        if not self.shape.kv_window:
            return
        first = max(0, start - self.shape.kv_window + 1)
        column, offset = divmod(first, self.shape.block_size)
        blocks, num_read = row.window_blocks[column:], row.num_computed - first
        full = self.kv[row.blocks[column:]].reshape(-1)[offset:][:num_read].tolist()
        held = self.kv[blocks].reshape(-1)[offset:][:num_read].tolist()
        assert held == list(map(window_kv, full)), "not what the row wrote there"
        self.reads[-1].append(Read(blocks, offset, held))

    def _answer(self, batch: RankBatch, gains: list[list[int]]) -> RankResult:
        logprobs: list[float] = []
        given: list[float] = []
        for scoring in batch.scorings:
            ids = scoring.sequence.request.output.logprob_ids
            logprobs += [0.0] * len(scoring.scored_ids)
            given += [0.0] * len(scoring.scored_ids) * len(ids)
            if scoring.sample_index is not None:
                row = self.rows[scoring.sequence.row % self.shape.rows_per_rank]
                held = self._held_by(row)
                logprobs.append(log_probability(held, gains[scoring.sample_index][0]))
                given += [log_probability(held, token) for token in ids]
        counts = np.array([len(gain) for gain in gains], np.int32)
        scores = Scores(np.array(logprobs, np.float32), given_logprobs=np.array(given, np.float32))
        return RankResult(
            np.array([token for gain in gains for token in gain], np.int32),
            counts if counts.max(initial=1) > 1 else None,
            scores=scores if batch.scorings else None,
        )

    def _held_by(self, row: Row) -> list[int]:
        held: list[int] = self.kv[row.blocks].reshape(-1)[: row.num_computed].tolist()
        return held

    def _check_row(self, row: Row, bound: int, end: int, *, is_decode: bool) -> None:
        """What an executor refuses, and blocks that nobody needs."""
        assert SCRATCH_BLOCK not in row.blocks
        assert len(set(row.blocks)) == len(row.blocks)
        assert len(row.window_blocks) == (len(row.blocks) if self.shape.kv_window else 0)
        num_slots = len(row.blocks) * self.shape.block_size
        assert num_slots >= end
        speculation = self.shape.speculation
        if speculation is None:
            assert num_slots < end + self.shape.block_size
            assert not is_decode or row.num_computed == bound
            return
        assert not is_decode or row.num_computed <= bound
        num_ahead = max(speculation.num_reserved_tokens, 1 + speculation.kv_lookahead)
        num_taken_back = MAX_DEPTH * (speculation.max_gain - 1)
        assert num_slots < end + num_taken_back + num_ahead + self.shape.block_size

    def _compute(self, row: Row, start: int, tokens: Sequence[int]) -> None:
        """Writes the KV of tokens; -1 is the one that the row sampled last."""
        self.ran.append(Ran(row.sequence, start, start + len(tokens), tokens[0] == -1))
        for position, token in enumerate(tokens, start):
            if token == -1:
                assert row.last_token is not None
                token = row.last_token
            self._write(row, position, extend_kv(self._held(row, position - 1), token))
        row.num_computed = start + len(tokens)

    def _sample(self, row: Row) -> int:
        row.last_token = next_token(self._held_by(row), row.sequence.seed)
        return row.last_token

    def _draft(self, row: Row, limit: int) -> list[int]:
        """Runs a row's last token and drafts behind it, of which fewer than ``limit`` are right."""
        speculation, start = self.shape.speculation, row.num_computed
        assert speculation is not None
        request = row.sequence.request
        has_more_state = request.output.logprobs or request.sampling.sees_output
        # Of a run, only the first token is sampled as if each were the last.
        has_more_state |= 1 + start < len(request.prompt) + request.stop.min_tokens
        assert 1 <= limit <= (1 if has_more_state else speculation.max_gain)
        gained: list[int] = []
        while len(gained) < limit and (not gained or self.rng.random() < self.acceptance):
            self._compute(row, row.num_computed, [-1])
            gained.append(self._sample(row))
        self._check_windows(row, start)
        num_written = row.num_computed - start
        self._scribble(row, row.num_computed, speculation.num_reserved_tokens - num_written)
        return gained

    @property
    def _lookahead(self) -> int:
        return 0 if self.shape.speculation is None else self.shape.speculation.kv_lookahead

    def _scribble(self, row: Row, start: int, count: int) -> None:
        """Writes something else into the slots from ``start`` on, as far as the row's blocks go."""
        for position in range(start, min(start + count, len(row.blocks) * self.shape.block_size)):
            self._write(row, position, -2 - position)

    def _write(self, row: Row, position: int, held: int) -> None:
        column, offset = divmod(position, self.shape.block_size)
        written = self.writes[-1]
        written.add((row.blocks[column], offset))
        self.kv[row.blocks[column], offset] = held
        if self.shape.kv_window:
            written.add((row.window_blocks[column], offset))
            self.kv[row.window_blocks[column], offset] = window_kv(held)

    def _held(self, row: Row, position: int) -> int:
        """What a position holds; 0 before the first."""
        block, offset = divmod(position, self.shape.block_size)
        return int(self.kv[row.blocks[block], offset]) if position >= 0 else 0
