"""Mixtral: experts under names of their own, whose weights always sum to 1.

Source: Transformers, models/mixtral/modeling_mixtral.py.
"""

from executor.model.decoder.config import (
    read_attention,
    read_experts,
    read_layers,
    read_model,
    read_num_layers,
    read_rope,
)
from executor.model.decoder.decoder import Tensors, renamed
from executor.model.decoder.fields import Fields
from executor.model.spec import ModelSpec, RouterSpec

_EXPERTS = (
    (".mlp.", ".block_sparse_moe."),
    (".gate_proj.", ".w1."),
    (".up_proj.", ".w3."),
    (".down_proj.", ".w2."),
)


def read(fields: Fields) -> ModelSpec:
    fields.refuse({"sliding_window": ()})
    fields.ignore("router_jitter_noise")  # of training
    attention = read_attention(fields)
    experts = read_experts(fields, RouterSpec(), width="intermediate_size")
    layers = read_layers(fields, attention, experts, [True] * read_num_layers(fields))
    rope = read_rope(fields, attention.head_dim, theta=1e6)
    return read_model(fields, layers, (rope,), norm_eps=1e-5)


def tensors(spec: ModelSpec) -> Tensors:
    return renamed(*_EXPERTS)
