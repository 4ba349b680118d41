"""Norms of queries' and keys' heads, and their rotation.

T token rows    H heads    D head width    R rotary width
"""

import ctypes

import torch

_LANES = 16  # head widths are multiples of it


def takes_width(width: int) -> bool:
    """Returns whether the kernel takes heads of this width."""
    return width % _LANES == 0


def prepare_heads(
    kernels: ctypes.CDLL,
    x: torch.Tensor,
    weights: torch.Tensor | None,
    eps: float,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Norms each head if there are weights, and turns it to its row's position. In place.

    Args:
        kernels: From ``library.load``.
        x: bfloat16 [T, H, D], of which the last dimension is dense.
        weights: bfloat16 [H, D].
        eps: Added to the mean square.
        rotation: Positions int64 [T], and float32 [positions, R], cosines and then sines, for pairs
            (i, i + R / 2) of the first R columns; None turns nothing.
    """
    num_rows, num_heads, width = x.shape
    positions, turns = (None, None) if rotation is None else rotation
    kernels.prepare_heads(
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        None if weights is None else weights.data_ptr(),
        None if turns is None else turns.data_ptr(),
        None if positions is None else positions.data_ptr(),
        0 if turns is None else turns.shape[0],
        num_rows,
        num_heads,
        width,
        0 if turns is None else turns.shape[1],
        eps,
    )
