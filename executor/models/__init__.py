"""Model families by the class name in config.json, imported only when asked for."""

from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import torch

from executor.errors import CheckpointError
from executor.forward_batch import ForwardBatch
from executor.layers.attention import Stages
from executor.layers.dp_communicator import DpCommunicator
from executor.models.config import ModelConfig
from executor.models.kernels import Kernels, cpu_kernels
from executor.topology import Topology
from executor.weights import OnProgress, WeightGroup, load_weights

_MODULES = {"Qwen3MoeForCausalLM": "executor.models.qwen3_moe"}


class Model(Protocol):
    """A loaded model, as runners see it."""

    def stages(self, batch: ForwardBatch) -> Stages:
        """Runs a forward pass up to each attention call; returns the hidden states [T, D].

        Every EP rank must run it, also with T = 0.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 logits [L, vocab_size] of hidden states [L, D]."""
        ...


class _Loadable(Model, Protocol):
    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        topology: Topology,
        communicator: DpCommunicator,
        kernels: Kernels,
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
    kernels: Kernels | None = None,
    on_progress: OnProgress | None = None,
) -> Model:
    """Builds the model that ``config`` names and fills it from ``path``.

    Args:
        path: Checkpoint directory.
        config: From the same directory.
        dtype: Type to run in; the saved one if None.
        device: Where to run.
        topology: This executor's place in its group; a group of its own if None.
        communicator: Joins the EP ranks. It may join a group later, and others after that,
            while the model stays loaded. Needed in a group of several.
        kernels: What the layers call; those of the CPU if None.
        on_progress: Called with tensors loaded and tensors in all.

    Raises:
        CheckpointError: The architecture is not supported, or the weights do not fit it.
        ValueError: The experts do not divide, or the communicator is for another place.
    """
    topology = topology or Topology()
    communicator = communicator or DpCommunicator.single()
    if communicator.topology != topology:
        raise ValueError(
            f"the communicator is for {communicator.topology}, the model for {topology}: they must "
            f"be the same"
        )
    dtype = dtype or config.dtype
    model = _model_class(config.architecture)(
        config,
        dtype=dtype,
        device=torch.device(device),
        topology=topology,
        communicator=communicator,
        kernels=kernels or cpu_kernels(config, dtype=dtype),
    )
    load_weights(path, model.weight_groups(), skipped=model.skips, on_progress=on_progress)
    return model


def _model_class(architecture: str) -> type[_Loadable]:
    if architecture not in _MODULES:
        raise CheckpointError(
            f"architecture {architecture!r} is not supported; {', '.join(_MODULES)} is"
        )
    return cast(type[_Loadable], getattr(import_module(_MODULES[architecture]), architecture))
