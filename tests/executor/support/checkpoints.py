"""Random small checkpoints for tests, saved by Transformers, and the model that saved them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB_SIZE = 96

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "norm_topk_prob": True},
    "sparse_step": {"decoder_sparse_step": 2, "num_key_value_heads": 4},
    "mlp_only": {"mlp_only_layers": [0, 2], "norm_topk_prob": True, "num_key_value_heads": 1},
    "biased": {"attention_bias": True, "num_attention_heads": 6, "num_key_value_heads": 3},
    "wide": {"num_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "norm_topk_prob": True},
}


def save_qwen3_moe(
    path: Path, shape: str, *, dtype: torch.dtype = torch.float32, **changed: Any
) -> Any:
    """Saves a random model of one of ``SHAPES`` and returns it, ready to run.

    ``changed`` are fields of its configuration that this one has otherwise.

    Weights have a standard deviation of fan_in^-0.5: at the usual 0.02 logits are nearly flat,
    and greedy tokens would hang on the last bit.
    """

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "intermediate_size": 40,
        "max_position_embeddings": 512,
        "eos_token_id": 2,
        "dtype": dtype,
    }
    torch.manual_seed(7)
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(sizes | SHAPES[shape] | changed)))
    model = model.to(dtype).eval()
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


def save_fp8_twins(model: Path, quantised: Path, plain: Path) -> None:
    """Saves a model with linear layers in FP8, blocks of 128 x 128, and what these stand for."""
    fields = json.loads((model / "config.json").read_text())
    tensors, twins = load_file(model / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = weight.shape
        scale = torch.rand(-(-rows // 128), -(-columns // 128)) / 100 + 0.001
        blocks = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        tensors[name] = (weight / blocks).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
        twins[name] = tensors[name].float() * blocks
    unscaled = {name: x for name, x in tensors.items() if not name.endswith("_scale_inv")}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    for folder, saved, extra in (
        (quantised, tensors, {"quantization_config": quantization}),
        (plain, unscaled | twins, {}),
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(fields | extra))
        save_file(saved, folder / "model.safetensors")
