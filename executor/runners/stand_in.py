"""Batches that stand for a size while it is captured: all padding, and valid to run."""

import numpy as np
import torch

from executor.forward_batch import ForwardBatch
from executor.runners.forward_pass import ForwardPass


def decode_stand_in(forward_pass: ForwardPass, size: int, width: int = 1) -> ForwardBatch:
    """Returns ``size`` sequences of ``width`` tokens each, which is all that they have."""
    return _stand_in(forward_pass, np.full(size, width))


def extend_stand_in(forward_pass: ForwardPass, num_tokens: int) -> ForwardBatch:
    """Returns a prompt of ``num_tokens`` tokens, cut into as many as the block table's rows hold.

    Raises:
        ValueError: All rows together hold fewer tokens.
    """
    pool = forward_pass.kv_pool
    row_tokens = pool.max_blocks_per_row * pool.block_size
    num_rows = -(-num_tokens // row_tokens)
    if num_rows > pool.num_rows:
        raise ValueError(
            f"prefill graph of {num_tokens} tokens: {pool.num_rows} rows of {row_tokens} tokens "
            f"hold {pool.num_rows * row_tokens}, so no step has as many: leave that size out"
        )
    lengths = np.full(num_rows, row_tokens)
    lengths[-1] = num_tokens - row_tokens * (num_rows - 1)
    return _stand_in(forward_pass, lengths)


def _stand_in(forward_pass: ForwardPass, lengths: np.ndarray) -> ForwardBatch:
    """Returns new sequences in rows 0, 1, … Their tokens are written to the scratch block."""
    total = int(lengths.sum())
    device = forward_pass.kv_pool.device
    return ForwardBatch.from_columns(
        rows=np.minimum(np.arange(len(lengths)), forward_pass.kv_pool.num_rows - 1),
        num_computed=np.zeros_like(lengths),
        num_tokens=lengths,
        input_ids=torch.zeros(total, dtype=torch.int64, device=device),
        out_cache_loc=torch.zeros(total, dtype=torch.int64, device=device),
        layout=forward_pass.captured_layout(total, has_extend=total > len(lengths)),
    )
