"""MTP drafts: layers that the target was trained with, to predict the token after next.

    cat(enorm(embed(id)), hnorm(hidden)) [S, 2H] ─▶ eh_proj ─▶ a layer of the target's kind ─▶ norm ─▶
    out [T, H]: the next step's hidden ─▶ head ─▶ logits [L, V]

         NEXTN: DeepSeek-V3, GLM-4.5                MTP: Qwen3-Next
         model.layers.{N + k}.enorm, .hnorm         mtp.pre_fc_norm_embedding, _hidden
         model.layers.{N + k}.eh_proj               mtp.fc
         model.layers.{N + k}.shared_head.norm      mtp.norm
         copies of the target's, left unread: model.layers.{N + k}.embed_tokens, .shared_head.head

In the second layout all layers share what is not in ``mtp.layers.{k}``.

Source: DeepSeek-V3 report, section 2.2; SGLang, models/deepseek_nextn.py, models/qwen3_next_mtp.py.
"""

import re
from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch

from executor.batch.forward_batch import ForwardBatch
from executor.model.decoder.kernels import Kernels
from executor.model.decoder.layer import DecoderLayer, missing_groups, names_left_to_others
from executor.model.drafts.config import DraftConfig, DraftLayout
from executor.model.drafts.draft import DraftShare
from executor.model.families import Model
from executor.model.layers.attention import Stages
from executor.model.layers.linear import Linear
from executor.model.layers.operators import RMSNorm
from executor.model.weights import WeightGroup

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_COPIES = ("embed_tokens.weight", "shared_head.head.weight", "self_attn.rotary_emb.inv_freq")
_OF_TARGET = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


class Combine:
    """Takes a token's embedding and a hidden state to a layer's input."""

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        norm = partial(RMSNorm, hidden_size, eps, kernels.operators, dtype=dtype, device=device)
        self.embedding_norm, self.hidden_norm = norm(), norm()
        self.proj = Linear(
            2 * hidden_size, hidden_size, dtype=dtype, device=device, library=kernels.library
        )

    def __call__(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Returns [S, H] of both [S, H]."""
        return self.proj(
            torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        )

    def weight_group(self, embedding_norm: str, hidden_norm: str, proj: str) -> WeightGroup:
        """Returns what fills it, by the names of its parts in the checkpoint."""
        targets = {
            f"{embedding_norm}.weight": self.embedding_norm.weight,
            f"{hidden_norm}.weight": self.hidden_norm.weight,
            f"{proj}.weight": self.proj.weight,
        }
        return WeightGroup(targets, self.proj.finish)


class MTPDraft(DraftShare):
    """One executor's share of one or several MTP layers. Implements ``DraftModel``."""

    def __init__(
        self, config: DraftConfig, target: Model, kernels: Kernels, names: frozenset[str]
    ) -> None:
        super().__init__(config, target, kernels)
        layers, peers, placed = config.layers, self._peers, self._placed
        self.num_layers = config.num_layers
        self.layers = [
            DecoderLayer(layers, k, peers, kernels, **placed) for k in range(config.num_layers)
        ]
        self._left_to_others = {
            name
            for k, layer in enumerate(layers.layers)
            for name in names_left_to_others(layer, self._prefix(k), peers)
        }
        num_shared = 1 if config.layout is DraftLayout.MTP else config.num_layers
        combines = [
            Combine(self.hidden_size, layers.norm_eps, kernels, **placed) for _ in range(num_shared)
        ]
        norms = [self._new_norm() for _ in range(num_shared)]
        # By layer; the same one for all where they share it.
        self.combines = combines * (config.num_layers // num_shared)
        self.norms = norms * (config.num_layers // num_shared)
        self._lm_head = target.lm_head

    def stages(self, batch: ForwardBatch, layer: int = 0) -> Stages:
        assert batch.hidden_states is not None, "a draft reads hidden states"
        layout, attn_tp = batch.layout, self._peers.attn_tp
        decoder = self.layers[layer]
        rotations = self._operators.rotations(batch.positions)
        is_padding = batch.is_padding()
        embedded = self._embed_tokens(attn_tp.shard(batch.input_ids, layout))
        hidden = attn_tp.shard(batch.hidden_states, layout)
        x = self.combines[layer](embedded, hidden)
        call, residual = decoder.before_attention(x, None, rotations, layout)
        attended = yield call
        x, residual = decoder.after_attention(attended, residual, layout, is_padding)
        return attn_tp.gather(self.norms[layer].add(x, residual)[0], layout)

    def compute_logits(self, hidden: torch.Tensor, layer: int = 0) -> torch.Tensor:
        return self._lm_head(hidden)

    def weight_groups(self) -> list[WeightGroup]:
        """Returns what the checkpoint must hold, in the order to load it."""
        decoders = chain.from_iterable(
            layer.weight_groups(self._prefix(k)) for k, layer in enumerate(self.layers)
        )
        if self._config.layout is DraftLayout.MTP:
            names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc")
            norm = WeightGroup({"mtp.norm.weight": self.norms[0].weight})
            return [self.combines[0].weight_group(*names), *decoders, norm]
        groups = []
        for k, (combine, norm_k) in enumerate(zip(self.combines, self.norms, strict=True)):
            prefix = self._prefix(k)
            names = (f"{prefix}enorm", f"{prefix}hnorm", f"{prefix}eh_proj")
            groups.append(combine.weight_group(*names))
            groups.append(WeightGroup({f"{prefix}shared_head.norm.weight": norm_k.weight}))
        return [*groups, *decoders]

    def missing_groups(self, slots: Sequence[int]) -> list[WeightGroup]:
        layers = ((self._prefix(k), layer) for k, layer in enumerate(self.layers))
        return [*missing_groups(layers, slots)]

    def skips(self, name: str) -> bool:
        """Whether a tensor may be left unread: another executor's, or the target's."""
        if name in self._left_to_others:
            return True
        layer = _LAYER.fullmatch(name)
        if layer is None:
            return name in _OF_TARGET
        if self._config.layout is DraftLayout.MTP or int(layer[1]) < self._config.first_layer_id:
            return True
        return layer[2] in _COPIES

    def _prefix(self, k: int) -> str:
        """Returns what the names of layer k's tensors begin with."""
        stem = "mtp" if self._config.layout is DraftLayout.MTP else "model"
        return f"{stem}.layers.{self._config.first_layer_id + k}."
