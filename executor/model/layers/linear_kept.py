"""Linear layers whose weights are quantised: in int8 on a CPU; in FP8, as they are stored, on Hopper.

FP8 has never run on a GPU yet. Its kernel, FlashInfer's, rounds x to FP8 as well, with a scale per 128 of a
row, which dequantised weights do not.
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
    """What the linear layers of a model keep, and how they run FP8.

    Args:
        kept_as: FP8, in blocks; or int8, which they pack for the CPU's kernels.
        ops: FlashInfer; None for int8, and for a model that only has sizes.

    Attributes:
        is_int8: Whether it is that.
        block: Rows that share a scale.
    """

    def __init__(self, kept_as: KeptAs, ops: FlashInferOps | None) -> None:
        self.is_int8 = kept_as.is_made_at_load
        self.block = kept_as.rows
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
        if self.is_int8:
            if in_features % 2:
                return None  # no kernel takes it, as the layer says
        elif in_features % block or out_features % _ROWS or any(rows % block for rows in parts):
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
