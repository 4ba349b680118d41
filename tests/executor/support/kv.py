"""KV slots of tokens, from lists. For tests."""

import numpy as np
import numpy.typing as npt
import torch

from executor.batch.kv_pool import KVPool


def out_cache_loc(
    pool: KVPool, rows: npt.ArrayLike, num_computed: npt.ArrayLike, num_tokens: npt.ArrayLike
) -> torch.Tensor:
    """Returns where the next tokens' keys and values go, int64 [sum(num_tokens)] on the device.

    Args:
        pool: Holds blocks for them.
        rows: [B] rows of the block table.
        num_computed: [B] tokens that the row already has in the pool.
        num_tokens: [B] tokens to add.
    """
    row_of, prefix_lens, new_lens = (
        np.asarray(column, dtype=np.int64) for column in (rows, num_computed, num_tokens)
    )
    missing = prefix_lens + new_lens - pool.row_num_blocks[row_of] * pool.block_size
    assert missing.max(initial=0) <= 0, f"rows {row_of[missing > 0]} lack blocks"
    locations = np.repeat(row_of, new_lens)
    shift = prefix_lens - (np.cumsum(new_lens) - new_lens)
    positions = np.arange(len(locations)) + np.repeat(shift, new_lens)
    pool.locate(locations, positions, out=locations)
    return torch.from_numpy(locations).to(pool.device)
