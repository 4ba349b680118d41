"""Frozen-KV MTP: a draft without keys and values, whose queries attend to the target's.

    cat(norm(embed(id)), norm(hidden)) [S, 2H] ─▶ fc ─▶ n layers ─▶ norm ─▶
    out [T, H]: the next step's hidden ─▶ the target's head ─▶ logits [L, V]

Layer i attends to what layer ``target_kv_layer_ids[i]`` of the target's pool holds of the token's
sequence, all of it, and stores nothing. So queries are shaped, normalised and turned like the
target's; each layer has an MLP of its own.
"""

from collections.abc import Sequence
from itertools import chain

import torch

from executor.batch.forward_batch import ForwardBatch
from executor.model.decoder.kernels import Kernels
from executor.model.decoder.layer import DecoderLayer, missing_groups, names_left_to_others
from executor.model.drafts.config import DraftConfig
from executor.model.drafts.draft import DraftShare
from executor.model.drafts.mtp import Combine
from executor.model.families import Model
from executor.model.layers.attention import Stages
from executor.model.weights import WeightGroup


class FrozenKvMTPDraft(DraftShare):
    """One executor's share of the draft. Implements ``DraftModel``."""

    def __init__(
        self, config: DraftConfig, target: Model, kernels: Kernels, names: frozenset[str]
    ) -> None:
        super().__init__(config, target, kernels)
        layers, peers, placed = config.layers, self._peers, self._placed
        self._lm_head = target.lm_head
        self.combine = Combine(self.hidden_size, layers.norm_eps, kernels, **placed)
        self.layers = [
            DecoderLayer(layers, i, peers, kernels, frozen_kv_layer=kv_layer, **placed)
            for i, kv_layer in enumerate(config.target_kv_layer_ids)
        ]
        self._left_to_others = {
            name
            for i, layer in enumerate(layers.layers)
            for name in names_left_to_others(layer, f"layers.{i}.", peers)
        }
        self.norm = self._new_norm()

    def stages(self, batch: ForwardBatch, layer: int = 0) -> Stages:
        assert batch.hidden_states is not None, "a draft reads hidden states"
        layout, attn_tp = batch.layout, self._peers.attn_tp
        rotations = self._operators.rotations(batch.positions)
        embedded = self._embed_tokens(attn_tp.shard(batch.input_ids, layout))
        x = self.combine(embedded, attn_tp.shard(batch.hidden_states, layout))
        residual = None
        for decoder in self.layers:
            call, residual = decoder.before_attention(x, residual, rotations, layout)
            attended = yield call
            x, residual = decoder.after_attention(attended, residual, layout, None)
        assert residual is not None, "a draft has layers"
        return attn_tp.gather(self.norm.add(x, residual)[0], layout)

    def compute_logits(self, hidden: torch.Tensor, layer: int = 0) -> torch.Tensor:
        return self._lm_head(hidden)

    def weight_groups(self) -> list[WeightGroup]:
        """Returns what the checkpoint must hold, in the order to load it."""
        layers = chain.from_iterable(
            layer.weight_groups(f"layers.{i}.") for i, layer in enumerate(self.layers)
        )
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc")
        norm = WeightGroup({"norm.weight": self.norm.weight})
        return [self.combine.weight_group(*names), *layers, norm]

    def missing_groups(self, slots: Sequence[int]) -> list[WeightGroup]:
        layers = ((f"layers.{i}.", layer) for i, layer in enumerate(self.layers))
        return [*missing_groups(layers, slots)]

    def skips(self, name: str) -> bool:
        """Whether a tensor may be left unread: another executor's."""
        return name in self._left_to_others
