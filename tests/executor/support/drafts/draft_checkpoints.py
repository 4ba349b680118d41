"""Random drafts in the layouts of published checkpoints, their sizes scaled down.

Names and shapes are those of the published files: EAGLE-3 heads of the EAGLE authors and of
SpecForge, layers after the last of DeepSeek-V3 and GLM-4.5, ``mtp.*`` of Qwen3-Next.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]

# Of the target, tests.executor.checkpoints "wide".
HIDDEN, VOCAB, TARGET_LAYERS, NUM_EXPERTS, TOP_K = 48, 96, 3, 8, 3
DRAFT_VOCAB = 41  # odd, so that two executors have unequal parts of it

_QWEN3_NEXT_NAMES = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")

_LLAMA: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 57,  # odd: dense MLPs of drafts are whole on every executor
    "max_position_embeddings": 64,  # published heads are trained on short texts
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": VOCAB,
}
_EAGLE: dict[str, Any] = _LLAMA | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": DRAFT_VOCAB,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 1], "use_aux_hidden_state": True},
}
_NEXTN: dict[str, Any] = _LLAMA | {
    "num_hidden_layers": TARGET_LAYERS,
    "num_nextn_predict_layers": 1,
    "rope_theta": 20000.0,
}
_QWEN_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 24,
    "norm_topk_prob": False,
}


@dataclass(frozen=True)
class Kind:
    """A published layout, with a choice of what is optional in it.

    Attributes:
        config: What config.json says.
        stem: What the names of its first layer's tensors begin with.
        extra: Optional tensors, by name.
    """

    config: Mapping[str, Any]
    stem: str
    extra: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def has_qk_norm(self) -> bool:
        names = self.config["architectures"]
        return names[0].startswith(("Qwen3", "Frozen"))

    @property
    def num_layers(self) -> int:
        """Of a draft with ``model.layers`` or ``mtp.layers``."""
        return int(self.config.get("num_nextn_predict_layers", 1))

    def is_moe(self, layer_id: int) -> bool:
        is_dense = layer_id in self.config.get("mlp_only_layers", ())
        return not is_dense and "num_experts" in self.config


_NEXTN_HEAD = "model.layers.3.shared_head.head.weight"

KINDS: dict[str, Kind] = {
    "eagle3": Kind(_EAGLE, "midlayer", {"t2d": (VOCAB,)}),
    "eagle3_whole_vocab": Kind(
        _EAGLE | {"draft_vocab_size": VOCAB, "rope_theta": 50000.0},
        "midlayer",
        {"lm_head.weight": (VOCAB, HIDDEN), "embed_tokens.weight": (VOCAB, HIDDEN)},
    ),
    "eagle3_of_targets_head": Kind(
        {k: v for k, v in _EAGLE.items() if k != "draft_vocab_size"}, "midlayer"
    ),
    "nextn": Kind(
        _NEXTN | _QWEN_MOE | {"norm_topk_prob": True},
        "model.layers.3",
        {_NEXTN_HEAD: (VOCAB, HIDDEN), "model.layers.3.embed_tokens.weight": (VOCAB, HIDDEN)},
    ),
    "nextn_three_layers": Kind(
        _NEXTN
        | _QWEN_MOE
        | {"num_nextn_predict_layers": 3, "mlp_only_layers": [3, 5], "attention_bias": True},
        "model.layers.3",
        {f"model.layers.{i}.shared_head.head.weight": (VOCAB, HIDDEN) for i in (4, 5)},
    ),
    "qwen3_next_names": Kind(_NEXTN | _QWEN_MOE, "mtp.layers.0"),
    "qwen3_next_names_two_layers": Kind(
        _NEXTN | _QWEN_MOE | {"num_nextn_predict_layers": 2, "mlp_only_layers": [3]}, "mtp.layers.0"
    ),
    # Heads of the target: 4, 2 of keys and values, 32 wide.
    "frozen_kv": Kind(
        _LLAMA
        | {
            "architectures": ["FrozenKvMTPForCausalLM"],
            "num_hidden_layers": 2,
            "target_kv_layer_ids": [2, 0],
            "num_attention_heads": 4,
            "head_dim": 32,
            "rope_theta": 10000.0,
        },
        "layers.0",
    ),
}


def save_draft(path: Path, kind: str, *, beside: Path | None = None) -> Tensors:
    """Writes a draft and returns its tensors, float32.

    Args:
        path: Its folder.
        kind: One of ``KINDS``.
        beside: A target's folder, which ``path`` becomes a copy of that holds the draft as well: its
            layers have the target's sizes then.
    """
    what, others = KINDS[kind], {}
    if beside is not None:
        of_draft = {x: what.config[x] for x in ("mlp_only_layers",) if x in what.config}
        config = json.loads((beside / "config.json").read_text())
        own = {x: value for x, value in what.config.items() if x != "rope_theta"}  # the target's
        what = replace(what, config={**own, **config, **of_draft})
        others = load_file(beside / "model.safetensors")
    (path / "config.json").write_text(json.dumps(what.config))
    tensors = _random(_shapes(what))
    if "d2t" in tensors:
        chosen = torch.arange(VOCAB)[torch.randperm(VOCAB)[:DRAFT_VOCAB]].sort().values
        tensors["d2t"] = chosen - torch.arange(DRAFT_VOCAB)
        tensors["t2d"] = torch.isin(torch.arange(VOCAB), chosen)
    save_file(others | tensors, path / "model.safetensors")
    return tensors


def _random(shapes: Shapes) -> Tensors:
    torch.manual_seed(len(shapes))
    tensors = {}
    for name, shape in shapes.items():
        if "norm" in name:
            tensors[name] = torch.randn(shape) * 0.2 + 1.0
        else:
            tensors[name] = torch.randn(shape) * shape[-1] ** -0.5
    return tensors


def _shapes(kind: Kind) -> Shapes:
    config, stem = kind.config, kind.stem
    shapes: Shapes = {}
    if stem == "midlayer":
        shapes |= {"fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,)}
        shapes |= {"midlayer.hidden_norm.weight": (HIDDEN,)}
        if config.get("draft_vocab_size", VOCAB) < VOCAB:
            shapes |= {"lm_head.weight": (DRAFT_VOCAB, HIDDEN), "d2t": (DRAFT_VOCAB,)}
        shapes |= _layer_shapes(kind, "midlayer.", 0, input_size=2 * HIDDEN)
        return shapes | dict(kind.extra)
    if stem == "layers.0":
        for i in range(config["num_hidden_layers"]):
            shapes |= _layer_shapes(kind, f"layers.{i}.", 0, has_keys=False)
        return shapes | _combine_shapes("", *_QWEN3_NEXT_NAMES)
    for k in range(kind.num_layers):
        if stem.startswith("mtp"):
            shapes |= _layer_shapes(kind, f"mtp.layers.{k}.", TARGET_LAYERS + k)
            continue
        prefix = f"model.layers.{TARGET_LAYERS + k}."
        names = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
        shapes |= _layer_shapes(kind, prefix, TARGET_LAYERS + k) | _combine_shapes(prefix, *names)
    if stem.startswith("mtp"):
        shapes |= _combine_shapes("mtp.", *_QWEN3_NEXT_NAMES)
    return shapes | dict(kind.extra)


def _combine_shapes(prefix: str, embedding: str, hidden: str, norm: str, fc: str) -> Shapes:
    norms: Shapes = {f"{prefix}{name}.weight": (HIDDEN,) for name in (embedding, hidden, norm)}
    return norms | {f"{prefix}{fc}.weight": (HIDDEN, 2 * HIDDEN)}


def _layer_shapes(
    kind: Kind, prefix: str, layer_id: int, *, input_size: int = HIDDEN, has_keys: bool = True
) -> Shapes:
    config = kind.config
    width = config["head_dim"]
    q_size, kv_size = (config[f"num_{x}_heads"] * width for x in ("attention", "key_value"))
    attention = {"q_proj": (q_size, input_size), "o_proj": (HIDDEN, q_size)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    head_norms = ["q_norm"]
    if has_keys:
        attention |= {"k_proj": (kv_size, input_size), "v_proj": (kv_size, input_size)}
        head_norms.append("k_norm")
    shapes: Shapes = {f"{prefix}self_attn.{name}.weight": x for name, x in attention.items()}
    if config.get("attention_bias"):
        shapes |= {f"{prefix}self_attn.{name}.bias": (x[0],) for name, x in attention.items()}
    if kind.has_qk_norm:
        shapes |= {f"{prefix}self_attn.{name}.weight": (width,) for name in head_norms}
    shapes |= {f"{prefix}{name}.weight": (HIDDEN,) for name in norms}
    if not kind.is_moe(layer_id):
        return shapes | _mlp_shapes(f"{prefix}mlp.", config["intermediate_size"])
    shapes[f"{prefix}mlp.gate.weight"] = (NUM_EXPERTS, HIDDEN)
    for expert in range(NUM_EXPERTS):
        shapes |= _mlp_shapes(f"{prefix}mlp.experts.{expert}.", config["moe_intermediate_size"])
    return shapes


def _mlp_shapes(prefix: str, size: int) -> Shapes:
    shapes = {"gate": (size, HIDDEN), "up": (size, HIDDEN), "down": (HIDDEN, size)}
    return {f"{prefix}{name}_proj.weight": shape for name, shape in shapes.items()}
