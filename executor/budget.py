"""The most that one step may carry. Every buffer is sized from this, once, at start."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBudget:
    """Upper bounds of one step on one DP rank, before padding.

    The router plans within it; the executor refuses a step that exceeds it.

    Attributes:
        max_num_batched_tokens: Tokens.
        max_num_seqs: Sequences.
        max_num_logits: Rows of logits: sampled tokens and scored prompt tokens together.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_num_logits: int

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs={self.max_num_seqs}: need at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below "
                f"max_num_seqs={self.max_num_seqs}: a full decode step would not fit"
            )
        if self.max_num_logits < self.max_num_seqs:
            raise ValueError(
                f"max_num_logits={self.max_num_logits} is below max_num_seqs="
                f"{self.max_num_seqs}: a step in which every sequence samples would not fit"
            )
