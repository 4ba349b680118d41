"""Matrix products with packed weights: one weight for all, or one for each head."""

import torch

from executor.model.cpu_kernels.library import Library

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
        padded = weight.new_zeros(*batch, -(-size // PANEL) * PANEL, width)
        padded[..., :size, :] = weight
        weight = padded
    panels = weight.reshape(*batch, -1, PANEL, width // 2, 2).transpose(-3, -2)
    return (panels.mT if weight.dtype is torch.int8 else panels).contiguous()


def pad_bias(bias: torch.Tensor) -> torch.Tensor:
    """Returns a bias or scales [N] as ``linear`` takes them: float32, zeros to the end of a panel."""
    padded = torch.zeros(-(-len(bias) // PANEL) * PANEL)
    padded[: len(bias)] = bias
    return padded


def linear(
    kernels: Library,
    x: torch.Tensor,
    weight: torch.Tensor,
    out_features: int,
    bias: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x @ weight.T + bias, bfloat16 [T, N]; sums in float32, rounded once.

    Args:
        kernels: From ``library.load``.
        x: bfloat16 [T, K].
        weight: From ``pack``.
        out_features: N.
        bias: From ``pad_bias``.
        scales: Likewise, of the rows of an int8 weight; None for bfloat16.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    return _run(kernels, x, 1, 0, weight, scales, bias, out_features)


def linear_of_heads(
    kernels: Library, x: torch.Tensor, weight: torch.Tensor, out_features: int
) -> torch.Tensor:
    """Returns each head's x @ weight.T, bfloat16 [T, H, N].

    Args:
        kernels: From ``library.load``.
        x: bfloat16 [T, H, K].
        weight: From ``pack``, of [H, N, K].
        out_features: N.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    return _run(kernels, x, x.shape[1], x.stride(1), weight, None, None, out_features)


def _run(
    kernels: Library,
    x: torch.Tensor,
    num_heads: int,
    head_stride: int,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_features: int,
) -> torch.Tensor:
    *rows, width = x.shape
    y = x.new_empty(*rows, -(-out_features // PANEL) * PANEL)
    assert x.dtype is torch.bfloat16
    assert weight.dtype is (torch.bfloat16 if scales is None else torch.int8)
    assert width == 2 * weight.shape[-3], "the weight is of another width"
    kernels.linear(
        x.data_ptr(),
        x.stride(0),
        head_stride,
        weight.data_ptr(),
        None if scales is None else scales.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        rows[0],
        num_heads,
        width,
        y.shape[-1],
    )
    return y if y.shape[-1] == out_features else y[..., :out_features].contiguous()
