"""If this fails, products on the CPU are wrong, or a row's bits depend on its batch."""

import pytest
import torch

from executor.model.cpu_kernels.library import Library
from executor.model.cpu_kernels.linear import linear, pack, pad_bias
from tests.executor.model.cpu_kernels.kernel_cases import (
    ROUNDING,
    assert_rows_stand_alone,
    num_rows_of,
    random_bf16,
    random_shapes,
    relative_error,
)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "width", "size"),
    [
        (0, 64, 32),
        (1, 2, 1),
        (5, 70, 33),
        (13, 64, 31),
        (25, 130, 8),
        (64, 96, 200),
        (1, 640, 8192),
    ],
)
def test_a_product_is_the_float32_product_rounded(
    kernels: Library, num_rows: int, width: int, size: int, has_bias: bool
):
    assert_is_rounded(kernels, num_rows, width, size, has_bias)


def test_products_of_random_shapes_are_those_of_float32(kernels: Library):
    for rng in random_shapes():
        width, size = 2 * rng.randint(1, 80), rng.randint(1, 150)
        assert_is_rounded(kernels, num_rows_of(rng), width, size, rng.random() < 0.5)


def assert_is_rounded(
    kernels: Library, num_rows: int, width: int, size: int, has_bias: bool
) -> None:
    x, weight = random_bf16(num_rows, width), random_bf16(size, width, seed=1)
    bias = random_bf16(size, seed=2) if has_bias else torch.zeros(size)
    padded = pad_bias(bias) if has_bias else None
    y = linear(kernels, x, pack(weight), size, padded)
    assert relative_error(y, x.float() @ weight.float().T + bias) < ROUNDING


def test_rows_may_be_strided(kernels: Library):
    wide, weight = random_bf16(5, 3, 64), random_bf16(40, 64, seed=1)
    for x in (wide[:, 1], random_bf16(64, 7).T):
        y = linear(kernels, x, pack(weight), 40)
        assert torch.equal(y, linear(kernels, x.contiguous(), pack(weight), 40))


def test_heads_have_weights_of_their_own(kernels: Library):
    wide, weight = random_bf16(7, 3, 50), random_bf16(3, 40, 34, seed=1)
    x = wide[..., 8:42]
    y = linear(kernels, x, pack(weight), 40)
    expected = torch.einsum("thk,hnk->thn", x.float(), weight.float())
    assert relative_error(y, expected) < ROUNDING
    assert torch.equal(linear(kernels, x[2:3], pack(weight), 40), y[2:3])


def test_infinities_and_nan_come_through(kernels: Library):
    x = random_bf16(4, 64)
    x[1, 3], x[2, 5], x[3, 0] = torch.inf, torch.nan, 3e38
    y = linear(kernels, x, pack(torch.ones(32, 64).bfloat16() * 100), 32)
    assert y[0].isfinite().all()
    assert y[1].isposinf().all()
    assert y[2].isnan().all()
    assert y[3].isposinf().all()


def test_rows_stand_alone(kernels: Library):
    x, packed = random_bf16(80, 640), pack(random_bf16(300, 640, seed=1))
    assert_rows_stand_alone(lambda rows: linear(kernels, x[rows], packed, 300), len(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("exponent", [-63, -128])  # products, or rows, are denormal or nearly so
@pytest.mark.parametrize("width", [2, 32, 46, 160])
def test_rows_of_tiny_numbers_stand_alone(
    kernels: Library, width: int, exponent: int, dtype: torch.dtype
):
    x, weight, scales = random_bf16(67, width), random_bf16(40, width, seed=1), None
    x *= 2.0**exponent
    if dtype is torch.int8:
        weight, scales = (weight * 40).to(dtype), pad_bias(torch.rand(40))
    elif exponent == -63:
        weight *= 2.0**exponent
    packed = pack(weight)
    assert_rows_stand_alone(lambda rows: linear(kernels, x[rows], packed, 40, None, scales), 67)


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match="a width of 63"):
        pack(random_bf16(32, 63))
