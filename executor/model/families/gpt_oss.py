"""gpt-oss: sinks in every softmax, windows in every other layer, experts with biases and a clamp.

Source: Transformers, models/gpt_oss/modeling_gpt_oss.py.
"""

import re
from dataclasses import replace

from executor.model.decoder.config import (
    read_attention,
    read_experts,
    read_model,
    read_num_layers,
    read_rope,
)
from executor.model.decoder.decoder import Tensors
from executor.model.decoder.fields import Fields
from executor.model.spec import ClampedSwiGlu, LayerSpec, ModelSpec, MoeSpec, RouterSpec
from executor.model.weights import Source

_WINDOWED, _FULL = "sliding_attention", "full_attention"
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.(weight|bias)")


def read(fields: Fields) -> ModelSpec:
    fields.ignore("experts_per_token", "initial_context_length")  # said by other fields as well
    has_bias = fields.flag("attention_bias", default=True)
    attention = read_attention(fields, qkv_bias=has_bias, o_bias=has_bias)
    attention = replace(attention, sinks=True)
    windowed = replace(attention, window=fields.integer("sliding_window", default=128, least=1))
    experts = read_experts(fields, RouterSpec(bias=True), width="intermediate_size")
    if experts is None:
        raise fields.error("num_local_experts is missing")
    clamp = ClampedSwiGlu(
        alpha=fields.number("swiglu_alpha", default=1.702),
        limit=fields.number("swiglu_limit", default=7.0),
    )
    experts = replace(experts, activation=clamp, bias=True)
    layers = tuple(
        LayerSpec(attention=windowed if kind == _WINDOWED else attention, feed_forward=experts)
        for kind in _kinds(fields)
    )
    if fields.get("rope_scaling") is None and fields.get("rope_parameters") is None:
        raise fields.error(
            "rope_scaling is missing, or rope_parameters; published models have yarn"
        )
    rope = read_rope(fields, attention.head_dim, theta=150000.0)
    return read_model(fields, layers, (rope,), norm_eps=1e-5)


def _kinds(fields: Fields) -> list[str]:
    num_layers = read_num_layers(fields)
    default = [_FULL if layer_id % 2 else _WINDOWED for layer_id in range(num_layers)]
    return fields.kinds("layer_types", (_WINDOWED, _FULL), default)


def tensors(spec: ModelSpec) -> Tensors:
    """Experts are stacked, with inputs before outputs; columns of gate and up alternate."""
    experts = spec.layers[0].feed_forward
    assert isinstance(experts, MoeSpec)
    count = experts.num_experts

    def source(name: str) -> str | Source:
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            return name.replace(".mlp.gate.", ".mlp.router.")
        prefix, number, part, kind = expert.groups()
        stack = "down_proj" if part == "down" else "gate_up_proj"
        return Source(
            name=f"{prefix}{stack}" if kind == "weight" else f"{prefix}{stack}_bias",
            index=int(number),
            count=count,
            transposed=kind == "weight",
            first=1 if part == "up" else 0,
            every=1 if part == "down" else 2,
        )

    return source
