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
    for cache, (start, end) in zip(caches, pairwise(table.cuts_of(bound)), strict=True):
        rows = bound[start:end].tolist()
        is_void = np.zeros(cache.pool.num_blocks, dtype=np.bool_)
        for row in rows:
            if any(plan.runs[row] for plan in lost):
                first = int(num_computed[row]) // table.block_size
                is_void[table.blocks_of(row)[first:]] = True
                is_void[
                    table.window_blocks_of(row)[max(0, first - table.num_past_blocks[row]) :]
                ] = True
        cache.unname(is_void)
        for row in rows:
            full = table.blocks_of(row)[: num_computed[row] // table.block_size]
            is_gone = is_void[full]
            if table.has_windows:  # its blocks may be of another row than those of all layers
                past = table.num_past_blocks[row]
                is_gone[past:] |= is_void[table.window_block_table[row, past : len(full)]]
            void_at = np.flatnonzero(is_gone)
            if len(void_at):  # found in the cache, while the step that writes it was in flight
                num_computed[row] = void_at[0] * table.block_size
                full = full[: void_at[0]]
            if table.sequences[row] is not None:
                blocks.name_missing(row, len(full))
                blocks.name_part(row, int(num_computed[row]))
            blocks.drop(row)
    return num_computed


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
