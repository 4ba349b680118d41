"""Attention over the paged KV pool in plain PyTorch, one sequence after another.

    Q queries of a sequence    S keys that they see    G = H / N query heads per KV head

Written to be read: what other backends must match, and what runs where there is no kernel.
"""

from collections.abc import Sequence

import torch

from executor.batch.forward_batch import ForwardBatch
from executor.batch.kv_pool import KVPool, KVShape
from executor.model.layers.attention import PLAIN, LayerOptions

_QUERY_TILE = 128  # queries whose scores are in memory at once


class TorchAttention:
    """The attention backend that runs anywhere.

    Not capturable: sequences are walked on the host.

    Args:
        num_heads: H.
        shape: Of the KV pool, with N and D. Where it keeps latents, all heads share one.
        scale: What scores are multiplied by; 1 / sqrt(D) if None.
        layers: What layers do that others do not, by their number; those behind them are plain.
    """

    is_capturable = False

    def __init__(
        self,
        num_heads: int,
        shape: KVShape,
        *,
        scale: float | None = None,
        layers: Sequence[LayerOptions] = (),
    ) -> None:
        keys = shape.parts[0]
        self.num_kv_heads = keys.num_heads
        self.group_size = num_heads // keys.num_heads
        self.scale = keys.width**-0.5 if scale is None else scale
        self.value_width = shape.value_width
        self._layers = tuple(layers)
        self._batch: ForwardBatch | None = None
        self._kv_pool: KVPool | None = None
        self._sequences: list[tuple[int, int, int]] = []  # row, tokens, new tokens of each

    def init_forward_metadata_in_graph(self) -> None:
        """Nothing: the tree mask is read when a layer runs."""

    def on_after_cuda_graph_warmup(self) -> None:
        """Nothing: metadata stays as planned."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, kv_pool: KVPool) -> None:
        counts = [1] * batch.batch_size
        if batch.extend_seq_lens_cpu is not None:
            counts = batch.extend_seq_lens_cpu.tolist()
        check_tree(batch, counts)
        self._batch, self._kv_pool = batch, kv_pool
        rows, lengths = batch.req_pool_indices.tolist(), batch.seq_lens_cpu.tolist()
        self._sequences = list(zip(rows, lengths, counts, strict=True))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer_id: int
    ) -> torch.Tensor:
        batch, kv_pool = self._batch, self._kv_pool
        assert batch is not None, "init_forward_metadata_out_graph runs before each pass"
        assert kv_pool is not None, "planned"
        options = self._layers[layer_id] if layer_id < len(self._layers) else PLAIN
        group = kv_pool.shape.group_of(options.window)
        caches, kept = kv_pool.caches[layer_id], [x for x in (k, v) if x is not None]
        for cache, x in zip(caches, kept, strict=bool(kept)):
            cache.index_copy_(0, batch.slots_of(group), x)
        out = q.new_zeros(q.shape[0], q.shape[1] * self.value_width)
        start = 0
        for i, (row, length, count) in enumerate(self._sequences):
            tree = None if batch.tree_mask is None else batch.tree_mask[i]
            table = kv_pool.tables[group, row]
            for first in range(0, count if length else 0, _QUERY_TILE):
                stop = min(first + _QUERY_TILE, count)
                # The first key that any of them sees, and one past the last. Padding has fewer keys
                # than queries.
                place = max(length - count + first, 0)
                end = length if tree is not None else max(length - count + stop, 1)
                begin = 0 if options.window is None else max(place + 1 - options.window, 0)
                keys, values = self._take(caches, table, begin, end, kv_pool.block_size)
                seen = None
                if stop - first > 1 or tree is not None:
                    places = torch.arange(place, place + stop - first, device=q.device)
                    seen = _seen(places, begin, end, options.window)
                    if tree is not None:
                        seen = _with_tree(seen, tree[first:stop])
                queries = q[start + first : start + stop]
                attended = self._attend(queries, keys, values, seen, options.sinks)
                out[start + first : start + stop] = attended
            start += count
        return out

    def _take(
        self,
        caches: Sequence[torch.Tensor],
        table: torch.Tensor,
        begin: int,
        end: int,
        block_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies of keys [S, N, D] and values [S, N, V] of a sequence, from begin to end."""
        first = begin // block_size
        blocks = table[first : -(-end // block_size)]
        own = slice(begin - first * block_size, end - first * block_size)
        taken = [
            cache.view(-1, block_size, *cache.shape[1:]).index_select(0, blocks).flatten(0, 1)[own]
            for cache in caches
        ]
        return taken[0], taken[-1][..., : self.value_width]

    def _attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns [Q, H * V] for q [Q, H, D].

        Args:
            seen: bool [Q, S]; None if each query sees all keys.
            sinks: [H], as in ``LayerOptions``.
        """
        by_head = (self.num_kv_heads, self.group_size, len(q), -1)
        queries = (
            q.reshape(len(q), *by_head[:2], -1).permute(1, 2, 0, 3).flatten(1, 2)
        )  # [N, G * Q, D]
        scores = (queries @ keys.permute(1, 2, 0)).float().mul_(self.scale).view(by_head)
        if seen is not None:
            scores.masked_fill_(~seen, -torch.inf)
        if sinks is not None:
            sink = sinks.float().view(self.num_kv_heads, self.group_size, 1, 1)
            scores = torch.cat((scores, sink.expand(-1, -1, len(q), -1)), dim=-1)
        weights = scores.softmax(-1)[..., : len(keys)].flatten(1, 2).to(q.dtype)
        attended = (weights @ values.transpose(0, 1)).view(by_head)
        return attended.permute(2, 0, 1, 3).flatten(1)


def _seen(places: torch.Tensor, begin: int, end: int, window: int | None) -> torch.Tensor:
    """Returns which of the keys from begin to end queries at these places see, bool [Q, S]."""
    keys = torch.arange(begin, end, device=places.device)
    seen = keys <= places[:, None]
    return seen if window is None else seen & (keys > places[:, None] - window)


def _with_tree(seen: torch.Tensor, tree: torch.Tensor) -> torch.Tensor:
    """Returns what queries see if a tree [Q, W] is about the last W keys.

    Padding, which sees none, sees the last key: its row is finite.
    """
    width = min(tree.shape[1], seen.shape[1])
    seen = torch.ones_like(seen)
    seen[:, -width:] = tree[:, -width:]
    seen[:, -1] |= ~seen.any(dim=1)
    return seen


def check_tree(batch: ForwardBatch, counts: list[int]) -> None:
    """Asserts that a batch whose sequences have so many new tokens has a mask for these, or none."""
    if batch.tree_mask is None:
        return
    num_sequences, num_queries, _ = batch.tree_mask.shape
    assert counts == [num_queries] * num_sequences, (
        f"tree_mask is for {num_sequences} sequences of {num_queries} tokens; the batch has "
        f"{len(counts)}, of {sorted(set(counts))}"
    )
