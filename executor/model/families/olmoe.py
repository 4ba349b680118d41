"""OLMoE: queries and keys normalised over all heads together, a softmax over all experts.

Source: Transformers, models/olmoe/modeling_olmoe.py.
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
from executor.model.spec import ModelSpec, QkNorm, RouterSpec


def read(fields: Fields) -> ModelSpec:
    fields.refuse({"clip_qkv": ()})
    bias = fields.flag("attention_bias")
    attention = read_attention(fields, qkv_bias=bias, o_bias=bias, qk_norm=QkNorm.PROJECTION)
    router = RouterSpec(renormalise=fields.flag("norm_topk_prob"))
    experts = read_experts(fields, router, width="intermediate_size")
    layers = read_layers(fields, attention, experts, [True] * read_num_layers(fields))
    rope = read_rope(fields, attention.head_dim, theta=1e4)
    return read_model(fields, layers, (rope,), norm_eps=1e-5)


def tensors(spec: ModelSpec) -> Tensors:
    return renamed()
