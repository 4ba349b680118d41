"""Modules of draft models, as they are trained.

The entry at position p takes the token t_p and what is known of position p - 1 (the target's
feature h_{p-1}, or the draft's own output there), and predicts t_{p+1}. Zeros stand for h_{-1}.

A chain of drafts starts at a root, the last token whose successor is unknown. Its step i takes
the token at root + i and predicts the next one. Knows nothing of tasks, files or training.

Shapes: B rows of S tokens, R roots in each row, H hidden size, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

CHAIN_LEN = 3

Choose = Callable[[int, torch.Tensor], torch.Tensor]
"""Takes a step's number and its logits [B, R, V], and returns the next step's tokens [B, R]."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a draft, most of them its target's."""

    hidden_size: int
    intermediate_size: int
    """Of the draft's dense feed-forwards."""

    vocab_size: int
    num_layers: int
    """Of the target."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float


@dataclass(frozen=True, slots=True)
class Context:
    """A batch of rows, and what the frozen target computes on them. float32, without gradient."""

    ids: torch.Tensor
    """int64 [B, S]"""

    hidden: torch.Tensor
    """[B, S, H], after the final norm."""

    residuals: dict[int, torch.Tensor]
    """[B, S, H] after the layer of that number, before the final norm."""

    keys: list[torch.Tensor]
    """Of each layer [B, KV heads, S, head size], normalised and rotated."""

    values: list[torch.Tensor]
    roots: torch.Tensor
    """int64 [B, R]. Rows with fewer roots repeat any position."""

    def at_roots(self, x: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """Returns what [B, S, ...] has at each root + offset, or at the row's end: [B, R, ...]."""
        at = (self.roots + offset).clamp(max=self.ids.shape[1] - 1)
        return x[torch.arange(len(x))[:, None], at]

    @property
    def positions(self) -> torch.Tensor:
        """int64 [1, S]"""
        return torch.arange(self.ids.shape[1])[None]


class Norm(nn.Module):
    """RMSNorm, over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)


class Mlp(nn.Module):
    """The gated feed-forward of Llama and Qwen3."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden_size, intermediate_size = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Attention(nn.Module):
    """Rotary attention whose keys the caller holds.

    Args:
        shape: Heads and their size.
        input_size: Width of the input.
        has_norms: Whether queries and keys are normalised, as Qwen3's are.
        has_keys: Whether it makes keys and values of its own.
    """

    def __init__(
        self, shape: Shape, input_size: int, *, has_norms: bool, has_keys: bool = True
    ) -> None:
        super().__init__()
        self._shape = shape
        query_size, kv_size = (n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads))
        self.q_proj = nn.Linear(input_size, query_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)
        if has_keys:
            self.k_proj = nn.Linear(input_size, kv_size, bias=False)
            self.v_proj = nn.Linear(input_size, kv_size, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.norm_eps) if has_norms else nn.Identity()
        self.k_norm = (
            Norm(shape.head_dim, shape.norm_eps) if has_norms and has_keys else nn.Identity()
        )

    def keys_values(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and values of [B, T, input]: each [B, KV heads, T, head size]."""
        heads = (*x.shape[:2], self._shape.num_kv_heads, self._shape.head_dim)
        keys = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)
        return self._rotate(keys, positions), self.v_proj(x).view(heads).transpose(1, 2)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, seen: "Row | Chains"
    ) -> torch.Tensor:
        """Attends from [B, T, input] at positions [B or 1, T]. Returns [B, T, H]."""
        heads = (*x.shape[:2], self._shape.num_heads, self._shape.head_dim)
        queries = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)
        attended = seen.attend(self._rotate(queries, positions))
        out: torch.Tensor = self.o_proj(attended.transpose(1, 2).reshape(*x.shape[:2], -1))
        return out

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Source: RoFormer, section 3.4.2, with the halves paired as in Llama's checkpoints."""
        half = self._shape.head_dim // 2
        frequencies = self._shape.rope_theta ** -(torch.arange(half) / half)
        angles = positions[:, None, :, None] * frequencies
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@dataclass(frozen=True, slots=True)
class Row:
    """Every position of a row sees itself and what is before it."""

    keys: torch.Tensor
    values: torch.Tensor

    def attend(self, queries: torch.Tensor) -> torch.Tensor:
        """Takes and returns [B, heads, S, head size]."""
        return F.scaled_dot_product_attention(
            queries, self.keys, self.values, is_causal=True, enable_gqa=True
        )


class Chains:
    """A query for each root sees the row up to some end, and the entries of its own chain.

    Args:
        keys: [B, KV heads, S, head size], the row's.
        values: Of the same shape.
        ends: int64 [B, R]: the query sees what is before this position.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, ends: torch.Tensor) -> None:
        self._keys, self._values = keys, values
        self._unseen = (torch.arange(keys.shape[2]) >= ends[:, :, None])[:, None, None]
        self._own_keys: list[torch.Tensor] = []
        self._own_values: list[torch.Tensor] = []

    def append(self, keys_values: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Adds an entry to each chain: keys and values [B, KV heads, R, head size]."""
        self._own_keys.append(keys_values[0])
        self._own_values.append(keys_values[1])

    def attend(self, queries: torch.Tensor) -> torch.Tensor:
        """Takes and returns [B, heads, R, head size]."""
        row_len = self._keys.shape[2]
        num_rows, num_kv_heads = self._keys.shape[:2]
        grouped = queries.reshape(num_rows, num_kv_heads, -1, *queries.shape[2:])
        grouped = grouped * queries.shape[-1] ** -0.5
        scores = grouped @ self._keys[:, :, None].mT
        scores = scores.masked_fill(self._unseen, torch.finfo(scores.dtype).min)
        own_scores = [(grouped * keys[:, :, None]).sum(-1, True) for keys in self._own_keys]
        weights = torch.cat((scores, *own_scores), dim=-1).softmax(dim=-1)
        out = weights[..., :row_len] @ self._values[:, :, None]
        for i, values in enumerate(self._own_values):
            out = out + weights[..., row_len + i, None] * values[:, :, None]
        return out.flatten(1, 2)


class Layer(nn.Module):
    """A decoder layer.

    Args:
        shape: Its sizes.
        self_attn: Its attention.
        mlp: Dense or mixture of experts, from [B, T, H] to [B, T, H].
    """

    def __init__(self, shape: Shape, self_attn: Attention, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.norm_eps)
        self.mlp = mlp

    def leave(self, residual: torch.Tensor) -> torch.Tensor:
        """Takes the residual after attention to what the next step takes, [B, R, H]."""
        out: torch.Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class Cell(Layer, ABC):
    """A layer that is applied again to its own output."""

    @abstractmethod
    def enter(
        self, embedded: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Joins tokens and what is known: the residual, and the input of attention."""


class Draft(nn.Module, ABC):
    """A draft model.

    Args:
        embedding: [V, H], the target's, not trained.
        head: [V, H], the target's, not trained; computes the logits where the draft has no head.
    """

    embedding: torch.Tensor
    head: torch.Tensor

    def __init__(self, embedding: torch.Tensor, head: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)

    @abstractmethod
    def unroll(self, context: Context, choose: Choose) -> list[torch.Tensor]:
        """Runs the chain of every root.

        Args:
            context: Rows, their roots and what the target says of them.
            choose: Gives the tokens of step i + 1 after step i, from the row or from the logits.

        Returns:
            Logits [B, R, V] of each of CHAIN_LEN steps.
        """

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings of int64 [B, T]: [B, T, H]."""
        return F.embedding(ids, self.embedding)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns [B, T, V] of [B, T, H]."""
        return F.linear(hidden, self.head)

    def unroll_cell(
        self, cell: Cell, features: torch.Tensor, context: Context, choose: Choose
    ) -> list[torch.Tensor]:
        """Runs the chains of a draft with one cell. The rows hold the entries of true features.

        Args:
            features: [B, S, H], what the target says of each position.

        Returns:
            Logits [B, R, V] of each step.
        """
        hidden_of_rows = shifted(features)
        _, inputs = cell.enter(self.embed(context.ids), hidden_of_rows)
        keys, values = cell.self_attn.keys_values(inputs, context.positions)
        chains = Chains(keys, values, ends=context.roots + 1)
        hidden, tokens = context.at_roots(hidden_of_rows), context.at_roots(context.ids)
        logits: list[torch.Tensor] = []
        for step in range(CHAIN_LEN):
            positions = context.roots + step
            residual, inputs = cell.enter(self.embed(tokens), hidden)
            if step > 0:
                chains.append(cell.self_attn.keys_values(inputs, positions))
            hidden = cell.leave(residual + cell.self_attn(inputs, positions, chains))
            logits.append(self.compute_logits(hidden))
            tokens = choose(step, logits[-1])
        return logits


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Moves [B, S, H] one position on: each entry takes what is known of the one before it."""
    return F.pad(x[:, :-1], (0, 0, 1, 0))
