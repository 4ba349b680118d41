"""Decoder-only model: an embedding, layers of a description, a norm and a head.

Where several executors share a DP rank's attention (attention TP), each has some of the heads for
all of its T rows, and some of its rows, S = layout.shard_num_rows, of everything else:

    ids [S] ─▶ embed ─▶ norm ─▶ gather [T] ─▶ heads ─▶ sum, scatter [S] ─▶ + ─▶ norm ─▶ experts ─▶ + ─▶
                         └──────────────────────── once per layer ───────────────────────────┘

An executor without peers has all heads and all rows, and nothing moves.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

import torch

from executor.batch.forward_batch import ForwardBatch
from executor.model.decoder.kernels import Kernels, Peers
from executor.model.decoder.layer import (
    DecoderLayer,
    expert_slots_of,
    missing_groups,
    names_left_to_others,
)
from executor.model.layers.attention import LayerOptions, Stages
from executor.model.layers.linear import Embedding, LMHead, vocab_slice
from executor.model.layers.operators import RMSNorm
from executor.model.moe.experts import ExpertSlots
from executor.model.spec import ModelSpec
from executor.model.weights import Source, WeightGroup

_LAYER = re.compile(r"model\.layers\.(\d+)\..*")


# Takes the name that a layer gives a tensor to what a checkpoint holds it as.
Tensors = Callable[[str], str | Source]


def renamed(*parts: tuple[str, str]) -> Tensors:
    """Returns names in which parts of a layer's are replaced, one pair after another."""

    def rename(name: str) -> str:
        for ours, theirs in parts:
            name = name.replace(ours, theirs)
        return name

    return rename


class Decoder:
    """One executor's share of the model.

    Args:
        spec: Sizes and switches.
        dtype: Type of weights and hidden states.
        device: Where everything lives.
        peers: Says what share that is, and joins it to the others.
        kernels: What the layers call.
        aux_layers: Layers, counted from 0, after which the sum of residuals is a feature for a draft.
        tensors: What the checkpoint holds them as.
        unread: Beginnings of names of tensors that the checkpoint holds for other parts.

    Raises:
        ValueError: Heads, experts or dense MLPs do not divide among the executors.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        peers: Peers,
        kernels: Kernels,
        aux_layers: Sequence[int] = (),
        tensors: Tensors = str,
        unread: tuple[str, ...] = (),
    ) -> None:
        hidden = spec.hidden_size
        attn_tp_size = peers.capacity.attn_tp_size
        self.peers = peers
        self._spec = spec
        self._tensors = tensors
        self._unread = unread
        self._aux_columns = {
            layer_id: slice(hidden * (1 + i), hidden * (2 + i))
            for i, layer_id in enumerate(aux_layers)
        }
        self._attn_tp = peers.attn_tp
        self._operators = kernels.operators
        self._tied = spec.tied
        self._vocab_size = spec.vocab_size
        self.embed_tokens = Embedding(
            vocab_slice(spec.vocab_size, attn_tp_size) * attn_tp_size,
            hidden,
            dtype=dtype,
            device=device,
        )
        self.layers = [
            DecoderLayer(spec, layer_id, peers, kernels, dtype=dtype, device=device)
            for layer_id in range(len(spec.layers))
        ]
        self._left_to_others = {
            _name(tensors(name))
            for layer_id, layer in enumerate(spec.layers)
            for name in names_left_to_others(layer, f"model.layers.{layer_id}.", peers)
        }
        self.norm = RMSNorm(hidden, spec.norm_eps, kernels.operators, dtype=dtype, device=device)
        self.lm_head = LMHead(
            hidden,
            spec.vocab_size,
            communicator=peers.attn_tp,
            dtype=dtype,
            device=device,
            library=kernels.library,
            kept=kernels.kept_head,
        )

    @property
    def expert_slots(self) -> list[ExpertSlots]:
        """Of each layer that has experts."""
        return expert_slots_of(self.layers)

    @property
    def attention_layers(self) -> tuple[LayerOptions, ...]:
        """What each layer's attention does that a plain softmax does not."""
        return tuple(layer.self_attn.options for layer in self.layers)

    def stages(self, batch: ForwardBatch) -> Stages:
        """Runs a forward pass that stops at each attention call.

        Every executor must run it, also with T = 0. Returns the hidden states [T, D], and beside
        them, if there are ``aux_layers``, their features: [T, D + len(aux_layers) * D].
        """
        layout = batch.layout
        rotations = self._operators.rotations(batch.positions)
        is_padding = batch.is_padding()
        x = self.embed_tokens(self._attn_tp.shard(batch.input_ids, layout))
        out = self._new_out(x)
        residual = None
        for layer_id, layer in enumerate(self.layers):
            call, residual = layer.before_attention(x, residual, rotations, layout)
            self._keep_sum(out, layer_id - 1, residual)
            attended = yield call
            x, residual = layer.after_attention(attended, residual, layout, is_padding)
        assert residual is not None, "a model has layers"
        hidden, residual = self.norm.add(x, residual)
        self._keep_sum(out, len(self.layers) - 1, residual)
        if out is not None:
            out[:, : hidden.shape[1]] = hidden
            hidden = out
        return self._attn_tp.gather(hidden, layout)

    def _new_out(self, x: torch.Tensor) -> torch.Tensor | None:
        """Returns room for hidden states and features; None if there are no features."""
        if not self._aux_columns:
            return None
        return x.new_empty(len(x), x.shape[1] * (1 + len(self._aux_columns)))

    def _keep_sum(self, out: torch.Tensor | None, layer_id: int, total: torch.Tensor) -> None:
        """Copies the sum after a layer, which the next norm may overwrite, if it is a feature."""
        if out is not None and layer_id in self._aux_columns:
            out[:, self._aux_columns[layer_id]] = total

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns float32 logits [L, vocab_size] of hidden states [L, D], in ``out`` if given.

        Every executor of the DP rank must call it, with the same rows.
        """
        return self.lm_head(hidden, out)

    def weight_groups(self) -> list[WeightGroup]:
        """Returns what the checkpoint must hold, in the order to load it."""
        embedding = self.embed_tokens.weight
        embedding[self._vocab_size :].zero_()
        head = (
            self.lm_head.tied_weight_group(embedding)
            if self._tied
            else self.lm_head.weight_group("lm_head.weight")
        )
        layers = (
            layer.weight_groups(f"model.layers.{layer_id}.")
            for layer_id, layer in enumerate(self.layers)
        )
        groups = [
            WeightGroup({"model.embed_tokens.weight": embedding[: self._vocab_size]}),
            *chain.from_iterable(layers),
            WeightGroup({"model.norm.weight": self.norm.weight}),
            head,
        ]
        return self._as_stored(groups)

    def missing_groups(self, slots: Sequence[int]) -> list[WeightGroup]:
        """Returns what the checkpoint must hold of experts that are not in their slots yet, of all layers.

        Args:
            slots: The expert wanted in each, or GHOST, where anything may be.
        """
        layers = ((f"model.layers.{i}.", layer) for i, layer in enumerate(self.layers))
        return self._as_stored(missing_groups(layers, slots))

    def _as_stored(self, groups: Iterable[WeightGroup]) -> list[WeightGroup]:
        return [
            replace(group, targets={self._source(x): y for x, y in group.targets.items()})
            for group in groups
        ]

    def _source(self, ours: str | Source) -> str | Source:
        """Returns what the checkpoint holds a layer's tensor as."""
        if isinstance(ours, str):
            return self._tensors(ours)
        return replace(ours, name=_name(self._tensors(ours.name)))

    def skips(self, name: str) -> bool:
        """Whether a tensor may be left unread.

        Another executor's, a draft's, another part's, a tied copy, or a buffer of rope, which old
        files hold.
        """
        if name in self._left_to_others or self._is_of_draft(name):
            return True
        if name.startswith(self._unread):
            return True
        if name.endswith(".self_attn.rotary_emb.inv_freq"):
            return True
        return self._tied and name == "lm_head.weight"

    def _is_of_draft(self, name: str) -> bool:
        layer = _LAYER.fullmatch(name)
        if layer is not None:
            return 0 <= int(layer[1]) - len(self._spec.layers) < len(self._spec.mtp_layers)
        return name.startswith("mtp.")


def _name(tensor: str | Source) -> str:
    return tensor if isinstance(tensor, str) else tensor.name
