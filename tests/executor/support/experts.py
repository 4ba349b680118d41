"""Models described for tests, and ghosts among their experts."""

from dataclasses import replace

import torch

from executor.model.moe.experts import ExpertSlots
from executor.model.spec import GqaSpec, LayerSpec, ModelSpec, MoeSpec, QkNorm, RopeSpec, RouterSpec
from executor.model.weights import KeptWeight
from protos.executor.placement import GHOST


def new_spec(
    *,
    vocab_size: int = 8,
    hidden_size: int,
    num_layers: int = 1,
    num_heads: int = 1,
    num_kv_heads: int = 1,
    head_dim: int = 16,
    num_experts: int,
    top_k: int,
    intermediate_size: int,
    max_position_embeddings: int = 8,
    dtype: torch.dtype,
) -> ModelSpec:
    """Returns a Qwen3-MoE whose layers all have experts."""
    attention = GqaSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=0,
        scale=head_dim**-0.5,
        qk_norm=QkNorm.HEAD,
    )
    experts = MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=intermediate_size,
        router=RouterSpec(),
    )
    layer = LayerSpec(attention=attention, feed_forward=experts)
    return ModelSpec(
        architecture="Qwen3MoeForCausalLM",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=(layer,) * num_layers,
        ropes=(RopeSpec(rotary_dim=head_dim, theta=1e6),),
        norm_eps=1e-6,
        tied=False,
        dtype=dtype,
        max_position_embeddings=max_position_embeddings,
    )


def with_heads(spec: ModelSpec, **sizes: int) -> ModelSpec:
    """Returns a model whose layers' attention has other sizes."""
    return _with_layers(spec, "attention", **sizes)


def with_experts(spec: ModelSpec, **sizes: int) -> ModelSpec:
    """Returns a model whose layers' experts have other sizes."""
    return _with_layers(spec, "feed_forward", **sizes)


def poison_ghosts(experts: ExpertSlots) -> int:
    """Makes what lies in slots without an expert NaN. Returns how many there are."""
    weights = [experts._w13, experts._w2, *(experts._biases or ())]
    ghosts = [slot for slot, expert in enumerate(experts._share.slots) if expert == GHOST]
    for weight in weights:
        parts = (weight.numbers, weight.scales) if isinstance(weight, KeptWeight) else (weight,)
        for part in parts:
            if part.is_floating_point():
                part[ghosts] = torch.nan
            elif part.dtype is torch.uint8:
                part[ghosts] = 254  # the largest scale of MXFP4
    return len(ghosts)


def _with_layers(spec: ModelSpec, part: str, **sizes: int) -> ModelSpec:
    layers = (
        replace(layer, **{part: replace(getattr(layer, part), **sizes)}) for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers))
