"""MiniMax-M2: norms over whole projections, half of each head turns, sigmoid routing.

Source: Transformers, models/minimax_m2/modeling_minimax_m2.py; vLLM, models/minimax_m2.py, for
the gate in float32.
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
from executor.model.spec import ModelSpec, QkNorm, RouterSpec, Scores

_SUPPORTED = {
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "shared_intermediate_size": (0,),
    "sliding_window": (),
    "layernorm_full_attention_beta": (1.0,),
    "layernorm_mlp_beta": (1.0,),
}


def read(fields: Fields) -> ModelSpec:
    fields.refuse(_SUPPORTED)
    fields.ignore("layernorm_linear_attention_beta", "mlp_intermediate_size", "shared_moe_mode")
    fields.ignore("router_jitter_noise", "use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    num_layers = read_num_layers(fields)
    kinds = fields.integers("attn_type_list", (1,) * num_layers)
    if kinds != (1,) * num_layers:
        raise fields.error("attn_type_list: only softmax attention, 1, in every layer is supported")
    attention = read_attention(fields, qk_norm=QkNorm.PROJECTION)
    rotary_dim = fields.integer("rotary_dim", default=attention.head_dim)
    rope = read_rope(fields, attention.head_dim, theta=5e6, rotary_dim=rotary_dim)
    # Files have the gate in float32; Transformers rounds it to the model's dtype.
    router = RouterSpec(scores=Scores.SIGMOID, correction_bias=True, in_float32=True)
    experts = read_experts(fields, router, width="intermediate_size")
    return read_model(fields, read_layers(fields, attention, experts, [True] * num_layers), (rope,))


def tensors(spec: ModelSpec) -> Tensors:
    return renamed(
        (".mlp.gate.e_score_correction_bias", ".block_sparse_moe.e_score_correction_bias"),
        (".mlp.", ".block_sparse_moe."),
        (".gate_proj.", ".w1."),
        (".up_proj.", ".w3."),
        (".down_proj.", ".w2."),
    )
