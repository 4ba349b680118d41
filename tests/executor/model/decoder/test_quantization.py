"""If this fails, a quantised checkpoint is refused, or read in a way that it is not written."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.errors import CheckpointError
from executor.model.decoder.quantization import read_quantization
from executor.model.weights import Format
from executor.model.weights.formats import (
    Fp8Format,
    Fp8RowFormat,
    Int4Format,
    Mxfp4Format,
    Nvfp4Format,
    Nvfp4PackedFormat,
)
from tests.executor.model.families.head_checkpoints import save_model
from tests.executor.model.weights.quantised import (
    Quantised,
    fp8,
    fp8_rows,
    int4,
    mxfp4,
    nvfp4,
    save_twins,
)
from tests.executor.support.checkpoints import save_latent_model, save_qwen3_moe
from tests.executor.support.serving import Rank

# As published, with what beside these are lists of modules.
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
WEIGHTS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
INT4 = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": WEIGHTS,
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
IN_ORDER = INT4 | {
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": WEIGHTS | {"actorder": "weight", "group_size": 128, "observer": "mse"},
        }
    }
}
_FLOAT = WEIGHTS | {"group_size": None, "num_bits": 8, "strategy": "channel", "type": "float"}
FP8_ROWS = INT4 | {
    "config_groups": {
        "group_0": {
            "input_activations": _FLOAT | {"dynamic": True, "observer": None, "strategy": "token"},
            "output_activations": None,
            "targets": ["Linear"],
            "weights": _FLOAT,
        }
    },
    "format": "float-quantized",
}
_FP4 = {"dynamic": False, "group_size": 16, "num_bits": 4, "type": "float"}
NVFP4 = {
    "config_groups": {
        "group_0": {"input_activations": _FP4, "targets": ["Linear"], "weights": _FP4}
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "quant_algo": "NVFP4",
    "quant_method": "modelopt",
}
_PACKED = WEIGHTS | {"group_size": 16, "strategy": "tensor_group", "type": "float"}
NVFP4_PACKED = INT4 | {
    "config_groups": {
        "group_0": {
            "format": "nvfp4-pack-quantized",
            "input_activations": _PACKED | {"dynamic": "local"},
            "targets": ["Linear"],
            "weights": _PACKED,
        }
    },
    "format": "nvfp4-pack-quantized",
}


def error(message: str) -> CheckpointError:
    return CheckpointError(message)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, None),
        (FP8, Fp8Format(128)),
        (
            FP8
            | {"fmt": "float8_e4m3fn", "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]},
            Fp8Format(128),
        ),
        (MXFP4, Mxfp4Format()),
        (INT4, Int4Format(32)),
        (IN_ORDER, Int4Format(128)),
        (FP8_ROWS, Fp8RowFormat()),
        (NVFP4, Nvfp4Format()),
        (NVFP4_PACKED, Nvfp4PackedFormat()),
    ],
)
def test_published_formats_are_read(config: Any, expected: Format | None) -> None:
    assert read_quantization(config, error) == expected


@pytest.mark.parametrize(
    ("config", "changed", "problem"),
    [
        (FP8, {"quant_method": "gptq"}, "quant_method='gptq' is not supported; fp8, mxfp4, comp"),
        (FP8, {"activation_scheme": "static"}, "activation_scheme='static' .*; 'dynamic' is"),
        (FP8, {"weight_block_size": [128, 64]}, r"weight_block_size=\[128, 64\] is not"),
        (FP8, {"weight_block_size": None}, "weight_block_size=None is not"),
        (FP8, {"fmt": "e5m2"}, "fmt='e5m2'"),
        (FP8, {"rotation": "hadamard"}, "rotation='hadamard' is not known"),
        (MXFP4, {"block": 16}, "block=16 is not known"),
        (INT4, {"format": "mxfp4-pack-quantized"}, "format='mxfp4-pack-quantized'"),
        (NVFP4, {"quant_algo": "FP8"}, "quant_algo='FP8' is not supported; 'NVFP4' is"),
        (NVFP4, {"quant_algo": None}, "quant_algo is missing"),
        (INT4, {"transform_config": {"r1": 1}}, "transform_config="),
        (INT4, {"config_groups": {}}, "config_groups={} is not supported; one group is"),
        (FP8, {"quant_method": []}, r"quant_method=\[\] is not supported; fp8, .* are"),
        (FP8, {"weight_block_size": [[128], [128]]}, r"=\[128\] is no multiple of 1"),
        (NVFP4, {"config_groups": "all"}, "config_groups='all' is no object"),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(
    config: dict[str, Any], changed: dict[str, Any], problem: str
) -> None:
    with pytest.raises(CheckpointError, match=problem):
        read_quantization(config | changed, error)


@pytest.mark.parametrize(
    ("config", "part", "changed", "problem"),
    [
        (INT4, "weights", {"symmetric": False}, "symmetric=False is not supported; True is"),
        (INT4, "weights", {"num_bits": 8}, "num_bits=8"),
        (INT4, "weights", {"num_bits": None}, "num_bits is missing"),
        (INT4, "weights", {"group_size": 12}, "group_size=12 is no multiple of 8"),
        (INT4, "weights", {"actorder": "group"}, "actorder='group'"),
        (INT4, "weights", {"zero": 1}, "zero=1 is not known"),
        (FP8_ROWS, "weights", {"strategy": "tensor"}, "strategy='tensor' .*; 'channel' is"),
        (FP8_ROWS, "weights", {"num_bits": 4}, "num_bits=4 is not supported; 8 is"),
        (FP8_ROWS, "input_activations", {"dynamic": False}, "dynamic=False .*; True is"),
    ],
)
def test_a_group_that_is_quantised_otherwise_is_refused_by_name(
    config: dict[str, Any], part: str, changed: dict[str, Any], problem: str
) -> None:
    config = deepcopy(config)
    config["config_groups"]["group_0"][part] |= changed
    with pytest.raises(CheckpointError, match=problem):
        read_quantization(config, error)


@pytest.mark.parametrize(
    ("save", "shape", "quantise", "config"),
    [
        (save_qwen3_moe, "plain", fp8, FP8),
        (save_qwen3_moe, "plain", int4, INT4),
        (save_qwen3_moe, "plain", nvfp4, NVFP4),
        (save_latent_model, "deepseek_v3", fp8, FP8),
        (save_latent_model, "deepseek_v3", int4, INT4),
        (save_model, "glm4_moe", fp8_rows, FP8_ROWS),
    ],
)
def test_a_quantised_model_answers_as_its_dequantised_twin(
    save: Callable[..., Any],
    shape: str,
    quantise: Callable[[torch.Tensor], Quantised],
    config: dict[str, Any],
    tmp_path: Path,
) -> None:
    """To the last bit; matrices have whole and partial blocks, and rope rows to turn."""
    folders = [tmp_path / name for name in ("model", "quantised", "plain")]
    width = 144 if quantise is nvfp4 else 136  # scales of NVFP4 are of 16 numbers, always
    save(folders[0], shape, hidden_size=144, moe_intermediate_size=width)
    save_twins(*folders, quantise=quantise, ending="_proj.weight", config=config)
    logits = [Rank(folder).step({0: [5, 9, 11, 80]})[0] for folder in folders]
    assert logits[1].equal(logits[2])
    assert 0.01 < (logits[0] - logits[1]).abs().max() < logits[0].abs().max()


def test_gpt_oss_in_mxfp4_answers_as_its_dequantised_twin(tmp_path: Path) -> None:
    """Its experts are stacked, inputs first in bfloat16 and outputs first in MXFP4."""
    folders = [tmp_path / name for name in ("model", "quantised", "plain")]
    save_model(folders[0], "gpt_oss")
    ending = ("experts.gate_up_proj", "experts.down_proj")
    save_twins(*folders, quantise=mxfp4, ending=ending, config=MXFP4)
    logits = [Rank(folder).step({0: [5, 9, 11, 80]})[0] for folder in folders]
    assert logits[1].equal(logits[2])
    assert (logits[0] - logits[1]).abs().max() > 0.01
