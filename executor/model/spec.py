"""Description of a model: sizes and switches of its layers, without tensors.

A family's file fills one in from config.json; the decoder, the KV pool, the budget and the kernels read
nothing else. What two families do differently is a field here, never the name of a family.

    ModelSpec ── layers ──▶ LayerSpec ┬─ attention ────▶ GqaSpec | MlaSpec
              └─ ropes ──▶ RopeSpec   └─ feed_forward ─▶ MlpSpec | MoeSpec ──▶ RouterSpec, SharedSpec
"""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import torch

from executor.model.weights import Format


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """Rope for longer texts than a model was first trained on, by frequency (arXiv 2309.00071).

    Attributes:
        factor: By how much longer.
        original_max_position_embeddings: Positions before.
        beta_fast: Turns within those positions above which a frequency stays.
        beta_slow: Turns below which it is divided by the factor.
        truncate: Whether the dimensions between are rounded outwards.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Rope of Llama 3.1 and later.

    Attributes:
        factor: What long wavelengths are multiplied by.
        low_freq_factor: Wavelengths above original_max_position_embeddings / this are long.
        high_freq_factor: Those below original_max_position_embeddings / this stay.
        original_max_position_embeddings: Positions before.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary position embedding; pairs are (x_i, x_{i + rotary_dim / 2}).

    Attributes:
        rotary_dim: Dimensions of a head that turn, from the first.
        theta: Base of the wavelengths.
        scaling: How frequencies change for long texts; None leaves them.
        attention_factor: What cosines and sines are multiplied by.
    """

    rotary_dim: int
    theta: float
    scaling: Yarn | Llama3Scaling | None = None
    attention_factor: float = 1.0


class QkNorm(Enum):
    """What RMS norm queries and keys go through before they turn."""

    NONE = "none"
    HEAD = "head"  # one weight of head_dim for all heads
    PROJECTION = "projection"  # over all heads of the model together


@dataclass(frozen=True, kw_only=True, slots=True)
class GqaSpec:
    """Attention whose query heads share key-value heads in groups.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key-value heads.
        head_dim: Width of each.
        rope: Index in ``ModelSpec.ropes``; None turns nothing.
        scale: What q kᵀ is multiplied by.
        qkv_bias: Whether the projections of queries, keys and values add one.
        o_bias: Whether the output projection does.
        qk_norm: Norm of queries and keys.
        window: Keys that a query sees, with its own; None for all before it.
        sinks: Whether each head has a logit that joins the softmax without a value.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: int | None
    scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    window: int | None = None
    sinks: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaSpec:
    """Attention over one latent that all heads share (multi-head latent attention).

    Attributes:
        num_heads: Query heads.
        q_lora_rank: Width of the latent of queries, Q; None projects them at once.
        kv_lora_rank: Width of the cached latent, C, which also gives the values.
        qk_nope_head_dim: Width of a head that does not turn, P.
        qk_rope_head_dim: Width that turns, R, one for all heads of the keys.
        v_head_dim: Width of a head's value, V.
        rope: Index in ``ModelSpec.ropes``.
        scale: What q kᵀ is multiplied by.
        bias: Whether the projections to latents and of the output add one.
        latent_norm_eps: Of the norms of both latents.
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: int
    scale: float
    bias: bool = False
    latent_norm_eps: float = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class ClampedSwiGlu:
    """SwiGLU of gpt-oss: (clip(u, ±limit) + 1) · g sigmoid(alpha g), with g = min(gate, limit)."""

    alpha: float
    limit: float


ActivationSpec: TypeAlias = ClampedSwiGlu | None  # None: silu(gate) · up


class Scores(Enum):
    """How a router turns logits into scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class GroupScore(Enum):
    """What a group of experts is chosen by."""

    MAX = "max"
    TOP2 = "top2"  # sum of its two largest


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSpec:
    """Choice of a token's experts and their weights.

    Attributes:
        scores: Of logits. A softmax over the chosen ones is one that is renormalised.
        correction_bias: Whether a bias is added to the scores for the choice, not for the weights.
        num_groups: Runs of equal length that experts are in; 1 for none.
        num_kept_groups: Groups that a token may choose from.
        group_score: What groups are chosen by.
        renormalise: Whether the chosen weights are divided by their sum.
        factor: What weights are multiplied by afterwards.
        in_float32: Whether logits are the product of float32 copies.
        bias: Whether logits have one.
    """

    scores: Scores = Scores.SOFTMAX
    correction_bias: bool = False
    num_groups: int = 1
    num_kept_groups: int = 1
    group_score: GroupScore = GroupScore.TOP2
    renormalise: bool = True
    factor: float = 1.0
    in_float32: bool = False
    bias: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSpec:
    """An MLP that every token goes through, beside its experts.

    Attributes:
        intermediate_size: Its hidden width.
        gated: Whether its output is multiplied by sigmoid(x · w), one number per token.
    """

    intermediate_size: int
    gated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpSpec:
    """A dense gated MLP."""

    intermediate_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeSpec:
    """Routed experts, each a gated MLP.

    Attributes:
        num_experts: Experts of the layer, E.
        top_k: Experts per token, K.
        intermediate_size: Hidden width of an expert, F.
        router: Choice of experts.
        activation: Between an expert's products.
        bias: Whether both products add one, the second inside the token's weight.
        shared: An MLP beside them.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    router: RouterSpec
    activation: ActivationSpec = None
    bias: bool = False
    shared: SharedSpec | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """A decoder layer: attention, then an MLP or experts, each after a norm and added to its input."""

    attention: GqaSpec | MlaSpec
    feed_forward: MlpSpec | MoeSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder-only model.

    Attributes:
        architecture: Class name that Hugging Face gives it.
        vocab_size: Rows of the embedding.
        hidden_size: Width of the hidden states, D.
        layers: In order.
        ropes: What layers refer to.
        norm_eps: Of every norm but those of latents.
        tied: Whether the head is the embedding.
        dtype: Type of the weights as saved.
        max_position_embeddings: Longest sequence, in tokens.
        eos_token_ids: Tokens that end a text.
        mtp_layers: Draft layers that the checkpoint holds after the model's.
        quantization: Format of quantised weights; None if the checkpoint has none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    norm_eps: float
    tied: bool
    dtype: torch.dtype
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()
    mtp_layers: tuple[LayerSpec, ...] = ()
    quantization: Format | None = None

    @property
    def moe(self) -> MoeSpec | None:
        """The experts of its layers, which are reached alike; None if all layers are dense."""
        return next(
            (x.feed_forward for x in self.layers if isinstance(x.feed_forward, MoeSpec)), None
        )

    @property
    def num_experts(self) -> int:
        """Experts of a layer that has some; 0 if none has."""
        return 0 if self.moe is None else self.moe.num_experts

    @property
    def top_k(self) -> int:
        """Experts per token; 0 if there are none."""
        return 0 if self.moe is None else self.moe.top_k

    @property
    def dense_widths(self) -> tuple[int, ...]:
        """Hidden widths of its dense MLPs."""
        mlps = (layer.feed_forward for layer in self.layers)
        return tuple(mlp.intermediate_size for mlp in mlps if isinstance(mlp, MlpSpec))
