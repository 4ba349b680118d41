"""Grouped-query attention over the paged KV pool, in plain PyTorch.

Sequences with one new token are attended a few together: of about equal length, so that a long one
does not make short ones pay for its padding, and as many as the workspace holds. A sequence with
more new tokens is attended by itself, in tiles of queries.

Keys and values are copied from their blocks into a workspace that stays in the cache of a core.
It is sized by the pool's longest row, never by a batch.

    B sequences    T token rows    H query heads    N KV heads    G = H / N    D head width

The group is laid along the query dimension (decode) or the head dimension (extend) with the KV
head as batch dimension, so keys and values are never repeated: repeating them, as
``enable_gqa`` does, costs a copy of the context per layer.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from executor.forward_batch import ForwardBatch
from executor.kv_pool import KVPool
from executor.layers.workers import WorkerPool

_MIN_BUCKET_BLOCKS = 8  # below this, padding costs less than another batch
_WORKSPACE_TOKENS = 2048  # 1 MiB of keys for 4 heads of 64 in bfloat16; more if a row is longer
_QUERY_TILE = 128  # queries per tile: each tile leaves out the keys in its future


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Sequences with one new token and about equally many blocks.

    Attributes:
        start, stop: Their places among all sequences with one new token, in ``decode_rows``.
        blocks: int64 [B * max_blocks], their blocks, each padded with its own first one.
        unwritten: int64, the places in those blocks that hold no token of theirs.
        mask: [B, 1, G, max_blocks * block_size], 0 or -inf; None if nothing is padded.
    """

    start: int
    stop: int
    blocks: torch.Tensor
    unwritten: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _ExtendTile:
    """Up to _QUERY_TILE queries of one sequence, against the keys that they may see.

    Attributes:
        start, stop: Rows in q.
        num_keys: Keys up to the last query's own.
        mask: [stop - start, num_keys], 0 or -inf; None if causal from the sequence's start.
    """

    start: int
    stop: int
    num_keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _ExtendSequence:
    """One sequence with several new tokens.

    Attributes:
        start, stop: Its rows in q, k and v.
        blocks: int64, its blocks; None if all its keys and values are in this very pass.
        tiles: Its queries.
    """

    start: int
    stop: int
    blocks: torch.Tensor | None
    tiles: tuple[_ExtendTile, ...]


@dataclass(frozen=True, slots=True)
class _Metadata:
    """What ``forward`` needs of a batch, the same for every layer.

    Attributes:
        decode_rows: int64, the rows in q of sequences with one new token, group after group;
            None if these are all rows, in order.
    """

    out_cache_loc: torch.Tensor
    kv_pool: KVPool
    workspaces: "tuple[_Workspace, ...]"
    decode_rows: torch.Tensor | None
    decode_groups: tuple[_DecodeGroup, ...]
    extend_sequences: tuple[_ExtendSequence, ...]


class _Workspace:
    """Room for the keys and values of a few sequences, taken out of their blocks.

    Holds what it last took: the next ``take`` overwrites it.
    """

    def __init__(self, kv_pool: KVPool) -> None:
        row_tokens = kv_pool.max_blocks_per_row * kv_pool.block_size
        self.kv_pool = kv_pool
        self.num_blocks = max(_WORKSPACE_TOKENS, row_tokens) // kv_pool.block_size
        width = kv_pool.block_size * kv_pool.shape.num_kv_heads * kv_pool.shape.head_dim
        size = (2, self.num_blocks, width)  # keys, values
        room = torch.zeros(size, dtype=kv_pool.shape.dtype, device=kv_pool.device)
        self._keys, self._values = room
        # A fill writes element by element: of eight bytes, it takes half as long as of two.
        num_tokens = self.num_blocks * kv_pool.block_size
        self._words = room.view(torch.int64).view(2, num_tokens, -1)

    def take(self, blocks: torch.Tensor, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of the blocks, each [len(blocks) * block_size, N, D]."""
        pool = self.kv_pool
        taken = []
        for cache, room in (
            (pool.key_cache[layer_id], self._keys),
            (pool.value_cache[layer_id], self._values),
        ):
            out = room[: len(blocks)]
            torch.index_select(cache.view(pool.num_blocks, -1), 0, blocks, out=out)
            taken.append(out.view(-1, *cache.shape[1:]))
        return taken[0], taken[1]

    def clear(self, places: torch.Tensor) -> None:
        """Zeroes keys and values at these places of what ``take`` returned."""
        self._words.index_fill_(1, places, 0)


class TorchAttention:
    """The attention backend of the CPU, and what other backends must match.

    Not capturable: sequences are grouped by length on the host.

    Args:
        num_heads: H.
        num_kv_heads: N, a divisor of H.
        head_dim: D.
        dtype: Type of q, k, v and the KV pool.
        num_workers: Threads of its worker pool; as many as OpenMP has if None.
    """

    is_capturable = False

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        num_workers: int | None = None,
    ) -> None:
        self.num_kv_heads = num_kv_heads
        self.group_size = num_heads // num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self._metadata: _Metadata | None = None
        self._workers = WorkerPool(num_workers)
        self._workspaces: tuple[_Workspace, ...] = ()  # one per worker

    def init_forward_metadata_in_graph(self) -> None:
        """Nothing: all is planned on the host."""

    def on_after_cuda_graph_warmup(self) -> None:
        """Nothing: metadata stays as planned."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, kv_pool: KVPool) -> None:
        seq_lens = batch.seq_lens_cpu.numpy()
        if batch.extend_seq_lens_cpu is None:
            new_lens = np.ones(batch.batch_size, dtype=np.int64)
        else:
            new_lens = batch.extend_seq_lens_cpu
        starts = np.cumsum(new_lens) - new_lens
        decoding = np.flatnonzero(new_lens == 1)
        rows = batch.req_pool_indices.cpu().numpy()
        if not self._workspaces or self._workspaces[0].kv_pool is not kv_pool:
            self._workspaces = tuple(_Workspace(kv_pool) for _ in range(self._workers.size))
        groups = _group_by_blocks(
            decoding, seq_lens, kv_pool.block_size, self._workspaces[0].num_blocks
        )
        decode_order = starts[np.concatenate(groups)] if groups else starts[:0]
        is_whole = bool(groups) and np.array_equal(decode_order, np.arange(len(batch.input_ids)))
        stops = np.cumsum([len(group) for group in groups]).tolist()
        self._metadata = _Metadata(
            out_cache_loc=batch.out_cache_loc,
            kv_pool=kv_pool,
            workspaces=self._workspaces,
            decode_rows=None if is_whole else torch.from_numpy(decode_order).to(kv_pool.device),
            decode_groups=tuple(
                self._plan_decode(stop - len(group), rows[group], seq_lens[group], kv_pool)
                for group, stop in zip(groups, stops, strict=True)
            ),
            extend_sequences=tuple(
                self._plan_extend(
                    int(starts[i]), int(new_lens[i]), int(seq_lens[i]), int(rows[i]), kv_pool
                )
                for i in np.flatnonzero(new_lens > 1)
            ),
        )

    def _plan_decode(
        self,
        start: int,
        rows: npt.NDArray[np.int64],
        seq_lens: npt.NDArray[np.int64],
        kv_pool: KVPool,
    ) -> _DecodeGroup:
        block_size = kv_pool.block_size
        max_blocks = -(-int(seq_lens.max()) // block_size)
        num_keys = max_blocks * block_size
        mask = None
        if int(seq_lens.min()) < num_keys:
            hidden = torch.arange(num_keys) >= torch.from_numpy(seq_lens)[:, None]
            mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, -torch.inf)
            mask = mask[:, None, None, :].expand(-1, 1, self.group_size, -1).contiguous()
            mask = mask.to(kv_pool.device)
        # A mask hides neither NaN nor infinity, and a slot without a token of the sequence holds
        # what another left there. Its first block is its own: in the padding it saves clearing.
        columns = np.arange(max_blocks)
        columns = np.where(columns * block_size < seq_lens[:, None], columns, 0)
        blocks = kv_pool.block_table_cpu.numpy()[rows[:, None], columns]
        positions = columns[:, :, None] * block_size + np.arange(block_size)
        unwritten = np.flatnonzero(positions >= seq_lens[:, None, None])
        return _DecodeGroup(
            start=start,
            stop=start + len(rows),
            blocks=torch.from_numpy(blocks.ravel().astype(np.int64)).to(kv_pool.device),
            unwritten=torch.from_numpy(unwritten).to(kv_pool.device),
            mask=mask,
        )

    def _plan_extend(
        self, start: int, new_len: int, seq_len: int, row: int, kv_pool: KVPool
    ) -> _ExtendSequence:
        prefix_len = seq_len - new_len
        tiles = []
        for first in range(0, new_len, _QUERY_TILE):
            last = min(first + _QUERY_TILE, new_len)
            num_keys = prefix_len + last
            mask = None
            if prefix_len + first > 0:
                seen = torch.ones(last - first, num_keys, dtype=torch.bool)
                hidden = ~seen.tril_(prefix_len + first)
                mask = torch.zeros(hidden.shape, dtype=self.dtype)
                mask = mask.masked_fill_(hidden, -torch.inf).to(kv_pool.device)
            tiles.append(_ExtendTile(start + first, start + last, num_keys, mask))
        blocks = None
        if prefix_len:
            table_row = kv_pool.block_table_cpu[row, : -(-seq_len // kv_pool.block_size)]
            blocks = table_row.to(kv_pool.device, torch.int64)
        return _ExtendSequence(start, start + new_len, blocks, tuple(tiles))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int
    ) -> torch.Tensor:
        metadata = self._metadata
        assert metadata is not None, "init_forward_metadata_out_graph runs before each pass"
        with self._workers.sharing(len(q)):
            return self._attend(q, k, v, metadata, layer_id)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: _Metadata,
        layer_id: int,
    ) -> torch.Tensor:
        key_cache = metadata.kv_pool.key_cache[layer_id]
        value_cache = metadata.kv_pool.value_cache[layer_id]
        key_cache.index_copy_(0, metadata.out_cache_loc, k)
        value_cache.index_copy_(0, metadata.out_cache_loc, v)
        if metadata.decode_rows is None:
            return self._decode(q, metadata, layer_id)
        out = q.new_zeros(q.shape[0], q.shape[1] * self.head_dim)
        if metadata.decode_groups:
            attended = self._decode(q[metadata.decode_rows], metadata, layer_id)
            out.index_copy_(0, metadata.decode_rows, attended)
        for sequence in metadata.extend_sequences:
            self._extend(q, k, v, sequence, metadata.workspaces[0], layer_id, out)
        return out

    def _decode(self, q: torch.Tensor, metadata: _Metadata, layer_id: int) -> torch.Tensor:
        """Returns [B, H * D] for q [B, H, D], group after group. Workers share the groups."""
        groups = metadata.decode_groups
        if len(groups) == 1:
            return self._decode_groups(q, groups, metadata.workspaces[0], layer_id)[0]
        shares = self._workers.shares([len(group.blocks) for group in groups])
        pieces = [
            partial(self._decode_groups, q, groups[share], workspace, layer_id)
            for share, workspace in zip(shares, metadata.workspaces, strict=False)
        ]
        attended = [x for piece in self._workers.run(pieces) for x in piece]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _decode_groups(
        self,
        q: torch.Tensor,
        groups: tuple[_DecodeGroup, ...],
        workspace: _Workspace,
        layer_id: int,
    ) -> list[torch.Tensor]:
        """Returns [B, H * D] of each group."""
        attended = []
        for group in groups:
            shape = (group.stop - group.start, -1, self.num_kv_heads, self.head_dim)
            k, v = (taken.view(shape) for taken in workspace.take(group.blocks, layer_id))
            if len(group.unwritten):
                workspace.clear(group.unwritten)
            grouped = (shape[0], self.num_kv_heads, self.group_size, self.head_dim)
            out = F.scaled_dot_product_attention(
                q[group.start : group.stop].reshape(grouped),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=group.mask,
            )
            attended.append(out.reshape(shape[0], -1))
        return attended

    def _extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sequence: _ExtendSequence,
        workspace: _Workspace,
        layer_id: int,
        out: torch.Tensor,
    ) -> None:
        """Writes the sequence's rows of ``out`` [T, H * D]. Workers share the tiles."""
        if sequence.blocks is None:
            keys, values = k[sequence.start : sequence.stop], v[sequence.start : sequence.stop]
        else:
            keys, values = workspace.take(sequence.blocks, layer_id)
        shape = (-1, self.num_kv_heads, self.group_size, self.head_dim)
        q = q.view(shape).permute(1, 2, 0, 3)  # N, G, T, D
        out = out.view(shape).permute(1, 2, 0, 3)
        keys, values = self._per_group(keys), self._per_group(values)
        tiles = sequence.tiles
        shares = self._workers.shares([(tile.stop - tile.start) * tile.num_keys for tile in tiles])
        self._workers.run([partial(_run_tiles, q, keys, values, out, tiles[s]) for s in shares])

    def _per_group(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x [S, N, D] as [N, G, S, D] without copying."""
        return x.transpose(0, 1)[:, None].expand(-1, self.group_size, -1, -1)


def _run_tiles(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    tiles: tuple[_ExtendTile, ...],
) -> None:
    """Writes the tiles' part of ``out``. Everything is [N, G, rows, D]."""
    for tile in tiles:
        out[:, :, tile.start : tile.stop] = F.scaled_dot_product_attention(
            q[:, :, tile.start : tile.stop],
            keys[:, :, : tile.num_keys],
            values[:, :, : tile.num_keys],
            attn_mask=tile.mask,
            is_causal=tile.mask is None,
        )


def _group_by_blocks(
    sequences: npt.NDArray[np.int64],
    seq_lens: npt.NDArray[np.int64],
    block_size: int,
    max_group_blocks: int,
) -> list[npt.NDArray[np.int64]]:
    """Splits sequence indices so that none pays for more than twice its own blocks.

    A group's sequences, padded to its longest, need at most ``max_group_blocks``.
    """
    groups = []
    num_blocks = np.maximum(-(-seq_lens[sequences] // block_size), 1)
    buckets = np.ceil(np.log2(np.maximum(num_blocks, _MIN_BUCKET_BLOCKS))).astype(np.int64)
    for bucket in np.unique(buckets):
        members = buckets == bucket
        size = max(max_group_blocks // int(num_blocks[members].max()), 1)
        alike = sequences[members]
        groups += [alike[i : i + size] for i in range(0, len(alike), size)]
    return groups
