"""Speculative decoding as the scheduler decides it: whether drafts pay, and which steps draft.

A speculative step costs more than a plain one, by the drafts' own passes and the wider verify pass,
and gives back a token for each draft that is accepted. How many are accepted depends on the
traffic, so `DraftGate` measures it: where a row gains too little in a step, the group decodes
plainly for a while and then tries again. A step is speculative on all DP ranks or on none.

A step that runs prompt tokens cannot draft: its decodes gain one token. Where prompts never cease,
every step would be such a step, so the two kinds alternate: once `prompt_steps_between_drafts` steps have
run prompts, the next one drafts although some wait (`Drafting`). The prompts pay with the time of
that step, and the decodes get several tokens instead of one. The alternation goes by steps as they
are planned, not as they come back, so that it does not depend on how many are in flight: lengths
that are not known yet count with their upper bounds, as in every speculative step.

Prompts go first all the same

* while drafts do not pay (`DraftGate`); each step that could have drafted counts towards its pause;
* where fewer than TURN_ROWS sequences would draft for each one whose prompt would wait: a step in
  which that one drafts too is worth more, and with short answers it comes before long;
* where the free KV blocks do not suffice for most rows' drafts.

Waiting sequences are bound to ranks in such a step as in any other; only their tokens run later. It
takes blocks for drafts only if no bound prompt needs them and no waiting sequence may; otherwise
rows draft as far as the blocks go that they hold. So drafts preempt nobody and keep nobody out for
want of blocks; they cost the others time only. And since prompts run in at least
`prompt_steps_between_drafts` of the steps that follow, they never starve.

The price is the time to the first token. With 2 steps between it is half of what it is with 1, for
most of the gain (`tests/bench/router/bench_draft_turns.py`), hence the default.
"""

from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain

import numpy as np

from protos.settings import ON_OFF, at_least, setting
from router.requests.request import Int32Array
from router.scheduling.columns import Mask
from router.scheduling.kv.row_blocks import RowBlocks
from router.scheduling.sequence_table import SequenceTable
from router.scheduling.step import SpeculationShape
from router.scheduling.step_builder import Chunk

FORGET = 1 / 64  # what a step takes off the weight of every one before it
PROBE_STEPS = 16  # steps with drafts before they are judged, at first and after each pause
PAUSE_STEPS = 512  # steps without, before drafts are tried again
TURN_ROWS = 4  # sequences that draft while prompts wait, for each whose prompt waits


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Outcome of speculative steps.

    Attributes:
        num_steps: How many there were.
        num_drafts: Drafts that could have been accepted: of each row, one less than it may gain;
            of rows whose sequence ended while the step was in flight, none.
        num_accepted: Drafts that were accepted.
    """

    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return DraftCounts(
            self.num_steps + other.num_steps,
            self.num_drafts + other.num_drafts,
            self.num_accepted + other.num_accepted,
        )


NO_DRAFTS = DraftCounts()


@dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """Settings for drafts."""

    speculation: str = setting("on", ON_OFF)
    """Whether steps are speculative where executors have a draft model."""
    min_tokens_per_draft_step: float = setting(
        1.5, at_least(1, ", the token that each sequence gains in any step")
    )
    """Tokens that a sequence must gain in a speculative step, on average, until both kinds of step have
    been timed; from then on, as many as such a step takes longer. Below, a group decodes plainly for
    some hundred steps before it tries again. 1 never gives up."""
    prompt_steps_between_drafts: int = setting(2, at_least(1))
    """While prompts wait, steps that run some of them between two that are speculative and run
    none. More of them: prompts begin their answers sooner, and answers come slower. 1000000 lets
    prompts always go first."""


class GateState(Enum):
    DRAFTING = auto()  # steps without prompts are speculative, and come in turn
    PAUSED = auto()  # too few drafts were accepted to pay; they will be tried again
    OFF = auto()  # the router was told not to


class DraftGate:
    """Decides step by step whether to draft.

        DRAFTING ──judged, and too few tokens per row──▶ PAUSED
           ▲                                               │
           └──────after PAUSE_STEPS, with no opinion───────┘

    Steps in flight at a change count where they are answered: a step with drafts measures the
    same thing whenever it was planned.

    Attributes:
        settings: What the operator said.
        is_on: Whether any step may draft. If not, the gate is OFF for ever.
        state: Whether steps draft now.
    """

    def __init__(self, settings: DraftSettings) -> None:
        self.settings = settings
        self.is_on = settings.speculation == "on"
        self.state = GateState.DRAFTING if self.is_on else GateState.OFF
        self._num_paused = 0  # steps of this pause
        self._num_measured = 0  # steps behind the sums
        self._num_rows = 0.0  # sums over steps, old ones weighing less and less
        self._num_tokens = 0.0
        self._price = 0.0  # sum over their rows of what they took over what plain steps would

    def wants_drafts(self) -> bool:
        """Whether the step that is planned now drafts. Call it once for each that could."""
        if self.state is GateState.PAUSED:
            self._num_paused += 1
            if self._num_paused > PAUSE_STEPS:
                self.state, self._num_measured = GateState.DRAFTING, 0
                self._num_rows = self._num_tokens = self._price = 0.0
        return self.state is GateState.DRAFTING

    def add(self, num_rows: int, num_tokens: int, price: float | None = None) -> None:
        """Takes what a speculative step gave.

        Args:
            num_rows: That gained tokens.
            num_tokens: Of all of them, at least one each.
            price: What the step took over what one without drafts would have; None: not known.
        """
        if num_rows == 0:
            return
        self._num_measured += 1
        self._num_rows += num_rows - FORGET * self._num_rows
        self._num_tokens += num_tokens - FORGET * self._num_tokens
        least = self.settings.min_tokens_per_draft_step
        needed = least if price is None or least == 1 else price
        self._price += num_rows * needed - FORGET * self._price
        is_judged = self.state is GateState.DRAFTING and self._num_measured >= PROBE_STEPS
        if is_judged and self._num_tokens < self._price:
            self.state, self._num_paused = GateState.PAUSED, 0

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a row gains in a speculative step, lately; None: nothing is known yet."""
        return self._num_tokens / self._num_rows if self._num_rows else None


class Drafting:
    """Drafts of one table's rows. Each step asks `take_turn` if prompts wait, and then `prepare`.

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
        speculation: SpeculationShape,
        gate: DraftGate,
    ) -> None:
        self._table = table
        self._blocks = blocks
        self._speculation = speculation
        self._gate = gate
        self._num_prompt_steps = 0  # planned since the last one without prompts

    def take_turn(self, runs: Mask, *, has_waiting: bool) -> Int32Array | None:
        """Decides whether the step drafts although prompts could run, and is to give them nothing.

        Args:
            runs: bool [R], rows that decode.
            has_waiting: Whether a sequence is still not bound to a rank.

        Returns:
            int32, of each decode the most tokens that it may gain; None: it is the prompts' turn.
        """
        table = self._table
        if self._num_prompt_steps < self._gate.settings.prompt_steps_between_drafts:
            return None
        num_prompts = len(table.prompt_rows)
        limits = self._limits(runs)
        drafts = limits > 1
        num_drafting = np.count_nonzero(drafts)
        if not num_prompts or num_drafting < TURN_ROWS * num_prompts:
            return None
        needs_kv = has_waiting and any(map(table.has_free_row, range(table.dp_size)))
        ends = self._ends(runs)
        takes_blocks = not needs_kv and self._blocks.can_reserve(ends)
        if not takes_blocks:
            drafts &= limits <= self._num_slots()
            if 2 * np.count_nonzero(drafts) < num_drafting:
                return None
        if not self._gate.wants_drafts():
            return None
        if takes_blocks:
            self._blocks.reserve(ends)
        self._num_prompt_steps = 0
        gains: Int32Array = np.minimum(limits, self._num_slots())[runs]
        return gains

    def prepare(self, runs: Mask, chunks: list[list[Chunk]]) -> Int32Array | None:
        """Gives rows blocks beyond what they run, for drafts.

        Args:
            runs: bool [R], rows that decode.
            chunks: [dp_size] what runs of prompts.

        Returns:
            int32, of each decode the most tokens that it may gain in a speculative step; None if
            the step is not to be one.
        """
        if any(chunks):
            self._num_prompt_steps += 1
        else:
            self._num_prompt_steps = 0
            limits = self._limits(runs)
            if limits.max() > 1 and self._gate.wants_drafts():
                self._blocks.reserve(self._ends(runs))
                gains: Int32Array = np.minimum(limits, self._num_slots())[runs]
                if gains.max() > 1:
                    return gains
        if self._speculation.kv_lookahead:
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
        table = self._table
        ends = np.where(runs, table.num_computed + 1, 0)
        for chunk in chain.from_iterable(chunks):
            end = int(table.num_computed[chunk.row]) + chunk.num_tokens
            ends[chunk.row] = end if end == table.num_extend[chunk.row] else 0
        ends[ends > 0] += self._speculation.kv_lookahead
        self._blocks.reserve(ends)
