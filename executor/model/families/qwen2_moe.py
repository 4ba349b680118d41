"""Qwen2-MoE: biased queries, keys and values, and an MLP beside the experts that a token may close.

Source: Transformers, models/qwen2_moe/modeling_qwen2_moe.py.
"""

from dataclasses import replace

from executor.model.decoder.config import (
    are_sparse,
    read_attention,
    read_experts,
    read_layers,
    read_model,
    read_num_layers,
    read_rope,
    refuse_windows,
)
from executor.model.decoder.decoder import Tensors, renamed
from executor.model.decoder.fields import Fields
from executor.model.spec import ModelSpec, RouterSpec, SharedSpec


def read(fields: Fields) -> ModelSpec:
    refuse_windows(fields)
    attention = read_attention(fields, qkv_bias=fields.flag("qkv_bias", default=True))
    router = RouterSpec(renormalise=fields.flag("norm_topk_prob"))
    width = fields.integer("shared_expert_intermediate_size", least=1)
    experts = read_experts(fields, router)
    if experts is not None:
        experts = replace(experts, shared=SharedSpec(intermediate_size=width, gated=True))
    sparse = are_sparse(fields, range(read_num_layers(fields)))
    layers = read_layers(fields, attention, experts, sparse)
    return read_model(fields, layers, (read_rope(fields, attention.head_dim, theta=10000.0),))


def tensors(spec: ModelSpec) -> Tensors:
    return renamed((".shared_experts.", ".shared_expert."))
