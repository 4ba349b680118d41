"""Experts by FlashInfer's CuTe-DSL kernels. Dimensions as in ``layer.py``."""

from typing import NamedTuple

import torch

from executor.model.flashinfer.cutedsl import CuteDslExperts, interleave_up_gate, scratch_rows
from executor.model.moe.layer import Dispatched, ExpertBiases, ExpertScratch, StackedMoERunner
from executor.model.spec import ActivationSpec


class CuteDslWrapper(NamedTuple):
    """The library's wrapper and the memory between its two products, for the largest pass.

    Attributes:
        experts: The wrapper.
        scratch: [scratch_rows, F].
        w2_shape: L, D and F of the layers that it is for.
    """

    experts: CuteDslExperts
    scratch: torch.Tensor
    w2_shape: torch.Size


class CuteDslSizing(ExpertScratch):
    """How large the wrapper is."""

    _wrapper: CuteDslWrapper | None = None

    def ensure_cutedsl_wrapper(self, w2: torch.Tensor) -> CuteDslWrapper:
        """Returns the wrapper for layers like this one, and makes it for the first of them.

        It is told no number of tokens: a wrapper that fits the first batch, which is a small one to
        warm up, is too small for a later one.

        Args:
            w2: [L, D, F].

        Raises:
            ValueError: As ``CuteDslExperts``.
        """
        if self._wrapper is None:
            experts = CuteDslExperts(self.ops, w2, self.top_k)
            num_rows = scratch_rows(self.max_num_rows, self.top_k, len(w2))
            self._wrapper = CuteDslWrapper(experts, w2.new_empty(num_rows, w2.shape[2]), w2.shape)
        assert self._wrapper.w2_shape == w2.shape, (
            f"w2 is {list(w2.shape)}; that of other layers {list(self._wrapper.w2_shape)}"
        )
        return self._wrapper


class CuteDslMoERunner(StackedMoERunner):
    """Runs all experts of a rank in one call, without the host.

    The sum over a row's experts has a fixed order: the faster variant, which adds as results come,
    is not asked for.

    Args:
        w31: [L, 2F, D], up and gate projections of each expert, as ``arrange`` returns them.
        w2: [L, D, F], down projections.
        sizing: For passes as large as any.
        activation: None: the kernels have SwiGLU only.
        biases: None: the kernels add none.

    Raises:
        ValueError: The weights do not fit one another, the kernels lack what the experts need, or
            as ``CuteDslExperts``.
    """

    gate_first = False
    arrange = staticmethod(interleave_up_gate)

    def __init__(
        self,
        w31: torch.Tensor,
        w2: torch.Tensor,
        sizing: CuteDslSizing,
        activation: ActivationSpec = None,
        biases: ExpertBiases | None = None,
    ) -> None:
        if activation is not None or biases is not None:
            raise ValueError(
                "moe_runner=cutedsl: its kernels have neither biases nor a clamped SwiGLU, which this "
                "model's experts need: set moe_runner to cutlass or grouped"
            )
        super().__init__(w31, w2)
        self._sizing = sizing
        self._wrapper = sizing.ensure_cutedsl_wrapper(w2)

    @staticmethod
    def elements_per_row(top_k: int, hidden_size: int, intermediate_size: int) -> int:
        """Besides those of others the results of each pair, for which the library takes memory."""
        return (2 + top_k) * hidden_size

    def run(self, dispatched: Dispatched) -> torch.Tensor:
        self._sizing.check(dispatched)
        out = dispatched.place_for_results()
        num_rows, top_k = dispatched.topk_ids_RK.shape
        experts, scratch, _ = self._wrapper
        experts.run(
            dispatched.x_RD.contiguous(),
            dispatched.topk_ids_RK,
            dispatched.topk_weights_RK,
            self._w13,
            self._w2,
            out=out,
            scratch=scratch[: scratch_rows(num_rows, top_k, len(self._w2))],
        )
        return out
