"""Token embedding."""

import torch
import torch.nn.functional as F


class Embedding:
    """Looks up a row per token.

    Attributes:
        weight: [num_embeddings, width].
    """

    def __init__(
        self, num_embeddings: int, width: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty(num_embeddings, width, dtype=dtype, device=device)

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Returns [T, width] for int64 ids [T]."""
        return F.embedding(input_ids, self.weight)
