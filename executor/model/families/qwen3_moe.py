"""Qwen3-MoE: normalised queries and keys, a softmax over all experts.

Source: Transformers, models/qwen3_moe/modeling_qwen3_moe.py.
"""

from executor.model.decoder.config import (
    are_sparse,
    read_attention,
    read_experts,
    read_layers,
    read_model,
    read_num_layers,
    read_num_mtp_layers,
    read_rope,
    refuse_windows,
)
from executor.model.decoder.decoder import Tensors, renamed
from executor.model.decoder.fields import Fields
from executor.model.spec import ModelSpec, QkNorm, RouterSpec

# Said by files of Qwen3-Coder; all models of the class are so.
_SUPPORTED = {
    "qkv_bias": (False,),
    "use_qk_norm": (True,),
    "shared_expert_intermediate_size": (0,),
}


def read(fields: Fields) -> ModelSpec:
    fields.refuse(_SUPPORTED)
    refuse_windows(fields)
    bias = fields.flag("attention_bias")
    attention = read_attention(fields, qkv_bias=bias, o_bias=bias, qk_norm=QkNorm.HEAD)
    router = RouterSpec(renormalise=fields.flag("norm_topk_prob"))
    num_layers = read_num_layers(fields)
    all_layers = range(num_layers + read_num_mtp_layers(fields))
    sparse = are_sparse(fields, all_layers)
    layers = read_layers(fields, attention, read_experts(fields, router), sparse)
    return read_model(
        fields,
        layers[:num_layers],
        (read_rope(fields, attention.head_dim),),
        mtp_layers=layers[num_layers:],
    )


def tensors(spec: ModelSpec) -> Tensors:
    return renamed()
