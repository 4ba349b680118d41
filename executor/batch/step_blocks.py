"""Which KV blocks the rows of a step keep and get, and whether these are enough.

Without a draft model the router knows how long each sequence is, and new blocks go behind those that
hold its tokens. With one it knows a bound alone: new blocks go behind all that a row holds.
"""

from typing import NamedTuple

import numpy as np

from executor.batch.columns import ColumnReader, Int64Array
from executor.batch.limits import StepLimits


class Blocks(NamedTuple):
    """Blocks of each sequence, as in ``StepColumns``: [B], [B] and [sum(num_new)]."""

    num_kept: Int64Array
    num_new: Int64Array
    new_ids: Int64Array


def read_blocks(
    read: ColumnReader,
    rows: Int64Array,
    num_computed: Int64Array,
    seq_lens: Int64Array,
    held: Int64Array,
    limits: StepLimits,
) -> Blocks:
    """Returns what becomes of each row's blocks.

    Args:
        read: The columns.
        rows: [B] row of each sequence.
        num_computed: [B] tokens that are in blocks already.
        seq_lens: [B] tokens for which there must be blocks by the end of the step.
        held: [B] blocks of each row; -1 for a row that starts, which holds none.
        limits: How many there are.

    Raises:
        InvalidStep: A row would end up with too few blocks, or with more than it holds.
    """
    num_new = read.counts("num_new_blocks", len(rows), default=0)
    new_ids = read.ids("new_block_ids", int(num_new.sum()), least=1, below=limits.num_kv_blocks)
    if limits.speculation is None:
        kept = -(-seq_lens // limits.block_size) - num_new
        _check_blocks(read, rows, num_computed, num_new, kept, held, limits.block_size)
    else:
        kept = np.maximum(held, 0)
        _check_appended_blocks(read, rows, seq_lens, kept + num_new, limits)
    return Blocks(kept, num_new, new_ids)


def _check_appended_blocks(
    read: ColumnReader,
    rows: Int64Array,
    seq_lens: Int64Array,
    num_blocks: Int64Array,
    limits: StepLimits,
) -> None:
    """Checks that rows end up with blocks for all tokens, and not with more than a row holds."""
    needed = -(-seq_lens // limits.block_size)
    is_short = num_blocks < needed
    if is_short.any():
        at = int(is_short.argmax())
        raise read.error(
            "num_new_blocks",
            f"row {rows[at]} comes to {num_blocks[at]} blocks and needs {needed[at]}",
        )
    most = -(-limits.max_model_len // limits.block_size)
    read.at_most("num_new_blocks", int(num_blocks.max(initial=0)), most, "a row's blocks")


def _check_blocks(
    read: ColumnReader,
    rows: Int64Array,
    num_computed: Int64Array,
    num_new: Int64Array,
    kept: Int64Array,
    held: Int64Array,
    block_size: int,
) -> None:
    """Checks that rows end up with blocks for all tokens and lose none that holds some.

    Args:
        held: [B] blocks of each row; -1 for a row that starts, which holds none.
    """
    starts = held < 0
    wrong = np.where(starts, kept != 0, (kept > held) | (kept * block_size < num_computed))
    if not wrong.any():
        return
    at = int(wrong.argmax())
    needed = int(kept[at] + num_new[at])
    if starts[at]:
        raise read.error(
            "num_new_blocks", f"row {rows[at]} starts and needs {needed}; {num_new[at]} came"
        )
    raise read.error(
        "num_new_blocks",
        f"row {rows[at]} holds {held[at]} blocks and {num_new[at]} came; it needs {needed} in all, "
        f"of which the first {-(-int(num_computed[at]) // block_size)} stay",
    )
