"""Root-mean-square normalisation."""

import torch
import torch.nn.functional as F


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    Attributes:
        weight: [size].

    Source: Zhang and Sennrich 2019, equation 4; Transformers, Qwen3MoeRMSNorm.forward.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.size = size
        self.eps = eps
        self.weight = torch.empty(size, dtype=dtype, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the shape and dtype of x [..., size]; the mean is taken in float32."""
        return F.rms_norm(x, (self.size,), self.weight, self.eps)
