"""Root-mean-square normalisation."""

import torch

from executor.model.layers.operators import Operators


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    Attributes:
        weight: [size].

    Source: Zhang and Sennrich 2019, equation 4; Transformers, Qwen3MoeRMSNorm.forward.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        operators: Operators,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.eps = eps
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self._operators = operators

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the shape and dtype of x [T, size]; the mean is taken in float32."""
        return self._operators.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the norm of x + residual, and x + residual. May overwrite both, [T, size]."""
        return self._operators.add_rms_norm(x, residual, self.weight, self.eps)
