"""Sampling in which all rows go through the same stages: fixed shapes, nothing read on the device.

``logits.py`` sends each row only through what it asks for, which saves work but launches something
for each kind of row. This is for a GPU, where a few kernels for all rows are faster: whatever the
host knows comes in one copy, and a stage that no row asks for is left out. A graph can capture it
(tests/gpu/test_sampling.py), though the executor samples after the replay.

    S rows    V vocabulary

The distribution is that of ``logits.draw_likeliest`` but for ties: here all tokens that are as
likely as the last one that a filter keeps stay too, as in FlashInfer. One uniform sample may pick
another token: there tokens lie by likelihood along the unit interval, here by id, as in
``logits.draw``. A row's token depends on its own logits, parameters and uniform sample only: sums
that decide are of integers, the same in any order.
"""

from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from executor.batch.columns import BoolArray
from executor.batch.staging import to_device
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.sampling.logits import Float64Array, temper

_SCALE = 2.0**52  # float64 counts units of probability exactly up to twice this


class Share(Enum):
    """How many rows ask for a stage."""

    NONE = 0
    SOME = 1
    ALL = 2

    @classmethod
    def of(cls, asks: BoolArray) -> "Share":
        """Args: asks bool [S]."""
        return cls.ALL if asks.all() else cls.SOME if asks.any() else cls.NONE


class Asked(NamedTuple):
    """The stages that rows ask for. ``SOME`` gives every row the same token, by more launches."""

    greedy: Share = Share.SOME
    top_k: Share = Share.SOME
    top_p: Share = Share.SOME
    min_p: Share = Share.SOME


class Draws(NamedTuple):
    """How the token of each row is drawn.

    Attributes:
        uniform: float64 [S], from ``logits.uniform_samples``.
        temperature: float32 [S]; 0 takes the likeliest token.
        top_k: int32 [S], 1 to V, which is all.
        top_p: float32 [S], above 0, to 1.
        min_p: float32 [S], 0 to 1.
        asked: What that comes to.
    """

    uniform: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    asked: Asked = Asked()

    @classmethod
    def of(
        cls,
        parameters: npt.NDArray[Any],
        uniform: Float64Array,
        vocab_size: int,
        device: torch.device,
    ) -> "Draws":
        """Returns those of rows, on the device, by one copy for which nothing waits.

        Args:
            parameters: [S], with fields as ``read_step.PARAMETERS`` has them.
            uniform: [S].
            vocab_size: V.
            device: Where the logits are.
        """
        size, top_k = len(uniform), parameters["top_k"].astype(np.int64)
        has_top_k = (top_k > 0) & (top_k < vocab_size)
        packed = np.empty(3 * size, np.int64)
        packed[:size] = uniform.view(np.int64)
        numbers = packed[size:].view(np.float32).reshape(4, size)
        for i, name in enumerate(("temperature", "top_p", "min_p")):
            numbers[i] = parameters[name]
        numbers[3].view(np.int32)[:] = np.where(has_top_k, top_k, vocab_size)
        asked = Asked(
            greedy=Share.of(numbers[0] <= 0),
            top_k=Share.of(has_top_k),
            top_p=Share.of(numbers[1] < 1),
            min_p=Share.of(numbers[2] > 0),
        )
        staged = to_device(packed, device)
        temperature, top_p, min_p, counts = staged[size:].view(torch.float32).view(4, size)
        uniforms = staged[:size].view(torch.float64)
        return cls(uniforms, temperature, counts.view(torch.int32), top_p, min_p, asked)


class Filters(Protocol):
    """Drops unlikely tokens and scales the rest to sum to 1."""

    def top_k(self, probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
        """Args: probs float32 [S, V], contiguous; top_k int32 [S], 1 to V."""
        ...

    def top_p(self, probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
        """Args: probs float32 [S, V], contiguous; top_p float32 [S]. At 1, rounding may lose some."""
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
        return _renormalize(probs.masked_fill(probs < least, 0))


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
        return self._ops.top_p_renorm(probs, top_p)


def sample_rows(logits: torch.Tensor, draws: Draws, filters: Filters) -> torch.Tensor:
    """Samples each row. Filters follow one another: top_k, top_p, min_p.

    Args:
        logits: float32 [S, V], penalties and the like applied.
        draws: How.
        filters: How to drop tokens.

    Returns:
        int64 [S] token ids.
    """
    asked, temperature, vocab_size = draws.asked, draws.temperature, logits.shape[-1]
    if asked.greedy is Share.ALL:
        return logits.argmax(dim=-1)
    if asked.greedy is Share.SOME:
        temperature = temperature.masked_fill(temperature <= 0, 1)
    probs = torch.softmax(temper(logits, temperature), dim=-1)
    for share, keep, limit, most in (
        (asked.top_k, filters.top_k, draws.top_k, vocab_size),
        (asked.top_p, filters.top_p, draws.top_p, 1),
    ):
        if share is not Share.NONE:
            kept = keep(probs, limit)
            # A row that keeps all would lose tokens to rounding.
            probs = kept if share is Share.ALL else torch.where(limit[:, None] < most, kept, probs)
    if asked.min_p is not Share.NONE:
        least = probs.amax(dim=-1, keepdim=True) * draws.min_p[:, None]
        probs = probs.masked_fill(probs < least, 0)
    drawn = _invert(probs, draws.uniform)
    if asked.greedy is Share.NONE:
        return drawn
    return torch.where(draws.temperature <= 0, logits.argmax(dim=-1), drawn)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Returns the first index at which the cumulative weight exceeds the sample's share, [S].

    In whole units of 2^-52: however a device splits the sum, it comes out the same.

    Args:
        weights: float32 [S, V], each row's sum about 1 or less.
        uniform: float64 [S] in [0, 1).
    """
    cumulative = (weights * _SCALE).floor_().cumsum(dim=-1, dtype=torch.float64)
    target = (
        uniform[:, None] * cumulative[:, -1:]
    )  # below the total, as uniform samples are rounded
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return index.clamp_(max=weights.shape[-1] - 1)  # only rows that are not finite get there


def _renormalize(probs: torch.Tensor) -> torch.Tensor:
    return probs / probs.sum(dim=-1, keepdim=True)
