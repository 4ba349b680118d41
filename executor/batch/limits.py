"""What a step must fit in, and what is known of each row from the steps before. Data only."""

from dataclasses import dataclass

import numpy as np

from executor.batch.columns import BoolArray, Int64Array
from executor.budget.capture_sizes import GraphSizes
from executor.budget.speculation import SpeculationPlan
from executor.budget.token_budget import TokenBudget
from executor.parallel.topology import Topology

NO_GRAPHS = GraphSizes()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLimits:
    """What a step of this executor must fit in.

    Attributes:
        topology: This executor's place in its group.
        budget: The most that one step may carry.
        num_rows: Lines of the block table.
        num_kv_blocks: Blocks that the router hands out, and the scratch block.
        block_size: Tokens per block.
        vocab_size: Token ids are below this.
        max_model_len: Tokens of one sequence.
        graph_sizes: What is captured.
        speculation: How the draft model drafts; None without one.
    """

    topology: Topology
    budget: TokenBudget
    num_rows: int
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
                f"{self.budget.attn_tp_size}, the executor's place for {sizes[0]} and {sizes[1]}"
            )


@dataclass(frozen=True, slots=True)
class RowProgress:
    """What is known on the host of each row since it started.

    Attributes:
        is_live: bool [R], rows that have started in this epoch. The worker writes it.
        has_sampled: bool [R], rows that have a last token. The worker writes it.
        num_blocks: int64 [R], blocks that each row holds. The KV pool writes it.
        num_tokens: int64 [R], tokens that each row has, the last sampled one included. The worker
            writes it where there is a draft model: then only it knows how many were accepted.
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
