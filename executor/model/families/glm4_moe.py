"""GLM-4.5, 4.6 and 4.7: half of each head turns, sigmoid routing, a shared expert.

Source: Transformers, models/glm4_moe/modeling_glm4_moe.py.
"""

from executor.model.decoder.config import (
    read_attention,
    read_experts,
    read_layers,
    read_model,
    read_num_layers,
    read_num_mtp_layers,
    read_rope,
    read_sigmoid_router,
    with_shared,
)
from executor.model.decoder.decoder import Tensors, renamed
from executor.model.decoder.fields import Fields
from executor.model.spec import ModelSpec, QkNorm


def read(fields: Fields) -> ModelSpec:
    has_norm = fields.flag("use_qk_norm")
    attention = read_attention(
        fields,
        qkv_bias=fields.flag("attention_bias"),
        qk_norm=QkNorm.HEAD if has_norm else QkNorm.NONE,
    )
    rope = read_rope(fields, attention.head_dim, rotary_dim=attention.head_dim // 2)
    num_layers, num_mtp_layers = read_num_layers(fields), read_num_mtp_layers(fields)
    num_dense = fields.integer("first_k_dense_replace", default=1)
    sparse = [layer_id >= num_dense for layer_id in range(num_layers)] + [True] * num_mtp_layers
    experts = with_shared(fields, read_experts(fields, read_sigmoid_router(fields)))
    layers = read_layers(fields, attention, experts, sparse)
    return read_model(
        fields, layers[:num_layers], (rope,), norm_eps=1e-5, mtp_layers=layers[num_layers:]
    )


def tensors(spec: ModelSpec) -> Tensors:
    return renamed()
