"""Operators between a model's matrix products: norms, rotation and activation, for any device.

A model is given one object with these methods, so that it is written once. ``TorchOperators`` runs
anywhere and is what the others must match.

    T token rows    H query heads    N KV heads    D head width    F hidden width of a gated MLP
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from executor.model.cpu_kernels.library import LANES, Library, by_row
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.spec import Llama3Scaling, RopeSpec, Yarn

Pair = tuple[torch.Tensor, torch.Tensor]
HeadNorm = tuple[torch.Tensor, float]


class RotaryEmbedding:
    """Turns pairs (x[i], x[i + rotary_dim / 2]) by an angle that grows with the position.

    With the sine's sign folded into its table, a rotation is ``x * cos + roll(x) * sin``, where
    roll swaps the halves: three operations.

    Args:
        rope: Angles.
        max_positions: Positions from 0 to below this can be asked for.
        dtype: Type of the tensors to turn.
        device: Where they live.

    Source: Su et al. 2021, equation 34; Transformers, apply_rotary_pos_emb.
    """

    def __init__(
        self, rope: RopeSpec, max_positions: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        cos, sin = cos_sin_table(rope, max_positions).chunk(2, dim=-1)
        self._cos = torch.cat((cos, cos), dim=-1).to(device, dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device, dtype)

    def at(self, positions: torch.Tensor) -> Pair:
        """Returns cosines and signed sines [T, 1, rotary_dim] for int64 positions [T].

        Looked up once per forward pass, for all layers.
        """
        cos, sin = (table.index_select(0, positions) for table in (self._cos, self._sin))
        return cos.unsqueeze(1), sin.unsqueeze(1)

    @staticmethod
    def rotate(x: torch.Tensor, cos_sin: Pair) -> torch.Tensor:
        """Returns x [T, heads, head_dim] turned by what ``at`` returned. May overwrite x."""
        cos, sin = cos_sin
        size = cos.shape[-1]
        if size < x.shape[-1]:
            x[..., :size] = RotaryEmbedding.rotate(x[..., :size], cos_sin)
            return x
        return torch.addcmul(x * cos, x.roll(size // 2, -1), sin)


class Operators(Protocol):
    """Norms, rotation and activation."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Returns x / sqrt(mean(x^2) + eps) * weight, all in float32 and rounded once.

        Norms of Llama's kind in Transformers round before they multiply, too.

        Args:
            x: [T, size].
            weight: [size].
            eps: Added to the mean square.

        Source: Zhang and Sennrich 2019, equation 4; Transformers, GptOssRMSNorm.forward.
        """
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> Pair:
        """Returns the norm of x + residual, and x + residual itself.

        Both arguments are the operator's own from then on: it may overwrite them.

        Args:
            x: [T, size], contiguous.
            residual: [T, size], contiguous.
            weight: [size].
            eps: As in ``rms_norm``.
        """
        ...

    def rotations(self, positions: torch.Tensor) -> Sequence[Any]:
        """Returns what turns heads in a pass, for each rope; looked up once, for all layers.

        Args:
            positions: int64 [T].
        """
        ...

    def prepare_heads(
        self, qk: torch.Tensor, num_heads: int, norm: HeadNorm | None, rotation: Any | None
    ) -> Pair:
        """Returns queries [T, H, D] and keys [T, N, D], each head normed, then turned to its position.

        Args:
            qk: [T, H + N, D], query heads first. Heads lie side by side, rows may be strided. N may
                be 0. May be overwritten.
            num_heads: H.
            norm: Weights [H + N, D], the same for all query heads, and for all KV heads; and eps, as
                in ``rms_norm``. None norms nothing.
            rotation: One of ``rotations``; None turns nothing.
        """
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns silu(gate) * up, [T, F].

        Args:
            gate_up: [T, 2F], gate first, contiguous.
        """
        ...


class TorchOperators(Operators):
    """Plain PyTorch.

    Args:
        ropes: Of the model.
    """

    def __init__(self, ropes: Sequence[RotaryEmbedding]) -> None:
        self._ropes = ropes

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> Pair:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rotations(self, positions: torch.Tensor) -> list[Pair]:
        return [rope.at(positions) for rope in self._ropes]

    def prepare_heads(
        self, qk: torch.Tensor, num_heads: int, norm: HeadNorm | None, rotation: Pair | None
    ) -> Pair:
        if norm is not None:
            qk = F.rms_norm(qk, (qk.shape[-1],), None, norm[1]).mul_(norm[0])
        if rotation is not None:
            qk = RotaryEmbedding.rotate(qk, rotation)
        return qk[:, :num_heads], qk[:, num_heads:]

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class CpuOperators(TorchOperators):
    """The CPU's kernels, for bfloat16; PyTorch for sizes that are no multiple of 16.

    Args:
        library: The kernels.
        ropes: Of the model.
        max_positions: Positions from 0 to below this can be asked for.
    """

    def __init__(self, library: Library, ropes: Sequence[RopeSpec], max_positions: int) -> None:
        super().__init__(())
        self._library = library
        self._turns = [cos_sin_table(rope, max_positions) for rope in ropes]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.shape[-1] % LANES:
            return super().rms_norm(x, weight, eps)
        return self._norm(x, None, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> Pair:
        if x.shape[-1] % LANES:
            return super().add_rms_norm(x, residual, weight, eps)
        return self._norm(x, residual, weight, eps), residual

    def _norm(
        self, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        num_rows, size = x.shape
        y = x.new_empty(num_rows, size)
        self._library("add_norm", *by_row(x), added, weight, y, num_rows, size, eps)
        return y

    def rotations(self, positions: torch.Tensor) -> list[Pair]:
        return [(positions, turns) for turns in self._turns]

    def prepare_heads(
        self, qk: torch.Tensor, num_heads: int, norm: HeadNorm | None, rotation: Pair | None
    ) -> Pair:
        if qk.shape[-1] % LANES or (norm or rotation) is None:
            if rotation is not None:
                at, turns = rotation
                cos, sin = turns.index_select(0, at)[:, None].to(qk.dtype).chunk(2, dim=-1)
                rotation = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
            return super().prepare_heads(qk, num_heads, norm, rotation)
        weight, eps = norm or (None, 0)
        positions, table = rotation or (None, None)
        limit, turned = (0, 0) if table is None else table.shape
        sizes = limit, *qk.shape, turned
        strides = qk.stride()[:2]
        self._library("prepare_heads", qk, *strides, weight, table, positions, *sizes, eps)
        return qk[:, :num_heads], qk[:, num_heads:]

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        num_rows, width = gate_up.shape
        if width % (2 * LANES):
            return super().silu_and_mul(gate_up)
        y = gate_up.new_empty(num_rows, width // 2)
        self._library("silu_and_mul", gate_up, y, num_rows, width // 2)
        return y


class FlashInferOperators(Operators):
    """FlashInfer's kernels, for float16 and bfloat16 on CUDA.

    Args:
        ops: The library.
        ropes: Of the model.
        max_positions: Positions from 0 to below this can be asked for. Not checked.
        device: Where the model lives.
    """

    def __init__(
        self,
        ops: FlashInferOps,
        *,
        ropes: Sequence[RopeSpec],
        max_positions: int,
        device: torch.device,
    ) -> None:
        self._ops = ops
        self._cos_sin = [cos_sin_table(rope, max_positions).to(device) for rope in ropes]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._ops.rms_norm(x, weight, eps, out)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> Pair:
        self._ops.add_rms_norm_(x, residual, weight, eps)
        return x, residual

    def rotations(self, positions: torch.Tensor) -> list[Pair]:
        return [(positions, table) for table in self._cos_sin]

    def prepare_heads(
        self, qk: torch.Tensor, num_heads: int, norm: HeadNorm | None, rotation: Pair | None
    ) -> Pair:
        q, k = qk[:, :num_heads], qk[:, num_heads:]
        if norm is not None:
            weight, eps = norm
            out = torch.empty_like(qk, memory_format=torch.contiguous_format)
            self._ops.rms_norm(q, weight[0], eps, out[:, :num_heads])
            if k.shape[1]:
                self._ops.rms_norm(k, weight[num_heads], eps, out[:, num_heads:])
            q, k = out[:, :num_heads], out[:, num_heads:]
        if rotation is not None:
            # The kernel wants a key head: where there is none, it gets one that nobody reads.
            turned = k if k.shape[1] else torch.zeros_like(q[:, :1])
            self._ops.rotate_(q, turned, *rotation)
        return q, k

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[-1] // 2)
        self._ops.silu_and_mul(gate_up, out)
        return out


def cos_sin_table(rope: RopeSpec, max_positions: int) -> torch.Tensor:
    """Returns float32 [max_positions, rotary_dim]: cosines of the angles, then their sines.

    Source: Su et al. 2021, equation 34, as in ``RotaryEmbedding``.
    """
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    frequencies = 1.0 / rope.theta**exponents
    if isinstance(rope.scaling, Yarn):
        frequencies = _yarn(frequencies, rope, rope.scaling)
    elif rope.scaling is not None:
        frequencies = _llama3(frequencies, rope.scaling)
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor


def _yarn(frequencies: torch.Tensor, rope: RopeSpec, yarn: Yarn) -> torch.Tensor:
    """Divides those by the factor that turn less than ``beta_slow`` times, some in between partly.

    Source: Peng et al. 2023, section 3.2; Transformers, _compute_yarn_parameters.
    """

    def dimension(turns: float) -> float:
        length = yarn.original_max_position_embeddings / (2 * math.pi * turns)
        return rope.rotary_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    divided = (
        torch.arange(len(frequencies), dtype=torch.float32).sub(low).div(high - low).clamp(0, 1)
    )
    return frequencies / yarn.factor * divided + frequencies * (1 - divided)


def _llama3(frequencies: torch.Tensor, llama3: Llama3Scaling) -> torch.Tensor:
    """Divides those of long waves by the factor, those of waves in between partly.

    Source: Transformers, _compute_llama3_parameters.
    """
    turns = llama3.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = llama3.low_freq_factor, llama3.high_freq_factor
    kept = turns.sub(low).div(high - low).clamp(0, 1)
    return frequencies / llama3.factor * (1 - kept) + frequencies * kept


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    Attributes:
        weight: [size].

    Source: As of ``Operators.rms_norm``.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        operators: Operators,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.eps = eps
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self._operators = operators

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the shape and dtype of x [T, size]."""
        return self._operators.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> Pair:
        """Returns the norm of x + residual, and x + residual. May overwrite both, [T, size]."""
        return self._operators.add_rms_norm(x, residual, self.weight, self.eps)
