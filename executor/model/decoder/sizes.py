"""Shares of a described model: the heads of each executor, and the keys and values that it keeps."""

from dataclasses import dataclass

import torch

from executor.batch.kv_pool import KVShape
from executor.model.spec import GqaSpec, MlaSpec, ModelSpec
from executor.parallel.layout import Capacity, divisors, share_of


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The attention heads of one executor.

    Attributes:
        q_heads: Its query heads.
        kv_heads: The KV heads that these read. Where there are fewer KV heads than executors that
            share a DP rank's attention, several hold the same one.
    """

    q_heads: range
    kv_heads: range


def attention_of(spec: ModelSpec) -> GqaSpec | MlaSpec:
    """Returns the attention of a model whose layers have the same heads."""
    return spec.layers[0].attention


def attention_share(attention: GqaSpec | MlaSpec, capacity: Capacity) -> HeadShare:
    """Returns the heads that an executor holds; of latents, which each keeps, there is one.

    Raises:
        ValueError: They cannot be shared by ``attn_tp_size`` executors. Says by how many.
    """
    q, kv = attention.num_heads, 1 if isinstance(attention, MlaSpec) else attention.num_kv_heads
    rank, size = capacity.attn_tp_rank, capacity.attn_tp_size
    problem = None
    if q % size:
        problem = f"num_attention_heads={q} does not divide by it"
    elif kv % size and size % kv:
        problem = f"it neither divides num_key_value_heads={kv} nor is a multiple of it"
    if problem is not None:
        sizes = [n for n in divisors(q) if kv % n == 0 or n % kv == 0]
        raise ValueError(f"attn_tp_size={size}: {problem}; use one of {', '.join(map(str, sizes))}")
    if kv % size:
        kv_head = rank * kv // size
        kv_heads = range(kv_head, kv_head + 1)
    else:
        kv_heads = share_of("num_key_value_heads", kv, rank, size)
    return HeadShare(share_of("num_attention_heads", q, rank, size), kv_heads)


def kv_shape(
    spec: ModelSpec, block_size: int, dtype: torch.dtype, capacity: Capacity | None = None
) -> KVShape:
    """Returns the sizes of the keys and values that an executor keeps of a model.

    Layers that see a window are a group of their own beside layers that see every token. If all have
    windows, there is one group, which keeps every block.

    Args:
        spec: The model.
        block_size: Tokens per block.
        dtype: Type of keys and values.
        capacity: What the executor is built for; to be alone if None.

    Raises:
        ValueError: As ``attention_share``.
    """
    attention = attention_of(spec)
    if isinstance(attention, MlaSpec):
        return KVShape.of_latents(
            num_layers=len(spec.layers),
            latent_dim=attention.kv_lora_rank,
            rope_dim=attention.qk_rope_head_dim,
            block_size=block_size,
            dtype=dtype,
        )
    windows = windows_of(spec)
    is_apart = 0 < len(windows) < len(spec.layers)
    return KVShape.of_heads(
        num_layers=len(spec.layers),
        num_kv_heads=len(attention_share(attention, capacity or Capacity()).kv_heads),
        head_dim=attention.head_dim,
        block_size=block_size,
        dtype=dtype,
        windowed=tuple(windows) if is_apart else (),
        window=max(windows.values()) if is_apart else None,
    )


def windows_of(spec: ModelSpec) -> dict[int, int]:
    """Returns how many tokens layers see, the own one included, by layer; without those that see all."""
    attentions = enumerate(layer.attention for layer in spec.layers)
    found = {i: x.window for i, x in attentions if isinstance(x, GqaSpec)}
    return {i: window for i, window in found.items() if window is not None}
