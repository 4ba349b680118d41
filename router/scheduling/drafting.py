"""Which steps are speculative, and how far: one decision for all DP ranks, taken as a step is planned.

A step that runs prompt tokens cannot draft: its decodes gain one token. Where prompts never cease,
every step would be such a step, so the two kinds take turns: once `prompt_steps_between` steps have
run prompts, the next one drafts although some wait. Prompts pay for it with the time of that step,
and sequences behind their prompts get several tokens instead of one. `Drafting` alone knows whose
turn it is. It goes by steps as they are planned, not as they come back, so with several in flight
the order is the same: of lengths that are not known yet it takes the upper bounds, as every
speculative step does.

No turn is taken

* while drafts do not pay (`DraftGate`); each step in which one was due counts towards its pause;
* where fewer than TURN_ROWS sequences would draft for each whose prompt would wait: a step in which
  that one drafts too is worth more, and with short answers it comes before long;
* where the KV that is left does not reach for most rows' drafts.

What waits is bound to ranks in a turn as in any step; only its tokens run later. A turn takes blocks
for drafts only if none of those bound prompts needs them, nor perhaps anybody in the line; else rows
draft as far as the blocks go that they hold. So for want of blocks it preempts nobody and keeps
nobody out; what it costs those who wait is its time. And since prompts run in at least
`prompt_steps_between` of the steps that follow, they never starve.

The price is the time to the first token. With 2 steps between it is half of what it is with 1, for
most of the gain (`tests/bench/router/bench_draft_turns.py`), hence the default.
"""

from itertools import chain

import numpy as np
import numpy.typing as npt

from router.requests.request import Int32Array
from router.scheduling.row_blocks import RowBlocks
from router.scheduling.sequence_table import RowSet, RowStatus, SequenceTable
from router.scheduling.speculation import DraftGate, Speculation
from router.scheduling.step_builder import Chunk

TURN_ROWS = 4  # sequences that draft in a turn, for each whose prompt waits for it

Mask = npt.NDArray[np.bool_]


class Drafting:
    """Plans the drafts of one table's rows. For each step, `takes_turn` if prompts wait, then `prepare`.

    Args:
        table: Read only.
        blocks: Gives rows blocks for their drafts.
        speculation: What the executors can draft.
        gate: Asked in each step that could draft.
    """

    def __init__(
        self,
        table: SequenceTable,
        blocks: RowBlocks,
        speculation: Speculation,
        gate: DraftGate,
    ) -> None:
        self._table = table
        self._blocks = blocks
        self._speculation = speculation
        self._gate = gate
        self._num_prompt_steps = 0  # planned since the last one without prompts
        self._answer: bool | None = None  # of the gate, for the step that is planned now
        self._takes_blocks = True  # for drafts, if that step is a turn

    def takes_turn(self, runs: Mask, *, has_waiting: bool) -> bool:
        """Returns whether the step drafts although prompts could run, and is to give them nothing.

        Args:
            runs: bool [R], rows that decode unless they have lost their place since.
            has_waiting: Whether somebody is still not bound to a rank.
        """
        self._answer = None
        if self._num_prompt_steps < self._gate.settings.prompt_steps_between:
            return False
        table = self._table
        num_prompts = np.count_nonzero(table.status == RowStatus.EXTEND)
        limits = self._limits(runs & (table.status == RowStatus.DECODE))
        drafts = limits > 1
        num_drafting = np.count_nonzero(drafts)
        if not num_prompts or num_drafting < TURN_ROWS * num_prompts:
            return False
        needs_kv = has_waiting and any(map(table.has_free_row, range(table.dp_size)))
        self._takes_blocks = not needs_kv and self._blocks.can_reserve(self._ends(limits > 0))
        if not self._takes_blocks:
            drafts &= limits <= self._num_slots()
            if 2 * np.count_nonzero(drafts) < num_drafting:
                return False
        self._answer = self._gate.wants_drafts()
        return self._answer

    def prepare(self, decodes: RowSet, runs: Mask, chunks: list[list[Chunk]]) -> Int32Array | None:
        """Gives rows blocks beyond what they run, for drafts.

        Args:
            decodes: Rows that decode.
            runs: bool [R], the same rows.
            chunks: [dp_size] what runs of prompts.

        Returns:
            int32, of each decode the most tokens that it may gain in a speculative step; None if
            the step is not to be one.
        """
        answer, self._answer = self._answer, None
        if any(chunks):
            self._num_prompt_steps += 1
        else:
            self._num_prompt_steps = 0
            limits = self._limits(runs)
            can_draft = limits.max() > 1
            if can_draft and (self._gate.wants_drafts() if answer is None else answer):
                if answer is None or self._takes_blocks:
                    self._blocks.reserve(self._ends(runs))
                gains = np.minimum(limits, self._num_slots()).take(decodes.rows)
                if gains.max() > 1:
                    return gains
        self._reserve_lookahead(runs, chunks)
        return None

    def _limits(self, runs: Mask) -> Int32Array:
        """Returns int32 [R], the most tokens that each row may gain, blocks aside; 0: it does not run."""
        table = self._table
        # Below its least length, only what a first token may be is known beforehand.
        takes_drafts = table.takes_drafts & (table.num_tokens >= table.min_len)
        limits = np.where(takes_drafts, np.int32(self._speculation.max_gain), np.int32(1))
        np.minimum(limits, table.max_computed - table.num_computed, out=limits)
        limits *= runs
        return limits

    def _ends(self, runs: Mask) -> Int32Array:
        """Returns int32 [R], the tokens for which a speculative step wants each row's blocks."""
        num_reserved = np.int32(self._speculation.num_reserved_tokens)
        return np.where(runs, self._table.num_computed + num_reserved, np.int32(0))

    def _num_slots(self) -> Int32Array:
        """Returns int32 [R], the tokens for which each row has blocks beyond those it has computed."""
        table = self._table
        return table.num_blocks * np.int32(table.block_size) - table.num_computed

    def _reserve_lookahead(self, runs: Mask, chunks: list[list[Chunk]]) -> None:
        """Gives rows that sample the blocks into which the draft model writes ahead of a plain step."""
        if not self._speculation.kv_lookahead:
            return
        table = self._table
        ends = np.where(runs, table.num_computed + 1, 0)
        for chunk in chain.from_iterable(chunks):
            end = int(table.num_computed[chunk.row]) + chunk.num_tokens
            ends[chunk.row] = end if end == table.num_extend[chunk.row] else 0
        ends[ends > 0] += self._speculation.kv_lookahead
        self._blocks.reserve(ends)
