"""Kernels and peers of a model: the implementation of each part by device, and the other executors.

CPU     PyTorch, experts packed one by one, small ones side by side
CUDA    FlashInfer's norms, rotation and activation where it is installed, PyTorch's elsewhere;
        experts as PyTorch's grouped products, or as FlashInfer's kernels, CUTLASS or CuTe-DSL

peer          reaches                     for
dispatcher    the whole group             routed experts
communicator  the whole group             dense MLPs that are split over it
attn_tp       executors of the DP rank    attention heads, logits
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from executor.model.families.config import ModelConfig
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.layers.operators import (
    FlashInferOperators,
    Operators,
    RotaryEmbedding,
    TorchOperators,
)
from executor.model.layers.workers import WorkerPool
from executor.model.moe.experts import Experts, ExpertShare, PackedExperts, StackedExperts
from executor.model.moe.layer import Dispatcher, MoERunner
from executor.model.moe.runner_cutedsl import CuteDslMoERunner, CuteDslSizing
from executor.model.moe.runner_cutlass import CutlassMoERunner, CutlassWorkspace
from executor.model.moe.runner_grouped import GroupedMMRunner
from executor.parallel.attn_tp_communicator import AttnTpCommunicator
from executor.parallel.dp_communicator import DpCommunicator
from executor.parallel.topology import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """What a model's layers call.

    Attributes:
        operators: Norms, rotation and activation.
        new_experts: Makes an executor's share of one layer's experts, given its place in the group.
        workers: Threads that share a layer on the CPU.
    """

    operators: Operators
    new_experts: Callable[[Topology], Experts]
    workers: WorkerPool


def cpu_kernels(
    config: ModelConfig, *, dtype: torch.dtype, num_workers: int | None = None
) -> Kernels:
    """Returns PyTorch's operators and packed experts.

    Args:
        config: Sizes.
        dtype: Type of weights and hidden states.
        num_workers: Threads that share a layer. None is as many as OpenMP has, which suits
            OMP_WAIT_POLICY=PASSIVE; 1 leaves all to OpenMP, which suits threads that spin.
    """
    device = torch.device("cpu")
    workers = WorkerPool(num_workers)
    return Kernels(
        operators=_torch_operators(config, dtype, device),
        new_experts=lambda topology: PackedExperts(
            _share(config, topology), config.hidden_size, workers, dtype=dtype, device=device
        ),
        workers=workers,
    )


def stacked_kernels(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: FlashInferOps | None,
    moe_runner: str = "grouped",
    max_moe_rows: int | None = None,
) -> Kernels:
    """Returns what CUDA runs: nothing in it reads a result on the host, so graphs can capture it.

    Args:
        config: Sizes.
        dtype: Type of weights and hidden states.
        device: Where the model lives.
        ops: FlashInfer; None runs PyTorch's operators.
        moe_runner: What runs the experts: ``grouped``, or FlashInfer's ``cutlass`` or ``cutedsl``.
        max_moe_rows: Most rows that the experts of a layer see in a pass, from the token budget;
            FlashInfer's kernels need it.

    Raises:
        ValueError: FlashInfer's kernels for experts are asked for without FlashInfer. When experts
            are made: they do not divide, or the kernels do not run here or take their sizes.
    """
    operators: Operators = _torch_operators(config, dtype, device)
    if ops is not None:
        operators = FlashInferOperators(
            ops,
            head_dim=config.head_dim,
            max_positions=config.max_position_embeddings,
            theta=config.rope_theta,
            device=device,
        )
    stacked = partial(StackedExperts, hidden_size=config.hidden_size, dtype=dtype, device=device)
    if moe_runner == "grouped":
        stacked = partial(
            stacked,
            new_runner=partial(GroupedMMRunner, silu_and_mul=operators.silu_and_mul),
            gate_first=GroupedMMRunner.gate_first,
        )
    elif ops is None:
        raise ValueError(
            f"moe_runner={moe_runner} needs FlashInfer, which is not installed: pip install "
            f"flashinfer-python, or set moe_runner=grouped"
        )
    else:
        assert max_moe_rows is not None, f"how many rows {moe_runner} may see is not said"
        stacked = partial(
            stacked,
            **_FLASHINFER_EXPERTS[moe_runner](ops, max_moe_rows, config.num_experts_per_tok),
        )
    return Kernels(
        operators=operators,
        new_experts=lambda topology: stacked(_share(config, topology)),
        workers=WorkerPool(1),
    )


def _share(config: ModelConfig, topology: Topology) -> ExpertShare:
    return ExpertShare.of(topology, config.num_experts, config.moe_intermediate_size)


def _torch_operators(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> TorchOperators:
    rotary = RotaryEmbedding(
        config.head_dim,
        config.max_position_embeddings,
        config.rope_theta,
        dtype=dtype,
        device=device,
    )
    return TorchOperators(rotary)


def _cutlass(ops: FlashInferOps, max_num_rows: int, top_k: int) -> dict[str, Any]:
    """Returns how experts for CUTLASS are laid out and run; all layers share one workspace."""
    workspaces: list[CutlassWorkspace] = []

    def new_runner(w31: torch.Tensor, w2: torch.Tensor) -> MoERunner:
        if not workspaces:
            workspaces.append(CutlassWorkspace(ops, max_num_rows=max_num_rows, top_k=top_k, w2=w2))
        return CutlassMoERunner(ops, w31, w2, workspaces[0])

    return {"new_runner": new_runner, "gate_first": CutlassMoERunner.gate_first}


def _cutedsl(ops: FlashInferOps, max_num_rows: int, top_k: int) -> dict[str, Any]:
    """Returns how experts for CuTe-DSL are laid out and run; all layers share one wrapper."""
    sizing = CuteDslSizing(ops, max_num_rows=max_num_rows, top_k=top_k)
    return {
        "new_runner": partial(CuteDslMoERunner, sizing=sizing),
        "gate_first": CuteDslMoERunner.gate_first,
        "arrange": CuteDslMoERunner.arrange,
    }


_FLASHINFER_EXPERTS = {"cutlass": _cutlass, "cutedsl": _cutedsl}


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """This executor's place, and its ways to the others. Groups come and go behind them.

    Attributes:
        topology: Which share of the model this executor has.
        communicator: Gathers and sums rows over the group.
        attn_tp: Gathers and sums rows over the executors of this DP rank.
        dispatcher: Takes rows to their experts; shared by all layers.
        moe_dense_tp_size: 1 runs dense MLPs whole on each executor; None splits them over the
            group.
    """

    topology: Topology
    communicator: DpCommunicator
    attn_tp: AttnTpCommunicator
    dispatcher: Dispatcher
    moe_dense_tp_size: int | None = None

    @property
    def splits_dense(self) -> bool:
        """Whether dense MLPs are split over the group."""
        return self.moe_dense_tp_size is None and self.topology.world_size > 1
