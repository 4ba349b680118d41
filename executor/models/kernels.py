"""Which implementation of each part a model is built from, by device.

CPU     PyTorch, experts packed one by one
CUDA    FlashInfer's norms, rotation and activation where it is installed, PyTorch's elsewhere;
        experts as PyTorch's grouped products, or as FlashInfer's fused kernels
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from executor.flashinfer_ops.operators import FlashInferOps
from executor.layers.operators import FlashInferOperators, Operators, TorchOperators
from executor.layers.rotary import RotaryEmbedding
from executor.layers.workers import WorkerPool
from executor.models.config import ModelConfig
from executor.moe.experts import Experts, PackedExperts, StackedExperts
from executor.moe.layer import MoERunner
from executor.moe.runner_cutlass import CutlassMoERunner, CutlassWorkspace
from executor.moe.runner_grouped import GroupedMMRunner


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """What a model's layers call.

    Attributes:
        operators: Norms, rotation and activation.
        new_experts: Makes the experts of one layer, given their numbers on this rank.
        workers: Threads that share a layer on the CPU.
    """

    operators: Operators
    new_experts: Callable[[range], Experts]
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
        new_experts=lambda experts: PackedExperts(
            experts,
            config.hidden_size,
            config.moe_intermediate_size,
            workers,
            dtype=dtype,
            device=device,
        ),
        workers=workers,
    )


def stacked_kernels(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: FlashInferOps | None,
    fused_moe_rows: int | None = None,
) -> Kernels:
    """Returns what CUDA runs: nothing in it reads a result on the host, so graphs can capture it.

    Args:
        config: Sizes.
        dtype: Type of weights and hidden states.
        device: Where the model lives.
        ops: FlashInfer; None runs PyTorch's operators.
        fused_moe_rows: Most rows that the experts of a layer see in a pass, if FlashInfer's fused
            kernels run them; None runs grouped products.

    Raises:
        ValueError: Fused kernels are asked for without FlashInfer.
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
    new_runner: Callable[[torch.Tensor, torch.Tensor], MoERunner]
    if fused_moe_rows is None:
        gate_first = GroupedMMRunner.gate_first
        new_runner = partial(GroupedMMRunner, silu_and_mul=operators.silu_and_mul)
    elif ops is None:
        raise ValueError("fused MoE kernels are FlashInfer's, which is not installed")
    else:
        gate_first = CutlassMoERunner.gate_first
        new_runner = _fused_runner(ops, fused_moe_rows, config.num_experts_per_tok)
    return Kernels(
        operators=operators,
        new_experts=lambda experts: StackedExperts(
            experts,
            config.hidden_size,
            config.moe_intermediate_size,
            new_runner,
            gate_first=gate_first,
            dtype=dtype,
            device=device,
        ),
        workers=WorkerPool(1),
    )


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


def _fused_runner(
    ops: FlashInferOps, max_num_rows: int, top_k: int
) -> Callable[[torch.Tensor, torch.Tensor], MoERunner]:
    """Returns what makes each layer's runner; all share one workspace."""
    workspaces: list[CutlassWorkspace] = []

    def new_runner(w31: torch.Tensor, w2: torch.Tensor) -> MoERunner:
        if not workspaces:
            workspaces.append(CutlassWorkspace(ops, max_num_rows=max_num_rows, top_k=top_k, w2=w2))
        return CutlassMoERunner(ops, w31, w2, workspaces[0])

    return new_runner
