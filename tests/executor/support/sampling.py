"""Columns of sampling parameters, as samplers of a fixed shape take them."""

from collections.abc import Sequence

import torch

Way = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p
NAMES = ("temperature", "top_k", "top_p", "min_p")


def parameters(rows: Sequence[Way], device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Returns a column of each parameter, with one value for each row."""
    columns = zip(*rows, strict=True)
    return {n: torch.tensor(c, device=device) for n, c in zip(NAMES, columns, strict=True)}
