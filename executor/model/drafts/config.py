"""Draft configuration: a draft's config.json beside its target's, all unsupported refused.

layout      architecture                 tensors                              algorithm
EAGLE3      LlamaForCausalLMEagle3       midlayer.*, fc, norm, lm_head, d2t   eagle
NEXTN       the target's                 model.layers.{N + k}.*               eagle, multi_layer_eagle
MTP         the target's                 mtp.*                                eagle, multi_layer_eagle
FROZEN_KV   FrozenKvMTPForCausalLM       layers.{i}.*, fc, norm               frozen_kv_mtp

N is ``num_hidden_layers`` of the folder's config.json, which for NEXTN and MTP may be the target's
own folder. With one MTP layer a draft is drafted with like EAGLE; several are run in turn.

Source: SGLang, models/llama_eagle3.py, models/deepseek_nextn.py, models/qwen3_next_mtp.py.
"""

import re
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch

from executor.batch.kv_pool import KVShape
from executor.model.decoder.config import (
    MAX_LAYERS,
    read_attention,
    read_layers,
    read_model,
    read_num_layers,
    read_rope,
    refuse_windows,
)
from executor.model.decoder.fields import Fields
from executor.model.decoder.sizes import attention_of, kv_shape, windows_of
from executor.model.families import read_family
from executor.model.spec import GqaSpec, ModelSpec, QkNorm
from executor.model.weights import tensor_names
from executor.parallel.layout import Capacity

_EAGLE3 = "LlamaForCausalLMEagle3"
_FROZEN_KV = "FrozenKvMTPForCausalLM"
_NEXTN_TENSOR = re.compile(r"model\.layers\.\d+\.eh_proj\.weight")
_LLAMA_ROPE_THETA = 10000.0  # of Transformers' LlamaConfig: published EAGLE-3 heads leave it out

# What layers of Llama's kind, of EAGLE-3 heads and frozen-KV drafts, do not do here.
_PLAIN_LAYERS: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1, 1.0),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "mlp_bias": (False,),
}


class DraftLayout(Enum):
    """How a draft's tensors are named, and what they compute."""

    EAGLE3 = auto()
    NEXTN = auto()
    MTP = auto()
    FROZEN_KV = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftConfig:
    """A draft for one target.

    Attributes:
        layout: How its tensors are named.
        algorithm: How it is drafted with: ``eagle``, ``multi_layer_eagle`` or ``frozen_kv_mtp``.
        layers: Its decoder layers, as a model. Everything else of it is the target's.
        num_layers: Layers that are passes of their own, in a multi-layer MTP; else 1.
        first_layer_id: Number of its first layer in its tensors' names.
        vocab_size: Tokens that it can draft, V.
        aux_layers: Layers of the target, counted from 0, after which the sum of residuals is a
            feature. None: the feature is the target's final hidden state.
        target_kv_layer_ids: Layers of the target whose keys and values its layers read, if it has
            none of its own.
    """

    layout: DraftLayout
    algorithm: str
    layers: ModelSpec
    num_layers: int
    first_layer_id: int = 0
    vocab_size: int
    aux_layers: tuple[int, ...] = ()
    target_kv_layer_ids: tuple[int, ...] = ()

    @classmethod
    def from_dir(cls, path: str | Path, target: ModelSpec) -> "DraftConfig":
        """Reads config.json, and the names of the tensors beside it.

        Raises:
            CheckpointError: It is no draft, one of another model, or one that is not supported.
        """
        path = Path(path)
        fields = Fields.read(path / "config.json")
        architecture = fields.architecture()
        if architecture == _EAGLE3:
            return _eagle3(fields, target)
        if architecture == _FROZEN_KV:
            return _frozen_kv(fields, target)
        names = tensor_names(path)
        if any(name.startswith("mtp.") for name in names):
            return _mtp(fields, target, DraftLayout.MTP)
        if any(_NEXTN_TENSOR.fullmatch(name) for name in names):
            return _mtp(fields, target, DraftLayout.NEXTN)
        raise fields.error(
            f"{architecture} is no draft that is supported: need {_EAGLE3}, {_FROZEN_KV}, or "
            f"tensors of MTP layers, model.layers.{{N}}.eh_proj.weight or mtp.fc.weight"
        )

    @property
    def feature_size(self) -> int:
        """Width F of the features that the target leaves for it."""
        return self.layers.hidden_size * (len(self.aux_layers) or 1)

    @property
    def gathered_size(self) -> int:
        """Width of the rows that the target gathers: hidden states, and features beside them."""
        return self.layers.hidden_size * (1 + len(self.aux_layers))

    def kv_shape(
        self, block_size: int, dtype: torch.dtype, capacity: Capacity | None = None
    ) -> KVShape | None:
        """Returns the sizes of its own keys and values on an executor; None if it has none.

        Args:
            block_size: Tokens per block, as in the target's pool.
            dtype: Type of keys and values.
            capacity: What the executor is built for; to be alone if None.

        Raises:
            ValueError: Its heads cannot be shared. Says by how many they can.
        """
        if self.target_kv_layer_ids:
            return None
        return kv_shape(self.layers, block_size, dtype, capacity)


def _eagle3(fields: Fields, target: ModelSpec) -> DraftConfig:
    fields.refuse(
        {
            "num_hidden_layers": (1,),
            "norm_before_residual": (False,),
            "target_hidden_size": (target.hidden_size,),
        }
    )
    fields.ignore("target_model_type", "modal_type")
    fields.nested("eagle_config").refuse(
        {
            "use_aux_hidden_state": (True,),
            "use_input_layernorm_in_first_layer": (True,),
            "use_last_layernorm": (True,),
            "use_mtp_layernorm": (False,),
        }
    )
    layers = _read_layers(fields, target, 1, theta=_LLAMA_ROPE_THETA)
    vocab_size = fields.integer("draft_vocab_size", default=layers.vocab_size)
    if not 1 <= vocab_size <= layers.vocab_size:
        raise fields.error(
            f"draft_vocab_size={vocab_size} of vocab_size={layers.vocab_size}: need 1 to as many"
        )
    aux_layers = _aux_layers(fields, target)
    fields.refuse_others()
    return DraftConfig(
        layout=DraftLayout.EAGLE3,
        algorithm="eagle",
        layers=layers,
        num_layers=1,
        vocab_size=vocab_size,
        aux_layers=aux_layers,
    )


def _aux_layers(fields: Fields, target: ModelSpec) -> tuple[int, ...]:
    """Source: SGLang, set_eagle3_layers_to_capture, whose numbers are of the layers after."""
    name, count = "eagle_aux_hidden_state_layer_ids", len(target.layers)
    given = fields.nested("eagle_config").integers(name)
    chosen = given or (1, count // 2 - 1, count - 4)
    if len(chosen) != 3 or not all(0 <= i < count for i in chosen):
        default = "" if given else ", by default"
        raise fields.error(
            f"eagle_config.{name}={list(chosen)}{default}: need three layers of the target, from 0 to "
            f"{count - 1}"
        )
    return chosen


def _mtp(fields: Fields, target: ModelSpec, layout: DraftLayout) -> DraftConfig:
    """The family that the file names reads it, so that layers are whatever the family's are."""
    names = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    default = 1 if layout is DraftLayout.MTP else None
    count = fields.integer(*names, default=default, most=MAX_LAYERS)
    if count < 1:
        raise fields.error(f"{names[0]}={count}: a draft needs at least 1 layer")
    fields = fields.changed(num_nextn_predict_layers=count, mtp_num_hidden_layers=None)
    model = read_family(fields)
    layers = replace(model, layers=model.mtp_layers, mtp_layers=())
    ours, theirs = (layers.num_experts, layers.top_k), (target.num_experts, target.top_k)
    if layers.moe is not None and ours != theirs:
        raise fields.error(
            f"num_experts={ours[0]}, num_experts_per_tok={ours[1]}: a draft's experts are reached "
            f"like the target's, which has {theirs[0]} and {theirs[1]}; need the same, or dense "
            f"layers"
        )
    return DraftConfig(
        layout=layout,
        algorithm="eagle" if count == 1 else "multi_layer_eagle",
        layers=_beside(fields, layers, target),
        num_layers=count,
        first_layer_id=len(model.layers) if layout is DraftLayout.NEXTN else 0,
        vocab_size=layers.vocab_size,
    )


def _frozen_kv(fields: Fields, target: ModelSpec) -> DraftConfig:
    if not isinstance(attention_of(target), GqaSpec):
        raise fields.error(
            f"a frozen-KV draft reads keys and values; {target.architecture} keeps latents (MLA)"
        )
    layers = _read_layers(fields, target, read_num_layers(fields), QkNorm.HEAD)
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "rope_theta", "rope")
    for name, ours, theirs in zip(names, _key_sizes(layers), _key_sizes(target), strict=True):
        if ours != theirs:
            raise fields.error(
                f"{name}={ours}: the draft reads the target's keys, so it must be {theirs}"
            )
    target_layers = fields.integers("target_kv_layer_ids")
    last = len(target.layers) - 1
    if not 1 <= len(target_layers) == len(layers.layers) or max(target_layers) > last:
        raise fields.error(
            f"target_kv_layer_ids={list(target_layers)}: need one layer of the target, 0 to {last}, "
            f"for each of num_hidden_layers={len(layers.layers)}"
        )
    windows = windows_of(target)
    if not windows.keys().isdisjoint(target_layers):
        seeing_all = [layer for layer in range(last + 1) if layer not in windows]
        raise fields.error(
            f"target_kv_layer_ids={list(target_layers)}: the draft sees all tokens, and the target's "
            f"layers with windows do not keep them; use layers of {seeing_all}"
        )
    fields.refuse_others()
    return DraftConfig(
        layout=DraftLayout.FROZEN_KV,
        algorithm="frozen_kv_mtp",
        layers=layers,
        num_layers=1,
        vocab_size=layers.vocab_size,
        target_kv_layer_ids=target_layers,
    )


def _key_sizes(model: ModelSpec) -> tuple[Any, ...]:
    attention, rope = attention_of(model), model.ropes[0]
    assert isinstance(attention, GqaSpec), "drafts have it, and their targets are checked"
    return attention.num_heads, attention.num_kv_heads, attention.head_dim, rope.theta, rope


def _read_layers(
    fields: Fields,
    target: ModelSpec,
    count: int,
    qk_norm: QkNorm = QkNorm.NONE,
    *,
    theta: float | None = None,
) -> ModelSpec:
    """Returns dense layers of Llama's kind as a model.

    Args:
        fields: Of the draft.
        target: What it drafts for.
        count: Layers.
        qk_norm: Norm of queries and keys.
        theta: Of the rope, where the file does not say; None if it must.

    Raises:
        CheckpointError: They do not fit the target.
    """
    fields.refuse(_PLAIN_LAYERS)
    refuse_windows(fields)
    bias = fields.flag("attention_bias")
    attention = read_attention(fields, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm)
    layers = read_layers(fields, attention, None, [False] * count)
    rope = read_rope(fields, attention.head_dim, theta=theta)
    return _beside(fields, read_model(fields, layers, (rope,)), target)


def _beside(fields: Fields, layers: ModelSpec, target: ModelSpec) -> ModelSpec:
    """Returns a draft's layers, for sequences as long as the target's.

    Raises:
        CheckpointError: They do not fit a target of this hidden size and vocabulary.
    """
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(layers, name), getattr(target, name)
        if ours != theirs:
            raise fields.error(
                f"{name}={ours}, and the target has {theirs}: need a draft made for this target"
            )
    positions = max(layers.max_position_embeddings, target.max_position_embeddings)
    return replace(layers, max_position_embeddings=positions)
