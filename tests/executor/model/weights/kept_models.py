"""Small models whose quantised weights are as the kernels take them, and their dequantised twins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.executor.model.weights.quantised import Quantised, fp8, save_twins

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
# Sizes that the FP8 kernels take, on each of two executors too; rows that turn share a scale.
LATENT = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
}
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")

Save = Callable[..., Any]
Quantise = Callable[[torch.Tensor], Quantised]


def twins(
    folder: Path, save: Save, shape: str, quantise: Quantise = fp8, **sizes: Any
) -> tuple[Path, Path]:
    """Saves a model quantised, and what its weights stand for."""
    model, quantised, plain = (folder / name for name in ("model", "quantised", "plain"))
    save(model, shape, **sizes)
    is_fp8 = quantise is fp8
    ending = ("_proj.weight", "_with_mqa.weight") if is_fp8 else EXPERTS
    config = FP8 if is_fp8 else {"quant_method": "mxfp4"}
    save_twins(model, quantised, plain, quantise=quantise, ending=ending, config=config)
    return quantised, plain
