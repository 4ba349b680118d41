"""Router of an expert layer: from rows to the experts that they go to, and their weights."""

import ctypes

import torch

from executor.model.cpu_kernels.library import Library


class RouterRule(ctypes.Structure):
    """How experts are chosen; the fields are those of ``RouterSpec``.

    Attributes:
        num_experts: E.
        top_k: K.
        num_groups: 1 for none.
        num_kept_groups: Of them.
        is_sigmoid: Scores are sigmoids; else a softmax.
        sums_two: A group counts as its two best scores; else as its best.
        renormalise: Weights are divided by their sum.
        factor: Times this, afterwards.
    """

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_experts", "top_k", "num_groups")),
        *((name, ctypes.c_int64) for name in ("num_kept_groups", "is_sigmoid", "sums_two")),
        ("renormalise", ctypes.c_int64),
        ("factor", ctypes.c_float),
    ]


def route(
    kernels: Library,
    x: torch.Tensor,
    rule: RouterRule,
    gate: torch.Tensor,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns expert ids [T, K] int32 and weights [T, K] float32, the first choice first.

    Args:
        kernels: From ``library.load``.
        x: bfloat16 [T, D].
        rule: Which experts.
        gate: Packed, or float32 [E, D] with D a multiple of 16.
        bias: float32 [E], of the logits.
        correction: float32 [E], added to scores for the choice.
        is_padding: bool [T, 1], rows whose ids are E: they go to no expert; None: no row is.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    num_rows, width = x.shape
    ids = torch.empty(num_rows, rule.top_k, dtype=torch.int32)
    weights = torch.empty(num_rows, rule.top_k)
    is_packed = gate.dtype is torch.bfloat16
    kernels.route(
        ctypes.byref(rule),
        x.data_ptr(),
        x.stride(0),
        gate.data_ptr() if is_packed else None,
        None if is_packed else gate.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if correction is None else correction.data_ptr(),
        None if is_padding is None else is_padding.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        num_rows,
        width,
    )
    return ids, weights
