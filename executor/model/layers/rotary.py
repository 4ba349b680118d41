"""Rotary position embedding, the half-split form that Hugging Face checkpoints use."""

import torch


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
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, 1.0 / theta**exponents)
        cos, sin = angles.cos(), angles.sin()
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
