"""Check of a model against settings, from its configuration and its tensors' names, types and shapes.

The plan, the parameters and the KV pool's shape are those of a start, on PyTorch's meta device, which
has sizes and no memory; no weight is read.
"""

from collections.abc import Callable
from contextlib import closing

import torch

from executor.budget.token_budget import FLOAT32_BYTES
from executor.build.keeping import META, bytes_of, keepable, sizes_only, weight_bytes
from executor.build.memory import blocks_in, kv_lines, new_kv_pool
from executor.build.plan import Blueprint
from executor.config import ExecutorConfig
from executor.model.cpu_kernels.linear import PANEL
from executor.model.decoder.expert_loader import check_experts
from executor.model.decoder.kernels import kept_sizes
from executor.model.decoder.sizes import windows_of
from executor.model.drafts.draft import load_draft_model
from executor.model.families import fill_model
from executor.model.layers.linear import vocab_slice
from executor.model.spec import MoeSpec
from executor.model.weights import Loader
from executor.model.weights.kept import DEQUANTISED, IN_INT8, Keeping
from executor.speculative.state import block_carry_bytes
from protos.executor.placement import GHOST


def check(config: ExecutorConfig, say: Callable[[str], None]) -> bool:
    """Says what an executor with these settings would hold. Returns whether it would load.

    Args:
        config: Every setting.
        say: Takes each line.
    """
    try:
        blueprint = Blueprint.of(config)
        _describe(blueprint, say)
        with torch.inference_mode():
            _check_tensors(blueprint, say)
    except ValueError as error:
        say(f"refused               {error}")
        return False
    say("tensors               all there, and fit")
    return True


def _describe(blueprint: Blueprint, say: Callable[[str], None]) -> None:
    config, model = blueprint.config, blueprint.model
    num_moe = sum(isinstance(layer.feed_forward, MoeSpec) for layer in model.layers)
    say(f"model                 {config.model}")
    say(f"family                {model.architecture}")
    say(f"layers                {len(model.layers)}, {num_moe} of them with experts")
    if num_moe:
        slots = config.capacity.slots_at_start(config.topology, model.num_experts)
        num_held = len(slots) - slots.count(GHOST)
        if config.capacity.is_elastic:
            num_held = len(slots)
        say(
            f"experts               {num_held} of {model.num_experts} in {len(slots)} slots, each shared by "
            f"{config.topology.moe_tp_size} executors"
        )
    saved = "" if model.quantization is None else f", dequantised from {model.quantization.title}"
    to_int8 = ", but int8 in projections, experts and head" if config.weights == "int8" else ""
    say(f"weights are           {str(blueprint.dtype).removeprefix('torch.')}{to_int8}{saved}")
    say(f"executors             {config.world_size}")


def _check_tensors(blueprint: Blueprint, say: Callable[[str], None]) -> None:
    config, draft_config, dtype = blueprint.config, blueprint.draft, blueprint.dtype
    plan = blueprint.speculation
    keeping = IN_INT8 if config.weights == "int8" else DEQUANTISED
    model = sizes_only(blueprint, keeping)
    num_bytes = bytes_of(model)
    say(f"weights               {num_bytes:,} bytes on this executor")
    if head := _packed_head_bytes(blueprint, keeping):
        num_bytes += head
        say(f"packed head           {head:,} bytes more on a CPU with kernels, as the head is tied")
    kv_pool = new_kv_pool(blueprint, META)
    if draft_config is not None and plan is not None:
        if (own := draft_config.kv_shape(config.block_size, dtype, config.capacity)) is not None:
            kv_pool.sibling(own)
        carries = block_carry_bytes(plan, draft_config.layers.hidden_size, dtype)
        kv_pool.per_block(carries, lambda: None)
    of_token, *of_windows = kv_lines(kv_pool.shape, kv_pool.all_bytes_per_block)
    say(f"KV per token          {of_token.bytes:,} bytes on this executor")
    if config.kv_cache_bytes is not None:
        blocks_in(config.kv_cache_bytes, kv_pool)  # checks itself
    if keeping == IN_INT8:
        plain = weight_bytes(blueprint, DEQUANTISED) + _packed_head_bytes(blueprint, DEQUANTISED)
        spared = plain - num_bytes
        say(f"int8 spares           {spared:,} bytes, KV of {spared // of_token.bytes:,} tokens")
    for line in of_windows:
        say(f"KV of windows         {line.bytes:,} bytes of a sequence that decodes, {line.bound}")
    if not of_windows and windows_of(blueprint.model):
        say("KV of windows         not apart: all layers have one, and every block is kept")
    fill_model(config.model, blueprint.model, model)
    if config.capacity.is_elastic:
        with closing(Loader(config.model, blueprint.model.quantization)) as loader:
            check_experts(model, loader, blueprint.model.num_experts)
    if blueprint.model.quantization is not None and keeping == DEQUANTISED:
        _describe_kept(blueprint, blueprint.model.quantization.title, say)
    if config.draft_model is not None and draft_config is not None:
        kernels = kept_sizes(draft_config.layers, keeping, dtype=dtype)
        draft = load_draft_model(config.draft_model, draft_config, model, kernels=kernels)
        say(f"weights of the draft  {bytes_of(draft):,} bytes on this executor")


def _packed_head_bytes(blueprint: Blueprint, keeping: Keeping) -> int:
    """Returns what the CPU's kernels have of a tied head, beside the embedding."""
    model, size = blueprint.model, blueprint.model.hidden_size
    if not model.tied or blueprint.dtype is not torch.bfloat16 or size % 2:
        return 0
    num_rows = vocab_slice(model.vocab_size, blueprint.config.attn_tp_size)
    row_bytes = size + FLOAT32_BYTES if keeping == IN_INT8 else size * blueprint.dtype.itemsize
    return -(-num_rows // PANEL) * PANEL * row_bytes


def _describe_kept(blueprint: Blueprint, title: str, say: Callable[[str], None]) -> None:
    """Says what a GPU with kernels for quantised weights would hold."""
    config = blueprint.config
    keeping, problems = keepable(config, blueprint.model, config.model)
    kept = " and ".join(name for name, how in keeping._asdict().items() if how is not None)
    if kept:
        num_bytes = weight_bytes(blueprint, keeping)
        say(f"weights if kept       {num_bytes:,} bytes with {kept} in {title}, on a Hopper GPU")
    for problem in problems:
        say(f"never kept            {problem}")
