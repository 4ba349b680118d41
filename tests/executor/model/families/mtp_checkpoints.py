"""Random small models with a draft layer of their own, as GLM-4.5 and DeepSeek-V3 are published."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 256,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Glm4Moe": {"num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
}
NUM_LAYERS = 2


def new_model(stem: str, num_layers: int, num_dense: int) -> Any:
    sizes = {"num_hidden_layers": num_layers, "first_k_dense_replace": num_dense}
    config = getattr(transformers, f"{stem}Config")(**(COMMON | FAMILIES[stem] | sizes))
    model = getattr(transformers, f"{stem}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                x.normal_(std=0.3)
            elif name.endswith("norm.weight"):
                x.normal_(mean=1.0, std=0.2)
            elif name.endswith(("weight", "proj")):
                x.normal_(std=x.shape[-1] ** -0.5)
    return model


def save_with_draft(path: Path, stem: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Saves a model with a draft layer of its own kind behind its layers, and copies that are not read.

    Returns that layer as a model whose final norm and head are the draft's, and the tensors of the
    projection before it.
    """
    torch.manual_seed(5)
    target, draft = new_model(stem, NUM_LAYERS, 1), new_model(stem, 1, 0)
    draft.lm_head.weight.data = target.lm_head.weight.data
    target.save_pretrained(path)
    draft.save_pretrained(path / "draft")
    prefix, size = f"model.layers.{NUM_LAYERS}.", COMMON["hidden_size"]
    combine = {
        "enorm": 1 + 0.2 * torch.randn(size),
        "hnorm": 1 + 0.2 * torch.randn(size),
        "eh_proj": torch.randn(size, 2 * size) * (2 * size) ** -0.5,
    }
    tensors = load_file(path / "model.safetensors")
    for name, x in load_file(path / "draft/model.safetensors").items():
        if name.startswith("model.layers.0."):
            tensors[name.replace("model.layers.0.", prefix)] = x
    tensors[f"{prefix}shared_head.norm.weight"] = draft.model.norm.weight.data.clone()
    tensors |= {f"{prefix}{name}.weight": x for name, x in combine.items()}
    for copy in ("embed_tokens", "shared_head.head"):  # published ones are the target's
        tensors[f"{prefix}{copy}.weight"] = torch.full((COMMON["vocab_size"], size), torch.nan)
    save_file(tensors, path / "model.safetensors")
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"num_nextn_predict_layers": 1}))
    return draft, {**combine, "embedding": target.model.embed_tokens.weight.data}
