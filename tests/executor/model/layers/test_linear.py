"""If this fails, a linear layer computes something else where its weight is packed."""

import pytest
import torch
from structlog.testing import capture_logs

from executor.model.cpu_kernels.library import load
from executor.model.layers.linear import Linear


@pytest.mark.parametrize("width", [64, 63])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_the_same_packed_or_not(dtype: torch.dtype, has_bias: bool, width: int):
    """Only bfloat16 of an even width is packed."""
    generator, results = torch.Generator().manual_seed(0), []
    weight, bias = (torch.randn(size, generator=generator) for size in ((96, width), (96,)))
    x = torch.randn(5, width, generator=generator).to(dtype)
    for library in (None, load()):
        device = torch.device("cpu")
        linear = Linear(width, 96, has_bias=has_bias, dtype=dtype, device=device, library=library)
        linear.weight.copy_(weight)
        if linear.bias is not None:
            linear.bias.copy_(bias)
        with capture_logs() as lines:
            linear.finish()
        is_packed = library is not None and dtype is torch.bfloat16 and width % 2 == 0
        assert linear.is_packed is is_packed
        is_odd = library is not None and dtype is torch.bfloat16 and not is_packed
        assert [line["event"] for line in lines] == ["no_kernel_for_odd_width"] * is_odd
        assert linear(x[:0]).shape == (0, 96)
        results.append(linear(x))
    torch.testing.assert_close(*results, atol=1e-2, rtol=1e-2)
