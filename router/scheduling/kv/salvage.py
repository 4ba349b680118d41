"""Salvage of prefix caches: which blocks keep their names when an epoch is over.

While a group steps, blocks are named when they are handed out, since whoever finds one runs after the
step that writes it. If that step is lost, executors may have run it or not, or on rubbish from peers
that were lost. So a name outlives an epoch only if committed steps computed all of its block:

    row A      [ committed ........ | written by lost steps ]      its full blocks before the line
    row B      [ blocks of A that it found .. | its own     ]      as far as those of A go

The block in which the line lies has a name of its own kind, by the tokens before the line: nobody else
uses it, and who does later writes behind them (`PrefixCache.use`).

An executor that is lost itself takes all of its blocks with it (engine/caches.py).
"""

from collections.abc import Sequence as SequenceOf
from itertools import pairwise

import numpy as np

from router.requests.request import Int32Array
from router.scheduling.columns import Mask, Rows, spread
from router.scheduling.kv.prefix_cache import PrefixCache
from router.scheduling.kv.row_blocks import RowBlocks
from router.scheduling.sequence_table import RowStatus, SequenceTable
from router.scheduling.step import StepPlan


def salvage(
    table: SequenceTable,
    blocks: RowBlocks,
    caches: SequenceOf[PrefixCache],
    lost: SequenceOf[StepPlan],
) -> Int32Array:
    """Drops all references of a table's rows, and lets names stand for what was committed only.

    Args:
        table: Of the epoch that is over; its rows are not used any more.
        blocks: Its rows' blocks.
        caches: [dp_size] of each rank.
        lost: All steps that were handed out and not committed.

    Returns:
        int32 [R], tokens of each row whose keys and values are there.
    """
    num_computed = num_committed(table, lost)
    bound = np.flatnonzero(table.status != RowStatus.FREE)
    is_lost = np.any([plan.runs for plan in lost], axis=0) if lost else table.status < 0
    table.tokens.settle_all()
    for cache, (start, end) in zip(caches, pairwise(table.cuts_of(bound)), strict=True):
        rows = bound[start:end]
        is_void = _written_blocks(table, rows[is_lost[rows]], num_computed, cache.pool.num_blocks)
        cache.unname(is_void)
        for row in rows.tolist():
            num_full = int(num_computed[row]) // table.block_size
            is_gone = is_void.take(table.block_table[row, :num_full])
            if table.has_windows:  # its blocks may be of another row than those of all layers
                past = table.num_past_blocks[row]
                is_gone[past:] |= is_void[table.window_block_table[row, past:num_full]]
            if np.count_nonzero(
                is_gone
            ):  # found in the cache, as the step that writes it was in flight
                num_full = int(is_gone.argmax())
                num_computed[row] = num_full * table.block_size
            if table.sequences[row] is not None:
                blocks.name_missing(row, num_full)
                blocks.name_part(row, int(num_computed[row]))
    blocks.drop(bound.tolist())
    return num_computed


def _written_blocks(
    table: SequenceTable, rows: Rows, num_computed: Int32Array, num_blocks: int
) -> Mask:
    """Returns bool [num_blocks], the blocks of a rank's rows that steps beyond what is computed write."""
    is_written = np.zeros(num_blocks, dtype=np.bool_)
    first, end = num_computed.take(rows) // table.block_size, table.num_blocks.take(rows)
    places = spread(table.block_starts.take(rows) + first, end - first)
    is_written[table.flat_blocks.take(places)] = True
    if table.has_windows:
        first = np.maximum(first, table.num_past_blocks.take(rows))
        places = spread(table.block_starts.take(rows) + first, end - first)
        is_written[table.flat_window_blocks.take(places)] = True
    return is_written


def num_committed(table: SequenceTable, lost: SequenceOf[StepPlan]) -> Int32Array:
    """Returns int32 [R], tokens of each row that committed steps have computed.

    A row that decodes lacks its last known token only, however many drafts are in flight; one that
    runs a prompt lacks all from its first chunk in flight on.
    """
    num_tokens = np.minimum(table.num_tokens - 1, table.num_computed)
    for plan in lost:
        for rank, batch in enumerate(plan.batches):
            rows = batch.rows + table.first_rows[rank]
            num_tokens[rows] = np.minimum(num_tokens[rows], batch.num_computed_tokens)
    return num_tokens
