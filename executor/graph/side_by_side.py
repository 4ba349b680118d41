"""Small buffers that touch in memory, so that one copy can write to several."""

from collections.abc import Sequence
from math import prod

import torch

CHUNK = 1024  # elements; the counts of a registry are a few dozen


class SideBySide:
    """Hands out zeros, each buffer right after the one before of its dtype and device.

    A buffer starts at a multiple of its element's size, no more: for what is read one by one.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns zeros of a shape."""
        numel = prod(shape)
        free = self._free.get((dtype, device))
        if free is None or len(free) < numel:
            free = torch.zeros(max(numel, CHUNK), dtype=dtype, device=device)
        self._free[dtype, device] = free[numel:]
        return free[:numel].view(tuple(shape))
