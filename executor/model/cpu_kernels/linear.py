"""Matrix products with packed weights: one weight for all, or one for each head."""

import torch
import torch.nn.functional as F

from executor.model.cpu_kernels.library import Library, by_row

PANEL = 32  # columns that a packed weight has side by side


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Returns bfloat16 weights [.., N, K] as panels, [.., ceil(N / 32), K / 2, 32, 2].

    Those of int8 are [.., ceil(N / 32), K / 2, 2, 32].

    Columns past N are zeros.

    Raises:
        ValueError: K is odd.
    """
    *batch, size, width = weight.shape
    if width % 2:
        raise ValueError(f"a width of {width}: rows are read in pairs, so it must be even")
    if size % PANEL:
        weight = F.pad(weight, (0, 0, 0, -size % PANEL))
    panels = weight.reshape(*batch, -1, PANEL, width // 2, 2).transpose(-3, -2)
    return (panels.mT if weight.dtype is torch.int8 else panels).contiguous()


def pad_bias(bias: torch.Tensor) -> torch.Tensor:
    """Returns a bias or scales [N] as ``linear`` takes them: float32, zeros to the end of a panel."""
    return F.pad(bias.float(), (0, -len(bias) % PANEL))


def linear(
    kernels: Library,
    x: torch.Tensor,
    weight: torch.Tensor,
    out_features: int,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x @ weight.T + bias, bfloat16 [T, N] or [T, H, N]; sums in float32, rounded once.

    Args:
        kernels: From ``library.load``.
        x: bfloat16 [T, K]; [T, H, K] for heads with weights of their own.
        weight: From ``pack``.
        out_features: N.
        bias: From ``pad_bias``; None for heads.
        scales: Likewise, of the rows of an int8 weight; None for bfloat16.
    """
    assert x.dtype is torch.bfloat16
    assert weight.dtype is (torch.bfloat16 if scales is None else torch.int8)
    assert x.shape[-1] == 2 * weight.shape[-3], "the weight is of another width"
    num_rows, *heads, width = x.shape
    size = out_features + -out_features % PANEL
    y = x.new_empty(num_rows, *heads, size)
    x, stride, *head_stride = by_row(x)
    strides, num_heads = (stride, *(head_stride or (0,))), heads[0] if heads else 1
    kernels("linear", x, *strides, weight, scales, bias, y, num_rows, num_heads, width, size)
    return y if size == out_features else y[..., :out_features].contiguous()
