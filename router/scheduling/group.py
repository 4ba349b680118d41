"""What a formed group is, as its executors described it. Data only."""

from dataclasses import dataclass

from router.scheduling.model import ServedModel
from router.scheduling.speculation import Speculation
from router.scheduling.step import Agreement
from router.scheduling.step_builder import NO_GRAPHS, GraphSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupShape:
    """What the scheduler must know of a group; the same on every DP rank but for the blocks.

    Attributes:
        dp_size: DP ranks.
        num_blocks: [dp_size] KV blocks of each rank, the scratch block included.
        block_size: Tokens per block.
        rows_per_rank: Sequences that can be live on a rank.
        max_num_batched_tokens: Tokens of a rank in one step.
        max_num_logits: Rows of logits of a rank in one step.
        max_model_len: Tokens of one sequence.
        attn_tp_size: Executors that share one DP rank's attention, and its rows between.
        graph_sizes: What the executors have captured.
        speculation: What they can draft; None without a draft model.
    """

    dp_size: int
    num_blocks: tuple[int, ...]
    block_size: int
    rows_per_rank: int
    max_num_batched_tokens: int
    max_num_logits: int
    max_model_len: int
    attn_tp_size: int = 1
    graph_sizes: GraphSizes = NO_GRAPHS
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        if len(self.num_blocks) != self.dp_size:
            raise ValueError(
                f"num_blocks has {len(self.num_blocks)} entries for dp_size={self.dp_size}"
            )
        capacity = (min(self.num_blocks) - 1) * self.block_size
        if self.max_model_len > capacity:
            raise ValueError(
                f"max_model_len={self.max_model_len}: the smallest KV pool holds {capacity} tokens; "
                f"raise the executors' KV cache or lower their max_model_len"
            )
        for name in ("max_num_batched_tokens", "max_num_logits"):
            if getattr(self, name) < self.rows_per_rank:
                raise ValueError(
                    f"{name}={getattr(self, name)} is below max_num_seqs={self.rows_per_rank}: "
                    f"a step of decodes would not fit"
                )

    def check(self, agreement: Agreement) -> None:
        """Checks that a step is within what the executors have room for. They would refuse it."""
        num_tokens = max(agreement.global_num_tokens)
        num_logits = max(agreement.global_num_tokens_for_logprob)
        most_tokens, most_logits = self.max_num_batched_tokens, self.max_num_logits
        if agreement.num_draft_tokens:  # for which there is room beside the budget
            most_tokens = most_logits = self.rows_per_rank * agreement.num_draft_tokens
        assert num_tokens <= most_tokens, (
            f"planned {num_tokens} tokens on a rank; the budget is {most_tokens}"
        )
        assert num_logits <= most_logits, (
            f"planned {num_logits} rows of logits on a rank; the budget is {most_logits}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupInfo:
    """A group that has formed.

    Attributes:
        addresses: [dp_size] where each DP rank's first executor listens.
    """

    epoch: int
    model: ServedModel
    shape: GroupShape
    addresses: tuple[str, ...]
