"""Experts as one call of the CPU's kernels. Dimensions as in ``layer.py``."""

from functools import cached_property

import torch

from executor.model.cpu_kernels.library import Library
from executor.model.cpu_kernels.moe import Activation, interleave, moe, pack_down, pack_gate_up
from executor.model.moe.layer import Dispatched, ExpertBiases, StackedMoERunner
from executor.model.spec import ActivationSpec
from executor.model.weights import KeptWeight, Weight


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
        self._library = library
        self._activation = Activation()
        if activation is not None:
            self._activation = Activation(activation.alpha, activation.limit, up_offset=1.0)

    @staticmethod
    def arrange(w13: torch.Tensor, /) -> torch.Tensor:
        return pack_gate_up(w13)

    @staticmethod
    def arrange_down(w2: torch.Tensor, /) -> torch.Tensor:
        return pack_down(w2)

    def arrange_kept(self, w13: KeptWeight, w2: KeptWeight) -> None:
        w13.numbers.copy_(pack_gate_up(w13.numbers))
        w13.scales.copy_(interleave(w13.scales))
        w2.numbers.copy_(pack_down(w2.numbers))

    @cached_property
    def _kernel_biases(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Made by the first run, when all are loaded."""
        if self._biases is None:
            return None
        b13, b2 = (bias.float() for bias in self._biases)
        return interleave(b13.T).T.contiguous(), b2

    def run(self, dispatched: Dispatched) -> torch.Tensor:
        return moe(
            self._library,
            dispatched.x_RD,
            dispatched.topk_ids_RK,
            dispatched.topk_weights_RK,
            self._w13,
            self._w2,
            dispatched.place_for_results(),
            self._kernel_biases,
            self._activation,
            self._scales,
        )
