"""Comparisons that the CPU kernels' tests share, and their random shapes."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

ROUNDING = 0.004  # relative error of a result that is rounded to bfloat16 once


def random_bf16(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return random_of(torch.bfloat16, *shape, seed=seed, scale=scale)


def random_of(dtype: torch.dtype, *shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def random_shapes() -> Iterator[random.Random]:
    """Returns what 100 random shapes are drawn from, the same in each run."""
    return (random.Random(seed) for seed in range(100))


def num_rows_of(rng: random.Random) -> int:
    """Returns rows of a batch: none, few, or more than a tile has."""
    return rng.choice([0, 1, rng.randint(2, 13), rng.randint(14, 70)])


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the norm of the difference over that of float32 ``expected``; 0 for no elements."""
    assert result.shape == expected.shape
    difference = (result.float() - expected).norm()
    return float(difference / expected.norm().clamp(min=1e-30))


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Lets OpenMP of this thread use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_rows_stand_alone(run: Callable[[slice], torch.Tensor], num_rows: int) -> None:
    """Asserts that rows have the same bits in every batch, and with one thread and two.

    Args:
        run: Returns the result for a batch of these rows.
        num_rows: Rows that there are; 65 or more reach every size of a tile.
    """
    whole = run(slice(0, num_rows))
    with num_threads(2):
        assert torch.equal(run(slice(0, num_rows)), whole)
    start, size = 0, 1
    while start < num_rows:
        rows = slice(start, min(start + size, num_rows))
        assert torch.equal(run(rows), whole[rows]), f"rows {rows} differ from those of all rows"
        start, size = rows.stop, size + 1
