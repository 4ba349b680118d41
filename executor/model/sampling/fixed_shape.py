"""Sampling in which every row goes through every stage: fixed shapes, nothing read on the host.

``logits.py`` sends each row only through what it asks for, which saves work but launches something
for each kind of row. This is for a GPU, where a few kernels for all rows are faster; a graph can
capture it (tests/gpu/test_sampling.py), though the executor samples after the replay.

    S rows    V vocabulary

The distribution is that of ``logits.draw_likeliest`` but for ties: here all tokens that are as
likely as the last one that a filter keeps stay too, as in FlashInfer. One uniform sample may pick
another token: there tokens lie by likelihood along the unit interval, here by id, as in
``logits.draw``. A row's token depends on its own logits, parameters and uniform sample only: sums
that decide are of integers, the same in any order.
"""

from typing import Protocol

import torch

from executor.model.flashinfer.operators import FlashInferOps
from executor.model.sampling.logits import RowParameters, temper

_SCALE = 2.0**52  # float64 counts units of probability exactly up to twice this


class Filters(Protocol):
    """Drops unlikely tokens and scales the rest to sum to 1."""

    def top_k(self, probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
        """Args: probs float32 [S, V], contiguous; top_k int32 [S], 1 to V."""
        ...

    def top_p(self, probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        """Args: probs float32 [S, V], contiguous; top_p float32 [S], above 0, to 1."""
        ...


class TorchFilters:
    """Plain PyTorch, by sorting: what other filters must match."""

    def top_k(self, probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
        likeliest = probs.sort(dim=-1, descending=True).values
        least = likeliest.gather(-1, top_k.long()[:, None] - 1)
        return _renormalize(probs.masked_fill(probs < least, 0))

    def top_p(self, probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        likeliest = probs.sort(dim=-1, descending=True).values
        before = likeliest.cumsum(dim=-1, dtype=torch.float64) - likeliest
        last = (before < top_p[:, None]).sum(dim=-1, keepdim=True) - 1
        least = likeliest.gather(-1, last.clamp_(min=0))
        kept = _renormalize(probs.masked_fill(probs < least, 0))
        return torch.where(top_p[:, None] < 1, kept, probs)


class FlashInferFilters:
    """FlashInfer's kernels. Call them before a capture: they make scratch memory on first use.

    Args:
        ops: The library.
    """

    def __init__(self, ops: FlashInferOps) -> None:
        self._ops = ops

    def top_k(self, probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
        return self._ops.top_k_renorm(probs, top_k)

    def top_p(self, probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        kept = self._ops.top_p_renorm(probs, top_p)
        # Its sum of all may round to below 1, and would lose tokens of a row that keeps all.
        return torch.where(top_p[:, None] < 1, kept, probs)


def sample_rows(
    logits: torch.Tensor, parameters: RowParameters, uniform: torch.Tensor, filters: Filters
) -> torch.Tensor:
    """Samples each row. Filters follow one another: top_k, top_p, min_p.

    Args:
        logits: float32 [S, V], penalties and the like applied.
        parameters: Of each row.
        uniform: float64 [S], from ``logits.uniform_samples``.
        filters: How to drop tokens.

    Returns:
        int64 [S] token ids.
    """
    temperature = parameters["temperature"]
    is_greedy = temperature <= 0
    temperature = temperature.masked_fill(is_greedy, 1)
    top_k = parameters["top_k"].clamp(max=logits.shape[-1])
    top_k = top_k.masked_fill(top_k == 0, logits.shape[-1]).to(torch.int32)
    probs = torch.softmax(temper(logits, temperature), dim=-1)
    probs = filters.top_p(filters.top_k(probs, top_k), parameters["top_p"])
    least = probs.amax(dim=-1, keepdim=True) * parameters["min_p"][:, None]
    drawn = _invert(probs.masked_fill(probs < least, 0), uniform)
    return torch.where(is_greedy, logits.argmax(dim=-1), drawn)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Returns the first index at which the cumulative weight exceeds the sample's share, [S].

    In units of 2^-52, as integers: however a device splits the sum, it comes out the same.

    Args:
        weights: float32 [S, V], each row's sum about 1 or less.
        uniform: float64 [S] in [0, 1).
    """
    units = (weights.double() * _SCALE).to(torch.int64)
    cumulative = units.cumsum(dim=-1)
    total = cumulative[:, -1]
    target = (uniform * total.double()).to(torch.int64)
    target = torch.minimum(target, total - 1)[:, None]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return index.clamp_(max=weights.shape[-1] - 1)  # only rows that are not finite get there


def _renormalize(probs: torch.Tensor) -> torch.Tensor:
    return probs / probs.sum(dim=-1, keepdim=True)
