"""What a group can draft, and whether its drafts pay. Pure; no clock, no sequences, no messages.

A speculative step costs more than a plain one, by the drafts' own passes and the wider verify pass,
and gives back a token for each draft that is accepted. How many are is the traffic's doing, so it is
measured: where a row gains too little in a step, the group decodes plainly for a while and then
tries again. One gate stands for all DP ranks, as a step is speculative on all of them or on none.
"""

from dataclasses import dataclass
from enum import Enum, auto

FORGET = 1 / 64  # what a step takes off the weight of every one before it
PROBE_STEPS = 16  # steps with drafts before they are judged, at first and after each pause
PAUSE_STEPS = 512  # steps without, before drafts are tried again


@dataclass(frozen=True, kw_only=True, slots=True)
class Speculation:
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


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What came of speculative steps.

    Attributes:
        num_steps: How many there were.
        num_drafts: Drafts that could have been accepted: of each row, one less than it may gain;
            of those whose sequence ended while the step was in flight, none.
        num_accepted: Those that were.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftSettings:
    """What an operator says about drafts.

    Attributes:
        is_on: Whether any step is speculative.
        min_tokens_per_step: Tokens that a row must gain in a speculative step for it to pay; 1,
            which each row gains in any step, is always.
        prompt_steps_between: While prompts wait, steps that run them between two that draft; see
            router/scheduling/drafting.py.
    """

    is_on: bool = True
    min_tokens_per_step: float = 1.5
    prompt_steps_between: int = 2


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
        settings: What the operator said. If that is off, so is the gate for ever.
        state: Whether steps draft now.
    """

    def __init__(self, settings: DraftSettings) -> None:
        self.settings = settings
        self.state = GateState.DRAFTING if settings.is_on else GateState.OFF
        self._num_paused = 0  # steps of this pause
        self._num_measured = 0  # steps behind the sums
        self._num_rows = 0.0  # sums over steps, old ones weighing less and less
        self._num_tokens = 0.0

    def wants_drafts(self) -> bool:
        """Whether the step that is planned now drafts. Call it once for each that could."""
        if self.state is GateState.PAUSED:
            self._num_paused += 1
            if self._num_paused > PAUSE_STEPS:
                self.state, self._num_measured = GateState.DRAFTING, 0
                self._num_rows = self._num_tokens = 0.0
        return self.state is GateState.DRAFTING

    def add(self, num_rows: int, num_tokens: int) -> None:
        """Takes what a speculative step gave: tokens gained by all of its rows, at least one each."""
        self._num_measured += 1
        self._num_rows += num_rows - FORGET * self._num_rows
        self._num_tokens += num_tokens - FORGET * self._num_tokens
        if self.state is GateState.DRAFTING and self._num_measured >= PROBE_STEPS:
            mean = self._num_tokens / self._num_rows
            if mean < self.settings.min_tokens_per_step:
                self.state, self._num_paused = GateState.PAUSED, 0

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a row gains in a speculative step, lately; None: nothing is known yet."""
        return self._num_tokens / self._num_rows if self._num_rows else None
