"""Linear layer whose weight is laid out once, at load, for the device that runs it.

On the CPU, oneDNN can reorder a weight into the order its kernels read; decode then streams it at
the speed of memory, about twice that of ``F.linear`` (``tests/bench/executor/bench_cpu_model.py``). The two
operators are private to PyTorch, which uses them itself to freeze compiled models, so they are
tried at load, and ``F.linear`` runs where they are missing or refuse.
"""

import logging
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from executor.model.layers.workers import WorkerPool

_LOG = logging.getLogger(__name__)
_PACK_FOR_ROWS = 8  # rows that oneDNN plans the order for; decode batches are about this large


class Linear:
    """y = x @ weight.T + bias.

    Filled by the loader through ``weight`` and ``bias``, then finished once.

    Args:
        in_features: Width of x.
        out_features: Width of y.
        has_bias: Whether there is a bias.
        dtype: Type of weight, bias, x and y.
        device: Where they live.
        workers: Share the rows of a packed weight; None leaves it to the caller's thread.

    Attributes:
        weight: [out_features, in_features]; empty once ``finish`` has packed it.
        bias: [out_features], or None.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        has_bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        workers: WorkerPool | None = None,
    ) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if has_bias else None
        self._workers = workers or WorkerPool(1)
        self._packed: list[Callable[[torch.Tensor], torch.Tensor]] = []

    def finish(self, weight: torch.Tensor | None = None) -> None:
        """Packs the weight if this device can, and drops the plain copy.

        Args:
            weight: Takes the place of ``self.weight``; for a weight that another layer owns.
        """
        if weight is not None:
            self.weight = weight
        weights = self.weight.chunk(self._workers.size)
        biases = [None] * len(weights) if self.bias is None else self.bias.chunk(len(weights))
        packed = [_pack(*part) for part in zip(weights, biases, strict=True)]
        self._packed = [product for product in packed if product is not None]
        if self._packed:
            self.weight = self.weight.new_empty(0, self.in_features)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [N, out_features] for x [N, in_features]. N may be 0."""
        if not self._packed:
            return F.linear(x, self.weight, self.bias)
        if x.shape[0] == 0:  # oneDNN refuses to plan for no rows
            return x.new_empty(0, self.out_features)
        if len(self._packed) == 1:
            return self._packed[0](x)
        return torch.cat(self._workers.run([partial(product, x) for product in self._packed]), -1)


def _pack(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Returns the product with a packed weight, or None where oneDNN has none to offer."""
    if weight.device.type != "cpu":
        return None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_FOR_ROWS)
        run = torch.ops.mkldnn._linear_pointwise.default
        run(weight.new_zeros(1, weight.shape[1]), packed, bias, "none", [], "")
    except (AttributeError, RuntimeError) as error:
        _LOG.warning("no packed weights on this CPU, running slower without: %s", error)
        return None

    def product(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = run(x, packed, bias, "none", [], "")
        return y

    return product
