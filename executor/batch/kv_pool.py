"""KV pool: the keys, values and block tables of one rank. No policy.

The router decides which block belongs to which sequence.

    caches[layer][part]  [num_physical_blocks * block_size, heads, width], keys and values, say
    tables[group]        [num_rows, max_blocks_per_row], a sequence's blocks in order

    token p of row r   lives at tables[g, r, p // block_size] * block_size + p % block_size

    blocks    0            scratch: padded token rows write there, and no sequence ever owns it
              1 …          those that the router hands out, below num_blocks
              num_blocks … spill: spill_blocks_per_row of each row, which never change hands

A model has one group of layers, or two: those that see every token, and those that see a window. A
block then holds tokens of one group's layers, whichever has it in its table: the n-th layers of both
keep what they keep in the same tensors. So one pool serves both groups, and the router takes blocks
back that lie wholly before a row's window. Nothing reads there, and what the window's table says of
these columns means nothing.

What a step writes behind a row's blocks, drafts for which there was no block, goes to the row's spill
blocks, in turn: column c of row r is num_blocks + (g * num_rows + r) * n + c % n until a block is put
there. So no row can write where another reads, and up to n blocks behind a row's own no two positions
share a place. Nobody reads there what an earlier step wrote.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from executor.batch.columns import Int64Array

SCRATCH_BLOCK = 0


@dataclass(frozen=True, slots=True)
class KVPart:
    """One tensor that a layer keeps per token.

    Attributes:
        name: What it is.
        num_heads: Heads on this rank.
        width: Of a head.
        dtype: Of its elements.
    """

    name: str
    num_heads: int
    width: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.num_heads * self.width * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVShape:
    """Sizes of what attention keeps per token.

    Attributes:
        groups: Numbers of the layers that share a block table: all, or those that see every token
            and those that see a window.
        parts: What a layer keeps: first keys, then values, unless these are columns of the keys.
        value_width: Columns of a head that are values, from the first of the last part.
        block_size: Tokens per block.
        window: Tokens that layers of the second group see at most, the own one included; None without.
    """

    groups: tuple[tuple[int, ...], ...]
    parts: tuple[KVPart, ...]
    value_width: int
    block_size: int
    window: int | None = None

    @classmethod
    def of_heads(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        windowed: Sequence[int] = (),
        window: int | None = None,
    ) -> "KVShape":
        """Returns what grouped-query attention keeps: keys and values.

        Args:
            windowed: Layers of a group of their own, beside others, which see ``window`` tokens.
        """
        parts = tuple(KVPart(name, num_kv_heads, head_dim, dtype) for name in ("keys", "values"))
        groups = [tuple(i for i in range(num_layers) if i not in windowed), tuple(windowed)]
        return cls(tuple(filter(None, groups)), parts, head_dim, block_size, window)

    @classmethod
    def of_latents(
        cls,
        *,
        num_layers: int,
        latent_dim: int,
        rope_dim: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> "KVShape":
        """Returns what multi-head latent attention keeps: [latent ; rotated key], for all heads."""
        part = KVPart("latents", 1, latent_dim + rope_dim, dtype)
        return cls((tuple(range(num_layers)),), (part,), latent_dim, block_size)

    @property
    def latent_dim(self) -> int | None:
        """Columns of the keys that are the values; None where these are a part of their own."""
        return self.value_width if len(self.parts) == 1 else None

    @property
    def num_layers(self) -> int:
        return sum(map(len, self.groups))

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, all parts of all layers of the larger group."""
        per_token = sum(part.bytes_per_token for part in self.parts)
        return max(map(len, self.groups)) * per_token * self.block_size

    @property
    def window_blocks(self) -> int:
        """Blocks that a window of a sequence lies in at most; 0 without windows."""
        return 0 if self.window is None else (self.window - 2) // self.block_size + 2

    def group_of(self, window: int | None) -> int:
        """Returns the group of layers that see so many tokens, all if None."""
        return int(window is not None and self.window is not None)


class KVPool:
    """Keys, values and block tables of one rank.

    Args:
        shape: Sizes per token.
        num_blocks: As of ``allocate``, at once; None: that is called once all else is made.
        num_rows: Sequences that can hold blocks at once.
        max_blocks_per_row: Blocks of the longest sequence, and behind them.
        spill_blocks_per_row: Blocks of its own behind those, of each row: at least as many as a step
            writes behind a row's blocks; 0 where none does.
        device: Where keys, values and block tables live.

    Attributes:
        caches: The parts of each layer, [num_physical_blocks * block_size, heads, width].
        tensors: The same, each once.
        tables: int32 [groups, num_rows, max_blocks_per_row] on ``device``.
        tables_cpu: The same on the host; shares memory with it if ``device`` is the CPU.
        row_num_blocks: int64 [num_rows] on the host, blocks that each row holds in each table.

    Raises:
        ValueError: A size leaves no room for any sequence.
    """

    def __init__(
        self,
        shape: KVShape,
        *,
        num_blocks: int | None = None,
        num_rows: int,
        max_blocks_per_row: int,
        spill_blocks_per_row: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_rows < 1 or max_blocks_per_row < 1:
            raise ValueError(
                f"num_rows={num_rows}, max_blocks_per_row={max_blocks_per_row}: need at least 1"
            )
        if spill_blocks_per_row < 0:
            raise ValueError(f"spill_blocks_per_row={spill_blocks_per_row}: need at least 0")
        self.num_blocks = 0
        self.num_rows = num_rows
        self.max_blocks_per_row = max_blocks_per_row
        self.spill_blocks_per_row = spill_blocks_per_row
        self.device = torch.device(device)
        self.shape = shape
        self.caches: list[tuple[torch.Tensor, ...]] = []
        self.tensors: list[torch.Tensor] = []
        self._per_block: list[tuple[int, Callable[[], None]]] = []  # of siblings, too
        size = (len(shape.groups), num_rows, max_blocks_per_row)
        self.tables_cpu = torch.zeros(size, dtype=torch.int32)
        self.tables = self.tables_cpu.to(self.device)
        self._fresh_cpu = torch.full_like(self.tables_cpu, SCRATCH_BLOCK)
        self._fresh = self._fresh_cpu.to(self.device)
        self._tables: npt.NDArray[np.int32] = self.tables_cpu.numpy()
        self.row_num_blocks = np.zeros(num_rows, dtype=np.int64)
        self.per_block(shape.bytes_per_block, self._make_caches)
        if num_blocks is not None:
            self.allocate(num_blocks)

    def per_block(self, num_bytes: int, make: Callable[[], None]) -> None:
        """Has something made as soon as the number of blocks is known.

        Args:
            num_bytes: What it takes for each physical block.
            make: Makes it.
        """
        self._per_block.append((num_bytes, make))
        if self.num_blocks:
            make()

    def allocate(self, num_blocks: int) -> None:
        """Takes the memory, once.

        Args:
            num_blocks: Blocks that can be handed out, and the scratch block.

        Raises:
            ValueError: There are too few.
        """
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: need the scratch block and one more")
        self.num_blocks = num_blocks
        if count := self.spill_blocks_per_row:
            rows = torch.arange(len(self.tables) * self.num_rows, dtype=torch.int32)
            columns = torch.arange(self.max_blocks_per_row, dtype=torch.int32) % count
            spilled = num_blocks + rows[:, None] * count + columns
            self._fresh_cpu.copy_(spilled.view_as(self._fresh_cpu))
            self._fresh.copy_(self._fresh_cpu)
        for _, make in self._per_block:
            make()

    def sibling(self, shape: KVShape) -> "KVPool":
        """Returns a pool with keys and values of its own over the same blocks: a draft's.

        Both have the same tables and one ``row_num_blocks``: blocks appended to either are in both.

        Args:
            shape: Sizes per token, with this pool's ``block_size`` and one group.

        Raises:
            ValueError: It has another block size.
        """
        if shape.block_size != self.block_size:
            raise ValueError(
                f"block_size={shape.block_size}: the blocks that it shares have {self.block_size} "
                f"tokens"
            )
        pool = copy(self)
        pool.shape = shape

        def make() -> None:
            pool.num_blocks = self.num_blocks
            pool._make_caches()

        self.per_block(shape.bytes_per_block, make)
        return pool

    def _make_caches(self) -> None:
        num_tokens = self.num_physical_blocks * self.block_size
        shared = [
            tuple(
                _zeros((num_tokens, p.num_heads, p.width), p.dtype, self.device)
                for p in self.shape.parts
            )
            for _ in range(max(map(len, self.shape.groups)))
        ]
        by_layer = {
            layer: parts
            for group in self.shape.groups
            for layer, parts in zip(group, shared, strict=False)
        }
        self.caches = [by_layer[layer] for layer in range(self.shape.num_layers)]
        self.tensors = [cache for parts in shared for cache in parts]

    @property
    def num_spill_blocks(self) -> int:
        """Spill blocks of all rows."""
        return len(self.tables) * self.num_rows * self.spill_blocks_per_row

    @property
    def num_physical_blocks(self) -> int:
        """Blocks that take memory: ``num_blocks``, and behind them the spill blocks."""
        return self.num_blocks + self.num_spill_blocks

    @property
    def block_size(self) -> int:
        return self.shape.block_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, as of ``KVShape``."""
        return self.shape.bytes_per_block

    @property
    def all_bytes_per_block(self) -> int:
        """The same with all that ``per_block`` has been told of: siblings' blocks, drafts' carries."""
        return sum(num_bytes for num_bytes, _ in self._per_block)

    @property
    def is_table_shared(self) -> bool:
        """Whether the device reads the host's block tables, so that there is but one of each."""
        return self.tables is self.tables_cpu

    def append_blocks(
        self,
        rows: npt.ArrayLike,
        starts: npt.ArrayLike,
        counts: npt.ArrayLike,
        block_ids: npt.ArrayLike,
    ) -> None:
        """Puts blocks into rows, on host and device: ``append_blocks_on_host`` of any sequences."""
        columns = [np.asarray(column, np.int64) for column in (rows, starts, counts, block_ids)]
        places = torch.from_numpy(self.append_blocks_on_host(*columns))
        if not self.is_table_shared:
            ids = torch.from_numpy(columns[3])
            self.write_blocks(places.to(self.device), ids.to(self.device))

    def append_blocks_on_host(
        self, rows: Int64Array, starts: Int64Array, counts: Int64Array, block_ids: Int64Array
    ) -> Int64Array:
        """Puts blocks into rows on the host, unchecked: read_step.py has checked them.

        Args:
            rows: [N] rows of the tables.
            starts: [N] blocks of that row that stay: at most as many as it holds. 0 gives the row to
                a new sequence.
            counts: [N] blocks to write after them.
            block_ids: [groups * sum(counts)] the blocks, row after row, table after table.

        Returns:
            int64, as many, the indices of the blocks in the tables laid flat, for ``write_blocks``.
        """
        ends = starts + counts
        first = rows * self.max_blocks_per_row + ends - np.cumsum(counts)
        places: Int64Array = np.arange(block_ids.size // len(self._tables))
        places += np.repeat(first, counts)
        if len(self._tables) > 1:
            places = np.concatenate((places, places + self._tables[0].size))
        self._tables.ravel()[places] = block_ids
        self.row_num_blocks[rows] = ends
        return places

    def write_blocks(self, places: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Brings the device's tables up to date. Does not wait for the device.

        Args:
            places: int64 [N] on the device, from ``append_blocks_on_host``.
            block_ids: int64 [N] on the device, what belongs there.
        """
        self.tables.view(-1).index_copy_(0, places, block_ids.to(torch.int32))

    def locate(
        self, rows: Int64Array, positions: Int64Array, *, out: Int64Array, group: int = 0
    ) -> None:
        """Locates tokens' keys and values, unchecked: for rows that hold their blocks.

        Args:
            rows: [T] row of each token.
            positions: [T] its place in the sequence.
            out: [T] its place in ``caches``; may be ``rows``.
            group: Of the layers that keep them.
        """
        columns = positions // self.block_size
        np.subtract(self._tables[group][rows, columns], columns, out=out)
        out *= self.block_size
        out += positions

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies what all layers keep from slots to other slots: first all are read.

        Args:
            sources, targets: int64 [N] places in ``caches``, on the device.
        """
        for cache in self.tensors:
            cache.index_copy_(0, targets, cache.index_select(0, sources))

    def clear_rows(self, rows: Int64Array) -> None:
        """Points rows that begin to their spill blocks, on host and device: what lies behind a
        row's blocks leads nowhere else. Without spill blocks, that is the scratch block."""
        self._tables[:, rows] = self._fresh_cpu.numpy()[:, rows]
        if not self.is_table_shared:
            at = torch.from_numpy(rows)
            if self.device.type == "cuda":  # from pinned memory the copy does not wait
                at = at.pin_memory().to(self.device, non_blocking=True)
            at = at.to(self.device)
            self.tables.index_copy_(1, at, self._fresh.index_select(1, at))


def _zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns zeros. On a CPU the kernel gives their memory as it is first written.

    To have a gigabyte of it at once takes longer than everything else that a restarted executor does.
    """
    if device.type != "cpu":
        return torch.zeros(*size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(size) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*size)
