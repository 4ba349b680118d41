"""From sequence lengths to page tables. Pure; knows no attention backend.

    B sequences    P pages, of all sequences together    C columns of the block table

Lengths are on the host and rows of the block table on the device, so both sides do their part and
neither waits: offsets are counted here, pages are looked up there.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Offsets of a batch, on the host.

    Attributes:
        qo_indptr: int32 [B + 1], first query row of each sequence, then their sum.
        kv_indptr: int32 [B + 1], first page of each sequence, then P.
        last_page_len: int32 [B], keys in each sequence's last page, 1 to block_size.
        num_keys: int32 [B], keys of each sequence, at least 1.
    """

    qo_indptr: Int32Array
    kv_indptr: Int32Array
    last_page_len: Int32Array
    num_keys: Int32Array

    @property
    def num_rows(self) -> int:
        """Query rows of all sequences."""
        return int(self.qo_indptr[-1])

    @property
    def num_pages(self) -> int:
        """P."""
        return int(self.kv_indptr[-1])


def plan_pages(seq_lens: Int64Array, new_lens: Int64Array | None, block_size: int) -> PagePlan:
    """Counts query rows and pages.

    A padded sequence may be shorter than the rows that it runs; it gets a page table as if it were
    as long, so that no query is without a key.

    Args:
        seq_lens: [B] keys of each sequence, those of this pass included.
        new_lens: [B] query rows of each sequence, at least 1; None if each has one.
        block_size: Keys per page.
    """
    new_lens = np.ones_like(seq_lens) if new_lens is None else new_lens
    num_keys = np.maximum(seq_lens, new_lens)
    num_pages = -(-num_keys // block_size)
    return PagePlan(
        qo_indptr=_offsets(new_lens),
        kv_indptr=_offsets(num_pages),
        last_page_len=(num_keys - (num_pages - 1) * block_size).astype(np.int32),
        num_keys=num_keys.astype(np.int32),
    )


def look_up_pages(
    block_table: torch.Tensor, rows: torch.Tensor, kv_indptr: torch.Tensor, places: torch.Tensor
) -> torch.Tensor:
    """Returns int32 [P], the pages of each row, row after row. All on one device, nothing waits.

    Args:
        block_table: int32 [num_rows, C].
        rows: int64 [B] lines of it.
        kv_indptr: int32 [B + 1] from ``plan_pages``.
        places: int32 [P], 0 to P - 1.
    """
    sequence = torch.searchsorted(kv_indptr[1:], places, right=True)
    column = places - kv_indptr[sequence]
    return block_table[rows[sequence], column]


def _offsets(counts: Int64Array) -> Int32Array:
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets
