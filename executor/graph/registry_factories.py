"""Which inputs each kind of captured graph has: the registries of decode, prefill, draft and eager
runs.

The public module of the registry; how it works is in ``buffer_registry.py``, what a slot is in
``graph_slot.py``, and each slot's shape, type and padding in ``slot_tables.py``.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from executor.graph.cuda_graph_buffer_registry import CudaGraphBufferRegistry
from executor.graph.draft_slots import tree_mask_slot
from executor.graph.graph_slot import FillContext, GraphSlot, PaddingPolicy
from executor.graph.input_buffers import INDEX_SEMANTIC_BUFFERS
from executor.graph.slots import (
    decode_slots,
    global_num_tokens_slots,
    num_token_non_padded_slot,
    prefill_slots,
    structured_slots,
)

__all__ = [
    "CudaGraphBufferRegistry",
    "FillContext",
    "GraphSlot",
    "PaddingPolicy",
    "build_decode_registry",
    "build_draft_registry",
    "build_eager_registry",
    "build_prefill_registry",
]


def build_decode_registry(
    *,
    device: torch.device | str,
    max_bs: int,
    max_num_token: int,
    seq_len_fill_value: int,
    cache_loc_dtype: torch.dtype,
    enable_mamba_track: bool = False,
    is_encoder_decoder: bool = False,
    encoder_len_fill_value: int = 0,
    encoder_lens_dtype: torch.dtype = torch.int32,
    enable_num_token_non_padded: bool = False,
    require_gathered_buffer: bool = False,
    require_mlp_tp_gather: bool = False,
    attn_tp_size: int = 1,
    attn_tp_rank: int = 0,
    num_dp_ranks: int = 1,
    register_global_num_tokens: bool = True,
    num_tree_nodes: int = 0,
    share_pool: bool = True,
    source: Any = None,
    structured_fields: Sequence[str] = (),
) -> CudaGraphBufferRegistry:
    """Returns the inputs of decode graphs: verify uses it with other sizes.

    Args:
        device: Where the graphs run.
        max_bs: Sequences of the largest graph.
        max_num_token: Token rows of the largest graph.
        seq_len_fill_value: Length of a padded sequence, from the attention backend; 1 where a
            kernel indexes by length - 1.
        cache_loc_dtype: Type of ``out_cache_loc``.
        enable_mamba_track: Whether the model tracks Mamba states.
        is_encoder_decoder: Whether the model has an encoder.
        encoder_len_fill_value: Length of a padded sequence's encoder input.
        encoder_lens_dtype: Type of ``encoder_lens``.
        enable_num_token_non_padded: Whether kernels skip padded rows.
        require_gathered_buffer: Whether layers scatter and gather rows over ranks.
        require_mlp_tp_gather: Whether they gather every DP rank's rows.
        attn_tp_size: Ranks of the attention-TP group.
        attn_tp_rank: This one.
        num_dp_ranks: Ranks that token counts are for.
        register_global_num_tokens: Whether the device needs the token counts.
        num_tree_nodes: Tokens of a sequence where these are verified as a tree, else 0.
        share_pool: Shares buffers with other runners; without effect on adopted ones.
        source: An object whose tensors are adopted as the slots' buffers, attribute by attribute.
        structured_fields: Dotted paths of further tensors to adopt from ``source``.

    Raises:
        ValueError: ``source`` lacks a tensor or has one that does not fit, or the attention-TP
            rank is none of the group's. Names the slot.
    """
    slots = decode_slots(
        seq_len_fill_value=seq_len_fill_value,
        cache_loc_dtype=cache_loc_dtype,
        seq_lens_dtype=_dtype_in(source, "seq_lens"),
        seq_lens_cpu_dtype=_dtype_in(source, "seq_lens_cpu"),
        enable_mamba_track=enable_mamba_track,
        is_encoder_decoder=is_encoder_decoder,
        encoder_len_fill_value=encoder_len_fill_value,
        encoder_lens_dtype=encoder_lens_dtype,
    )
    if num_tree_nodes:
        slots.append(tree_mask_slot(num_tree_nodes))
    if enable_num_token_non_padded:
        slots.append(
            num_token_non_padded_slot(
                require_gathered_buffer=require_gathered_buffer,
                attn_tp_size=attn_tp_size,
                attn_tp_rank=attn_tp_rank,
            )
        )
    if register_global_num_tokens:
        slots += global_num_tokens_slots(
            require_gathered_buffer=require_gathered_buffer,
            require_mlp_tp_gather=require_mlp_tp_gather,
            num_dp_ranks=num_dp_ranks,
        )
    registry = CudaGraphBufferRegistry(
        device=device, max_bs=max_bs, max_num_tokens=max_num_token, share_pool=share_pool
    )
    return _with_slots(registry, slots, source, structured_fields)


def build_prefill_registry(
    *,
    device: torch.device | str,
    max_bs: int,
    max_num_token: int,
    cache_loc_dtype: torch.dtype,
    is_multimodal: bool = False,
    hidden_size: int = 0,
    embed_dtype: torch.dtype | None = None,
    register_input_embeds: bool = True,
    enable_mamba_track: bool = False,
    enable_num_token_non_padded: bool = False,
    require_gathered_buffer: bool = False,
    require_mlp_tp_gather: bool = False,
    attn_tp_size: int = 1,
    attn_tp_rank: int = 0,
    num_dp_ranks: int = 1,
    register_global_num_tokens: bool = False,
    share_pool: bool = True,
    source: Any = None,
    structured_fields: Sequence[str] = (),
) -> CudaGraphBufferRegistry:
    """Returns the inputs of extend graphs. Attention reads the other fields off the batch itself.

    Args:
        is_multimodal: Whether the model takes embeddings and three-fold positions.
        hidden_size: Width of ``input_embeds``.
        embed_dtype: Type of ``input_embeds``.
        register_input_embeds: False if a multimodal model reads them off the batch.

    The other arguments and errors are those of ``build_decode_registry``.
    """
    slots = prefill_slots(
        cache_loc_dtype=cache_loc_dtype,
        is_multimodal=is_multimodal,
        hidden_size=hidden_size,
        embed_dtype=embed_dtype,
        register_input_embeds=register_input_embeds,
        enable_mamba_track=enable_mamba_track,
    )
    if enable_num_token_non_padded:
        slots.append(
            num_token_non_padded_slot(
                require_gathered_buffer=require_gathered_buffer,
                attn_tp_size=attn_tp_size,
                attn_tp_rank=attn_tp_rank,
            )
        )
    if register_global_num_tokens:
        slots += global_num_tokens_slots(
            require_gathered_buffer=require_gathered_buffer,
            require_mlp_tp_gather=require_mlp_tp_gather,
            num_dp_ranks=num_dp_ranks,
        )
    registry = CudaGraphBufferRegistry(
        device=device, max_bs=max_bs, max_num_tokens=max_num_token, share_pool=share_pool
    )
    return _with_slots(registry, slots, source, structured_fields)


def build_draft_registry(
    slots: Iterable[GraphSlot],
    *,
    device: torch.device | str,
    max_bs: int,
    width: int,
    require_gathered_buffer: bool = False,
    require_mlp_tp_gather: bool = False,
    attn_tp_size: int = 1,
    attn_tp_rank: int = 0,
    num_dp_ranks: int = 1,
    register_global_num_tokens: bool = True,
    share_pool: bool = True,
) -> CudaGraphBufferRegistry:
    """Returns the inputs of a phase of the draft model.

    Args:
        slots: Those of the phase (``draft_slots.py``).
        max_bs: Sequences of the largest graph.
        width: Token rows of each, in every pass of the phase.

    The other arguments and errors are those of ``build_decode_registry``.
    """
    counts = [
        num_token_non_padded_slot(
            require_gathered_buffer=require_gathered_buffer,
            attn_tp_size=attn_tp_size,
            attn_tp_rank=attn_tp_rank,
        )
    ]
    if register_global_num_tokens:
        counts += global_num_tokens_slots(
            require_gathered_buffer=require_gathered_buffer,
            require_mlp_tp_gather=require_mlp_tp_gather,
            num_dp_ranks=num_dp_ranks,
        )
    registry = CudaGraphBufferRegistry(
        device=device, max_bs=max_bs, max_num_tokens=max_bs * width, share_pool=share_pool
    )
    return _with_slots(registry, [*slots, *counts], None, ())


def build_eager_registry(
    *,
    device: torch.device | str,
    max_bs: int,
    max_num_token: int,
    cache_loc_dtype: torch.dtype,
    enable_mamba_track: bool = False,
    is_encoder_decoder: bool = False,
    encoder_len_fill_value: int = 0,
    encoder_lens_dtype: torch.dtype = torch.int32,
    share_pool: bool = True,
) -> CudaGraphBufferRegistry:
    """Returns the inputs of eager runs: the decode set, for decodes and extends.

    Args:
        max_num_token: Token rows of the largest extend.

    No counts for ranks or padding: an eager run is not padded, and ranks differ, so ``DpLayout``
    says it. The other arguments are those of ``build_decode_registry``.
    """
    return build_decode_registry(
        device=device,
        max_bs=max_bs,
        max_num_token=max_num_token,
        seq_len_fill_value=0,
        cache_loc_dtype=cache_loc_dtype,
        enable_mamba_track=enable_mamba_track,
        is_encoder_decoder=is_encoder_decoder,
        encoder_len_fill_value=encoder_len_fill_value,
        encoder_lens_dtype=encoder_lens_dtype,
        register_global_num_tokens=False,
        share_pool=share_pool,
    )


def _with_slots(
    registry: CudaGraphBufferRegistry,
    slots: Iterable[GraphSlot],
    source: Any,
    structured_fields: Sequence[str],
) -> CudaGraphBufferRegistry:
    """Registers a factory's slots and those that the source adds."""
    for slot in slots:
        bind = None
        if source is not None:
            bind = getattr(source, slot.name, None)
            if not isinstance(bind, torch.Tensor):
                raise ValueError(f"slot {slot.name!r}: source has no tensor of that name to adopt")
        registry.register_slot(slot, bind)
    for slot, tensor in structured_slots(source, structured_fields):
        registry.register_slot(slot, tensor)
    for name in INDEX_SEMANTIC_BUFFERS.intersection(registry.slot_names()):
        policy = registry.get_slot(name).padding_policy
        assert policy is PaddingPolicy.ZERO, f"padded rows of {name} are followed as indices"
    return registry


def _dtype_in(source: Any, name: str) -> torch.dtype:
    """Returns the type of the source's tensor, int64 if there is none."""
    tensor = getattr(source, name, None)
    return tensor.dtype if isinstance(tensor, torch.Tensor) else torch.int64
