"""Qwen3-MoE: grouped-query attention with normalised queries and keys, routed experts.

Source: Transformers, models/qwen3_moe/modeling_qwen3_moe.py.
"""

import re
from itertools import chain

import torch
import torch.nn.functional as F

from executor.forward_batch import DpLayout, ForwardBatch
from executor.layers.attention import Attention
from executor.layers.dp_communicator import DpCommunicator
from executor.layers.embedding import Embedding
from executor.layers.linear import Linear
from executor.layers.norm import RMSNorm
from executor.layers.rotary import RotaryEmbedding
from executor.layers.workers import WorkerPool
from executor.models.config import ModelConfig
from executor.moe.dispatch_all_gather import AllGatherDispatcher
from executor.moe.layer import MoELayer
from executor.moe.runner_torch import TorchMoERunner
from executor.parallel import ExpertParallel
from executor.weights import WeightGroup

_EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


class Qwen3MoeAttention:
    """Projections, norms and rotation around the attention backend."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        workers: WorkerPool,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layer_id = layer_id
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.eps = config.rms_norm_eps
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = Linear(
            config.hidden_size,
            q_size + 2 * kv_size,
            has_bias=config.attention_bias,
            dtype=dtype,
            device=device,
            workers=workers,
        )
        self.o_proj = Linear(
            q_size,
            config.hidden_size,
            has_bias=config.attention_bias,
            dtype=dtype,
            device=device,
            workers=workers,
        )
        # Queries and keys are normalised in one call, each head with its own row of weights.
        self.qk_norm_weight = torch.empty(
            self.num_heads + self.num_kv_heads, self.head_dim, dtype=dtype, device=device
        )
        self.sizes = (q_size, kv_size, kv_size)

    def __call__(
        self,
        x: torch.Tensor,
        rotary: RotaryEmbedding,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        attention: Attention,
    ) -> torch.Tensor:
        heads = self.qkv_proj(x).view(len(x), self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        num_qk = self.num_heads + self.num_kv_heads
        qk = F.rms_norm(heads[:, :num_qk], (self.head_dim,), None, self.eps)
        qk = rotary.rotate(qk.mul_(self.qk_norm_weight), cos_sin)
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        return self.o_proj(attention.forward(q, k, heads[:, num_qk:], self.layer_id))

    def weight_groups(self, prefix: str) -> list[WeightGroup]:
        qkv, o = self.qkv_proj, self.o_proj
        parts = zip("qkv", torch.split_with_sizes(qkv.weight, self.sizes), strict=True)
        qkv_targets = {f"{prefix}{name}_proj.weight": part for name, part in parts}
        o_targets = {f"{prefix}o_proj.weight": o.weight}
        if qkv.bias is not None and o.bias is not None:
            biases = zip("qkv", torch.split_with_sizes(qkv.bias, self.sizes), strict=True)
            qkv_targets |= {f"{prefix}{name}_proj.bias": part for name, part in biases}
            o_targets[f"{prefix}o_proj.bias"] = o.bias
        q_norm = torch.empty_like(self.qk_norm_weight[0])
        k_norm = torch.empty_like(q_norm)

        def spread_norms() -> None:
            self.qk_norm_weight[: self.num_heads] = q_norm
            self.qk_norm_weight[self.num_heads :] = k_norm

        norms = {f"{prefix}q_norm.weight": q_norm, f"{prefix}k_norm.weight": k_norm}
        return [
            WeightGroup(qkv_targets, qkv.finish),
            WeightGroup(o_targets, o.finish),
            WeightGroup(norms, spread_norms),
        ]


class Qwen3MoeMLP:
    """A dense gated MLP."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        workers: WorkerPool,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.gate_up_proj = Linear(
            hidden_size, 2 * intermediate_size, dtype=dtype, device=device, workers=workers
        )
        self.down_proj = Linear(
            intermediate_size, hidden_size, dtype=dtype, device=device, workers=workers
        )

    def __call__(self, x: torch.Tensor, layout: DpLayout) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate).mul_(up))

    def weight_groups(self, prefix: str) -> list[WeightGroup]:
        return _mlp_groups(prefix, self.gate_up_proj, self.down_proj)


class Qwen3MoeSparseBlock:
    """Routed experts, of which this rank holds a part."""

    def __init__(
        self,
        config: ModelConfig,
        local_experts: range,
        communicator: DpCommunicator,
        workers: WorkerPool,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.local_experts = local_experts
        self.gate = Linear(hidden, config.num_experts, dtype=dtype, device=device)
        self.w13 = [Linear(hidden, 2 * inner, dtype=dtype, device=device) for _ in local_experts]
        self.w2 = [Linear(inner, hidden, dtype=dtype, device=device) for _ in local_experts]
        self._layer = MoELayer(
            self.gate,
            config.num_experts_per_tok,
            renormalize=config.norm_topk_prob,
            dispatcher=AllGatherDispatcher(communicator, local_experts),
            runner=TorchMoERunner(self.w13, self.w2, workers),
        )

    def __call__(self, x: torch.Tensor, layout: DpLayout) -> torch.Tensor:
        return self._layer(x, layout)

    def weight_groups(self, prefix: str) -> list[WeightGroup]:
        groups = [WeightGroup({f"{prefix}gate.weight": self.gate.weight}, self.gate.finish)]
        for expert, w13, w2 in zip(self.local_experts, self.w13, self.w2, strict=True):
            groups += _mlp_groups(f"{prefix}experts.{expert}.", w13, w2)
        return groups


class Qwen3MoeDecoderLayer:
    """Attention, then experts or a dense MLP, each around a residual."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        local_experts: range,
        communicator: DpCommunicator,
        workers: WorkerPool,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.self_attn = Qwen3MoeAttention(config, layer_id, workers, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.mlp: Qwen3MoeSparseBlock | Qwen3MoeMLP
        if config.is_moe_layer(layer_id):
            self.mlp = Qwen3MoeSparseBlock(
                config, local_experts, communicator, workers, dtype=dtype, device=device
            )
        else:
            self.mlp = Qwen3MoeMLP(
                hidden, config.intermediate_size, workers, dtype=dtype, device=device
            )

    def __call__(
        self,
        x: torch.Tensor,
        rotary: RotaryEmbedding,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        attention: Attention,
        layout: DpLayout,
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, cos_sin, attention)
        return x + self.mlp(self.post_attention_layernorm(x), layout)

    def weight_groups(self, prefix: str) -> list[WeightGroup]:
        norms = {
            f"{prefix}input_layernorm.weight": self.input_layernorm.weight,
            f"{prefix}post_attention_layernorm.weight": self.post_attention_layernorm.weight,
        }
        attention = self.self_attn.weight_groups(f"{prefix}self_attn.")
        return [WeightGroup(norms), *attention, *self.mlp.weight_groups(f"{prefix}mlp.")]


class Qwen3MoeForCausalLM:
    """The whole model, on one EP rank.

    Args:
        config: Sizes and switches.
        dtype: Type of weights and hidden states.
        device: Where everything lives.
        ep: This rank's share of the experts. Everything else is on every rank.
        communicator: Joins the EP ranks.

    Raises:
        ValueError: The experts do not divide among the ranks.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ep: ExpertParallel,
        communicator: DpCommunicator,
    ) -> None:
        hidden = config.hidden_size
        self._workers = WorkerPool(None if device.type == "cpu" else 1)
        self._tied = config.tie_word_embeddings
        self._local_experts = ep.local_experts(config.num_experts)
        self.rotary = RotaryEmbedding(
            config.head_dim,
            config.max_position_embeddings,
            config.rope_theta,
            dtype=dtype,
            device=device,
        )
        self.embed_tokens = Embedding(config.vocab_size, hidden, dtype=dtype, device=device)
        self.layers = [
            Qwen3MoeDecoderLayer(
                config,
                layer_id,
                self._local_experts,
                communicator,
                self._workers,
                dtype=dtype,
                device=device,
            )
            for layer_id in range(config.num_hidden_layers)
        ]
        self.norm = RMSNorm(hidden, config.rms_norm_eps, dtype=dtype, device=device)
        self.lm_head = Linear(
            hidden, config.vocab_size, dtype=dtype, device=device, workers=self._workers
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, attention: Attention) -> torch.Tensor:
        """Returns the hidden states after the last norm, [T, D].

        Every EP rank must call it, also with T = 0.
        """
        with self._workers.sharing(batch.layout.global_dp_buffer_len):
            cos_sin = self.rotary.at(batch.positions)
            x = self.embed_tokens(batch.input_ids)
            for layer in self.layers:
                x = layer(x, self.rotary, cos_sin, attention, batch.layout)
            return self.norm(x)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        """Returns float32 logits [L, vocab_size] of the chosen rows of ``hidden``."""
        with self._workers.sharing(len(logits_indices)):
            return self.lm_head(hidden.index_select(0, logits_indices)).float()

    def weight_groups(self) -> list[WeightGroup]:
        """Returns what the checkpoint must hold, in the order to load it."""
        embedding = self.embed_tokens.weight
        head = {"lm_head.weight": self.lm_head.weight}
        finish_tied = lambda: self.lm_head.finish(embedding)  # noqa: E731
        layers = (
            layer.weight_groups(f"model.layers.{layer_id}.")
            for layer_id, layer in enumerate(self.layers)
        )
        return [
            WeightGroup({"model.embed_tokens.weight": embedding}),
            *chain.from_iterable(layers),
            WeightGroup({"model.norm.weight": self.norm.weight}),
            WeightGroup({}, finish_tied) if self._tied else WeightGroup(head, self.lm_head.finish),
        ]

    def skips(self, name: str) -> bool:
        """Whether a tensor may be left unread: another rank's expert, or a tied copy."""
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            return int(expert[1]) not in self._local_experts
        return self._tied and name == "lm_head.weight"


def _mlp_groups(prefix: str, gate_up: Linear, down: Linear) -> list[WeightGroup]:
    gate, up = gate_up.weight.chunk(2)
    targets = {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
    return [
        WeightGroup(targets, gate_up.finish),
        WeightGroup({f"{prefix}down_proj.weight": down.weight}, down.finish),
    ]
