"""Norms, the activation of dense MLPs, and arg-max: what reads each number once or twice."""

import torch

from executor.model.cpu_kernels.library import Library

LANES = 16  # sizes of norms and activations are multiples of it


def rms_norm(kernels: Library, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight, bfloat16 [T, size], rounded once."""
    return _norm(kernels, x, None, weight, eps)


def add_rms_norm(
    kernels: Library, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds x to the dense ``residual``, bfloat16 [T, size]. Returns the norm of the sum, and that."""
    return _norm(kernels, x, residual, weight, eps), residual


def _norm(
    kernels: Library,
    x: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    num_rows, size = x.shape
    y = x.new_empty(num_rows, size)
    kernels.add_norm(
        x.data_ptr(),
        x.stride(0),
        None if added is None else added.data_ptr(),
        weight.data_ptr(),
        y.data_ptr(),
        num_rows,
        size,
        eps,
    )
    return y


def silu_and_mul(kernels: Library, gate_up: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up, bfloat16 [T, F], of dense [T, 2F], gate first."""
    num_rows, size = gate_up.shape
    y = gate_up.new_empty(num_rows, size // 2)
    kernels.silu_and_mul(gate_up.data_ptr(), y.data_ptr(), num_rows, size // 2)
    return y


def arg_max(kernels: Library, logits: torch.Tensor) -> torch.Tensor:
    """Returns int64 [S], the first place of the largest of each row of float32 logits [S, V]."""
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    num_rows, size = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64)
    kernels.arg_max(logits.data_ptr(), logits.stride(0), tokens.data_ptr(), num_rows, size)
    return tokens
