"""Experts by FlashInfer's CuTe-DSL kernels. Dimensions as in ``layer.py``."""

from collections.abc import Callable
from typing import ClassVar

import torch

from executor.model.flashinfer.cutedsl import CuteDslExperts, interleave_up_gate, scratch_rows
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.moe.layer import Dispatched
from executor.model.moe.stacked import check_stacked


class CuteDslWrapper:
    """The library's wrapper and the memory between its two products, for the largest pass.

    Args:
        ops: The library.
        w2: [L, D, F] of any layer, for sizes, dtype and device.
        max_num_rows: R at most.
        top_k: K.

    Raises:
        ValueError: As ``CuteDslExperts``.
    """

    def __init__(
        self, ops: FlashInferOps, w2: torch.Tensor, *, max_num_rows: int, top_k: int
    ) -> None:
        self.experts = CuteDslExperts(ops, w2, top_k)
        self.max_num_rows = max_num_rows
        self.top_k = top_k
        self.w2_shape = w2.shape
        self._scratch = w2.new_empty(scratch_rows(max_num_rows, top_k, len(w2)), w2.shape[2])

    def scratch(self, num_rows: int) -> torch.Tensor:
        """Returns as much of the memory as ``num_rows`` rows take."""
        return self._scratch[: scratch_rows(num_rows, self.top_k, self.w2_shape[0])]


class CuteDslSizing:
    """How large the wrapper is, known before any batch. All layers share one, as they never run at once.

    Args:
        ops: The library.
        max_num_rows: R at most, all passes considered, from the token budget: every DP rank's
            ``cutedsl_moe_max_num_tokens`` where rows are all-gathered, ``max_num_tokens`` of each EP rank
            where an all-to-all brings them.
        top_k: K.
    """

    def __init__(self, ops: FlashInferOps, *, max_num_rows: int, top_k: int) -> None:
        self._ops = ops
        self._max_num_rows = max_num_rows
        self._top_k = top_k
        self._wrapper: CuteDslWrapper | None = None

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
            self._wrapper = CuteDslWrapper(
                self._ops, w2, max_num_rows=self._max_num_rows, top_k=self._top_k
            )
        assert self._wrapper.w2_shape == w2.shape, (
            f"w2 is {list(w2.shape)}; that of other layers {list(self._wrapper.w2_shape)}"
        )
        return self._wrapper


class CuteDslMoERunner:
    """Runs all experts of a rank in one call, on the device alone.

    The sum over a row's experts has a fixed order: the faster variant, which adds as results come,
    is not asked for.

    Args:
        w31: [L, 2F, D], up and gate projections of each expert, as ``arrange`` returns them.
        w2: [L, D, F], down projections.
        sizing: For passes as large as any.

    Raises:
        ValueError: The weights do not fit one another, or as ``CuteDslExperts``.
    """

    gate_first: ClassVar[bool] = False  # how w31 lies before ``arrange``
    arrange: ClassVar[Callable[[torch.Tensor], torch.Tensor]] = staticmethod(interleave_up_gate)

    def __init__(self, w31: torch.Tensor, w2: torch.Tensor, sizing: CuteDslSizing) -> None:
        check_stacked("w31", w31, w2)
        self._w31 = w31
        self._w2 = w2
        self._wrapper = sizing.ensure_cutedsl_wrapper(w2)

    def run(self, dispatched: Dispatched) -> torch.Tensor:
        num_rows, top_k = dispatched.topk_ids_RK.shape
        wrapper = self._wrapper
        assert top_k == wrapper.top_k, f"{top_k} experts; the wrapper is for {wrapper.top_k}"
        assert num_rows <= wrapper.max_num_rows, (
            f"{num_rows} rows; the wrapper is for {wrapper.max_num_rows}"
        )
        out = dispatched.place_for_results()
        wrapper.experts.run(
            dispatched.x_RD.contiguous(),
            dispatched.topk_ids_RK,
            dispatched.topk_weights_RK,
            self._w31,
            self._w2,
            out=out,
            scratch=wrapper.scratch(num_rows),
        )
        return out
