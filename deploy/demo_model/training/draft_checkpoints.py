"""Draft checkpoints: the demo model as a target, and drafts in published layouts."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from torch import nn

from deploy.demo_model.training.draft_models import (
    EagleDraft,
    FrozenKvDraft,
    MtpDraft,
    MultiLayerMtpDraft,
)
from deploy.demo_model.training.draft_modules import CHAIN_LEN, Attention, Context, Draft, Shape

DRAFT_NAMES = ("eagle", "mtp", "mtp3", "frozen_kv")
AUX_LAYER_IDS = (1, 2, 3)
TARGET_KV_LAYER_IDS = (0, 3)
INTERMEDIATE_SIZE = 256
EAGLE_HEAD_DIM = 64


class Target:
    """The demo model in float32, frozen.

    Args:
        path: Folder of a Qwen3-MoE checkpoint.
    """

    def __init__(self, path: Path) -> None:
        from transformers import Qwen3MoeForCausalLM  # seconds

        self.config: dict[str, Any] = json.loads((path / "config.json").read_text())
        self.model = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.model.requires_grad_(False)
        config = self.config
        self.shape = Shape(
            hidden_size=config["hidden_size"],
            intermediate_size=INTERMEDIATE_SIZE,
            vocab_size=config["vocab_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            norm_eps=config["rms_norm_eps"],
            rope_theta=config["rope_parameters"]["rope_theta"],
        )
        self._residuals: dict[int, torch.Tensor] = {}
        for layer_id, layer in enumerate(self.model.model.layers):
            layer.register_forward_hook(self._keeper(layer_id))

    @property
    def embedding(self) -> torch.Tensor:
        """[V, H]"""
        return cast(torch.Tensor, self.model.model.embed_tokens.weight)

    @property
    def head(self) -> torch.Tensor:
        """[V, H]"""
        return cast(torch.Tensor, self.model.lm_head.weight)

    @torch.no_grad()
    def read(self, ids: torch.Tensor, roots: torch.Tensor) -> Context:
        """Runs rows through the model: ids int64 [B, S], roots int64 [B, R]."""
        from transformers import DynamicCache

        cache = DynamicCache()
        output = self.model.model(ids, past_key_values=cache, use_cache=True)
        layers = cast(list[Any], cache.layers)
        return Context(
            ids=ids,
            hidden=output.last_hidden_state,
            residuals=dict(self._residuals),
            keys=[layer.keys for layer in layers],
            values=[layer.values for layer in layers],
            roots=roots,
        )

    @torch.no_grad()
    def probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the next token's distribution of hidden states: [..., V]."""
        return torch.softmax(self.model.lm_head(hidden), dim=-1)

    def _keeper(self, layer_id: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            self._residuals[layer_id] = output

        return keep


def build_draft(name: str, target: Target) -> Draft:
    """Builds an untrained draft that starts from the target's weights where these fit."""
    shape, layers = target.shape, target.model.model.layers
    final_norm = target.model.model.norm.weight
    if name == "eagle":
        eagle_shape = replace(shape, head_dim=EAGLE_HEAD_DIM)
        eagle = EagleDraft(eagle_shape, target.embedding, target.head, AUX_LAYER_IDS)
        eagle.norm.weight.data.copy_(final_norm)
        pass_last(eagle.fc)
        return eagle
    if name == "frozen_kv":
        frozen = FrozenKvDraft(shape, target.embedding, target.head, TARGET_KV_LAYER_IDS)
        for layer, layer_id in zip(frozen.kv_layers, TARGET_KV_LAYER_IDS, strict=True):
            copy_attention(layer.self_attn, layers[layer_id].self_attn)
        frozen.norm.weight.data.copy_(final_norm)
        pass_last(frozen.fc)
        return frozen
    draft: MtpDraft | MultiLayerMtpDraft
    if name == "mtp":
        mlp = copy.deepcopy(layers[-1].mlp).requires_grad_(True)
        draft = MtpDraft(shape, target.embedding, target.head, mlp)
    else:
        draft = MultiLayerMtpDraft(shape, target.embedding, target.head)
    for mtp_layer in draft.mtp_layers:
        copy_attention(mtp_layer.self_attn, layers[-1].self_attn)
        mtp_layer.shared_head.norm.weight.data.copy_(final_norm)
        pass_last(mtp_layer.eh_proj)
    return draft


def pass_last(projection: nn.Linear) -> None:
    """Makes a projection begin as one that mostly passes on the last part of its input."""
    weight = projection.weight.data
    weight.mul_(0.3)
    weight[:, -len(weight) :] += torch.eye(len(weight))


def copy_attention(attention: Attention, source: nn.Module) -> None:
    """Copies the target's weights of the same names."""
    weights = source.state_dict()
    attention.load_state_dict({name: weights[name] for name in attention.state_dict()})


def save(name: str, draft: Draft, target: Target, out: Path) -> None:
    """Writes config.json and model.safetensors, bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        key: tensor.to(torch.bfloat16).contiguous()
        for key, tensor in to_layout(name, draft, target).items()
    }
    # As bytes, since only their owner may read the files of save_file.
    data = serialize(tensors, metadata={"format": "pt"})
    (out / "model.safetensors").write_bytes(data)
    config = json.dumps(config_of(name, target), indent=2, sort_keys=True)
    (out / "config.json").write_text(config + "\n")


def load(name: str, target: Target, path: Path) -> Draft:
    """Reads a draft that `save` wrote, in float32.

    Raises:
        ValueError: The file holds other tensors than such a draft has.
    """
    draft = build_draft(name, target)
    wanted = to_layout(name, draft, target)
    tensors = load_file(path / "model.safetensors")
    given, fitting = (
        {(key, tuple(tensor.shape)) for key, tensor in of.items()} for of in (tensors, wanted)
    )
    if given != fitting:
        raise ValueError(
            f"{path} is not a {name} draft for this target: it lacks {sorted(fitting - given)} "
            f"and should not have {sorted(given - fitting)}"
        )
    with torch.no_grad():
        # They share memory with the draft's parameters.
        for key, tensor in wanted.items():
            tensor.copy_(tensors[key])
    return draft


def to_layout(name: str, draft: Draft, target: Target) -> dict[str, torch.Tensor]:
    """Returns views of a draft's parameters under the names of its published layout."""
    state = draft.state_dict()
    if name not in ("mtp", "mtp3"):
        return state
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in state.items():
        _, layer, rest = key.split(".", 2)
        prefix = f"model.layers.{target.shape.num_layers + int(layer)}."
        if rest == "mlp.experts.gate_up_proj":
            for expert, pair in enumerate(tensor):
                gate, up = pair.chunk(2)
                tensors[f"{prefix}mlp.experts.{expert}.gate_proj.weight"] = gate
                tensors[f"{prefix}mlp.experts.{expert}.up_proj.weight"] = up
        elif rest == "mlp.experts.down_proj":
            for expert, down in enumerate(tensor):
                tensors[f"{prefix}mlp.experts.{expert}.down_proj.weight"] = down
        else:
            tensors[prefix + rest] = tensor
    return tensors


def config_of(name: str, target: Target) -> dict[str, Any]:
    """Returns the contents of a draft's config.json."""
    shape, config = target.shape, target.config
    if name == "mtp":
        return config | {"num_nextn_predict_layers": 1}
    if name == "mtp3":
        dense = [shape.num_layers + i for i in range(CHAIN_LEN)]
        return config | {"num_nextn_predict_layers": CHAIN_LEN, "mlp_only_layers": dense}
    kept = (
        *("attention_bias", "dtype", "head_dim", "hidden_act", "hidden_size"),
        *("max_position_embeddings", "num_attention_heads", "num_key_value_heads"),
        *("rms_norm_eps", "rope_parameters", "vocab_size"),
    )
    common = {key: config[key] for key in kept} | {
        "intermediate_size": INTERMEDIATE_SIZE,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
    }
    if name == "eagle":
        return common | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "head_dim": EAGLE_HEAD_DIM,
            "model_type": "llama",
            "draft_vocab_size": shape.vocab_size,
            "num_hidden_layers": 1,
            "target_hidden_size": shape.hidden_size,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(AUX_LAYER_IDS),
                "use_aux_hidden_state": True,
            },
        }
    return common | {
        "architectures": ["FrozenKvMTPForCausalLM"],
        "model_type": "frozen_kv_mtp",
        "num_hidden_layers": len(TARGET_KV_LAYER_IDS),
        "target_kv_layer_ids": list(TARGET_KV_LAYER_IDS),
    }
