"""Qwen3-MoE: grouped-query attention with normalised queries and keys, routed experts.

Source: Transformers, models/qwen3_moe/modeling_qwen3_moe.py.
"""

import re
from functools import partial
from itertools import chain
from typing import Any

import torch

from executor.dp_layout import DpLayout
from executor.forward_batch import ForwardBatch
from executor.layers.attention import AttentionCall, Stages
from executor.layers.dp_communicator import DpCommunicator
from executor.layers.embedding import Embedding
from executor.layers.linear import Linear
from executor.layers.norm import RMSNorm
from executor.models.config import ModelConfig
from executor.models.kernels import Kernels
from executor.moe.dispatch_all_gather import AllGatherDispatcher
from executor.moe.layer import MoELayer
from executor.topology import Topology
from executor.weights import WeightGroup

_EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


class Qwen3MoeAttention:
    """Projections, norms and rotation around the attention backend."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layer_id = layer_id
        self.operators = kernels.operators
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
            workers=kernels.workers,
        )
        self.o_proj = Linear(
            q_size,
            config.hidden_size,
            has_bias=config.attention_bias,
            dtype=dtype,
            device=device,
            workers=kernels.workers,
        )
        # Queries and keys are normalised in one call, each head with its own row of weights.
        self.qk_norm_weight = torch.empty(
            self.num_heads + self.num_kv_heads, self.head_dim, dtype=dtype, device=device
        )
        self.sizes = (q_size, kv_size, kv_size)

    def project(self, x: torch.Tensor, rotation: Any) -> AttentionCall:
        """Returns the rotated queries, keys and values of x [T, D]."""
        heads = self.qkv_proj(x).view(len(x), self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        num_qk = self.num_heads + self.num_kv_heads
        qk = self.operators.norm_heads(
            heads[:, :num_qk], self.qk_norm_weight, self.num_heads, self.eps
        )
        q, k = self.operators.rotate(qk, self.num_heads, rotation)
        return AttentionCall(q, k, heads[:, num_qk:], self.layer_id)

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
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.operators = kernels.operators
        linear = partial(Linear, dtype=dtype, device=device, workers=kernels.workers)
        self.gate_up_proj = linear(hidden_size, 2 * intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def __call__(
        self, x: torch.Tensor, layout: DpLayout, is_padding: torch.Tensor | None
    ) -> torch.Tensor:
        return self.down_proj(self.operators.silu_and_mul(self.gate_up_proj(x)))

    def weight_groups(self, prefix: str) -> list[WeightGroup]:
        gate, up = self.gate_up_proj.weight.chunk(2)
        targets = {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        down = self.down_proj
        return [
            WeightGroup(targets, self.gate_up_proj.finish),
            WeightGroup({f"{prefix}down_proj.weight": down.weight}, down.finish),
        ]


class Qwen3MoeSparseBlock:
    """Routed experts, of which this rank holds a part."""

    def __init__(
        self,
        config: ModelConfig,
        local_experts: range,
        communicator: DpCommunicator,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.gate = Linear(config.hidden_size, config.num_experts, dtype=dtype, device=device)
        self.experts = kernels.new_experts(local_experts)
        self._layer = MoELayer(
            self.gate,
            config.num_experts_per_tok,
            num_experts=config.num_experts,
            renormalize=config.norm_topk_prob,
            dispatcher=AllGatherDispatcher(communicator, local_experts),
            runner=self.experts.runner,
        )

    def __call__(
        self, x: torch.Tensor, layout: DpLayout, is_padding: torch.Tensor | None
    ) -> torch.Tensor:
        return self._layer(x, layout, is_padding)

    def weight_groups(self, prefix: str) -> list[WeightGroup]:
        gate = WeightGroup({f"{prefix}gate.weight": self.gate.weight}, self.gate.finish)
        return [gate, *self.experts.weight_groups(f"{prefix}experts.")]


class Qwen3MoeDecoderLayer:
    """Attention, then experts or a dense MLP, each around a residual."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        local_experts: range,
        communicator: DpCommunicator,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        hidden = config.hidden_size
        norm = partial(
            RMSNorm, hidden, config.rms_norm_eps, kernels.operators, dtype=dtype, device=device
        )
        self.input_layernorm = norm()
        self.self_attn = Qwen3MoeAttention(config, layer_id, kernels, dtype=dtype, device=device)
        self.post_attention_layernorm = norm()
        self.mlp: Qwen3MoeSparseBlock | Qwen3MoeMLP
        if config.is_moe_layer(layer_id):
            self.mlp = Qwen3MoeSparseBlock(
                config, local_experts, communicator, kernels, dtype=dtype, device=device
            )
        else:
            self.mlp = Qwen3MoeMLP(
                hidden, config.intermediate_size, kernels, dtype=dtype, device=device
            )

    def before_attention(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Any
    ) -> tuple[AttentionCall, torch.Tensor]:
        """Takes what the layer before added, and the sum up to it; returns the whole sum, too."""
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.add(x, residual)
        return self.self_attn.project(x, rotation), residual

    def after_attention(
        self,
        attended: torch.Tensor,
        residual: torch.Tensor,
        layout: DpLayout,
        is_padding: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what this layer's experts add, [T, D], and the sum without it."""
        x, residual = self.post_attention_layernorm.add(self.self_attn.o_proj(attended), residual)
        return self.mlp(x, layout, is_padding), residual

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
        topology: This executor's place in its group, which says what share of the experts it has.
        communicator: Joins the EP ranks.
        kernels: What the layers call.

    Raises:
        ValueError: The experts do not divide among the ranks.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        topology: Topology,
        communicator: DpCommunicator,
        kernels: Kernels,
    ) -> None:
        hidden = config.hidden_size
        self._operators = kernels.operators
        self._workers = kernels.workers
        self._tied = config.tie_word_embeddings
        self._local_experts = topology.local_experts(config.num_experts)
        self.embed_tokens = Embedding(config.vocab_size, hidden, dtype=dtype, device=device)
        self.layers = [
            Qwen3MoeDecoderLayer(
                config,
                layer_id,
                self._local_experts,
                communicator,
                kernels,
                dtype=dtype,
                device=device,
            )
            for layer_id in range(config.num_hidden_layers)
        ]
        self.norm = RMSNorm(
            hidden, config.rms_norm_eps, kernels.operators, dtype=dtype, device=device
        )
        self.lm_head = Linear(
            hidden, config.vocab_size, dtype=dtype, device=device, workers=self._workers
        )

    def stages(self, batch: ForwardBatch) -> Stages:
        """Runs a forward pass that stops at each attention call.

        Every EP rank must run it, also with T = 0.
        """
        with self._workers.sharing(batch.layout.global_dp_buffer_len):
            rotation = self._operators.rotation(batch.positions)
            is_padding = batch.is_padding()
            x, residual = self.embed_tokens(batch.input_ids), None
            for layer in self.layers:
                call, residual = layer.before_attention(x, residual, rotation)
                attended = yield call
                x, residual = layer.after_attention(attended, residual, batch.layout, is_padding)
            assert residual is not None, "a model has layers"
            return self.norm.add(x, residual)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 logits [L, vocab_size] of hidden states [L, D]."""
        with self._workers.sharing(len(hidden)):
            return self.lm_head(hidden).float()

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
