"""Model families by the class name in config.json, imported only when asked for."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import torch

from executor.batch.forward_batch import ForwardBatch
from executor.errors import CheckpointError
from executor.model.families.config import ModelConfig
from executor.model.families.kernels import Kernels, Peers, cpu_kernels
from executor.model.layers.attention import Stages
from executor.model.layers.vocab import Embedding, LMHead
from executor.model.moe.dispatch_all_gather import AllGatherDispatcher
from executor.model.moe.layer import Dispatcher
from executor.model.weights import OnProgress, WeightGroup, load_weights
from executor.parallel.communicators import AttnTpCommunicator, DpCommunicator
from executor.parallel.topology import Topology

_MODULES = {"Qwen3MoeForCausalLM": "executor.model.families.qwen3_moe"}


class Model(Protocol):
    """A loaded model, as runners see it, and what a draft shares with it.

    Attributes:
        embed_tokens: The same rows on every executor; those past the vocabulary are zeros.
        lm_head: Takes normalised hidden states to logits.
        peers: Its ways to the other executors.
    """

    embed_tokens: Embedding
    lm_head: LMHead
    peers: Peers

    def stages(self, batch: ForwardBatch) -> Stages:
        """Runs a forward pass up to each attention call; returns the hidden states [T, D].

        With ``aux_layers``, their features stand beside them, [T, D + len(aux_layers) * D].
        Every executor must run it, also with T = 0.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 logits [L, vocab_size] of hidden states [L, D].

        Every executor of the DP rank must call it, with the same rows. The next call may overwrite
        what this one returned.
        """
        ...


class _Loadable(Model, Protocol):
    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        peers: Peers,
        kernels: Kernels,
        aux_layers: Sequence[int],
    ) -> None: ...

    def weight_groups(self) -> list[WeightGroup]: ...

    def skips(self, name: str) -> bool: ...


def load_model(
    path: str | Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    topology: Topology | None = None,
    communicator: DpCommunicator | None = None,
    attn_tp_communicator: AttnTpCommunicator | None = None,
    dispatcher: Dispatcher | None = None,
    moe_dense_tp_size: int | None = None,
    kernels: Kernels | None = None,
    aux_layers: Sequence[int] = (),
    on_progress: OnProgress | None = None,
) -> Model:
    """Builds the model that ``config`` names and fills it from ``path``.

    Args:
        path: Checkpoint directory.
        config: From the same directory.
        dtype: Type to run in; the saved one if None.
        device: Where to run.
        topology: This executor's place in its group; a group of its own if None.
        communicator: Joins all executors. It may join a group later, and others after that, while
            the model stays loaded. Needed in a group of several.
        attn_tp_communicator: Joins the executors of this DP rank in the same way. Needed if there
            are several.
        dispatcher: Takes rows to their experts; gathers all of them if None.
        moe_dense_tp_size: 1 runs dense MLPs whole on each executor; None splits them over the
            group.
        kernels: What the layers call; those of the CPU if None.
        aux_layers: Layers, counted from 0, after which the sum of residuals is a feature for a draft
            (``DraftConfig.aux_layers``).
        on_progress: Called with tensors loaded and tensors in all.

    Raises:
        CheckpointError: The architecture is not supported, or the weights do not fit it.
        ValueError: Heads, experts or dense MLPs do not divide, or a communicator is for another
            place.
    """
    topology = topology or Topology()
    communicator = communicator or DpCommunicator.single()
    attn_tp_communicator = attn_tp_communicator or AttnTpCommunicator.single()
    if communicator.topology != topology:
        raise ValueError(
            f"the communicator is for {communicator.topology}, the model for {topology}: they must "
            f"be the same"
        )
    if attn_tp_communicator.size != topology.attn_tp_size:
        raise ValueError(
            f"the attention-TP communicator joins {attn_tp_communicator.size} executors, the "
            f"model's attention is shared by attn_tp_size={topology.attn_tp_size}"
        )
    absent = [layer for layer in aux_layers if not 0 <= layer < config.num_hidden_layers]
    if absent:
        raise ValueError(
            f"aux_layers={list(aux_layers)}: the model has layers 0 to "
            f"{config.num_hidden_layers - 1}"
        )
    local_experts = topology.local_experts(config.num_experts)
    dtype = dtype or config.dtype
    model = _model_class(config.architecture)(
        config,
        dtype=dtype,
        device=torch.device(device),
        peers=Peers(
            topology=topology,
            communicator=communicator,
            attn_tp=attn_tp_communicator,
            dispatcher=dispatcher or AllGatherDispatcher(communicator, local_experts),
            moe_dense_tp_size=moe_dense_tp_size,
        ),
        kernels=kernels or cpu_kernels(config, dtype=dtype),
        aux_layers=aux_layers,
    )
    load_weights(path, model.weight_groups(), skipped=model.skips, on_progress=on_progress)
    return model


def _model_class(architecture: str) -> type[_Loadable]:
    if architecture not in _MODULES:
        raise CheckpointError(
            f"architecture {architecture!r} is not supported; {', '.join(_MODULES)} is"
        )
    return cast(type[_Loadable], getattr(import_module(_MODULES[architecture]), architecture))
