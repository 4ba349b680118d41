"""Fields of a checkpoint's config.json, and the parts of a description that families read alike.

Transformers 5 writes some fields under other names than the releases before it; both are read.
A field that a family neither reads nor names as harmless is an error: a model that ignored it
might answer fluently and wrongly.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from executor.errors import CheckpointError
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

MAX_CONFIG_BYTES = 4 << 20
MAX_SIZE = 1 << 24  # of a dimension or a number of positions; the largest published is 10 million
MAX_LAYERS = 1024
MAX_EXPERTS = 1 << 17  # of all layers, which are built one by one; Kimi-K2 has 23,000


# Of training, of classes' bookkeeping, or read elsewhere: no family's numbers change with them.
_HARMLESS = frozenset(
    [
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "eos_token_id",
        "initializer_range",
        "is_encoder_decoder",
        "model_type",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "router_aux_loss_coef",
        "tokenizer_class",
        "transformers_version",
        "use_cache",
    ]
)
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Fields:
    """The fields of one file, or of an object in it. A null counts as absent, as Hugging Face means it.

    Args:
        path: The file, for errors.
        values: What it holds.
        prefix: Of the fields' names, in errors.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self._path = path
        self._values = values
        self._prefix = prefix
        self._known: set[str] = set()
        self._nested: dict[tuple[str, ...], Fields] = {}

    @classmethod
    def read(cls, path: Path) -> "Fields":
        """Returns the fields of a file.

        Raises:
            CheckpointError: There is no such file, or it holds no JSON object, or too large a one.
        """
        try:
            if path.stat().st_size > MAX_CONFIG_BYTES:
                raise CheckpointError(f"{path} has more than {MAX_CONFIG_BYTES:,} bytes")
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path} does not exist: need a model in Hugging Face format"
            ) from error
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} holds a {type(values).__name__}, not an object")
        return cls(path, values)

    def changed(self, **values: Any) -> "Fields":
        """Returns the same fields but for these."""
        return Fields(self._path, {**self._values, **values}, self._prefix)

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {message}")

    def get(self, *names: str, default: Any = None) -> Any:
        """Returns the value of a field that has several names.

        Raises:
            CheckpointError: Two of the names are there and say different things.
        """
        self._known.update(names)
        found = {name: self._values[name] for name in names if self._values.get(name) is not None}
        value = next(iter(found.values()), default)
        if any(other != value for other in found.values()):
            said = " and ".join(f"{self._prefix}{name}={each!r}" for name, each in found.items())
            raise self.error(f"{said} contradict each other; leave out the wrong one")
        return value

    def integer(
        self, *names: str, default: int | None = None, least: int = 0, most: int = MAX_SIZE
    ) -> int:
        """Returns what any of the names says, a whole number within the bounds.

        Raises:
            CheckpointError: It is none; or none is there and there is no default; or two differ.
        """
        value = self.get(*names, default=default)
        if value is None:
            raise self.error(f"{' or '.join(names)} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.error(
                f"{self._prefix}{names[0]}={value!r} is not a whole number from {least} to {most}"
            )
        return value

    def integers(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Returns a list of whole numbers from 0.

        Raises:
            CheckpointError: It is none.
        """
        values = self.get(name, default=default)
        if not isinstance(values, list | tuple) or not all(
            isinstance(value, int) and not isinstance(value, bool) and value >= 0
            for value in values
        ):
            raise self.error(f"{name}={values!r} is no list of whole numbers from 0")
        return tuple(values)

    def number(self, name: str, *, default: float | None = None) -> float:
        """Returns a finite number above 0.

        Raises:
            CheckpointError: It is none; or it is not there and there is no default.
        """
        value = self.get(name, default=default)
        if value is None:
            raise self.error(f"{self._prefix}{name} is missing")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise self.error(f"{self._prefix}{name}={value!r} is no number above 0")
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Returns true or false.

        Raises:
            CheckpointError: It is neither.
        """
        value = self.get(name, default=default)
        if not isinstance(value, bool):
            raise self.error(f"{self._prefix}{name}={value!r} is neither true nor false")
        return value

    def nested(self, *names: str) -> "Fields":
        """Returns the fields of objects, the later before the earlier; none if all are absent.

        Raises:
            CheckpointError: One is no object.
        """
        merged = self._nested.get(names)
        if merged is None:
            values: dict[str, Any] = {}
            for name in names:
                found = self.get(name, default={})
                if not isinstance(found, dict):
                    raise self.error(f"{self._prefix}{name}={found!r} is no object")
                values |= found
            merged = self._nested[names] = Fields(self._path, values, f"{self._prefix}{names[-1]}.")
        return merged

    def architecture(self) -> str:
        names = self.get("architectures", default=[])
        if not isinstance(names, list) or len(names) != 1:
            raise self.error(f"architectures={names!r}: need exactly one class name")
        return str(names[0])

    def refuse(self, supported: Mapping[str, tuple[Any, ...]]) -> None:
        """Raises for what would change the numbers and is not implemented.

        Args:
            supported: By field, the values that do not. Leaving the field out never does.

        Raises:
            CheckpointError: A field has another value.
        """
        for name, values in supported.items():
            value = self.get(name)
            if value is not None and value not in values:
                fits = f"only {values[0]!r} is" if values else "leaving it out is"
                raise self.error(f"{self._prefix}{name}={value!r} is not supported; {fits}")

    def ignore(self, *names: str) -> None:
        """Takes fields for harmless: numbers are the same for any value of theirs."""
        self._known.update(names)

    def refuse_others(self) -> None:
        """Raises for fields that were neither read nor taken for harmless, of nested objects too.

        Raises:
            CheckpointError: There are such fields. Names them.
        """
        unknown = list(self._unknown())
        if unknown:
            rest = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            raise self.error(
                f"{', '.join(unknown[:3])}{rest}: not known of {self.get('architectures')}, and may "
                f"change its numbers; leave out what does not"
            )

    def _unknown(self) -> Iterator[str]:
        for name, value in self._values.items():
            if name not in self._known | _HARMLESS and value is not None:
                yield f"{self._prefix}{name}={value!r}"[:100]
        for fields in self._nested.values():
            yield from fields._unknown()


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
    if not isinstance(kinds, list) or set(kinds) != {"full_attention"}:
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
