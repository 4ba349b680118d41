"""Experts one after another on the CPU, from stacked weights."""

import torch

from executor.model.layers.linear import Linear, WorkerPool
from executor.model.moe.runner_torch import TorchMoERunner


def one_by_one(
    w13: torch.Tensor, w2: torch.Tensor, workers: WorkerPool | None = None
) -> TorchMoERunner:
    """Returns what runs w13 [E, 2F, D], gate first, and w2 [E, D, F], packed where they can be."""
    return TorchMoERunner([linear_of(w) for w in w13], [linear_of(w) for w in w2], workers)


def linear_of(weight: torch.Tensor) -> Linear:
    linear = Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype, device=weight.device)
    linear.weight.copy_(weight)
    linear.finish()
    return linear
