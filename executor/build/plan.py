"""Plan of an executor: every size that settings and checkpoints' configurations decide.

It says what each executor holds, captures and can take. What does not fit is refused here, before a
weight is read.
"""

from dataclasses import dataclass

import torch

from executor.budget.capture_sizes import (
    GraphSizes,
    capture_alignment,
    decode_capture_sizes,
    prefill_capture_sizes,
)
from executor.budget.speculation import SpeculationPlan
from executor.budget.token_budget import TokenBudget
from executor.config import ExecutorConfig, resolve_max_model_len
from executor.model.decoder.sizes import attention_of, attention_share
from executor.model.drafts.config import DraftConfig
from executor.model.families import read_spec
from executor.model.moe.dispatch import DISPATCHERS
from executor.model.moe.runner_cpu import HIDDEN_MULTIPLE
from executor.model.spec import MlaSpec, ModelSpec
from executor.parallel.layout import divisors, require_gathered_buffer

DEFAULT_DRAFT_STEPS = 3


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
    model: ModelSpec
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
        model = read_spec(config.model)
        dtype = model.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        max_model_len = resolve_max_model_len(config.max_model_len, model.max_position_embeddings)
        check_model_fits(config, model)
        has_split_dense = splits_dense(config, model)
        draft, speculation = None, None
        if config.draft_model is not None:
            draft = DraftConfig.from_dir(config.draft_model, model)
            speculation = plan_speculation(config, draft)
            for each in (model, draft.layers):
                _check_trees(each, speculation)
        if config.weights == "int8":
            for each in (model, *(() if draft is None else (draft.layers,))):
                _check_int8(each, dtype)
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


def splits_dense(config: ExecutorConfig, model: ModelSpec) -> bool:
    """Whether the model has dense MLPs that are split over the group."""
    return config.moe_dense_tp_size is None and bool(model.dense_widths)


def check_model_fits(config: ExecutorConfig, model: ModelSpec) -> None:
    """Checks that heads, columns of experts and dense MLPs divide among the executors.

    Raises:
        ValueError: Names the setting, the model's size that it does not fit, and what would.
    """
    attention_share(attention_of(model), config.capacity)  # checks itself
    world_size, num_parts = config.world_size, config.topology.num_expert_parts
    if model.moe is not None:
        width = model.moe.intermediate_size
        block = 1 if model.quantization is None else model.quantization.block
        fitting = [
            size
            for size in divisors(world_size)
            if size == world_size or width % (world_size // size * block) == 0
        ]
        if num_parts not in fitting:
            blocks = f" in blocks of {block}, which share a scale," if block > 1 else ""
            raise ValueError(
                f"ep_size={num_parts}: moe_intermediate_size={width} does not divide{blocks} among the "
                f"{config.topology.moe_tp_size} executors that share each expert; use ep_size "
                f"{' or '.join(map(str, fitting))}"
            )
    elif config.moe_a2a != "none":
        raise ValueError(f"moe_a2a={config.moe_a2a}: the model has no experts; set moe_a2a=none")
    if splits_dense(config, model) and config.capacity.is_elastic:
        raise ValueError(
            f"moe_dense_tp_size is not set, but an elastic executor (max_dp_size={config.max_dp_size}) "
            f"holds no share of dense MLPs that follows from its place: set moe_dense_tp_size=1"
        )
    uneven = [width for width in model.dense_widths if width % world_size]
    if splits_dense(config, model) and uneven:
        raise ValueError(
            f"moe_dense_tp_size is not set, but intermediate_size={uneven[0]} of the "
            f"dense MLPs does not divide among {world_size} executors: set moe_dense_tp_size=1"
        )


def _check_int8(model: ModelSpec, dtype: torch.dtype) -> None:
    if dtype is not torch.bfloat16:
        raise ValueError(
            f"weights=int8: its kernels take bfloat16 for all else, and dtype is "
            f"{str(dtype).removeprefix('torch.')}: set dtype=bfloat16, or weights=auto"
        )
    if model.moe is not None and model.hidden_size % HIDDEN_MULTIPLE:
        raise ValueError(
            f"weights=int8: the kernel for experts takes hidden_size in multiples of "
            f"{HIDDEN_MULTIPLE}, not {model.hidden_size}: set weights=auto"
        )


def _check_trees(model: ModelSpec, speculation: SpeculationPlan) -> None:
    if not speculation.is_tree:
        return
    unable = None
    for attention in (layer.attention for layer in model.layers):
        if isinstance(attention, MlaSpec):
            unable = "latent attention (MLA)"
        elif attention.window is not None:
            unable = f"attention with sliding_window={attention.window}"
    if unable is not None:
        raise ValueError(
            f"draft_topk={speculation.topk}: drafts are verified as trees, which {unable} of "
            f"{model.architecture} cannot; set draft_topk=1"
        )


def plan_graph_sizes(
    config: ExecutorConfig, max_model_len: int, *, has_split_dense: bool = False
) -> GraphSizes:
    """Returns what to capture, which is also what Describe tells the router to plan with.

    Args:
        config: The settings.
        max_model_len: Tokens of one sequence.
        has_split_dense: From ``splits_dense``.

    Raises:
        ValueError: The operator listed sizes of which none is left.
    """
    alignment = 1
    if require_gathered_buffer(
        config.topology, gathers_experts=config.gathers_experts, splits_dense=has_split_dense
    ):
        alignment = capture_alignment(config.attn_tp_size)
    decode: tuple[int, ...] = ()
    extend: tuple[int, ...] = ()
    if config.decode_graphs == "on":
        decode = decode_capture_sizes(
            config.max_num_seqs, alignment=alignment, listed=config.decode_graph_sizes
        )
    if config.prefill_graphs != "off":
        held, listed = config.max_num_seqs * max_model_len, config.prefill_graph_sizes
        most = min(config.max_num_batched_tokens, held)
        extend = prefill_capture_sizes(most, alignment=alignment, listed=listed)
        if listed is not None and extend[-1] > held:
            raise ValueError(
                f"prefill_graph_sizes has {extend[-1]}: {config.max_num_seqs} sequences of "
                f"{max_model_len} tokens make {held} at most, so no step is larger"
            )
        extend = tuple(size for size in extend if size <= held)  # alignment may bring one above
    return GraphSizes(decode, extend)


def plan_speculation(config: ExecutorConfig, draft: DraftConfig) -> SpeculationPlan:
    """Returns how a draft model drafts.

    Raises:
        ValueError: The settings do not fit it. Says which to set, and to what.
    """
    steps = config.num_draft_steps
    if draft.num_layers > 1:  # a layer drafts one token
        steps = draft.num_layers if steps is None else steps
        if steps > draft.num_layers:
            raise ValueError(
                f"num_draft_steps={steps}: the draft model has a layer for each of "
                f"{draft.num_layers} drafts; set at most that"
            )
    return SpeculationPlan(
        algorithm=draft.algorithm,
        num_draft_steps=DEFAULT_DRAFT_STEPS if steps is None else steps,
        topk=config.draft_topk,
        num_draft_tokens=config.num_draft_tokens or 0,
    )


def plan_budget(
    config: ExecutorConfig,
    model: ModelSpec,
    dtype: torch.dtype,
    graph_sizes: GraphSizes,
    speculation: SpeculationPlan | None = None,
) -> TokenBudget:
    """Returns what every buffer is sized by.

    Args:
        config: The settings.
        model: Sizes.
        dtype: Type of the hidden states.
        graph_sizes: What is captured.
        speculation: How a draft model drafts; None without.

    Raises:
        ValueError: The settings do not fit one another. Says which to set, and to what.
    """
    budget = TokenBudget(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_num_logits=config.num_logits,
        num_tokens_per_bs=1 if speculation is None else speculation.num_rows_per_sequence,
        draft_lookahead=0 if speculation is None else speculation.kv_lookahead,
        decode_graph_size=max(graph_sizes.decode, default=0),
        extend_graph_size=max(graph_sizes.extend, default=0),
        dp_size=config.topology.dp_size,
        attn_tp_size=config.attn_tp_size,
        ep_size=config.topology.num_expert_parts,
        hidden_size=model.hidden_size,
        itemsize=dtype.itemsize,
        top_k=model.top_k,
        vocab_size=model.vocab_size,
        a2a_extends=config.moe_a2a_extend == "all-to-all",
        quantized_dispatch=None
        if config.quantized_dispatch == "off"
        else config.quantized_dispatch,
        max_dispatch_tokens_per_rank=config.max_dispatch_tokens_per_rank,
    )
    DISPATCHERS[config.moe_a2a].check(budget)
    return budget
