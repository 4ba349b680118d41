"""Random small checkpoints for tests, saved by Transformers, and the model that saved them."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 96

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "norm_topk_prob": True},
    "sparse_step": {"decoder_sparse_step": 2, "num_key_value_heads": 4},
    "mlp_only": {"mlp_only_layers": [0, 2], "norm_topk_prob": True, "num_key_value_heads": 1},
    "biased": {"attention_bias": True, "num_attention_heads": 6, "num_key_value_heads": 3},
    "wide": {"num_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "norm_topk_prob": True},
}


# Of other families: the name of the classes, and what their sizes have beside ``_SIZES``. Every text
# of the tests is longer than what ropes were first made for.
_MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": _LLAMA3, "head_dim": 16}),
    "llama_biased": ("Llama", {"attention_bias": True}),
    "qwen2": ("Qwen2", {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "qwen3": (
        "Qwen3",
        {"tie_word_embeddings": True, "rope_parameters": _YARN | {"truncate": False}},
    ),
    "mixtral": ("Mixtral", _MOE),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
            "mlp_only_layers": [1],
        },
    ),
}


def save_family(path: Path, name: str, **changed: Any) -> Any:
    """Saves a random model of one of ``FAMILIES`` and returns it, as ``save_qwen3_moe`` does."""
    stem, sizes = FAMILIES[name]
    config = getattr(transformers, f"{stem}Config")
    model = getattr(transformers, f"{stem}ForCausalLM")
    return _save(path, model(config(**(_SIZES | sizes | changed))))


def save_qwen3_moe(
    path: Path, shape: str, *, dtype: torch.dtype = torch.float32, **changed: Any
) -> Any:
    """Saves a random model of one of ``SHAPES`` and returns it, ready to run.

    ``changed`` are fields of its configuration that this one has otherwise.

    Weights have a standard deviation of fan_in^-0.5: at the usual 0.02 logits are nearly flat,
    and greedy tokens would hang on the last bit.
    """

    sizes: dict[str, Any] = {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "dtype": dtype,
    }
    config = Qwen3MoeConfig(**(_SIZES | sizes | SHAPES[shape] | changed))
    return _save(path, Qwen3MoeForCausalLM(config).to(dtype))


def _save(path: Path, model: Any) -> Any:
    torch.manual_seed(7)
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(mean=1.0, std=0.2)
            elif name.endswith("bias"):
                parameter.normal_(std=0.2)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(path)
    return model


def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Returns float32 logits [len(ids), vocab_size] of one text, without any cache."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits.float()


_LATENT_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERT_GROUPS = {"n_group": 4, "topk_group": 2}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
_V2 = (DeepseekV2Config, DeepseekV2ForCausalLM)
_V3 = (DeepseekV3Config, DeepseekV3ForCausalLM)
_GLM = (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM)
LATENT_SHAPES: dict[str, tuple[tuple[Any, Any], dict[str, Any]]] = {
    "deepseek_v3": (_V3, {**_EXPERT_GROUPS, "routed_scaling_factor": 2.5, "rope_parameters": YARN}),
    "deepseek_v3_mscales": (
        _V3,
        {**_EXPERT_GROUPS, "rope_parameters": YARN | {"mscale_all_dim": 0.5}},
    ),
    "deepseek_v3_plain": (
        _V3,
        {
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "attention_bias": True,
        },
    ),
    "kimi_k2": (
        _V3,
        {
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "rope_parameters": YARN | {"rope_theta": 5e4, "factor": 32.0, "beta_fast": 1.0},
            "num_nextn_predict_layers": 0,
        },
    ),
    "deepseek_v2": (
        _V2,
        {**_EXPERT_GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    ),
    "deepseek_v2_lite": (
        _V2,
        {
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "topk_method": "greedy",
            "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "glm4_moe_lite": (_GLM, {"rms_norm_eps": 1e-5}),
}


def save_latent_model(path: Path, shape: str, **changed: Any) -> Any:
    """Saves a random model of one of ``LATENT_SHAPES`` and returns it, ready to run.

    ``changed`` are fields of its configuration that this one has otherwise.

    Latents are small where their norms' epsilon is another than the model's, and correction biases
    negative where groups are left out by them: else either fault would not show.
    """
    (config, kind), fields = LATENT_SHAPES[shape]
    torch.manual_seed(3)
    model: Any = kind(config(**{**_LATENT_SIZES, **fields, **changed})).float().eval()
    with torch.no_grad():
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            if "e_score_correction_bias" in name:
                x.normal_(std=0.3).sub_(2.0 if model.config.n_group > 1 else 0.0)
            elif name.endswith("norm.weight"):
                x.normal_(mean=1.0, std=0.2)
            elif name.endswith("bias"):
                x.normal_(std=0.2)
            elif name.endswith("embed_tokens.weight"):
                x.normal_()
            elif name.endswith(("weight", "proj")):
                x.normal_(std=1.5 * x.shape[-1] ** -0.5)
                if "_a_proj" in name and model.config.rms_norm_eps > 1e-6:
                    x.mul_(0.01)
    model.save_pretrained(path)
    return model
