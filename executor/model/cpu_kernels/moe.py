"""Experts of a layer, from packed weights. Dimensions as in ``model/moe/layer.py``."""

from typing import NamedTuple

import torch

from executor.model.cpu_kernels.library import Library
from executor.model.cpu_kernels.linear import PANEL, pack

HIDDEN_MULTIPLE = PANEL  # of D
INTERMEDIATE_MULTIPLE = PANEL // 2  # of F: a panel has so many columns of gate, then as many of up


class Activation(NamedTuple):
    """min(gate, limit) · sigmoid(alpha · gate) · (clip(up, ±limit) + up_offset)."""

    alpha: float = 1.0
    limit: float = float("inf")
    up_offset: float = 0.0


def pack_gate_up(w13: torch.Tensor) -> torch.Tensor:
    """Returns one expert's gate and up as the kernel reads them, in the shape they had, [2F, D]."""
    return pack(interleave(w13)).view(w13.shape)


def pack_down(w2: torch.Tensor) -> torch.Tensor:
    """Returns one expert's down as the kernel reads it, in the shape it had, [D, F]."""
    return pack(w2).view(w2.shape)


def interleave(gate_up: torch.Tensor) -> torch.Tensor:
    """Returns gates then ups [2F, ..] as 16 of one and 16 of the other in turn, dense."""
    by_halves = gate_up.reshape(2, -1, INTERMEDIATE_MULTIPLE, *gate_up.shape[1:])
    return by_halves.transpose(0, 1).reshape(gate_up.shape)


def scratch_bytes(num_rows: int, top_k: int, intermediate_size: int) -> int:
    """Returns what threads keep for a pass of so many rows: hidden columns, and sums of a panel."""
    return num_rows * (2 * top_k * intermediate_size + 4 * PANEL * torch.get_num_threads())


def moe(
    kernels: Library,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    y: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    activation: Activation = Activation(),  # noqa: B008  a tuple
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Returns each row's outputs of these experts, weighted and summed, in ``y``.

    Args:
        kernels: From ``library.load``.
        x: bfloat16 [R, D].
        ids: int32 [R, K]; those outside 0 to L are of experts elsewhere.
        weights: float32 [R, K].
        w13: bfloat16 or int8 [L, 2F, D], each expert from ``pack_gate_up``.
        w2: The same type, [L, D, F], each expert from ``pack_down``.
        y: bfloat16 [R, D], dense.
        biases: float32, of gate and up [L, 2F], from ``interleave``, and of down [L, D].
        activation: Between the products.
        scales: Of the rows of int8 weights, in order as biases; None for bfloat16.
    """
    assert (x.dtype, ids.dtype, weights.dtype) == (torch.bfloat16, torch.int32, torch.float32)
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    assert w13.dtype is w2.dtype is (torch.bfloat16 if scales is None else torch.int8)
    of_columns = (*(scales or (None, None)), *(biases or (None, None)))
    num_experts, hidden_size, intermediate_size = w2.shape
    kernels.moe(
        x.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        w13.data_ptr(),
        w2.data_ptr(),
        *(None if each is None else each.data_ptr() for each in of_columns),
        y.data_ptr(),
        *ids.shape,
        num_experts,
        hidden_size,
        intermediate_size,
        *activation,
    )
    return y
