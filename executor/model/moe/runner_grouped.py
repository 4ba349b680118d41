"""Experts as two grouped matrix products, without the host, so that a graph can capture them.

Which rows go to which expert is never read on the host: rows are sorted by expert, and the products
are told where each expert's rows end. Dimensions as in ``layer.py``.
"""

from collections.abc import Callable

import torch

from executor.model.moe.activation import clamped_swiglu
from executor.model.moe.layer import Dispatched, ExpertBiases, StackedMoERunner
from executor.model.spec import ActivationSpec

# Where there is no public one yet: torch 2.8 and 2.9 have it under the other name.
_grouped_mm: Callable[..., torch.Tensor] = getattr(
    torch.nn.functional, "grouped_mm", None
) or getattr(torch, "_grouped_mm")  # noqa: B009


class GroupedMMRunner(StackedMoERunner):
    """Sorts rows by expert, runs all experts at once, and unsorts.

    The sum over a row's experts has a fixed order, so a row's result does not change from run to
    run. On CUDA the grouped product takes bfloat16 and, up to torch 2.13, compute capability 9.0 or
    10.0; PyTorch's fallback for others reads the offsets on the host, which no graph can capture.

    Args:
        w13: [L, 2F, D], gate and up projections of each expert.
        w2: [L, D, F], down projections. D and F are multiples of 16 bytes.
        silu_and_mul: Takes [P, 2F] to [P, F], gate first.
        activation: In its place; None for that.
        biases: Of both products; None without.

    Raises:
        ValueError: The weights do not fit one another, or the grouped product.
    """

    def __init__(
        self,
        w13: torch.Tensor,
        w2: torch.Tensor,
        silu_and_mul: Callable[[torch.Tensor], torch.Tensor],
        activation: ActivationSpec = None,
        biases: ExpertBiases | None = None,
    ) -> None:
        super().__init__(w13, w2, biases)
        num_local, hidden_size, intermediate_size = w2.shape
        for name, size in (("D", hidden_size), ("F", intermediate_size)):
            if size * w2.itemsize % 16:
                raise ValueError(
                    f"{name}={size} in {w2.dtype}: the grouped product needs rows of a multiple "
                    f"of 16 bytes; use another MoE runner"
                )
        self._activate = silu_and_mul
        if activation is not None:
            self._activate = lambda hidden: clamped_swiglu(activation, *hidden.chunk(2, dim=-1))
        self._experts = torch.arange(num_local, dtype=torch.int32, device=w2.device)

    @staticmethod
    def elements_per_row(top_k: int, hidden_size: int, intermediate_size: int) -> int:
        """Sorted rows, both products, and activations or results in order; all stay until the end."""
        of_pair = 2 * hidden_size + 2 * intermediate_size + max(intermediate_size, hidden_size)
        return top_k * of_pair + hidden_size

    def run(self, dispatched: Dispatched) -> torch.Tensor:
        x_RD, ids_RK = dispatched.x_RD, dispatched.topk_ids_RK
        num_rows, top_k = ids_RK.shape
        if num_rows == 0:
            return x_RD.new_zeros(x_RD.shape)
        # Experts elsewhere, L, come last. A row's are distinct, so L of them at most are here; one pair
        # more is elsewhere, if any is, and stands for all of these.
        num_pairs = min(num_rows * top_k, num_rows * len(self._experts) + 1)
        sorted_RK, order_RK = ids_RK.flatten().sort(stable=True)
        ids_P, order_P = sorted_RK[:num_pairs], order_RK[:num_pairs]
        ends_L = torch.searchsorted(ids_P, self._experts, right=True, out_int32=True)
        x_PD = x_RD.index_select(0, order_P // top_k)
        hidden = _grouped_mm(x_PD, self._w13.transpose(-2, -1), offs=ends_L)
        if self._biases is not None:
            local_P = ids_P.clamp(max=len(self._experts) - 1)
            hidden += self._biases.b13.index_select(0, local_P)
        y_PD = _grouped_mm(self._activate(hidden), self._w2.transpose(-2, -1), offs=ends_L)
        if self._biases is not None:
            y_PD += self._biases.b2.index_select(0, local_P)
        # Rows past the last expert's were never written, and may hold anything.
        y_PD.masked_fill_((ids_P == len(self._experts)).unsqueeze(1), 0)
        places = torch.arange(len(order_RK), device=order_RK.device)
        if num_pairs < len(places):
            places.clamp_(max=num_pairs - 1)
        places_RK = torch.empty_like(order_RK).scatter_(0, order_RK, places)
        y_RKD = y_PD.index_select(0, places_RK).view(num_rows, top_k, -1)
        weights_R1K = dispatched.topk_weights_RK.to(x_RD.dtype).unsqueeze(1)
        return torch.bmm(weights_R1K, y_RKD).squeeze(1)
