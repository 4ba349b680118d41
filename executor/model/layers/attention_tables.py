"""Page tables and tree masks as FlashInfer's attention reads them.

    B sequences    P pages, of all sequences together    C columns of the block table
    Q queries of each sequence    W keys that the tree is about    n keys of a sequence

Lengths are on the host and rows of the block table on the device, so both sides do their part and
neither waits: offsets are counted here, pages are looked up there.

A tree mask has a bit for each query and each key of its sequence: Q lines of n bits, line after
line, the lowest bit of a byte first; a sequence begins with a byte of its own. Only the last W bits
of a line depend on the tree: the others are 1.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from executor.batch.columns import Int64Array

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Offsets of a batch, on the host.

    Attributes:
        qo_indptr: int32 [B + 1], first query row of each sequence, then their sum.
        kv_indptr: int32 [B + 1], first page of each sequence, then P.
        last_page_len: int32 [B], keys in each sequence's last page, 1 to block_size.
        num_keys: int32 [B], keys of each sequence, at least 1, from its first page on.
        firsts: int32 [B], the column of each sequence's first page; None if that is 0 of all.
    """

    qo_indptr: Int32Array
    kv_indptr: Int32Array
    last_page_len: Int32Array
    num_keys: Int32Array
    firsts: Int32Array | None

    @property
    def num_rows(self) -> int:
        """Query rows of all sequences."""
        return int(self.qo_indptr[-1])

    @property
    def num_pages(self) -> int:
        """P."""
        return int(self.kv_indptr[-1])


def plan_pages(
    seq_lens: Int64Array, new_lens: Int64Array | None, block_size: int, window: int | None = None
) -> PagePlan:
    """Counts query rows and pages.

    A padded sequence may be shorter than the rows that it runs; it gets a page table as if it were
    as long, so that no query is without a key.

    Args:
        seq_lens: [B] keys of each sequence, those of this pass included.
        new_lens: [B] query rows of each sequence, at least 1; None if each has one.
        block_size: Keys per page.
        window: Keys that a query sees, with its own; None for all. Pages before them are left out.
    """
    new_lens = np.ones_like(seq_lens) if new_lens is None else new_lens
    num_keys, firsts = np.maximum(seq_lens, new_lens), None
    if window is not None:
        firsts = np.maximum(num_keys - new_lens + 1 - window, 0) // block_size
        num_keys = num_keys - firsts * block_size
    num_pages = -(-num_keys // block_size)
    return PagePlan(
        qo_indptr=_offsets(new_lens),
        kv_indptr=_offsets(num_pages),
        last_page_len=(num_keys - (num_pages - 1) * block_size).astype(np.int32),
        num_keys=num_keys.astype(np.int32),
        firsts=None if firsts is None else firsts.astype(np.int32),
    )


def look_up_pages(
    block_table: torch.Tensor,
    rows: torch.Tensor,
    kv_indptr: torch.Tensor,
    places: torch.Tensor,
    firsts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns int32 [P], the pages of each row, row after row. All on one device, nothing waits.

    Args:
        block_table: int32 [num_rows, C].
        rows: int64 [B] lines of it.
        kv_indptr: int32 [B + 1] from ``plan_pages``.
        places: int32 [P], 0 to P - 1.
        firsts: int32 [B], the column of each row's first page; None if that is 0 of all.
        out: int32 [P], where they go; None: to new memory.
    """
    sequence = torch.searchsorted(kv_indptr[1:], places, right=True)
    column = places - kv_indptr[sequence]
    if firsts is not None:
        column += firsts[sequence]
    found = (rows[sequence], column)
    if out is None:
        return block_table[found]
    torch.ops.aten.index.Tensor_out(block_table, list(found), out=out)
    return out


def _offsets(counts: Int64Array) -> Int32Array:
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets


Count = TypeVar("Count", int, Int32Array, torch.Tensor)


class TreeBits:
    """A batch's bits, in memory that stays where it is: B and Q are fixed, lengths are not.

    Args:
        bits: uint8 on the device, ``num_bytes`` or more.
        indptr: int32 [B + 1] on the device, for the first byte of each sequence.
        num_keys: int32 [B] on the device, for n of each.
        width: Q.
    """

    def __init__(
        self, bits: torch.Tensor, indptr: torch.Tensor, num_keys: torch.Tensor, width: int
    ) -> None:
        self.bits = bits
        self.indptr = indptr
        self._num_keys = num_keys
        self._width = width

    @staticmethod
    def num_bytes(num_sequences: int, width: int, max_len: int) -> int:
        """Returns how many bytes sequences of at most ``max_len`` keys need."""
        return num_sequences * _bytes(width * max_len)

    def has_room(self, num_sequences: int, width: int) -> bool:
        """Whether ``first`` may be asked for so much."""
        return num_sequences < len(self.indptr) and width <= self._width

    def first(self, num_sequences: int, width: int) -> "TreeBits":
        """Returns those of a batch no larger, in the same memory."""
        indptr, num_keys = self.indptr[: num_sequences + 1], self._num_keys[:num_sequences]
        return TreeBits(self.bits, indptr, num_keys, width)

    def plan(self, num_keys: Int32Array) -> None:
        """Takes the lengths, on the host and without waiting. Before each pass and each replay."""
        indptr = np.zeros(len(num_keys) + 1, dtype=np.int32)
        np.cumsum(_bytes(self._width * num_keys), out=indptr[1:])
        assert indptr[-1] <= len(self.bits), "longer sequences than it was made for"
        for buffer, values in ((self.indptr, indptr), (self._num_keys, num_keys)):
            on_host = torch.from_numpy(values)
            if buffer.device.type == "cuda":
                on_host = on_host.pin_memory()
            buffer.copy_(on_host, non_blocking=True)

    def write(self, tree_mask: torch.Tensor) -> None:
        """Writes the bits. Device work of fixed shapes, for the start of a graph.

        Computes the bytes that hold a line's last W bits. Lines may share a byte: each computes all
        of it, so they agree.

        Args:
            tree_mask: bool [B, Q, W].
        """
        num_sequences, width, tree_width = tree_mask.shape
        device = tree_mask.device
        num_keys = self._num_keys.long().view(-1, 1, 1)
        lines = torch.arange(width, device=device).view(1, -1, 1)
        first = lines * num_keys + (num_keys - tree_width).clamp_min(0)
        bytes_ = first // 8 + torch.arange(_bytes(tree_width + 7), device=device)
        bytes_ = torch.minimum(bytes_, _bytes(width * num_keys) - 1)
        shifts = torch.arange(8, device=device)
        bits, num_keys = bytes_.unsqueeze(-1) * 8 + shifts, num_keys.unsqueeze(-1)
        columns = bits % num_keys - (num_keys - tree_width)
        sequences = torch.arange(num_sequences, device=device).view(-1, 1, 1, 1)
        lines = (bits // num_keys).clamp_max(width - 1)  # past the end nobody reads
        seen = (columns < 0) | tree_mask[sequences, lines, columns.clamp_min(0)]
        values = (seen.long() << shifts).sum(dim=-1)
        places = bytes_ + self.indptr[:-1].view(-1, 1, 1)
        self.bits.fill_(0xFF)
        self.bits.index_copy_(0, places.flatten(), values.flatten().to(torch.uint8))


def _bytes(num_bits: Count) -> Count:
    return (num_bits + 7) // 8
