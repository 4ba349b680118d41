"""The KV tensors of one rank and the block-table row of each sequence. No policy.

The router decides which block belongs to whom; this file only remembers what it was told.

    key_cache[layer]   [num_physical_blocks * block_size, kv_heads, head_dim]     value_cache alike
    block_table        [num_rows, max_blocks_per_row], a sequence's blocks in order

    token p of row r   lives at block_table[r, p // block_size] * block_size + p % block_size

    blocks    0            scratch: padded token rows write there, and no sequence ever owns it
              1 …          those that the router hands out, below num_blocks
              num_blocks … spill: spill_blocks_per_row of each row, which never change hands

What a step writes behind a row's blocks, drafts for which there was no block, goes to the row's spill
blocks, in turn: column c of row r is num_blocks + r * n + c % n until a block is put there. So no row
can write where another reads, and up to n blocks behind a row's own no two positions share a place.
Nobody reads there what an earlier step wrote.
"""

from copy import copy
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

SCRATCH_BLOCK = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """Sizes of the keys and values that grouped-query attention keeps per token.

    Attributes:
        num_layers: Layers that keep keys and values.
        num_kv_heads: KV heads on this rank.
        head_dim: Width of a head.
        block_size: Tokens per block.
        dtype: Type of keys and values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, keys and values, all layers."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return per_token * self.block_size * self.dtype.itemsize


class KVPool:
    """Keys, values and block table of one rank.

    Args:
        shape: Sizes per token.
        num_blocks: Blocks that can be handed out, and the scratch block.
        num_rows: Sequences that can hold blocks at once.
        max_blocks_per_row: Blocks of the longest sequence, and behind them.
        spill_blocks_per_row: Blocks of its own behind those, of each row: at least as many as a step
            writes behind a row's blocks; 0 where none does.
        device: Where keys, values and block table live.

    Attributes:
        key_cache: One tensor per layer, [num_physical_blocks * block_size, kv_heads, head_dim].
        value_cache: The same for values.
        block_table: int32 [num_rows, max_blocks_per_row] on ``device``.
        block_table_cpu: The same on the host; shares memory with it if ``device`` is the CPU.
        row_num_blocks: int64 [num_rows] on the host, blocks that each row holds.

    Raises:
        ValueError: A size leaves no room for any sequence.
    """

    def __init__(
        self,
        shape: KVShape,
        *,
        num_blocks: int,
        num_rows: int,
        max_blocks_per_row: int,
        spill_blocks_per_row: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: need the scratch block and one more")
        if num_rows < 1 or max_blocks_per_row < 1:
            raise ValueError(
                f"num_rows={num_rows}, max_blocks_per_row={max_blocks_per_row}: need at least 1"
            )
        if spill_blocks_per_row < 0:
            raise ValueError(f"spill_blocks_per_row={spill_blocks_per_row}: need at least 0")
        self.num_blocks = num_blocks
        self.num_rows = num_rows
        self.max_blocks_per_row = max_blocks_per_row
        self.spill_blocks_per_row = spill_blocks_per_row
        self.device = torch.device(device)
        self._make_caches(shape)
        self.block_table_cpu = torch.zeros(num_rows, max_blocks_per_row, dtype=torch.int32)
        self.block_table = self.block_table_cpu.to(self.device)
        self._fresh_table_cpu = self._spill_table()
        self._fresh_table = self._fresh_table_cpu.to(self.device)
        self._table: npt.NDArray[np.int32] = self.block_table_cpu.numpy()
        self.row_num_blocks = np.zeros(num_rows, dtype=np.int64)

    def sibling(self, shape: KVShape) -> "KVPool":
        """Returns a pool with keys and values of its own over the same blocks: a draft's.

        Both have one block table and one ``row_num_blocks``: blocks appended to either are in both.

        Args:
            shape: Sizes per token, with this pool's ``block_size``.

        Raises:
            ValueError: It has another block size.
        """
        if shape.block_size != self.block_size:
            raise ValueError(
                f"block_size={shape.block_size}: the blocks that it shares have {self.block_size} "
                f"tokens"
            )
        pool = copy(self)
        pool._make_caches(shape)
        return pool

    def _make_caches(self, shape: KVShape) -> None:
        self.shape = shape
        size = (self.num_physical_blocks * shape.block_size, shape.num_kv_heads, shape.head_dim)
        zeros = partial(torch.zeros, size, dtype=shape.dtype, device=self.device)
        self.key_cache = [zeros() for _ in range(shape.num_layers)]
        self.value_cache = [zeros() for _ in range(shape.num_layers)]

    def _spill_table(self) -> torch.Tensor:
        """Returns the table of rows that hold nothing, int32 [num_rows, max_blocks_per_row]."""
        count = self.spill_blocks_per_row
        if not count:
            return torch.full_like(self.block_table_cpu, SCRATCH_BLOCK)
        firsts = self.num_blocks + torch.arange(self.num_rows, dtype=torch.int32) * count
        return firsts[:, None] + torch.arange(self.max_blocks_per_row, dtype=torch.int32) % count

    @property
    def num_spill_blocks(self) -> int:
        """Spill blocks of all rows."""
        return self.num_rows * self.spill_blocks_per_row

    @property
    def num_physical_blocks(self) -> int:
        """Blocks that take memory: ``num_blocks``, and behind them the spill blocks."""
        return self.num_blocks + self.num_spill_blocks

    @property
    def block_size(self) -> int:
        return self.shape.block_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, keys and values, all layers."""
        return self.shape.bytes_per_block

    @property
    def is_table_shared(self) -> bool:
        """Whether the device reads the host's block table, so that there is but one."""
        return self.block_table is self.block_table_cpu

    def append_blocks(
        self,
        rows: npt.ArrayLike,
        starts: npt.ArrayLike,
        counts: npt.ArrayLike,
        block_ids: npt.ArrayLike,
    ) -> None:
        """Puts blocks into rows, on host and device. A start of 0 gives a row to a new sequence.

        Nothing is written unless everything fits.

        Args:
            rows: [N] rows of the block table.
            starts: [N] blocks of that row that stay: at most as many as it holds.
            counts: [N] blocks to write after them.
            block_ids: [sum(counts)] the blocks, row after row.

        Raises:
            ValueError: The columns do not fit one another, the table or the pool.
        """
        ids = np.asarray(block_ids, dtype=np.int64)
        places = torch.from_numpy(self.append_blocks_on_host(rows, starts, counts, ids))
        if not self.is_table_shared:
            self.write_blocks(places.to(self.device), torch.from_numpy(ids).to(self.device))

    def append_blocks_on_host(
        self,
        rows: npt.ArrayLike,
        starts: npt.ArrayLike,
        counts: npt.ArrayLike,
        block_ids: npt.ArrayLike,
    ) -> npt.NDArray[np.int64]:
        """Does what ``append_blocks`` does, but leaves the device's table to ``write_blocks``.

        Returns:
            int64 [sum(counts)], the places of the blocks in the table laid flat.

        Raises:
            ValueError: As ``append_blocks``.
        """
        rows_, starts_, counts_ = _columns(rows=rows, starts=starts, counts=counts)
        ids = np.asarray(block_ids, dtype=np.int64)
        self._check_rows(rows_)
        ends = starts_ + counts_
        if counts_.size and counts_.min() < 0:
            raise ValueError(f"counts has {counts_.min()}: a row cannot lose blocks")
        if ids.shape != (counts_.sum(),):
            raise ValueError(f"counts adds up to {counts_.sum()}, but {ids.size} block_ids came")
        if ends.size and ends.max() > self.max_blocks_per_row:
            raise ValueError(
                f"row {rows_[ends.argmax()]} would hold {ends.max()} blocks; "
                f"at most {self.max_blocks_per_row} fit"
            )
        if np.any((starts_ < 0) | (starts_ > self.row_num_blocks[rows_])):
            raise ValueError("starts leaves a hole: it is above the blocks that the row holds")
        if ids.size and not SCRATCH_BLOCK < ids.min() <= ids.max() < self.num_blocks:
            raise ValueError(
                f"block_ids run from {ids.min()} to {ids.max()}; "
                f"this pool hands out 1 to {self.num_blocks - 1}"
            )
        first = rows_ * self.max_blocks_per_row + ends - np.cumsum(counts_)
        places: npt.NDArray[np.int64] = np.arange(ids.size) + np.repeat(first, counts_)
        self._table.ravel()[places] = ids
        self.row_num_blocks[rows_] = ends
        return places

    def write_blocks(self, places: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Brings the device's table up to date. Does not wait for the device.

        Args:
            places: int64 [N] on the device, from ``append_blocks_on_host``.
            block_ids: int64 [N] on the device, what belongs there.
        """
        self.block_table.view(-1).index_copy_(0, places, block_ids.to(torch.int32))

    def out_cache_loc(
        self, rows: npt.ArrayLike, num_computed: npt.ArrayLike, num_tokens: npt.ArrayLike
    ) -> torch.Tensor:
        """Returns where the next tokens' keys and values go.

        Args:
            rows: [B] rows of the block table.
            num_computed: [B] tokens that the row already has in the pool.
            num_tokens: [B] tokens to add.

        Returns:
            int64 [sum(num_tokens)] on the pool's device, sequence after sequence.

        Raises:
            ValueError: A row has too few blocks for its tokens.
        """
        rows_, prefix_lens, new_lens = _columns(
            rows=rows, num_computed=num_computed, num_tokens=num_tokens
        )
        self._check_rows(rows_)
        capacity = self.row_num_blocks[rows_] * self.block_size
        missing = prefix_lens + new_lens - capacity
        if missing.size and missing.max() > 0:
            worst = int(missing.argmax())
            raise ValueError(
                f"row {rows_[worst]} holds blocks for {capacity[worst]} tokens, not for "
                f"{prefix_lens[worst] + new_lens[worst]}: append blocks first"
            )
        shift = prefix_lens - (np.cumsum(new_lens) - new_lens)
        locations = np.repeat(rows_, new_lens)
        positions = np.arange(len(locations)) + np.repeat(shift, new_lens)
        self.locate(locations, positions, out=locations)
        return torch.from_numpy(locations).to(self.device)

    def locate(
        self,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        *,
        out: npt.NDArray[np.int64],
    ) -> None:
        """Says where tokens' keys and values are, unchecked: for rows that hold their blocks.

        Args:
            rows: [T] row of each token.
            positions: [T] its place in the sequence.
            out: [T] its place in ``key_cache`` and ``value_cache``; may be ``rows``.
        """
        columns = positions // self.block_size
        np.subtract(self._table[rows, columns], columns, out=out)
        out *= self.block_size
        out += positions

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies keys and values of all layers from slots to other slots: first all are read.

        Args:
            sources, targets: int64 [N] places in ``key_cache`` and ``value_cache``, on the device.
        """
        for cache in (*self.key_cache, *self.value_cache):
            cache.index_copy_(0, targets, cache.index_select(0, sources))

    def clear_rows(self, rows: npt.NDArray[np.int64]) -> None:
        """Points rows that begin to their spill blocks, on host and device: what lies behind a
        row's blocks leads nowhere else. Without spill blocks, that is the scratch block."""
        self._table[rows] = self._fresh_table_cpu.numpy()[rows]
        if not self.is_table_shared:
            at = torch.from_numpy(rows)
            if self.device.type == "cuda":  # from pinned memory the copy does not wait
                at = at.pin_memory().to(self.device, non_blocking=True)
            at = at.to(self.device)
            self.block_table.index_copy_(0, at, self._fresh_table.index_select(0, at))

    def _check_rows(self, rows: npt.NDArray[np.int64]) -> None:
        if rows.size and not 0 <= rows.min() <= rows.max() < self.num_rows:
            raise ValueError(
                f"rows run from {rows.min()} to {rows.max()}; this pool has 0 to {self.num_rows - 1}"
            )


def _columns(**columns: npt.ArrayLike) -> list[npt.NDArray[np.int64]]:
    """Returns the columns as int64 arrays of one length."""
    arrays = {name: np.asarray(column, dtype=np.int64) for name, column in columns.items()}
    if len({array.shape for array in arrays.values()}) > 1:
        lengths = ", ".join(f"{name} has {array.size}" for name, array in arrays.items())
        raise ValueError(f"columns of unequal length: {lengths} entries")
    return list(arrays.values())
