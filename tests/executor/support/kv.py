"""KV slots and batches of tokens, from lists. For tests."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from executor.batch.forward_batch import ForwardBatch
from executor.batch.kv_pool import KVPool, KVShape
from executor.parallel.layout import DpLayout


def full_pool(
    shape: KVShape, num_rows: int, max_len: int, device: torch.device | str = "cpu"
) -> KVPool:
    """Returns a pool in which every row owns blocks for ``max_len`` tokens of each group.

    They are shuffled, as after hours of serving, and alike on all devices.
    """
    blocks_per_row = -(-max_len // shape.block_size)
    pool = KVPool(
        shape,
        num_blocks=1 + len(shape.groups) * num_rows * blocks_per_row,
        num_rows=num_rows,
        max_blocks_per_row=blocks_per_row,
        device=device,
    )
    shuffled = np.random.default_rng(0).permutation(np.arange(1, pool.num_blocks))
    rows = range(num_rows)
    pool.append_blocks(rows, [0] * num_rows, [blocks_per_row] * num_rows, shuffled)
    return pool


def out_cache_loc(
    pool: KVPool,
    rows: npt.ArrayLike,
    num_computed: npt.ArrayLike,
    num_tokens: npt.ArrayLike,
    group: int = 0,
) -> torch.Tensor:
    """Returns where the next tokens' keys and values go, int64 [sum(num_tokens)] on the device.

    Args:
        pool: Holds blocks for them.
        rows: [B] rows of the block table.
        num_computed: [B] tokens that the row already has in the pool.
        num_tokens: [B] tokens to add.
        group: Of layers.
    """
    row_of, prefix_lens, new_lens = (
        np.asarray(column, dtype=np.int64) for column in (rows, num_computed, num_tokens)
    )
    missing = prefix_lens + new_lens - pool.row_num_blocks[row_of] * pool.block_size
    assert missing.max(initial=0) <= 0, f"rows {row_of[missing > 0]} lack blocks"
    locations = np.repeat(row_of, new_lens)
    shift = prefix_lens - (np.cumsum(new_lens) - new_lens)
    positions = np.arange(len(locations)) + np.repeat(shift, new_lens)
    pool.locate(locations, positions, out=locations, group=group)
    return torch.from_numpy(locations).to(pool.device)


def batch_of(
    pool: KVPool,
    rows: npt.ArrayLike,
    num_computed: npt.ArrayLike,
    num_tokens: npt.ArrayLike,
    input_ids: torch.Tensor | None = None,
    layout: DpLayout | None = None,
    logits_indices: Any = None,
) -> ForwardBatch:
    """Returns a batch whose keys and values go where the pool's block table says.

    The arguments are those of ``ForwardBatch.from_columns``; without a layout there are no peers, and
    without ids they are 0.
    """
    if input_ids is None:
        input_ids = torch.zeros(int(np.sum(num_tokens)), dtype=torch.int64, device=pool.device)
    slots = [
        out_cache_loc(pool, rows, num_computed, num_tokens, group)
        for group in range(len(pool.shape.groups))
    ]
    return ForwardBatch.from_columns(
        rows=rows,
        num_computed=num_computed,
        num_tokens=num_tokens,
        input_ids=input_ids,
        out_cache_loc=slots[0],
        window_cache_loc=slots[1] if len(slots) > 1 else None,
        layout=layout or DpLayout.single(int(np.sum(num_tokens))),
        logits_indices=logits_indices,
    )
