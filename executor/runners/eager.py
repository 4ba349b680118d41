"""Runs any batch as it comes, without a graph."""

from collections.abc import Callable

import torch

from executor.forward_batch import ForwardBatch


class EagerRunner:
    """Plans attention on the host, then calls the model.

    Args:
        plan: Prepares attention for a batch, before each forward pass.
        forward: Takes a batch to hidden states [T, D]; calls the group's collectives.
        compute_logits: Takes hidden states and the token rows wanted to logits [L, V].
    """

    def __init__(
        self,
        plan: Callable[[ForwardBatch], None],
        forward: Callable[[ForwardBatch], torch.Tensor],
        compute_logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        self._plan = plan
        self._forward = forward
        self._compute_logits = compute_logits

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns logits [L, V] of ``batch.logits_indices``."""
        self._plan(batch)
        return self._compute_logits(self._forward(batch), batch.logits_indices)
