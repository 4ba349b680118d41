"""Dense models: Llama 3, Qwen2 and Qwen2.5, Qwen3, which differ in biases and norms.

Source: Transformers, models/llama/modeling_llama.py, qwen2/modeling_qwen2.py, qwen3/modeling_qwen3.py.
"""

from executor.model.decoder.config import (
    read_attention,
    read_layers,
    read_model,
    read_num_layers,
    read_rope,
    refuse_windows,
)
from executor.model.decoder.decoder import Tensors, renamed
from executor.model.decoder.fields import Fields
from executor.model.spec import GqaSpec, ModelSpec, QkNorm


def read(fields: Fields) -> ModelSpec:
    attention = _ATTENTION[fields.architecture()](fields)
    layers = read_layers(fields, attention, None, [False] * read_num_layers(fields))
    return read_model(fields, layers, (read_rope(fields, attention.head_dim, theta=10000.0),))


def tensors(spec: ModelSpec) -> Tensors:
    return renamed()


def _llama(fields: Fields) -> GqaSpec:
    fields.refuse({"mlp_bias": (False,)})
    bias = fields.flag("attention_bias")
    return read_attention(fields, qkv_bias=bias, o_bias=bias)


def _qwen2(fields: Fields) -> GqaSpec:
    refuse_windows(fields)
    fields.refuse({"use_mrope": (False,)})
    return read_attention(fields, qkv_bias=True)


def _qwen3(fields: Fields) -> GqaSpec:
    refuse_windows(fields)
    bias = fields.flag("attention_bias")
    return read_attention(fields, qkv_bias=bias, o_bias=bias, qk_norm=QkNorm.HEAD)


_ATTENTION = {
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
