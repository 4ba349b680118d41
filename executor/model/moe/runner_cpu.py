"""Experts as one call of the CPU's kernels, from packed weights. Dimensions as in ``layer.py``."""

from functools import cached_property

import torch

from executor.model.cpu_kernels.library import Library
from executor.model.cpu_kernels.linear import PANEL, pack
from executor.model.moe.layer import Dispatched, ExpertBiases, StackedMoERunner
from executor.model.spec import ActivationSpec
from executor.model.weights import KeptWeight, Weight

HIDDEN_MULTIPLE = PANEL  # of D
INTERMEDIATE_MULTIPLE = PANEL // 2  # of F: a panel has so many columns of gate, then as many of up


class CpuMoERunner(StackedMoERunner):
    """Reads each weight once, in place of its checkpoint's order; a row's bits are its own.

    Args:
        w13: bfloat16 or int8 [L, 2F, D], gate and up projections of each expert.
        w2: The same type, [L, D, F], down projections. D is a multiple of 32, F of 16.
        library: The kernels.
        activation: Between the products.
        biases: Of both products; None without.
    """

    def __init__(
        self,
        w13: Weight,
        w2: Weight,
        library: Library,
        activation: ActivationSpec = None,
        biases: ExpertBiases | None = None,
    ) -> None:
        super().__init__(w13, w2, biases)
        dtype = torch.bfloat16 if self._scales is None else torch.int8
        assert self._w13.dtype is self._w2.dtype is dtype, "read as such, by pointers"
        self._library = library
        # min(gate, limit) · sigmoid(alpha · gate) · (clip(up, ±limit) + offset)
        self._activation = 1.0, torch.inf, 0.0
        if activation is not None:
            self._activation = activation.alpha, activation.limit, 1.0

    @staticmethod
    def arrange(w13: torch.Tensor, /) -> torch.Tensor:
        return pack(_interleave(w13)).view(w13.shape)

    @staticmethod
    def arrange_down(w2: torch.Tensor, /) -> torch.Tensor:
        return pack(w2).view(w2.shape)

    def arrange_kept(self, w13: KeptWeight, w2: KeptWeight) -> None:
        w13.numbers.copy_(self.arrange(w13.numbers))
        w13.scales.copy_(_interleave(w13.scales))
        w2.numbers.copy_(self.arrange_down(w2.numbers))

    @cached_property
    def _float_biases(self) -> tuple[torch.Tensor | None, ...]:
        """Both biases as the kernel reads them, made by the first run, when all are loaded."""
        if self._biases is None:
            return None, None
        b13, b2 = (bias.float() for bias in self._biases)
        return _interleave(b13.T).T.contiguous(), b2

    def refresh(self) -> None:
        before = self.__dict__.pop("_float_biases", None)
        if before is None or self._biases is None:
            return
        for old, new in zip(before, self._float_biases, strict=True):
            old.copy_(new)
        self._float_biases = before  # where recorded passes read them

    def run(self, dispatched: Dispatched) -> torch.Tensor:
        x, ids = dispatched.x_RD.contiguous(), dispatched.topk_ids_RK.contiguous()
        weights, y = dispatched.topk_weights_RK.contiguous(), dispatched.place_for_results()
        assert (x.dtype, ids.dtype, weights.dtype) == (torch.bfloat16, torch.int32, torch.float32)
        columns = *(self._scales or (None, None)), *self._float_biases
        given = x, ids, weights, self._w13, self._w2, *columns, y
        self._library("moe", *given, *ids.shape, *self._w2.shape, *self._activation)
        return y


def _interleave(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns gates then ups [2F, ..] as 16 of one and 16 of the other in turn, dense."""
    by_halves = gate_up.reshape(2, -1, INTERMEDIATE_MULTIPLE, *gate_up.shape[1:])
    return by_halves.transpose(0, 1).reshape(gate_up.shape)


def scratch_bytes(num_rows: int, top_k: int, intermediate_size: int) -> int:
    """Returns what threads keep for a pass of so many rows: hidden columns, and sums of a panel."""
    return num_rows * (2 * top_k * intermediate_size + 4 * PANEL * torch.get_num_threads())
