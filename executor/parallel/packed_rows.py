"""Tensors of one row per token, side by side, so that one collective moves them all.

    row    hidden states ............ │ expert ids │ weights        int32 words

A collective costs more to start than to fill.
"""

from collections.abc import Sequence

import torch

WORD = torch.int32  # as wide as ids and weights; a row of hidden states is some of them


def words_of(width: int, dtype: torch.dtype) -> int:
    """Returns the words of a row of ``width`` numbers.

    Raises:
        ValueError: It is not a whole number of words.
    """
    num_bytes = width * dtype.itemsize
    if num_bytes % WORD.itemsize:
        raise ValueError(
            f"{width} numbers of {dtype} are {num_bytes} bytes, and a row must be a multiple of "
            f"{WORD.itemsize}"
        )
    return num_bytes // WORD.itemsize


def moe_words(hidden_size: int, dtype: torch.dtype, top_k: int) -> int:
    """Returns the words of a row of hidden states, expert ids and weights."""
    return words_of(hidden_size, dtype) + 2 * words_of(top_k, WORD)


def view_rows(storage: torch.Tensor, num_rows: int, num_words: int) -> torch.Tensor:
    """Returns the start of ``storage`` as words [num_rows, num_words]."""
    size = num_rows * num_words
    assert size <= storage.numel(), (
        f"{num_rows} rows of {num_words} words; the buffers were made for {storage.numel()} words"
    )
    return storage[:size].view(num_rows, num_words)


def pack(columns: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Lays the columns, each [num_rows, width], side by side in ``out`` [num_rows, words]."""
    torch.cat([column.view(WORD) for column in columns], dim=1, out=out)


def unpack(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns views of the columns, of the widths and dtypes of ``like``."""
    widths = [words_of(column.shape[1], column.dtype) for column in like]
    parts = packed.split_with_sizes(widths, dim=1)
    return tuple(part.view(column.dtype) for part, column in zip(parts, like, strict=True))
