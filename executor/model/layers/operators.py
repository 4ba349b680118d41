"""Operators between a model's matrix products: norms, rotation and activation, for any device.

A model is given one object with these methods, so that it is written once. ``TorchOperators`` runs
anywhere and is what ``FlashInferOperators`` must match.

    T token rows    H query heads    N KV heads    D head width    F hidden width of a gated MLP
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F

from executor.model.flashinfer.operators import FlashInferOps


class RotaryEmbedding:
    """Turns pairs (x[i], x[i + head_dim / 2]) by an angle that grows with the position.

    With the sine's sign folded into its table, a rotation is ``x * cos + roll(x) * sin``, where
    roll swaps the halves: three operations.

    Args:
        head_dim: Width of a head, even.
        max_positions: Positions from 0 to below this can be asked for.
        theta: Base of the angles.
        dtype: Type of the tensors to turn.
        device: Where they live.

    Source: Su et al. 2021, equation 34; Transformers, apply_rotary_pos_emb.
    """

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        theta: float,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.half = head_dim // 2
        cos, sin = cos_sin_table(head_dim, max_positions, theta).chunk(2, dim=-1)
        self._cos = torch.cat((cos, cos), dim=-1).to(device, dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device, dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns cosines and signed sines [T, 1, head_dim] for int64 positions [T].

        Looked up once per forward pass, for all layers.
        """
        cos, sin = (table.index_select(0, positions) for table in (self._cos, self._sin))
        return cos.unsqueeze(1), sin.unsqueeze(1)

    def rotate(self, x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Returns x [T, heads, head_dim] turned by what ``at`` returned."""
        cos, sin = cos_sin
        return torch.addcmul(x * cos, x.roll(self.half, -1), sin)


class Operators(Protocol):
    """Norms, rotation and activation."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Returns x / sqrt(mean(x^2) + eps) * weight, the mean taken in float32.

        Args:
            x: [T, size].
            weight: [size].
            eps: Added to the mean square.

        Source: Zhang and Sennrich 2019, equation 4; Transformers, Qwen3MoeRMSNorm.forward.
        """
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the norm of x + residual, and x + residual itself.

        Both arguments are the operator's own from then on: it may overwrite them.

        Args:
            x: [T, size], contiguous.
            residual: [T, size], contiguous.
            weight: [size].
            eps: As in ``rms_norm``.
        """
        ...

    def norm_heads(
        self, qk: torch.Tensor, weight: torch.Tensor, num_heads: int, eps: float
    ) -> torch.Tensor:
        """Returns each head's norm times its row of weights, [T, H + N, D].

        Args:
            qk: [T, H + N, D], query heads first. Heads lie side by side, rows may be strided. N may
                be 0.
            weight: [H + N, D]. All query heads have the same weights, and all KV heads.
            num_heads: H.
            eps: As in ``rms_norm``.
        """
        ...

    def rotation(self, positions: torch.Tensor) -> Any:
        """Returns what ``rotate`` needs of a pass; looked up once, for all layers.

        Args:
            positions: int64 [T].
        """
        ...

    def rotate(
        self, qk: torch.Tensor, num_heads: int, rotation: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns queries [T, H, D] and keys [T, N, D], turned to their positions.

        Args:
            qk: [T, H + N, D], as in ``norm_heads``. May be overwritten.
            num_heads: H.
            rotation: From ``rotation``.
        """
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns silu(gate) * up, [T, F].

        Args:
            gate_up: [T, 2F], gate first, contiguous.
        """
        ...


class TorchOperators:
    """Plain PyTorch.

    Args:
        rotary: The model's rotation.
    """

    def __init__(self, rotary: RotaryEmbedding) -> None:
        self._rotary = rotary

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def norm_heads(
        self, qk: torch.Tensor, weight: torch.Tensor, num_heads: int, eps: float
    ) -> torch.Tensor:
        return F.rms_norm(qk, (qk.shape[-1],), None, eps).mul_(weight)

    def rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rotary.at(positions)

    def rotate(
        self, qk: torch.Tensor, num_heads: int, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        turned = self._rotary.rotate(qk, rotation)
        return turned[:, :num_heads], turned[:, num_heads:]

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class FlashInferOperators:
    """FlashInfer's kernels, for float16 and bfloat16 on CUDA.

    Args:
        ops: The library.
        head_dim: D.
        max_positions: Positions from 0 to below this can be asked for. Not checked.
        theta: Base of the rotation's angles.
        device: Where the model lives.
    """

    def __init__(
        self,
        ops: FlashInferOps,
        *,
        head_dim: int,
        max_positions: int,
        theta: float,
        device: torch.device,
    ) -> None:
        self._ops = ops
        self._cos_sin = cos_sin_table(head_dim, max_positions, theta).to(device)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._ops.rms_norm(x, weight, eps, out)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._ops.add_rms_norm_(x, residual, weight, eps)
        return x, residual

    def norm_heads(
        self, qk: torch.Tensor, weight: torch.Tensor, num_heads: int, eps: float
    ) -> torch.Tensor:
        out = torch.empty_like(qk, memory_format=torch.contiguous_format)
        self._ops.rms_norm(qk[:, :num_heads], weight[0], eps, out[:, :num_heads])
        if len(weight) > num_heads:
            self._ops.rms_norm(qk[:, num_heads:], weight[num_heads], eps, out[:, num_heads:])
        return out

    def rotation(self, positions: torch.Tensor) -> torch.Tensor:
        return positions

    def rotate(
        self, qk: torch.Tensor, num_heads: int, rotation: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = qk[:, :num_heads], qk[:, num_heads:]
        # The kernel wants a key head: where there is none, it gets one that nobody reads.
        turned = k if k.shape[1] else torch.zeros_like(q[:, :1])
        self._ops.rotate_(q, turned, rotation, self._cos_sin)
        return q, k

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[-1] // 2)
        self._ops.silu_and_mul(gate_up, out)
        return out


def cos_sin_table(head_dim: int, max_positions: int, theta: float) -> torch.Tensor:
    """Returns float32 [max_positions, head_dim]: cosines of the angles, then their sines.

    Source: Su et al. 2021, equation 34, as in ``RotaryEmbedding``.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, 1.0 / theta**exponents)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

    Attributes:
        weight: [size].

    Source: Zhang and Sennrich 2019, equation 4; Transformers, Qwen3MoeRMSNorm.forward.
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
        """Returns the shape and dtype of x [T, size]; the mean is taken in float32."""
        return self._operators.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the norm of x + residual, and x + residual. May overwrite both, [T, size]."""
        return self._operators.add_rms_norm(x, residual, self.weight, self.eps)
