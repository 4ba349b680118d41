"""Limits of a step, and the progress of each row through the steps before."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from executor.batch.columns import BoolArray, Int64Array
from executor.budget.capture_sizes import GraphSizes
from executor.budget.speculation import SpeculationPlan
from executor.budget.token_budget import TokenBudget
from executor.parallel.topology import Topology

NO_GRAPHS = GraphSizes()


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """What a step of this executor must fit in.

    Attributes:
        topology: This executor's coordinates in its group.
        budget: The most that one step may carry. The block table has ``max_num_seqs`` rows.
        num_kv_blocks: Blocks that the router hands out, and the scratch block.
        block_size: Tokens per block.
        vocab_size: Token ids are below this.
        max_model_len: Tokens of one sequence.
        graph_sizes: Sizes for which a graph was captured.
        speculation: How the draft model drafts; None without one.
    """

    topology: Topology
    budget: TokenBudget
    num_kv_blocks: int
    block_size: int
    vocab_size: int
    max_model_len: int
    graph_sizes: GraphSizes = NO_GRAPHS
    speculation: SpeculationPlan | None = None

    def __post_init__(self) -> None:
        sizes = (self.topology.dp_size, self.topology.attn_tp_size)
        if sizes != (self.budget.dp_size, self.budget.attn_tp_size):
            raise ValueError(
                f"the budget is for dp_size={self.budget.dp_size} and attn_tp_size="
                f"{self.budget.attn_tp_size}, the executor's coordinates for {sizes[0]} and "
                f"{sizes[1]}"
            )

    @cached_property
    def bounds(self) -> dict[str, int]:
        """The largest values that columns may have, by the names that their tables use."""
        plan = self.speculation
        return {
            "row": self.budget.max_num_seqs - 1,
            "token_id": self.vocab_size - 1,
            "block_id": self.num_kv_blocks - 1,
            "vocab_size": self.vocab_size,
            "num_draft_tokens": 0 if plan is None else plan.num_draft_tokens,
            "max_num_batched_tokens": self.budget.max_num_batched_tokens,
            "max_num_logits": self.budget.max_num_logits,
            "max_model_len": self.max_model_len,
            "max_blocks_per_row": -(-self.max_model_len // self.block_size),
        }


@dataclass(frozen=True, slots=True)
class RowProgress:
    """What the host knows of each row since it started.

    Attributes:
        is_live: bool [R], rows that have started in this epoch. The worker writes it.
        has_sampled: bool [R], rows that have a last token. The worker writes it.
        num_blocks: int64 [R], blocks that each row holds. The KV pool writes it.
        num_tokens: int64 [R], tokens that each row has, the last sampled one included. The worker
            writes it where there is a draft model: only it knows how many drafts were accepted.
        is_followed: bool [R], rows of which a draft model with KV has run every token. The worker
            writes it.
    """

    is_live: BoolArray
    has_sampled: BoolArray
    num_blocks: Int64Array
    num_tokens: Int64Array
    is_followed: BoolArray

    @classmethod
    def empty(cls, num_blocks: Int64Array) -> "RowProgress":
        """Returns the progress of rows of which none has started."""
        return cls(
            np.zeros_like(num_blocks, np.bool_),
            np.zeros_like(num_blocks, np.bool_),
            num_blocks,
            np.zeros_like(num_blocks),
            np.ones_like(num_blocks, np.bool_),
        )

    def start(self, rows: Int64Array) -> None:
        """Notes that rows begin."""
        self.is_live[rows] = True
        self.has_sampled[rows] = False
        self.is_followed[rows] = True

    def reset(self) -> None:
        """Forgets all rows."""
        self.is_live[:] = False
        self.has_sampled[:] = False
