"""If this fails, norms, activations or arg-max on the CPU are wrong."""

import pytest
import torch
import torch.nn.functional as F

from executor.model.cpu_kernels.library import Library
from executor.model.layers.operators import CpuOperators
from tests.executor.model.cpu_kernels.kernel_cases import (
    ROUNDING,
    assert_rows_stand_alone,
    num_rows_of,
    num_threads,
    random_bf16,
    random_shapes,
    relative_error,
)


def norms(kernels: Library) -> CpuOperators:
    return CpuOperators(kernels, (), 0)


def arg_max(kernels: Library, logits: torch.Tensor) -> torch.Tensor:
    tokens = torch.empty(len(logits), dtype=torch.int64)
    kernels("arg_max", logits, logits.stride(0), tokens, *logits.shape)
    return tokens


def test_norms_of_random_shapes_are_as_in_float32(kernels: Library):
    for rng in random_shapes():
        assert_normed(kernels, num_rows_of(rng), 16 * rng.randint(1, 64))


def assert_normed(kernels: Library, rows: int, size: int) -> None:
    x, weight = random_bf16(rows, size, scale=3), random_bf16(size, seed=1)
    expected = F.rms_norm(x.float(), (size,), weight.float(), 1e-3)
    assert relative_error(norms(kernels).rms_norm(x, weight, 1e-3), expected) < ROUNDING
    residual = random_bf16(rows, size, seed=2)
    total = x + residual
    expected = F.rms_norm(total.float(), (size,), weight.float(), 1e-3)
    normed, summed = norms(kernels).add_rms_norm(x, residual, weight, 1e-3)
    assert relative_error(normed, expected) < ROUNDING
    assert torch.equal(summed, total)


def test_rows_of_a_norm_may_be_strided(kernels: Library):
    wide, weight = random_bf16(5, 96), random_bf16(32, seed=1)
    for x in (wide[:, 32:64], wide[:, ::3]):
        normed = norms(kernels).rms_norm(x, weight, 1e-6)
        assert torch.equal(normed, norms(kernels).rms_norm(x.contiguous(), weight, 1e-6))


def test_activations_of_random_shapes_are_as_in_float32(kernels: Library):
    for rng in random_shapes():
        gate_up = random_bf16(num_rows_of(rng), 32 * rng.randint(1, 32), scale=20)
        gate, up = gate_up.float().chunk(2, dim=-1)
        assert relative_error(norms(kernels).silu_and_mul(gate_up), F.silu(gate) * up) < ROUNDING


def test_rows_stand_alone(kernels: Library):
    x, weight = random_bf16(80, 1024), random_bf16(1024, seed=1)
    assert_rows_stand_alone(lambda rows: norms(kernels).rms_norm(x[rows], weight, 1e-6), len(x))
    assert_rows_stand_alone(lambda rows: norms(kernels).silu_and_mul(x[rows]), len(x))


@pytest.mark.parametrize(
    ("rows", "size"), [(0, 40), (1, 1), (3, 15), (5, 16), (9, 33), (20, 20000)]
)
def test_arg_max_is_the_first_of_the_largest(kernels: Library, rows: int, size: int):
    generator = torch.Generator().manual_seed(size)
    logits = torch.randint(-size, size, (rows, size), generator=generator).float()  # with ties
    first = (logits == logits.amax(dim=-1, keepdim=True)).int().argmax(dim=-1)
    with num_threads(2):
        assert torch.equal(arg_max(kernels, logits), first)
    assert torch.equal(arg_max(kernels, logits.repeat(1, 2)[:, :size]), first)


def test_arg_max_gives_a_token_whatever_the_row(kernels: Library):
    logits = torch.full((3, 50), -torch.inf)
    logits[1], logits[2, 7] = torch.nan, torch.inf
    assert arg_max(kernels, logits).tolist() == [0, 0, 7]


def test_arg_max_passes_over_nan(kernels: Library):
    logits = torch.arange(50, 0, -1).float().repeat(3, 1)
    logits[0, 32], logits[1, 0], logits[2, 48] = torch.nan, torch.nan, torch.nan
    assert arg_max(kernels, logits).tolist() == [0, 1, 0]
