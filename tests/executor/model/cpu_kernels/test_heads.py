"""If this fails, queries and keys on the CPU have wrong norms or stand at wrong positions."""

import torch

from executor.model.cpu_kernels.library import Library
from executor.model.layers.operators import CpuOperators
from tests.executor.model.cpu_kernels.kernel_cases import (
    ROUNDING,
    assert_rows_stand_alone,
    num_rows_of,
    random_bf16,
    random_shapes,
    relative_error,
)

EPS = 1e-5


def turns_of(rotary: int, limit: int = 50) -> torch.Tensor:
    angles = torch.outer(torch.arange(limit), 0.5 ** torch.arange(rotary // 2))
    return torch.cat((angles.cos(), angles.sin()), -1)


def prepare(
    kernels: Library,
    x: torch.Tensor,
    weights: torch.Tensor | None,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Prepares heads in place."""
    norm = None if weights is None else (weights, EPS)
    q, k = CpuOperators(kernels, (), 0).prepare_heads(x, 1, norm, rotation)
    assert q.data_ptr() == x.data_ptr()
    assert q.shape[1] + k.shape[1] == x.shape[1]


def prepared(
    x: torch.Tensor, weights: torch.Tensor | None, positions: torch.Tensor, turns: torch.Tensor
) -> torch.Tensor:
    """Returns what float32 gives."""
    y = x.float()
    if weights is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * weights.float()
    half = turns.shape[1] // 2
    cos, sin = turns[positions, None].chunk(2, -1)
    a, b, rest = y.split((half, half, y.shape[-1] - 2 * half), -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def test_heads_of_random_shapes_are_those_of_float32(kernels: Library):
    for rng in random_shapes():
        num_rows, num_heads, width = num_rows_of(rng), rng.randint(1, 6), 16 * rng.randint(1, 8)
        wide = random_bf16(num_rows, num_heads + 2, width)
        x, behind = wide[:, :num_heads], wide[:, num_heads:].clone()
        weights = random_bf16(num_heads, width, seed=1) if rng.random() < 0.5 else None
        turns = turns_of(2 * rng.randint(0, width // 2))
        positions = torch.arange(num_rows) * 7 % 50
        expected = prepared(x, weights, positions, turns)
        prepare(kernels, x, weights, (positions, turns))
        assert relative_error(x, expected) < ROUNDING
        assert torch.equal(wide[:, num_heads:], behind)


def test_parts_of_heads_may_be_turned_and_heads_normed_only(kernels: Library):
    wide, turns, positions = random_bf16(3, 4, 96), turns_of(32), torch.tensor([4, 0, 49])
    expected = prepared(wide[..., 64:], None, positions, turns)
    before = wide[..., :64].clone()
    prepare(kernels, wide[..., 64:], None, (positions, turns))
    assert relative_error(wide[..., 64:], expected) < ROUNDING
    assert torch.equal(wide[..., :64], before)
    weights, normed = random_bf16(4, 96, seed=2), wide.clone()
    prepare(kernels, normed, weights, None)
    assert relative_error(normed, prepared(wide, weights, positions, turns_of(0))) < ROUNDING


def test_rows_stand_alone(kernels: Library):
    x, weights, turns = random_bf16(80, 5, 128), random_bf16(5, 128, seed=1), turns_of(64)
    positions = torch.arange(80) % 50

    def run(rows: slice) -> torch.Tensor:
        y = x[rows].clone()
        prepare(kernels, y, weights, (positions[rows], turns))
        return y

    assert_rows_stand_alone(run, len(x))


def test_a_position_outside_the_table_is_the_nearest_in_it(kernels: Library):
    x, turns = random_bf16(4, 1, 32), turns_of(32)
    x[1], x[3] = x[0], x[2]
    prepare(kernels, x, None, (torch.tensor([49, 1 << 40, 0, -(1 << 40)]), turns))
    assert torch.equal(x[0], x[1])
    assert torch.equal(x[2], x[3])
