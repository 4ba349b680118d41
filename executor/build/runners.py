"""Runners of the target model, with their registries and backends."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from executor.budget.capture_sizes import GraphSizes
from executor.budget.speculation import SpeculationPlan
from executor.budget.token_budget import TokenBudget
from executor.config import ExecutorConfig
from executor.graph.backend import RunnerBackend
from executor.graph.cuda_graph_buffer_registry import (
    build_decode_registry,
    build_eager_registry,
    build_prefill_registry,
)
from executor.runners import Capturable, GraphRunner
from executor.runners.forward_pass import ForwardPass
from executor.runners.target import (
    BreakablePrefillRunner,
    DecodeRunner,
    EagerRunner,
    PiecewisePrefillRunner,
    RunnerSelection,
)

PADDED_SEQ_LEN = 1  # a padded sequence attends to one key of the scratch block


def build_runners(
    config: ExecutorConfig,
    budget: TokenBudget,
    forward_pass: ForwardPass,
    graph_sizes: GraphSizes,
    new_backend: Callable[[], RunnerBackend],
    *,
    speculation: SpeculationPlan | None = None,
    draft_runners: Sequence[Capturable] = (),
) -> RunnerSelection:
    """Builds the runners of the target model that the settings ask for. Nothing is captured yet.

    Args:
        config: The settings.
        budget: What buffers are sized by.
        forward_pass: What to run.
        graph_sizes: From ``plan_graph_sizes``.
        new_backend: Makes the backend of one runner.
        speculation: How a draft model drafts; None without.
        draft_runners: Its runners, to be captured with these, in this order.
    """
    device = forward_pass.kv_pool.device
    decode_backend, prefill_backend = new_backend(), new_backend()
    decode = prefill = verify = None
    if graph_sizes.decode:
        decode = _decode_runner(forward_pass, graph_sizes.decode, decode_backend)
        if speculation is not None:
            verify = _decode_runner(
                forward_pass,
                graph_sizes.decode,
                new_backend(),
                speculation.num_draft_tokens,
                has_tree=speculation.is_tree,
            )
    if graph_sizes.extend:
        prefill = _prefill_runner(config, budget, forward_pass, graph_sizes.extend, prefill_backend)
    eager = EagerRunner(
        forward_pass,
        build_eager_registry(
            device=device,
            max_bs=budget.max_num_seqs,
            max_num_token=budget.max_tokens_per_rank,
            cache_loc_dtype=torch.int64,
            has_window=forward_pass.has_window,
        ),
    )
    binds_group = config.world_size > 1 and not decode_backend.outlives_group
    return RunnerSelection(
        eager,
        decode=decode,
        prefill=prefill,
        verify=verify,
        draft_runners=draft_runners,
        binds_group=binds_group,
        place=forward_pass.place,
    )


def _decode_runner(
    forward_pass: ForwardPass,
    sizes: tuple[int, ...],
    backend: RunnerBackend,
    width: int = 1,
    *,
    has_tree: bool = False,
) -> DecodeRunner:
    registry = build_decode_registry(
        device=forward_pass.kv_pool.device,
        max_bs=sizes[-1],
        max_num_token=sizes[-1] * width,
        seq_len_fill_value=max(PADDED_SEQ_LEN, width),
        cache_loc_dtype=torch.int64,
        enable_num_token_non_padded=True,
        num_tree_nodes=width if has_tree else 0,
        has_window=forward_pass.has_window,
        **row_counts(forward_pass),
    )
    return DecodeRunner(forward_pass, registry, backend, sizes, num_tokens_per_bs=width)


def _prefill_runner(
    config: ExecutorConfig,
    budget: TokenBudget,
    forward_pass: ForwardPass,
    sizes: tuple[int, ...],
    backend: RunnerBackend,
) -> GraphRunner:
    registry = build_prefill_registry(
        device=forward_pass.kv_pool.device,
        max_bs=budget.max_num_seqs,
        max_num_token=budget.extend_graph_size,
        cache_loc_dtype=torch.int64,
        has_window=forward_pass.has_window,
        enable_num_token_non_padded=True,
        **row_counts(forward_pass),
    )
    if config.prefill_graphs == "piecewise":
        return PiecewisePrefillRunner(forward_pass, registry, backend, sizes)
    return BreakablePrefillRunner(forward_pass, registry, backend, sizes)


def row_counts(forward_pass: ForwardPass) -> dict[str, Any]:
    """Returns how a graph's registry counts rows: this executor's own, and those of all ranks."""
    topology = forward_pass.place.topology
    return {
        "require_gathered_buffer": forward_pass.require_gathered_buffer,
        "require_mlp_tp_gather": forward_pass.require_mlp_tp_gather,
        "register_global_num_tokens": forward_pass.require_gathered_buffer,
        "attn_tp_size": topology.attn_tp_size,
        "attn_tp_rank": topology.attn_tp_rank,
        "num_dp_ranks": topology.dp_size,
    }
