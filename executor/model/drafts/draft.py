"""Draft models: what runners see of one, and how it is loaded.

A draft guesses the token after next. Its entry at position p takes the token there, t_p, and the
hidden state of the position before, and predicts t_{p+1}; it stores its keys and values at p:

    position        0        1        2
    token           t_0      t_1      t_2
    hidden          zeros    h_0      h_1        of the target, or of an earlier draft step
    predicts        t_1      t_2      t_3

So what an entry holds depends on no token after its own, as in the target, and blocks of the
target's prefix cache are valid for the draft's keys and values, too.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from executor.batch.forward_batch import ForwardBatch
from executor.errors import CheckpointError
from executor.model.decoder.kernels import Kernels, cpu_kernels
from executor.model.decoder.layer import DecoderLayer, expert_slots_of
from executor.model.drafts.config import DraftConfig, DraftLayout
from executor.model.families import Model
from executor.model.layers.attention import Stages
from executor.model.layers.linear import LMHead
from executor.model.layers.operators import RMSNorm
from executor.model.moe.experts import ExpertSlots
from executor.model.weights import OnProgress, WeightGroup, load_weights, tensor_names

_CLASSES = {
    DraftLayout.EAGLE3: "executor.model.drafts.eagle3:Eagle3Draft",
    DraftLayout.NEXTN: "executor.model.drafts.mtp:MTPDraft",
    DraftLayout.MTP: "executor.model.drafts.mtp:MTPDraft",
    DraftLayout.FROZEN_KV: "executor.model.drafts.frozen_kv_mtp:FrozenKvMTPDraft",
}


class DraftModel(Protocol):
    """A draft, as the loader and runners see it.

    T token rows    H hidden size    F feature size (``DraftConfig.feature_size``)    V vocabulary

    Attributes:
        num_layers: Layers that a runner picks between with ``layer``, each a forward pass of its
            own: K of a multi-layer MTP, else 1.
        hidden_size: H, the target's.
        vocab_size: V of the draft, at most the target's.
        target_ids: int64 [V], the target's id of each of the draft's; None if they are the same.
        expert_slots: Of each layer that has experts.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    target_ids: torch.Tensor | None

    @property
    def expert_slots(self) -> list[ExpertSlots]: ...

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Returns [T, H], what ``stages`` takes as hidden states, of the target's features [T, F].

        Rows are independent. May be the argument itself, or a view of it.
        """
        ...

    def stages(self, batch: ForwardBatch, layer: int = 0) -> Stages:
        """Runs a forward pass up to each attention call; returns hidden states [T, H].

        These are what the next draft step takes, and what ``compute_logits`` takes. Every executor
        must run it, also with T = 0. A later pass may overwrite what this one returned.

        Args:
            batch: With ``hidden_states`` [T, H]: row t holds that of the position before token t.
            layer: From 0 to ``num_layers - 1``.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor, layer: int = 0) -> torch.Tensor:
        """Returns float32 logits [L, V] of hidden states [L, H] that ``stages`` returned.

        Every executor of the DP rank must call it, with the same rows, and gets the same bits. The
        next call, of the target too, may overwrite what this one returned.
        """
        ...

    def weight_groups(self) -> list[WeightGroup]:
        """Returns what the checkpoint must hold, in the order to load it."""
        ...

    def missing_groups(self, slots: Sequence[int]) -> list[WeightGroup]:
        """Returns the same of experts that are not in their slots yet, as a target's does."""
        ...

    def skips(self, name: str) -> bool:
        """Whether a tensor of the checkpoint may be left unread."""
        ...


class DraftShare:
    """One executor's share of a draft, in what all layouts have alike.

    Args:
        config: Sizes.
        target: Loaded.
        kernels: What the layers call.
    """

    num_layers = 1
    target_ids: torch.Tensor | None = None
    layers: Sequence[DecoderLayer] = ()

    def __init__(self, config: DraftConfig, target: Model, kernels: Kernels) -> None:
        embedding = target.embed_tokens.weight
        self.hidden_size = config.layers.hidden_size
        self.vocab_size = config.vocab_size
        self._config = config
        self._peers = replace(target.peers, moe_dense_tp_size=1)
        self._operators = kernels.operators
        self._kernels = kernels
        self._embed_tokens = target.embed_tokens
        self._placed: dict[str, Any] = {"dtype": embedding.dtype, "device": embedding.device}
        self._new_norm = partial(
            RMSNorm,
            self.hidden_size,
            config.layers.norm_eps,
            kernels.operators,
            **self._placed,
        )

    @property
    def expert_slots(self) -> list[ExpertSlots]:
        return expert_slots_of(self.layers)

    def missing_groups(self, slots: Sequence[int]) -> list[WeightGroup]:
        return []  # a draft with experts has its own

    def _new_head(self) -> LMHead:
        return LMHead(
            self.hidden_size,
            self.vocab_size,
            communicator=self._peers.attn_tp,
            library=self._kernels.library,
            kept=self._kernels.kept_head,
            **self._placed,
        )

    def project(self, features: torch.Tensor) -> torch.Tensor:
        return features


def load_draft_model(
    path: str | Path,
    config: DraftConfig,
    target: Model,
    *,
    kernels: Kernels | None = None,
    on_progress: OnProgress | None = None,
) -> DraftModel:
    """Builds a draft beside its target and fills it from ``path``.

    It runs where the target runs, in its type, and shares its embedding, its head if it has none of
    its own, and its communicators and dispatcher. Attention heads are shared over attention TP like
    the target's; dense MLPs are whole on each executor.

    Args:
        path: The draft's directory; may be the target's own.
        config: From the same directory.
        target: Loaded; with the features that ``config`` names, if it is to feed the draft.
        kernels: What the layers call, made for ``config.layers``; those of the CPU if None.
        on_progress: Called with tensors loaded and tensors in all.

    Raises:
        CheckpointError: The tensors do not fit the configuration. Names them.
        ValueError: Heads or experts do not divide among the executors.
    """
    kernels = kernels or cpu_kernels(config.layers, dtype=target.embed_tokens.weight.dtype)
    module, name = _CLASSES[config.layout].split(":")
    new_draft = getattr(import_module(module), name)
    draft: DraftModel = new_draft(config, target, kernels, tensor_names(path))
    load_weights(
        path,
        draft.weight_groups(),
        weight_format=config.layers.quantization,
        skipped=draft.skips,
        on_progress=on_progress,
    )
    if draft.target_ids is not None and not draft.target_ids.is_meta:
        _check_target_ids(path, draft.target_ids, config.layers.vocab_size)
    return draft


def _check_target_ids(path: str | Path, target_ids: torch.Tensor, vocab_size: int) -> None:
    least, most = (int(x) for x in target_ids.aminmax())
    if least < 0 or most >= vocab_size:
        raise CheckpointError(
            f"{path}: d2t leads to token ids {least} to {most}; the target has 0 to "
            f"{vocab_size - 1}: the draft was made for another vocabulary"
        )
    if len(set(target_ids.tolist())) < len(target_ids):
        raise CheckpointError(
            f"{path}: d2t leads several of the draft's tokens to one of the target's: each needs its own"
        )
