"""Linear layers whose weights stay in FP8, by FlashInfer's product on Hopper; never run on a GPU yet.

The kernel rounds x to FP8 as well, with a scale per 128 of a row, which dequantised weights do not.
"""

import logging
from collections.abc import Sequence

import torch

from executor.model.flashinfer.operators import FlashInferOps
from executor.model.weights import KeptAs, KeptWeight

_LOG = logging.getLogger(__name__)
BLOCK_ROWS = 128  # of a matrix, as many columns of which share a scale
_ROWS = 64  # that the kernel computes at once


class KeptLinears:
    """What the linear layers of a model keep, and how they run it.

    Args:
        kept_as: FP8, in blocks.
        ops: FlashInfer; None for a model that only has sizes.
    """

    def __init__(self, kept_as: KeptAs, ops: FlashInferOps | None) -> None:
        self._kept_as = kept_as
        self._ops = ops
        self._said: set[str] = set()

    def new(
        self, out_features: int, in_features: int, parts: Sequence[int], device: torch.device
    ) -> KeptWeight | None:
        """Returns a weight to be filled; None if it is to be dequantised, which is logged.

        Args:
            out_features, in_features: Its rows and columns.
            parts: Rows of each matrix in it that others follow, or that executors share.
            device: Where it lives.
        """
        block = BLOCK_ROWS
        if in_features % block or out_features % _ROWS or any(rows % block for rows in parts):
            self.say_dequantised(
                f"weights [{out_features}, {in_features}]",
                f"the FP8 kernel takes rows in multiples of {_ROWS}, parts of them and columns in "
                f"multiples of {block}",
            )
            return None
        return KeptWeight.zeros(self._kept_as, out_features, in_features, device=device)

    def say_dequantised(self, what: str, problem: str) -> None:
        """Logs, once, what stays in the type of the others, and why."""
        if what not in self._said:
            self._said.add(what)
            _LOG.warning("%s are dequantised: %s", what, problem)

    def run(self, x: torch.Tensor, weight: KeptWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns x @ weight.T + bias."""
        assert self._ops is not None, "a model that only has sizes"
        y = self._ops.fp8_linear(x, weight.numbers, weight.scales)
        return y if bias is None else y.add_(bias)
