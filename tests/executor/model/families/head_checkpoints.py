"""Random small checkpoints of models with heads of keys, filled so that faults show in the logits."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
)

VOCAB_SIZE = 128
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GLM: dict[str, Any] = {
    "attention_bias": True,
    "use_qk_norm": True,
    "first_k_dense_replace": 1,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_type": "default"},
    "num_nextn_predict_layers": 0,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
_GPT_OSS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "intermediate_size": 32,
    "num_local_experts": 8,
    "sliding_window": 8,
    "rope_parameters": _YARN,
}
_MINIMAX: dict[str, Any] = {
    "intermediate_size": 32,
    "num_local_experts": 8,
    "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_type": "default"},
}
SHAPES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM, _GLM),
    "glm4_moe_air": (
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        _GLM | {"use_qk_norm": False, "routed_scaling_factor": 1.0, "n_group": 4, "topk_group": 2},
    ),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM, _GPT_OSS),
    "minimax_m2": (MiniMaxM2Config, MiniMaxM2ForCausalLM, _MINIMAX),
}


def config_of(shape: str, **changed: Any) -> Any:
    """Returns the configuration of one of ``SHAPES``, but for some fields."""
    config, _, fields = SHAPES[shape]
    return config(**(_SIZES | fields | changed))


def save_model(path: Path, shape: str, **changed: Any) -> Any:
    """Saves a random model of one of ``SHAPES`` and returns it, ready to run.

    Correction biases are negative: groups that counted 0 instead of nothing would win. Inputs of
    gpt-oss's experts are large: else no clamp would show.
    """
    torch.manual_seed(3)
    model: Any = SHAPES[shape][1](config_of(shape, **changed)).float().eval()
    with torch.no_grad():
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            if "e_score_correction_bias" in name:
                x.normal_(std=0.3).sub_(2.0)
            elif name.endswith("norm.weight"):
                x.normal_(mean=1.0, std=0.2)
            elif name.endswith("sinks"):
                x.normal_()
            elif name.endswith("bias"):
                x.normal_(std=0.2)
            elif name.endswith("embed_tokens.weight"):
                x.normal_()
            elif name.endswith(("weight", "proj")):
                fan_in = x.shape[-2] if shape == "gpt_oss" and x.dim() == 3 else x.shape[-1]
                x.normal_(
                    std=(6 if name.endswith("gate_up_proj") and shape == "gpt_oss" else 1.5)
                    * fan_in**-0.5
                )
    model.save_pretrained(path)
    return model
