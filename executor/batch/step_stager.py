"""A step's columns on their way to the device, and its blocks into the block table."""

import numpy as np
import torch

from executor.batch.columns import Int64Array
from executor.batch.kv_pool import KVPool
from executor.batch.limits import StepLimits
from executor.batch.read_step import StepColumns
from executor.batch.staging import Copier, Staged, StagingBuffer, StepInputs, to_device
from executor.model.sampling.sampler import PARAMETER_WIDTH

NUM_SLOTS = 3  # the router's steps in flight, 2, and one


class StepStager:
    """Computes what follows from a step's columns, and sends it in one copy.

    Args:
        limits: What a step fits in.
        kv_pool: Keeps the block table.
        copier: How columns get to the device.
    """

    def __init__(self, limits: StepLimits, kv_pool: KVPool, copier: Copier) -> None:
        self._kv_pool = kv_pool
        self._has_drafts = limits.speculation is not None
        self._capacity = _capacity(limits)
        self._staging = StagingBuffer(self._capacity, NUM_SLOTS, copier)

    def stage(self, columns: StepColumns) -> Staged:
        """Writes the host's block table, then all columns to a slot, and sends it."""
        rows, starts, is_sampled = columns.rows, columns.starts, columns.is_sampled
        if starts is not None and self._has_drafts:
            self._kv_pool.clear_rows(starts.rows)
        row_of, positions = _flatten(rows, columns.num_computed_tokens, columns.num_rows)
        seq_lens = columns.num_computed_tokens + columns.num_rows
        unknown = np.flatnonzero(columns.token_ids < 0)
        sequences = columns.logits_sequence[is_sampled]
        places = self._write_blocks(columns)
        num_tokens, num_starts = len(row_of), 0 if starts is None else len(starts.rows)
        staged = self._staging.begin(
            StepInputs(
                input_ids=num_tokens,
                positions=num_tokens,
                out_cache_loc=num_tokens,
                req_pool_indices=len(rows),
                seq_lens=len(rows),
                logits_indices=len(is_sampled),
                sampled_rows=len(sequences),
                sampled_positions=len(sequences),
                sampled_at=len(sequences) if len(sequences) < len(is_sampled) else 0,
                unknown_rows=len(unknown),
                unknown_at=len(unknown) if len(unknown) < num_tokens else 0,
                block_places=len(places),
                block_ids=len(places),
                start_rows=num_starts,
                start_parameters=num_starts * PARAMETER_WIDTH,
            )
        )
        to = staged.arrays
        to.input_ids[:] = columns.token_ids
        to.positions[:] = positions
        self._kv_pool.locate(row_of, positions, out=to.out_cache_loc)
        to.req_pool_indices[:] = rows
        to.seq_lens[:] = seq_lens
        to.logits_indices[:] = columns.logits_indices
        to.sampled_rows[:] = rows[sequences]
        to.sampled_positions[:] = seq_lens[sequences]
        if to.sampled_at.size:
            to.sampled_at[:] = np.flatnonzero(is_sampled)
        to.unknown_rows[:] = row_of[unknown]
        if to.unknown_at.size:
            to.unknown_at[:] = unknown
        if places.size:
            to.block_places[:] = places
            to.block_ids[:] = columns.new_block_ids
        if starts is not None:
            to.start_rows[:] = starts.rows
            starts.pack_parameters(to.start_parameters)
        self._staging.send(staged)
        return staged

    def _write_blocks(self, columns: StepColumns) -> Int64Array:
        """Writes the host's block table. Returns the places to stage for the device's."""
        pool, none = self._kv_pool, columns.rows[:0]
        kept, new, ids = columns.num_kept_blocks, columns.num_new_blocks, columns.new_block_ids
        if not ids.size and (kept == pool.row_num_blocks[columns.rows]).all():
            return none
        places = pool.append_blocks_on_host(columns.rows, kept, new, ids)
        if pool.is_table_shared:
            return none
        if len(places) > self._capacity.block_places:
            pool.write_blocks(self._to_device(places), self._to_device(ids))
            return none
        return places

    def _to_device(self, values: Int64Array) -> torch.Tensor:
        return to_device(values, self._kv_pool.device)


def _capacity(limits: StepLimits) -> StepInputs[int]:
    """Returns the most entries of each column of a step."""
    budget = limits.budget
    num_tokens, num_seqs = budget.max_step_tokens, budget.max_num_seqs
    # Blocks for all of a step's tokens, and one each. Prefixes found in the cache bring more; a
    # step with that many goes another way.
    num_blocks = num_tokens // limits.block_size + 2 * num_seqs
    return StepInputs(
        input_ids=num_tokens,
        positions=num_tokens,
        out_cache_loc=num_tokens,
        req_pool_indices=num_seqs,
        seq_lens=num_seqs,
        logits_indices=max(budget.max_num_logits, num_seqs * budget.num_tokens_per_bs),
        sampled_rows=num_seqs,
        sampled_positions=num_seqs,
        sampled_at=num_seqs,
        unknown_rows=num_tokens,
        unknown_at=num_tokens,
        block_places=num_blocks,
        block_ids=num_blocks,
        start_rows=num_seqs,
        start_parameters=num_seqs * PARAMETER_WIDTH,
    )


def _flatten(
    rows: Int64Array, num_computed: Int64Array, num_tokens: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Returns each token's row and its position in the sequence."""
    ends = np.cumsum(num_tokens)
    total = int(ends[-1]) if ends.size else 0
    if total == len(rows):
        return rows, num_computed
    shift = num_computed - (ends - num_tokens)
    return np.repeat(rows, num_tokens), np.arange(total) + np.repeat(shift, num_tokens)
