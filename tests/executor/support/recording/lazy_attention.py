"""A capturable attention backend whose metadata upgrades itself on first use.

It stands for a kind of backend that broke in the field: planning leaves something small, the first
layer upgrades it on the device, and all later layers use the upgrade. Warm-up runs upgrade it, so a
capture after them lacks the upgrade, and every replay attends as the capture's batch did. The cure
is ``on_after_cuda_graph_warmup``.
"""

from functools import partial

import torch
import torch.nn.functional as F

from executor.batch.forward_batch import ForwardBatch
from executor.batch.kv_pool import KVPool
from executor.model.decoder.sizes import attention_of
from executor.model.spec import ModelSpec


class LazyAttention:
    """Decodes over every key of the block table, masked: device work alone, and slow.

    Args:
        num_heads: Query heads.
        num_kv_heads: Heads of keys and values.
        restores: False breaks it: metadata stays upgraded after a warm-up.
    """

    is_capturable = True

    def __init__(self, num_heads: int, num_kv_heads: int, *, restores: bool = True) -> None:
        self.num_kv_heads = num_kv_heads
        self.group_size = num_heads // num_kv_heads
        self.restores = restores
        self._batch: ForwardBatch | None = None
        self._pool: KVPool | None = None
        self._upgraded: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, config: ModelSpec, pool: KVPool, *, restores: bool = True) -> "LazyAttention":
        return cls(
            attention_of(config).num_heads, attention_of(config).num_kv_heads, restores=restores
        )

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, kv_pool: KVPool) -> None:
        self._batch, self._pool, self._upgraded = batch, kv_pool, None

    def init_forward_metadata_in_graph(self) -> None:
        """Nothing: the first layer does it."""

    def on_after_cuda_graph_warmup(self) -> None:
        if self.restores:
            self._upgraded = None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer_id: int
    ) -> torch.Tensor:
        batch, pool = self._batch, self._pool
        assert batch is not None
        assert pool is not None
        if k is not None and v is not None:
            for cache, x in zip(pool.caches[layer_id], (k, v), strict=True):
                cache.index_copy_(0, batch.out_cache_loc, x)
        if self._upgraded is None:
            self._upgraded = self._upgrade(batch, pool)
        slots, is_seen = self._upgraded
        keys, values = (
            cache.index_select(0, slots.flatten()).view(*slots.shape, *cache.shape[1:])
            for cache in pool.caches[layer_id]
        )
        width = len(q) // len(slots)
        queries = q.view(len(slots), width, self.num_kv_heads * self.group_size, -1)
        attended = F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.repeat_interleave(self.group_size, dim=2).transpose(1, 2),
            values.repeat_interleave(self.group_size, dim=2).transpose(1, 2),
            attn_mask=is_seen,
        )
        return attended.transpose(1, 2).reshape(len(q), -1)

    def _upgrade(self, batch: ForwardBatch, pool: KVPool) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the slot of every key [B, S], and which ones each query sees [B, 1, width, S]."""
        table = pool.tables[0].index_select(0, batch.req_pool_indices).to(torch.int64)
        arange = partial(torch.arange, device=pool.device)
        offsets = arange(pool.block_size)
        slots = (table.unsqueeze(2) * pool.block_size + offsets).flatten(1)
        width = len(batch.input_ids) // batch.batch_size
        last = batch.seq_lens[:, None] - width + arange(width)
        is_seen = arange(slots.shape[1]) <= last.clamp(min=0)[:, :, None]
        return slots, is_seen.unsqueeze(1)
