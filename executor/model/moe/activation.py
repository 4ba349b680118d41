"""Activation between the two products of an expert."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from executor.model.spec import ActivationSpec, ClampedSwiGlu

# Takes gate and up, [.., F] each, which it may not overwrite, to [.., F].
Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def activation_of(spec: ActivationSpec) -> Activation:
    """Returns what computes it in plain PyTorch."""
    return swiglu if spec is None else partial(clamped_swiglu, spec)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate).mul_(up)


def clamped_swiglu(spec: ClampedSwiGlu, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Source: Transformers, GptOssExperts._apply_gate."""
    gate = gate.clamp(max=spec.limit)
    gate = gate * torch.sigmoid(gate * spec.alpha)
    return up.clamp(-spec.limit, spec.limit).add_(1).mul_(gate)
