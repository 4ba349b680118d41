"""Plan of speculative decoding: the widths of its phases, and the KV slots that they write."""

from dataclasses import dataclass

MAX_DRAFT_TOKENS = 64  # a tree's mask grows with the square of it


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationPlan:
    """What one executor does in a speculative step. The same on all executors.

    Attributes:
        algorithm: Which runners draft.
        num_draft_steps: D, drafts on the longest path from the last token.
        topk: Drafts that each step goes on from; 1 is a chain.
        num_draft_tokens: Tokens that a sequence verifies: its last one, and drafts.

    Raises:
        ValueError: They do not fit one another. Says what fits.
    """

    algorithm: str
    num_draft_steps: int
    topk: int = 1
    num_draft_tokens: int = 0

    def __post_init__(self) -> None:
        steps, topk = self.num_draft_steps, self.topk
        if steps < 1 or topk < 1:
            raise ValueError(f"num_draft_steps={steps}, draft_topk={topk}: need at least 1")
        if topk > 1 and self.algorithm == "multi_layer_eagle":
            raise ValueError(
                f"draft_topk={topk}: a draft model with a layer for each step drafts a chain; set 1"
            )
        if not self.num_draft_tokens:
            object.__setattr__(self, "num_draft_tokens", steps * topk + 1)
        given, most = self.num_draft_tokens, 1 + topk + (steps - 1) * topk * topk
        least = steps + 1  # a path of all drafts, or a step has drafted for nothing
        if not least <= given <= min(most, MAX_DRAFT_TOKENS):
            raise ValueError(
                f"num_draft_tokens={given} with num_draft_steps={steps} and draft_topk={topk}: need "
                f"{least} to {min(most, MAX_DRAFT_TOKENS)}, the last token included"
            )

    @property
    def is_tree(self) -> bool:
        return self.topk > 1

    @property
    def extends(self) -> bool:
        """Whether the draft model keeps KV of its own, and so runs behind every step."""
        return self.algorithm != "frozen_kv_mtp"

    @property
    def num_layers(self) -> int:
        """Draft layers that take one another's output."""
        return self.num_draft_steps if self.algorithm == "multi_layer_eagle" else 1

    @property
    def num_extend_rows(self) -> int:
        """Rows that a sequence has in a speculative step's draft-extend."""
        return self.num_draft_tokens + self.num_layers - 1 if self.extends else 0

    @property
    def num_rows_per_sequence(self) -> int:
        """Rows that a sequence has in the widest phase."""
        return max(self.num_draft_tokens, self.topk, self.num_extend_rows)

    @property
    def kv_lookahead(self) -> int:
        """Slots behind the tokens run that a step which is not speculative writes."""
        return self.num_layers if self.extends else 0

    @property
    def num_reserved_tokens(self) -> int:
        """Slots from a sequence's last token on that a speculative step writes."""
        drafted = 0
        if self.algorithm == "eagle":
            drafted = 1 + (self.num_draft_steps - 1) * self.topk
        extended = 1 + self.num_extend_rows if self.extends else 0
        return max(self.num_draft_tokens, drafted, extended)

    @property
    def num_spilled_tokens(self) -> int:
        """Slots behind a sequence's blocks that a step writes at most.

        There are blocks for its last token, and for every token that a step runs or may gain.
        """
        return max(self.num_reserved_tokens - 1, self.kv_lookahead)
