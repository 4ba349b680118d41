"""If this fails, a Kimi-K2.5 is refused, or answers for another text model than it holds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.errors import CheckpointError
from executor.model.families import read_spec
from tests.executor.model.weights.quantised import int4, save_twins
from tests.executor.support.checkpoints import reference_logits, save_latent_model
from tests.executor.support.serving import Rank

IDS = [5, 9, 11, 80, 33, 4]
INT4 = {
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"group_size": 32, "num_bits": 4, "strategy": "group", "type": "int"},
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:vision_tower.*"],
    "quant_method": "compressed-tensors",
}


def wrap(folder: Path, *, left_in: tuple[str, ...] = (), **changed: Any) -> Path:
    """Makes a DeepSeek-V3's folder one of Kimi-K2.5, with parts for images beside it.

    Args:
        folder: As Transformers saves it.
        left_in: Fields of the text's that stay where they are; those of the whole are beside it.
        changed: Fields of the text's.
    """
    text = json.loads((folder / "config.json").read_text())
    moved = {name: text.pop(name) for name in ("dtype", "eos_token_id") if name not in left_in}
    fields = {
        **moved,
        "architectures": ["KimiK25ForConditionalGeneration"],
        "media_placeholder_token_id": 90,
        "model_type": "kimi_k25",
        "text_config": {**text, "top_k": 50, "is_decoder": False, **changed},
        "vision_config": {"hidden_size": 16},
    }
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = load_file(folder / "model.safetensors")
    wrapped = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    wrapped |= {"vision_tower.encoder.blocks.0.wo.weight": torch.ones(2, 2)}
    wrapped |= {"mm_projector.proj.0.weight": torch.ones(2, 2)}
    save_file(wrapped, folder / "model.safetensors")
    return folder


def test_the_text_model_answers_as_it_does_without_its_parts_for_images(tmp_path: Path) -> None:
    expected = reference_logits(save_latent_model(tmp_path, "kimi_k2"), IDS)
    spec = read_spec(wrap(tmp_path, left_in=("eos_token_id",)))
    assert spec.architecture == "KimiK25ForConditionalGeneration"
    assert spec.eos_token_ids == (2,)
    assert (Rank(tmp_path).step({0: IDS})[0] - expected).abs().max() < 1e-4


def test_experts_in_int4_answer_as_their_dequantised_twins(tmp_path: Path) -> None:
    """The format is told inside of text_config, as of Kimi-K2.5."""
    folders = [tmp_path / name for name in ("model", "quantised", "plain")]
    save_latent_model(folders[0], "kimi_k2")
    ending = tuple(f".experts.{i}.{part}_proj.weight" for i in range(12) for part in ("up", "down"))
    save_twins(*folders, quantise=int4, ending=ending, config=INT4)
    logits = [Rank(wrap(folder)).step({0: IDS})[0] for folder in folders]
    assert logits[1].equal(logits[2])
    assert (logits[0] - logits[1]).abs().max() > 0.01


def test_a_tensor_of_neither_text_nor_images_is_refused(tmp_path: Path) -> None:
    save_latent_model(tmp_path, "kimi_k2")
    tensors = load_file(wrap(tmp_path) / "model.safetensors")
    save_file(tensors | {"audio_tower.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has audio_tower.weight, for which"):
        Rank(tmp_path)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            {"architectures": ["Qwen3ForCausalLM"]},
            r"text_config.architectures=\['Qwen3ForCausalLM'",
        ),
        ({"architectures": None}, r"text_config.architectures=\[\]: need exactly one"),
        ({"hidden_size": None}, "text_config.hidden_size is missing"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1 is not supported; only 0"),
        ({"is_decoder": True}, "text_config.is_decoder=True is not supported; only False is"),
        ({"index_topk": 2048}, "text_config.index_topk=2048: not known of"),
        ({"dtype": "float16"}, "dtype='float32', and in text_config 'float16', contradict"),
    ],
)
def test_what_would_change_the_numbers_is_refused_by_name(
    changed: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    save_latent_model(tmp_path, "kimi_k2")
    with pytest.raises(CheckpointError, match=problem):
        read_spec(wrap(tmp_path, **changed))
