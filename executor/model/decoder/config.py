"""Model configuration: the sizes and switches of a checkpoint's config.json, in one spelling.

Transformers 5 writes some fields under other names than the releases before it; both are read.
A field that would change the numbers and is not implemented is an error here: a model that ignored
it would answer fluently and wrongly.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from executor.batch.kv_pool import KVShape
from executor.errors import CheckpointError
from executor.model.decoder.quantization import read_quantization
from executor.model.weights import Format
from executor.parallel.layout import Topology, divisors, share_of

MAX_CONFIG_BYTES = 4 << 20
MAX_SIZE = 1 << 24  # of a dimension or a number of positions; the largest published is 10 million
MAX_LAYERS = 1024
MAX_EXPERTS = 1 << 17  # of all layers, which are built one by one; Kimi-K2 has 23,000


class Fields:
    """The fields of one file. A null counts as absent, as Hugging Face means it.

    Args:
        path: The file, for errors.
        values: What it holds.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path = path
        self._values = values

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
        return Fields(self._path, {**self._values, **values})

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {message}")

    def get(self, *names: str, default: Any = None) -> Any:
        """Returns the first of the names that is there."""
        found = [self._values[name] for name in names if self._values.get(name) is not None]
        return found[0] if found else default

    def integer(
        self, *names: str, default: int | None = None, least: int = 0, most: int = MAX_SIZE
    ) -> int:
        """Returns the first of the names that is there, a whole number within the bounds.

        Raises:
            CheckpointError: It is none; or none is there and there is no default.
        """
        value = self.get(*names, default=default)
        if value is None:
            raise self.error(f"{' or '.join(names)} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.error(f"{names[0]}={value!r} is not a whole number from {least} to {most}")
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

    def architecture(self) -> str:
        names = self.get("architectures", default=[])
        if len(names) != 1:
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
                raise self.error(f"{name}={value!r} is not supported; {fits}")


_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SUPPORTED = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1, 1.0),
}


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The attention heads of one executor.

    Attributes:
        q_heads: Its query heads.
        kv_heads: The KV heads that these read. Where there are fewer KV heads than executors that
            share a DP rank's attention, several hold the same one.
    """

    q_heads: range
    kv_heads: range


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes and switches of a decoder-only mixture-of-experts model.

    Attributes:
        architecture: Class name that Hugging Face gives the model.
        hidden_size: Width of the hidden states.
        intermediate_size: Hidden width of a dense MLP.
        moe_intermediate_size: Hidden width of an expert.
        num_experts: Experts per layer, 0 for a dense model.
        num_experts_per_tok: Experts per token.
        decoder_sparse_step: Every so many layers has experts.
        mlp_only_layers: Layers that have none all the same.
        norm_topk_prob: Whether a token's routing weights are scaled to sum to 1.
        max_position_embeddings: Longest sequence, in tokens.
        dtype: Type of the weights as saved.
        eos_token_ids: Tokens that end a text.
        has_qk_norm: Whether each head of queries and keys is normalised.
        num_nextn_predict_layers: Layers of a draft (MTP) that the checkpoint holds after the model's.
        quantization: Format of quantised weights; None if the checkpoint has none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]
    norm_topk_prob: bool
    attention_bias: bool
    tie_word_embeddings: bool
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    has_qk_norm: bool = True
    num_nextn_predict_layers: int = 0
    quantization: Format | None = None

    @classmethod
    def from_dir(cls, path: str | Path) -> "ModelConfig":
        """Reads config.json and, if there is one, generation_config.json.

        Raises:
            CheckpointError: A file or field is missing, or says what is not supported.
        """
        path = Path(path)
        fields = Fields.read(path / "config.json")
        eos_token_ids = _eos_token_ids(path / "generation_config.json", fields)
        return cls.from_fields(fields, eos_token_ids=eos_token_ids)

    @classmethod
    def from_fields(cls, fields: Fields, *, eos_token_ids: tuple[int, ...] = ()) -> "ModelConfig":
        """Takes what config.json says.

        Raises:
            CheckpointError: A field is missing, or says what is not supported.
        """
        fields.refuse(_SUPPORTED)
        hidden_size = fields.integer("hidden_size", least=1)
        num_heads = fields.integer("num_attention_heads", least=1)
        num_kv_heads = fields.integer("num_key_value_heads", default=num_heads, least=1)
        if num_heads % num_kv_heads:
            raise fields.error(
                f"num_attention_heads={num_heads} is no multiple of "
                f"num_key_value_heads={num_kv_heads}"
            )
        num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
        num_experts = fields.integer("num_experts", "num_local_experts", default=0)
        if num_layers * num_experts > MAX_EXPERTS:
            raise fields.error(
                f"num_experts={num_experts} in each of num_hidden_layers={num_layers}: there may be "
                f"{MAX_EXPERTS} in all"
            )
        top_k = fields.integer("num_experts_per_tok", default=0)
        if num_experts and not 1 <= top_k <= num_experts:
            raise fields.error(f"num_experts_per_tok={top_k} of num_experts={num_experts}")
        return cls(
            architecture=fields.architecture(),
            vocab_size=fields.integer("vocab_size", least=1),
            hidden_size=hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=fields.integer("head_dim", default=hidden_size // num_heads),
            intermediate_size=fields.integer("intermediate_size", default=0),
            moe_intermediate_size=fields.integer("moe_intermediate_size", default=0),
            num_experts=num_experts,
            num_experts_per_tok=top_k,
            decoder_sparse_step=fields.integer("decoder_sparse_step", default=1, least=1),
            mlp_only_layers=fields.integers("mlp_only_layers"),
            norm_topk_prob=bool(fields.get("norm_topk_prob", default=False)),
            attention_bias=bool(fields.get("attention_bias", default=False)),
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", default=False)),
            rms_norm_eps=float(fields.get("rms_norm_eps", default=1e-6)),
            rope_theta=_rope_theta(fields),
            max_position_embeddings=fields.integer("max_position_embeddings"),
            dtype=_dtype(fields),
            eos_token_ids=eos_token_ids,
            num_nextn_predict_layers=fields.integer(
                "num_nextn_predict_layers", default=0, most=MAX_LAYERS
            ),
            quantization=read_quantization(fields.get("quantization_config"), fields.error),
        )

    def is_moe_layer(self, layer_id: int) -> bool:
        """Source: Transformers, Qwen3MoeDecoderLayer.__init__."""
        if layer_id in self.mlp_only_layers or self.num_experts == 0:
            return False
        return (layer_id + 1) % self.decoder_sparse_step == 0

    def attention_share(self, topology: Topology) -> HeadShare:
        """Returns the heads that an executor holds.

        Raises:
            ValueError: They cannot be shared by ``attn_tp_size`` executors. Says by how many.
        """
        q, kv = self.num_attention_heads, self.num_key_value_heads
        rank, size = topology.attn_tp_rank, topology.attn_tp_size
        problem = None
        if q % size:
            problem = f"num_attention_heads={q} does not divide by it"
        elif kv % size and size % kv:
            problem = f"it neither divides num_key_value_heads={kv} nor is a multiple of it"
        if problem is not None:
            sizes = [n for n in divisors(q) if kv % n == 0 or n % kv == 0]
            raise ValueError(
                f"attn_tp_size={size}: {problem}; use one of {', '.join(map(str, sizes))}"
            )
        if kv % size:
            kv_head = rank * kv // size
            kv_heads = range(kv_head, kv_head + 1)
        else:
            kv_heads = share_of("num_key_value_heads", kv, rank, size)
        return HeadShare(share_of("num_attention_heads", q, rank, size), kv_heads)

    def kv_shape(
        self, block_size: int, dtype: torch.dtype, topology: Topology | None = None
    ) -> KVShape:
        """Returns the sizes of the keys and values that an executor keeps of this model.

        Args:
            block_size: Tokens per block.
            dtype: Type of keys and values.
            topology: The executor's place in its group; a group of its own if None.

        Raises:
            ValueError: As ``attention_share``.
        """
        return KVShape.of_heads(
            num_layers=self.num_hidden_layers,
            num_kv_heads=len(self.attention_share(topology or Topology()).kv_heads),
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=dtype,
        )


def _rope_theta(fields: Fields) -> float:
    rope = {**fields.get("rope_scaling", default={}), **fields.get("rope_parameters", default={})}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default" or "factor" in rope:
        raise fields.error(f"rope_type={rope_type!r} is not supported; only 'default' is")
    theta = rope.get("rope_theta", fields.get("rope_theta"))
    if theta is None:
        raise fields.error("rope_theta is missing, on its own or in rope_parameters")
    return float(theta)


def _dtype(fields: Fields) -> torch.dtype:
    name = str(fields.get("dtype", "torch_dtype", default="float32")).removeprefix("torch.")
    if name not in _DTYPES:
        raise fields.error(f"dtype={name!r} is not supported; {', '.join(_DTYPES)} are")
    return _DTYPES[name]


def _eos_token_ids(generation_config: Path, fields: Fields) -> tuple[int, ...]:
    """The generation config decides where there is one, as in Transformers' generate."""
    eos = Fields.read(generation_config).get("eos_token_id") if generation_config.exists() else None
    eos = fields.get("eos_token_id", default=[]) if eos is None else eos
    return tuple(eos) if isinstance(eos, list) else (int(eos),)
