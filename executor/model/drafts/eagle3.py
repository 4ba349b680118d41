"""EAGLE-3 head: one layer of Llama that reads the token and the target's features.

    features [T, 3H] ─▶ fc ─▶ hidden [T, H]                            once, for the target's features

    cat(norm(embed(id)), norm(hidden)) [T, 2H] ─▶ attention ─▶ + hidden ─▶ norm ─▶ MLP ─▶ + ─▶ out
    out [T, H]: the next draft step's hidden ─▶ norm ─▶ head ─▶ logits [L, V]

Queries and keys are not normalised. The embedding is the target's, and so is the head where the
checkpoint has none of its own.

Source: Li et al. 2025, EAGLE-3, section 3; SGLang, models/llama_eagle3.py.
"""

import torch

from executor.batch.forward_batch import ForwardBatch
from executor.model.decoder.kernels import Kernels
from executor.model.decoder.layer import DenseMlp, GroupedQueryAttention
from executor.model.drafts.config import DraftConfig
from executor.model.drafts.draft import DraftShare
from executor.model.families import Model
from executor.model.layers.attention import Stages
from executor.model.layers.linear import Linear
from executor.model.spec import GqaSpec, MlpSpec
from executor.model.weights import WeightGroup

_NORMS = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
# Vocabulary as a mask, which d2t says again; and a copy of the target's embedding.
_SPARE = ("t2d", "embed_tokens.weight", "midlayer.self_attn.rotary_emb.inv_freq")


class Eagle3Draft(DraftShare):
    """One executor's share of the head. Implements ``DraftModel``."""

    def __init__(
        self, config: DraftConfig, target: Model, kernels: Kernels, names: frozenset[str]
    ) -> None:
        super().__init__(config, target, kernels)
        layers, peers, placed, hidden = config.layers, self._peers, self._placed, self.hidden_size
        [layer] = layers.layers
        attention, mlp = layer.attention, layer.feed_forward
        assert isinstance(attention, GqaSpec)
        assert isinstance(mlp, MlpSpec)
        if config.vocab_size < layers.vocab_size or "d2t" in names:
            self.target_ids = torch.empty(
                config.vocab_size, dtype=torch.int64, device=placed["device"]
            )
        self._attn_tp = peers.attn_tp
        self.fc = Linear(config.feature_size, hidden, library=kernels.library, **placed)
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            self._new_norm() for _ in _NORMS
        )
        self.self_attn = GroupedQueryAttention(
            attention, hidden, layers.norm_eps, 0, peers, kernels, input_size=2 * hidden, **placed
        )
        self.mlp = DenseMlp(mlp, hidden, peers, kernels, **placed)
        self.norm = self._new_norm()
        self.lm_head = target.lm_head
        self._has_head = self.target_ids is not None or "lm_head.weight" in names
        if self._has_head:
            self.lm_head = self._new_head()

    def project(self, features: torch.Tensor) -> torch.Tensor:
        return self.fc(features)

    def stages(self, batch: ForwardBatch, layer: int = 0) -> Stages:
        assert batch.hidden_states is not None, "a draft reads hidden states"
        hidden, layout = batch.hidden_states, batch.layout
        rotations = self._operators.rotations(batch.positions)
        embedded = self.input_layernorm(self._embed_tokens(batch.input_ids))
        # Every executor of the DP rank has all rows here, so none needs to be gathered.
        x = torch.cat((embedded, self.hidden_norm(hidden)), dim=-1)
        attended = yield self.self_attn.project_gathered(x, rotations)
        x = self.self_attn.merge(attended, layout)
        # A copy: the sum may be written where the residual is, and the input stays as it was.
        residual = self._attn_tp.shard(hidden, layout).clone()
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self._attn_tp.gather(residual + self.mlp(x, layout, None), layout)

    def compute_logits(self, hidden: torch.Tensor, layer: int = 0) -> torch.Tensor:
        return self.lm_head(self.norm(hidden))

    def weight_groups(self) -> list[WeightGroup]:
        """Returns what the checkpoint must hold, in the order to load it."""
        norms = {f"midlayer.{name}.weight": getattr(self, name).weight for name in _NORMS}
        groups = [
            WeightGroup({"fc.weight": self.fc.weight}, self.fc.finish),
            WeightGroup(norms | {"norm.weight": self.norm.weight}),
            *self.self_attn.weight_groups("midlayer.self_attn."),
            *self.mlp.weight_groups("midlayer.mlp."),
        ]
        if self._has_head:
            groups.append(self.lm_head.weight_group("lm_head.weight"))
        if self.target_ids is not None:
            groups.append(WeightGroup({"d2t": self.target_ids}, self._finish_target_ids))
        return groups

    def skips(self, name: str) -> bool:
        """Whether a tensor may be left unread."""
        return name in _SPARE

    def _finish_target_ids(self) -> None:
        """Adds 0, 1, … to them: d2t says how far each id of the draft is from the target's."""
        assert self.target_ids is not None
        self.target_ids += torch.arange(len(self.target_ids), device=self.target_ids.device)
