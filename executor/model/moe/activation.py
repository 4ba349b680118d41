"""Activation between the two products of an expert."""

import torch

from executor.model.spec import ClampedSwiGlu


def clamped_swiglu(spec: ClampedSwiGlu, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Source: Transformers, GptOssExperts._apply_gate."""
    gate = gate.clamp(max=spec.limit)
    gate = gate * torch.sigmoid(gate * spec.alpha)
    return up.clamp(-spec.limit, spec.limit).add_(1).mul_(gate)
