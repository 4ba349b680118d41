"""What groups and ranks are doing, as GetStatus tells it. Data only; see serving.proto."""

from dataclasses import dataclass
from enum import Enum, auto


class GroupState(Enum):
    FORMING = auto()  # connecting to its executors, or forming a new epoch
    READY = auto()  # steps can run


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """One DP rank at one moment.

    Attributes:
        address: Where its first executor listens.
        num_running: Sequences bound to it.
        last_step_tokens: Tokens that it ran in the last step.
        last_step_s: Time that its executor took for the last step.
        total_tokens: Tokens that it ran in all steps.
        num_used_blocks: KV blocks that live sequences hold.
        num_cached_blocks: KV blocks that only hold a reusable prefix.
        num_free_blocks: KV blocks that hold nothing.
        prefix_hit_rate: Share of prompt tokens that came from the prefix cache, 0 to 1.
        num_preemptions: Sequences that lost their blocks to others.
    """

    dp_rank: int
    address: str = ""
    num_running: int = 0
    last_step_tokens: int = 0
    last_step_s: float = 0.0
    total_tokens: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_free_blocks: int = 0
    prefix_hit_rate: float = 0.0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class GraphCount:
    """How many steps ran in one way.

    Attributes:
        runner: What ran them: "decode", "verify", "prefill_breakable", …; "eager" without a graph.
        size: Sequences of a decode or verify graph, tokens of a prefill graph; 0 without a graph.
        miss: Why there was no graph, such as "too_large"; empty with one.
    """

    runner: str
    size: int
    miss: str
    num_steps: int


class SpeculationState(Enum):
    DRAFTING = auto()  # steps without prompts are speculative, and come in turn
    PAUSED = auto()  # too few drafts were accepted to pay; they will be tried again
    OFF = auto()  # the router was told not to


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationStatus:
    """What came of a group's drafts in this epoch.

    Attributes:
        algorithm: Which runners draft.
        num_steps: Speculative steps.
        num_drafts: Drafts that could have been accepted.
        num_accepted_drafts: Those that were.
        tokens_per_step: That a sequence gains in one, lately; None before the first.
    """

    algorithm: str
    state: SpeculationState
    num_steps: int = 0
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    tokens_per_step: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStatus:
    """One group of executors at one moment.

    Attributes:
        problem: What keeps it from being READY; empty if nothing does.
        epoch: Formations so far.
        step: Steps committed in this epoch.
        last_step_age_s: Since the last commit; None before the first.
        num_waiting: Sequences not bound to a rank.
        num_waiting_tokens: Prompt tokens of those sequences.
        graphs: The steps of this epoch, by what ran them.
        block_size: Tokens per KV block; 0 before the first forming.
        max_num_seqs: Sequences that each rank runs at most; 0 before the first forming.
        speculation: None without a draft model.
    """

    group: int
    state: GroupState
    problem: str = ""
    epoch: int = 0
    step: int = 0
    last_step_age_s: float | None = None
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    ranks: tuple[RankStatus, ...] = ()
    graphs: tuple[GraphCount, ...] = ()
    block_size: int = 0
    max_num_seqs: int = 0
    speculation: SpeculationStatus | None = None
