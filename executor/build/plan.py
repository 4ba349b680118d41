"""What the settings and the checkpoints come to: everything that is decided before a weight is read."""

from dataclasses import dataclass

import torch

from executor.budget.capture_sizes import GraphSizes
from executor.budget.speculation import SpeculationPlan
from executor.budget.token_budget import TokenBudget
from executor.build.sizes import (
    check_model_fits,
    plan_budget,
    plan_graph_sizes,
    plan_speculation,
    splits_dense,
)
from executor.config import ExecutorConfig, resolve_max_model_len
from executor.model.families.config import ModelConfig
from executor.model.families.draft_config import DraftConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Blueprint:
    """One executor, as it is to be built.

    Attributes:
        config: The settings.
        model: Sizes of the model.
        draft: Those of its draft model; None without.
        speculation: How that drafts; None without.
        dtype: Type of weights, activations and KV.
        max_model_len: Tokens of one sequence.
        has_split_dense: Whether dense MLPs are split over the group.
        graph_sizes: What is captured.
        budget: What buffers are sized by.
    """

    config: ExecutorConfig
    model: ModelConfig
    draft: DraftConfig | None
    speculation: SpeculationPlan | None
    dtype: torch.dtype
    max_model_len: int
    has_split_dense: bool
    graph_sizes: GraphSizes
    budget: TokenBudget

    @classmethod
    def of(cls, config: ExecutorConfig) -> "Blueprint":
        """Reads the checkpoints' configurations and plans every size.

        Raises:
            CheckpointError: A configuration is missing, or says what is not supported.
            ValueError: The models and the settings do not fit one another.
        """
        model = ModelConfig.from_dir(config.model)
        dtype = model.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        max_model_len = resolve_max_model_len(config.max_model_len, model.max_position_embeddings)
        check_model_fits(config, model)
        has_split_dense = splits_dense(config, model)
        draft, speculation = None, None
        if config.draft_model is not None:
            draft = DraftConfig.from_dir(config.draft_model, model)
            speculation = plan_speculation(config, draft)
        graph_sizes = plan_graph_sizes(config, max_model_len, has_split_dense=has_split_dense)
        return cls(
            config=config,
            model=model,
            draft=draft,
            speculation=speculation,
            dtype=dtype,
            max_model_len=max_model_len,
            has_split_dense=has_split_dense,
            graph_sizes=graph_sizes,
            budget=plan_budget(config, model, dtype, graph_sizes, speculation),
        )

    @property
    def max_blocks_per_row(self) -> int:
        """Blocks of the longest sequence, and of the drafts behind it."""
        plan = self.speculation
        reserved = 0 if plan is None else max(plan.num_reserved_tokens, plan.kv_lookahead)
        return -(-(self.max_model_len + reserved) // self.config.block_size)

    @property
    def spill_blocks_per_row(self) -> int:
        """Blocks that hold what a step writes behind a row's own; 0 without a draft model."""
        plan = self.speculation
        return 0 if plan is None else -(-plan.num_spilled_tokens // self.config.block_size)
