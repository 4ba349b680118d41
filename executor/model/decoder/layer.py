"""Decoder layer: attention, and experts or a dense MLP. Drafts are built of the same parts.

Where several executors share a DP rank's attention (attention TP), attention has some of the heads
for all of its T rows; between attention calls an executor has some of the rows,
S = layout.shard_num_rows (see ``decoder.py``).
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from executor.model.decoder.kernels import Kernels, Peers
from executor.model.decoder.latent import LatentAttention
from executor.model.decoder.sizes import attention_share
from executor.model.layers.attention import AttentionCall, LayerOptions
from executor.model.layers.operators import RMSNorm
from executor.model.moe.experts import ExpertSlots
from executor.model.moe.layer import MoELayer
from executor.model.moe.routing import Router
from executor.model.moe.shared import SharedExpert
from executor.model.spec import GqaSpec, LayerSpec, MlaSpec, MlpSpec, ModelSpec, MoeSpec, QkNorm
from executor.model.triton.operators import HeadTurn
from executor.model.weights import Part, Source, Target, Weight, WeightGroup
from executor.parallel.layout import DpLayout, share_of


class GroupedQueryAttention:
    """Projections, norms and rotation around the attention backend, for this executor's heads.

    Args:
        spec: Sizes and switches.
        hidden_size: Width of its output.
        eps: Of the norms of queries and keys.
        layer_id: Layer of the KV pool.
        peers: Share the heads.
        kernels: What it calls.
        input_size: Width of its input; that of hidden states if None.
        stores_kv: Whether it has keys and values of its own. If not, its queries attend to what that
            layer of the pool already holds.
    """

    def __init__(
        self,
        spec: GqaSpec,
        hidden_size: int,
        eps: float,
        layer_id: int,
        peers: Peers,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
        input_size: int | None = None,
        stores_kv: bool = True,
    ) -> None:
        self.layer_id = layer_id
        self.operators = kernels.operators
        self.rope = spec.rope
        self.head_dim = spec.head_dim
        self.eps = eps
        share = attention_share(spec, peers.capacity)
        self.num_heads = len(share.q_heads)
        self.num_kv_heads = len(share.kv_heads) if stores_kv else 0
        # By the letter of its projection: what this executor has of the checkpoint's rows.
        self._parts = {
            "q": (self._rows(share.q_heads), spec.num_heads * self.head_dim),
            **dict.fromkeys("kv", (self._rows(share.kv_heads), spec.num_kv_heads * self.head_dim)),
        }
        sinks = torch.empty(self.num_heads, dtype=torch.float32, device=device)
        self._sinks = Part(sinks, 0, share.q_heads, spec.num_heads) if spec.sinks else None
        self.options = LayerOptions(spec.window, sinks if spec.sinks else None)
        self._attn_tp = peers.attn_tp
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.sizes = (q_size, kv_size, kv_size)
        linear = kernels.linear(dtype=dtype, device=device)
        width = hidden_size if input_size is None else input_size
        self.qkv_proj = linear(width, sum(self.sizes), has_bias=spec.qkv_bias, parts=self.sizes)
        # The executors' products are summed, so the first one adds the bias.
        has_bias = spec.o_bias and peers.capacity.attn_tp_rank == 0
        self.o_proj = linear(q_size, hidden_size, has_bias=has_bias)
        # Queries and keys are normalised in one call, each head with its own row of weights.
        self.qk_norm_weight: torch.Tensor | None = None
        if spec.qk_norm is not QkNorm.NONE:
            self.qk_norm_weight = torch.empty(
                self.num_heads + self.num_kv_heads, self.head_dim, dtype=dtype, device=device
            )
        self._norms_projections = spec.qk_norm is QkNorm.PROJECTION
        self._turns_late = (
            kernels.triton is not None
            and stores_kv
            and self.rope is not None
            and not self._norms_projections
        )

    def project(self, x: torch.Tensor, rotations: Sequence[Any], layout: DpLayout) -> AttentionCall:
        """Returns the rotated queries, keys and values [T, heads, D] of x [S, input_size]."""
        x = self._attn_tp.gather(x, layout)
        if self._turns_late and not layout.has_extend:
            return self._project_only(x, rotations)
        return self.project_gathered(x, rotations)

    def _project_only(self, x: torch.Tensor, rotations: Sequence[Any]) -> AttentionCall:
        """Leaves norms and rotation to attention, which does them as it stores."""
        assert self.rope is not None, "else it projects and turns"
        heads, turn = self._heads(x), HeadTurn(self.qk_norm_weight, self.eps, *rotations[self.rope])
        q, k, v = heads.split_with_sizes([self.num_heads, *[self.num_kv_heads] * 2], dim=1)
        return AttentionCall(q, k, v, self.layer_id, turn)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """Returns queries, keys and values as they are projected, [T, H + 2N, D]."""
        num_heads = self.num_heads + 2 * self.num_kv_heads
        return self.qkv_proj(x).view(len(x), num_heads, self.head_dim)

    def project_gathered(self, x: torch.Tensor, rotations: Sequence[Any]) -> AttentionCall:
        """Does the same for x [T, input_size], which every executor of the DP rank has."""
        heads = self._heads(x)
        num_qk = self.num_heads + self.num_kv_heads
        qk = heads[:, :num_qk]
        weight = self.qk_norm_weight
        if weight is not None and self._norms_projections:
            qk, weight = self._norm_projections(qk, weight), None
        norm = None if weight is None else (weight, self.eps)
        rotation = None if self.rope is None else rotations[self.rope]
        q, k = self.operators.prepare_heads(qk, self.num_heads, norm, rotation)
        if not self.num_kv_heads:
            return AttentionCall(q, None, None, self.layer_id)
        return AttentionCall(q, k, heads[:, num_qk:], self.layer_id)

    def _norm_projections(self, qk: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Divides by the root mean square of all executors' queries, and by that of their keys."""
        parts = qk.float().split_with_sizes([self.num_heads, self.num_kv_heads], dim=1)
        squares = torch.stack([x.square().mean((1, 2)) for x in parts], dim=-1)
        self._attn_tp.sum_(squares)
        scales = torch.rsqrt(squares / self._attn_tp.size + self.eps)
        normed = [x * scales[:, i, None, None] for i, x in enumerate(parts)]
        return torch.cat(normed, dim=1).to(qk.dtype).mul_(weight)

    def merge(self, attended: torch.Tensor, layout: DpLayout) -> torch.Tensor:
        """Returns what attention adds to this executor's rows, [S, D], of its heads' [T, H * D]."""
        return self._attn_tp.scatter_sum(self.o_proj(attended), layout)

    def weight_groups(self, prefix: str) -> list[WeightGroup]:
        qkv, o = self.qkv_proj, self.o_proj
        qkv_targets = self._qkv_parts(f"{prefix}{{}}_proj.weight", qkv.rows(*self.sizes))
        o_targets: dict[str, Target] = {
            f"{prefix}o_proj.weight": Part(o.filled, 1, *self._parts["q"])
        }
        if qkv.bias is not None:
            biases = torch.split_with_sizes(qkv.bias, self.sizes)
            qkv_targets |= self._qkv_parts(f"{prefix}{{}}_proj.bias", biases)
        if o.bias is not None:
            o_targets[f"{prefix}o_proj.bias"] = o.bias
        groups = [WeightGroup(qkv_targets, qkv.finish), WeightGroup(o_targets, o.finish)]
        if self.qk_norm_weight is not None:
            groups.append(self._norm_group(prefix, self.qk_norm_weight))
        if self._sinks is not None:
            groups.append(WeightGroup({f"{prefix}sinks": self._sinks}))
        return groups

    def _norm_group(self, prefix: str, weight: torch.Tensor) -> WeightGroup:
        heads = {"q": weight[: self.num_heads], "k": weight[self.num_heads :]}
        if not self.num_kv_heads:
            del heads["k"]
        if self._norms_projections:
            return WeightGroup(
                {
                    f"{prefix}{letter}_norm.weight": Part(x.flatten(), 0, *self._parts[letter])
                    for letter, x in heads.items()
                }
            )
        return WeightGroup(
            {
                Source(name=f"{prefix}{letter}_norm.weight", spread=True): x
                for letter, x in heads.items()
            }
        )

    def _qkv_parts(self, name: str, targets: Sequence[Weight]) -> dict[str, Part]:
        letters = zip("qkv" if self.num_kv_heads else "q", targets, strict=False)
        return {name.format(letter): Part(x, 0, *self._parts[letter]) for letter, x in letters}

    def _rows(self, heads: range) -> range:
        """Returns the rows of a projection that belong to these heads."""
        return range(heads.start * self.head_dim, heads.stop * self.head_dim)


class DenseMlp:
    """A dense gated MLP: whole on each executor for its own rows, or split for everybody's."""

    def __init__(
        self,
        spec: MlpSpec,
        hidden_size: int,
        peers: Peers,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.operators = kernels.operators
        self._size = spec.intermediate_size
        self._at = range(self._size)
        self._communicator = peers.communicator if peers.splits_dense else None
        if peers.splits_dense:
            rank, count = peers.topology.world_rank, peers.topology.world_size
            try:
                self._at = share_of("intermediate_size", self._size, rank, count)
            except ValueError as error:
                raise ValueError(f"{error}, or set moe_dense_tp_size=1") from error
        linear = kernels.linear(dtype=dtype, device=device)
        self.gate_up_proj = linear(hidden_size, 2 * len(self._at), parts=(len(self._at),))
        self.down_proj = linear(len(self._at), hidden_size)

    def __call__(
        self, x: torch.Tensor, layout: DpLayout, is_padding: torch.Tensor | None
    ) -> torch.Tensor:
        if self._communicator is None:
            return self._run(x)
        y = self._run(self._communicator.gather(x, layout))
        return self._communicator.scatter_sum(y, layout)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.operators.silu_and_mul(self.gate_up_proj(x)))

    def weight_groups(self, prefix: str) -> list[WeightGroup]:
        halves = self.gate_up_proj.rows(len(self._at), len(self._at))
        gate, up = (Part(x, 0, self._at, self._size) for x in halves)
        down = Part(self.down_proj.filled, 1, self._at, self._size)
        targets = {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        return [
            WeightGroup(targets, self.gate_up_proj.finish),
            WeightGroup({f"{prefix}down_proj.weight": down}, self.down_proj.finish),
        ]


class SparseBlock:
    """Routed experts, of which this executor holds a part."""

    def __init__(
        self,
        spec: MoeSpec,
        hidden_size: int,
        peers: Peers,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.router = Router(
            spec,
            hidden_size,
            kernels.library,
            kernels.ops,
            kernels.triton,
            dtype=dtype,
            device=device,
        )
        self.experts = kernels.new_experts(spec, peers.expert_share(spec))
        self.shared: SharedExpert | None = None
        if spec.shared is not None:
            self.shared = SharedExpert(
                spec.shared,
                hidden_size,
                kernels.operators,
                kernels.library,
                kernels.kept,
                dtype=dtype,
                device=device,
            )
        self._layer = MoELayer(
            self.router,
            dispatcher=peers.dispatcher,
            runner=self.experts.runner,
            shared=self.shared,
        )

    def __call__(
        self, x: torch.Tensor, layout: DpLayout, is_padding: torch.Tensor | None
    ) -> torch.Tensor:
        return self._layer(x, layout, is_padding)

    def weight_groups(self, prefix: str) -> list[WeightGroup]:
        gate = self.router.gate
        targets = {f"{prefix}gate.weight": gate.weight}
        if gate.bias is not None:
            targets[f"{prefix}gate.bias"] = gate.bias
        if self.router.correction is not None:
            targets[f"{prefix}gate.e_score_correction_bias"] = self.router.correction
        groups = [WeightGroup(targets, gate.finish)]
        groups += self.experts.weight_groups(f"{prefix}experts.")
        if self.shared is not None:
            scale = f"{prefix}shared_expert_gate.weight"
            groups += self.shared.weight_groups(f"{prefix}shared_experts.", scale)
        return groups


class DecoderLayer:
    """Attention, then experts or a dense MLP, each around a residual.

    Args:
        model: The model that it is one of.
        layer_id: Its number.
        peers: Share it.
        kernels: What it calls.
        frozen_kv_layer: Layer of the KV pool that it reads, if it has no keys and values of its own.
    """

    def __init__(
        self,
        model: ModelSpec,
        layer_id: int,
        peers: Peers,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
        frozen_kv_layer: int | None = None,
    ) -> None:
        spec, hidden, eps = model.layers[layer_id], model.hidden_size, model.norm_eps
        norm = partial(RMSNorm, hidden, eps, kernels.operators, dtype=dtype, device=device)
        self.input_layernorm = norm()
        self.self_attn: GroupedQueryAttention | LatentAttention
        if isinstance(spec.attention, MlaSpec):
            assert frozen_kv_layer is None, "refused at start: no draft reads latents"
            self.self_attn = LatentAttention(
                spec.attention, hidden, layer_id, peers, kernels, dtype=dtype, device=device
            )
        else:
            self.self_attn = GroupedQueryAttention(
                spec.attention,
                hidden,
                eps,
                layer_id if frozen_kv_layer is None else frozen_kv_layer,
                peers,
                kernels,
                dtype=dtype,
                device=device,
                stores_kv=frozen_kv_layer is None,
            )
        self.post_attention_layernorm = norm()
        self.mlp: SparseBlock | DenseMlp
        if isinstance(spec.feed_forward, MoeSpec):
            self.mlp = SparseBlock(
                spec.feed_forward, hidden, peers, kernels, dtype=dtype, device=device
            )
        else:
            self.mlp = DenseMlp(
                spec.feed_forward, hidden, peers, kernels, dtype=dtype, device=device
            )

    def before_attention(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rotations: Sequence[Any],
        layout: DpLayout,
    ) -> tuple[AttentionCall, torch.Tensor]:
        """Takes what the layer before added, and the sum up to it; returns the whole sum, too."""
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.add(x, residual)
        return self.self_attn.project(x, rotations, layout), residual

    def after_attention(
        self,
        attended: torch.Tensor,
        residual: torch.Tensor,
        layout: DpLayout,
        is_padding: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what this layer's experts add, [S, D], and the sum without it."""
        x = self.self_attn.merge(attended, layout)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x, layout, is_padding), residual

    def weight_groups(self, prefix: str) -> list[WeightGroup]:
        norms = {
            f"{prefix}input_layernorm.weight": self.input_layernorm.weight,
            f"{prefix}post_attention_layernorm.weight": self.post_attention_layernorm.weight,
        }
        attention = self.self_attn.weight_groups(f"{prefix}self_attn.")
        return [WeightGroup(norms), *attention, *self.mlp.weight_groups(f"{prefix}mlp.")]


def expert_slots_of(layers: Iterable[DecoderLayer]) -> list[ExpertSlots]:
    """Returns the slots of the layers that have experts."""
    return [layer.mlp.experts for layer in layers if isinstance(layer.mlp, SparseBlock)]


def missing_groups(
    layers: Iterable[tuple[str, DecoderLayer]], slots: Sequence[int]
) -> Iterator[WeightGroup]:
    """Yields what the checkpoint must hold of experts that are not in their slots yet, of all layers.

    Args:
        layers: Each with the prefix of its tensors' names.
        slots: The expert wanted in each, or GHOST, where anything may be.
    """
    for prefix, layer in layers:
        if isinstance(layer.mlp, SparseBlock):
            yield from layer.mlp.experts.missing_groups(f"{prefix}mlp.experts.", slots)


def names_left_to_others(layer: LayerSpec, prefix: str, peers: Peers) -> Iterator[str]:
    """Yields the tensors of a layer that are only for other executors, so that they stay unread.

    Args:
        layer: Its description.
        prefix: Of their names, with a dot at its end.
        peers: This executor's place.
    """
    attention = layer.attention
    has_o_bias = attention.bias if isinstance(attention, MlaSpec) else attention.o_bias
    if has_o_bias and peers.capacity.attn_tp_rank:
        yield f"{prefix}self_attn.o_proj.bias"
    if not isinstance(moe := layer.feed_forward, MoeSpec):
        return
    share = peers.expert_share(moe)
    for expert in range(moe.num_experts):
        stem, is_here = f"{prefix}mlp.experts.{expert}.", expert in share.slots
        if not is_here:
            yield from (f"{stem}{part}_proj.weight" for part in ("gate", "up", "down"))
        if moe.bias and not is_here:
            yield from (f"{stem}{part}_proj.bias" for part in ("gate", "up"))
        if moe.bias and not (is_here and share.adds_down_bias):
            yield f"{stem}down_proj.bias"
