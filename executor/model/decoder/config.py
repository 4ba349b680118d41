"""Parts of a description that families read alike out of config.json: attention, experts, rope."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from executor.model.decoder.fields import Fields
from executor.model.decoder.quantization import read_quantization
from executor.model.moe.routing import check_groups
from executor.model.spec import (
    GqaSpec,
    GroupScore,
    LayerSpec,
    Llama3Scaling,
    MlaSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    QkNorm,
    RopeSpec,
    RouterSpec,
    Scores,
    SharedSpec,
    Yarn,
)

MAX_LAYERS = 1024
MAX_EXPERTS = 1 << 17  # of all layers, which are built one by one; Kimi-K2 has 23,000
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def read_model(
    fields: Fields,
    layers: tuple[LayerSpec, ...],
    ropes: tuple[RopeSpec, ...],
    *,
    norm_eps: float = 1e-6,
    mtp_layers: tuple[LayerSpec, ...] = (),
) -> ModelSpec:
    """Returns a model of these layers.

    Args:
        fields: Of config.json.
        layers: Of ``read_layers``.
        ropes: That they refer to.
        norm_eps: Where the file does not say.
        mtp_layers: After the model's.

    Raises:
        CheckpointError: A field is missing, or says what is not supported.
    """
    fields.refuse({"hidden_act": ("silu",)})
    return ModelSpec(
        architecture=fields.architecture(),
        vocab_size=fields.integer("vocab_size", least=1),
        hidden_size=fields.integer("hidden_size", least=1),
        layers=layers,
        ropes=ropes,
        norm_eps=fields.number("rms_norm_eps", default=norm_eps),
        tied=fields.flag("tie_word_embeddings"),
        dtype=_dtype(fields),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        mtp_layers=mtp_layers,
        quantization=read_quantization(fields.get("quantization_config"), fields.error),
    )


def read_num_layers(fields: Fields) -> int:
    """Returns how many layers the model has, drafts not counted."""
    return fields.integer("num_hidden_layers", least=1, most=MAX_LAYERS)


def read_num_mtp_layers(fields: Fields) -> int:
    """Returns how many draft layers the checkpoint holds after the model's."""
    return fields.integer("num_nextn_predict_layers", default=0, most=MAX_LAYERS)


def read_attention(
    fields: Fields, *, qkv_bias: bool = False, o_bias: bool = False, qk_norm: QkNorm = QkNorm.NONE
) -> GqaSpec:
    """Returns grouped-query attention over the first rope.

    Raises:
        CheckpointError: A field is missing, or sizes contradict one another.
    """
    hidden_size = fields.integer("hidden_size", least=1)
    num_heads = fields.integer("num_attention_heads", least=1)
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads, least=1)
    if num_heads % num_kv_heads:
        raise fields.error(
            f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}"
        )
    head_dim = fields.integer("head_dim", default=hidden_size // num_heads, least=1)
    return GqaSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=0,
        scale=head_dim**-0.5,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
    )


def read_experts(
    fields: Fields, router: RouterSpec, *, width: str = "moe_intermediate_size"
) -> MoeSpec | None:
    """Returns experts, as many as any of the published names says; None if there are none.

    Args:
        fields: Of config.json.
        router: Choice of experts.
        width: Name of the field that has an expert's hidden width.

    Raises:
        CheckpointError: A field is missing, or sizes contradict one another.
    """
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts, num_layers = fields.integer(*names, default=0), read_num_layers(fields)
    if not num_experts:
        fields.ignore("num_experts_per_tok", width)
        return None
    if num_layers * num_experts > MAX_EXPERTS:
        raise fields.error(
            f"num_experts={num_experts} in each of num_hidden_layers={num_layers}: there may be "
            f"{MAX_EXPERTS} in all"
        )
    top_k = fields.integer("num_experts_per_tok")
    if not 1 <= top_k <= num_experts:
        raise fields.error(f"num_experts_per_tok={top_k} of num_experts={num_experts}")
    experts = MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.integer(width, least=1),
        router=router,
    )
    try:
        check_groups(experts)
    except ValueError as error:
        raise fields.error(str(error)) from error
    return experts


def read_sigmoid_router(fields: Fields) -> RouterSpec:
    """Returns the router of DeepSeek-V3: groups by their best two, a bias for the choice only.

    Raises:
        CheckpointError: A field is missing, or says what is not supported.
    """
    fields.refuse({"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)})
    # Without defaults: Transformers' differ by class, and no tensor's shape would show another.
    return RouterSpec(
        scores=Scores.SIGMOID,
        correction_bias=True,
        num_groups=fields.integer("n_group", least=1),
        num_kept_groups=fields.integer("topk_group", least=1),
        group_score=GroupScore.TOP2,
        renormalise=fields.flag("norm_topk_prob", default=True),
        factor=fields.number("routed_scaling_factor"),
        in_float32=True,
    )


def with_shared(fields: Fields, experts: MoeSpec | None) -> MoeSpec | None:
    """Returns experts with an MLP beside them, as wide as ``n_shared_experts`` of them."""
    count = fields.integer("n_shared_experts", default=0)
    if experts is None or not count:
        return experts
    return replace(experts, shared=SharedSpec(intermediate_size=count * experts.intermediate_size))


def read_layers(
    fields: Fields, attention: GqaSpec | MlaSpec, experts: MoeSpec | None, sparse: Sequence[bool]
) -> tuple[LayerSpec, ...]:
    """Returns a layer for each of ``sparse``, which says where there are experts; else an MLP.

    Raises:
        CheckpointError: Some are dense, and no field says how wide.
    """
    width = fields.integer("intermediate_size", default=0)
    if experts is None or not all(sparse):
        width = fields.integer("intermediate_size", least=1)
    dense = MlpSpec(intermediate_size=width)
    return tuple(
        LayerSpec(attention=attention, feed_forward=experts if experts and is_sparse else dense)
        for is_sparse in sparse
    )


def are_sparse(fields: Fields, layer_ids: range) -> list[bool]:
    """Returns whether layers of a Qwen have experts.

    Source: Transformers, Qwen3MoeDecoderLayer.__init__.
    """
    step = fields.integer("decoder_sparse_step", default=1, least=1)
    dense = fields.integers("mlp_only_layers")
    return [layer_id not in dense and (layer_id + 1) % step == 0 for layer_id in layer_ids]


def refuse_windows(fields: Fields) -> None:
    """Raises where some layers of a Qwen see a window of keys.

    Raises:
        CheckpointError: They do.
    """
    fields.refuse({"use_sliding_window": (False,)})
    fields.ignore("sliding_window", "max_window_layers")
    kinds = fields.get("layer_types", default=["full_attention"])
    if not isinstance(kinds, list) or kinds != ["full_attention"] * max(len(kinds), 1):
        raise fields.error(f"layer_types={kinds!r} is not supported; only full_attention is")


def read_rope(
    fields: Fields, head_dim: int, *, theta: float | None = None, rotary_dim: int | None = None
) -> RopeSpec:
    """Returns a model's only rope.

    Args:
        fields: Of config.json.
        head_dim: Width of a head, of which a part may turn.
        theta: Where the file does not say; None if it must.
        rotary_dim: Where the file says no part of a head; None for all of it.

    Raises:
        CheckpointError: A field is missing, or says what is not supported.

    Source: Transformers, modeling_rope_utils.py.
    """
    rope = read_rope_fields(fields)
    theta = _of_either(fields, rope, "rope_theta", theta)
    if theta is None:
        raise fields.error("rope_theta is missing, on its own or in rope_parameters")
    kind = rope.get("rope_type", "type", default="default")
    if kind not in ("default", "llama3", "yarn"):
        raise fields.error(f"rope_type={kind!r} is not supported; default, llama3 and yarn are")
    scaling: Yarn | Llama3Scaling | None = None
    if kind == "llama3":
        scaling = _llama3(fields, rope)
    factor = 1.0
    if kind == "yarn":
        scaling = _yarn(fields, rope)
        factor = rope.number("attention_factor", default=_yarn_attention_factor(rope))
    return RopeSpec(
        rotary_dim=_rotary_dim(fields, rope, head_dim, rotary_dim),
        theta=rope.changed(rope_theta=theta).number("rope_theta"),
        scaling=scaling,
        attention_factor=factor,
    )


def _of_either(fields: Fields, rope: Fields, name: str, default: Any) -> Any:
    """Returns a field that releases before Transformers 5 keep outside of the rope's."""
    inside, outside = rope.get(name), fields.get(name)
    if inside is None:
        return default if outside is None else outside
    if outside is not None and outside != inside:
        raise fields.error(
            f"{name}={outside!r}, and of the rope {inside!r}, contradict each other; leave out the "
            f"wrong one"
        )
    return inside


def read_rope_fields(fields: Fields) -> Fields:
    """Returns what Transformers 5 calls rope_parameters, and releases before it rope_scaling."""
    return fields.nested("rope_scaling", "rope_parameters")


def yarn_mscale(factor: float, scale: float) -> float:
    """Returns by how much attention is sharpened in texts that are longer by a factor."""
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def read_mscale(rope: Fields, name: str) -> float:
    """Returns one of yarn's mscale fields, 0 where it is absent or 0.

    Raises:
        CheckpointError: It is neither 0 nor a number above it.
    """
    return rope.number(name) if rope.get(name, default=0) != 0 else 0.0


def _yarn_attention_factor(rope: Fields) -> float:
    factor = rope.number("factor")
    scales = [read_mscale(rope, name) for name in ("mscale", "mscale_all_dim")]
    if not all(scales):
        return yarn_mscale(factor, 1.0)
    return yarn_mscale(factor, scales[0]) / yarn_mscale(factor, scales[1])


def _yarn(fields: Fields, rope: Fields) -> Yarn:
    return Yarn(
        factor=rope.number("factor"),
        original_max_position_embeddings=_original_positions(fields, rope),
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        truncate=rope.flag("truncate", default=True),
    )


def _llama3(fields: Fields, rope: Fields) -> Llama3Scaling:
    return Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_position_embeddings=_original_positions(fields, rope),
    )


def _original_positions(fields: Fields, rope: Fields) -> int:
    name = "original_max_position_embeddings"
    positions = _of_either(fields, rope, name, fields.get("max_position_embeddings"))
    return rope.changed(**{name: positions}).integer(name, least=1)


def _rotary_dim(fields: Fields, rope: Fields, head_dim: int, rotary_dim: int | None) -> int:
    name = "partial_rotary_factor"
    whole = 1.0 if rotary_dim is None else rotary_dim / head_dim
    part = rope.changed(**{name: _of_either(fields, rope, name, whole)}).number(name)
    size = int(head_dim * part)
    if not 2 <= size <= head_dim or size % 2:
        raise fields.error(
            f"{name}={part}: of head_dim={head_dim} {size} would turn; need an even number, 2 or more"
        )
    return size


def _dtype(fields: Fields) -> torch.dtype:
    unsaid = "float32" if fields.get("quantization_config") is None else "bfloat16"
    name = str(fields.get("dtype", "torch_dtype", default=unsaid)).removeprefix("torch.")
    if name not in _DTYPES:
        raise fields.error(f"dtype={name!r} is not supported; {', '.join(_DTYPES)} are")
    return _DTYPES[name]
