"""Batches that stand for a size while it is captured: all padding, and valid to run."""

import numpy as np
import torch

from executor.batch.forward_batch import ForwardBatch
from executor.parallel.layout import DpPaddingMode
from executor.runners.forward_pass import ForwardPass
from executor.speculative.draft_batch import DraftBatch, Draws, ExtendBatch, Step


def decode_stand_in(
    forward_pass: ForwardPass, size: int, width: int = 1, *, has_tree: bool = False
) -> ForwardBatch:
    """Returns ``size`` sequences of ``width`` tokens each, which is all that they have.

    Args:
        has_tree: Whether they are a tree, in which every token sees all others.
    """
    batch = _stand_in(forward_pass, np.full(size, width))
    if has_tree:
        device = forward_pass.kv_pool.device
        batch.tree_mask = torch.ones(size, width, width, dtype=torch.bool, device=device)
    return batch


def extend_stand_in(forward_pass: ForwardPass, num_tokens: int) -> ForwardBatch:
    """Returns a prompt of ``num_tokens`` tokens, cut into as many as a sequence may have.

    Raises:
        ValueError: All rows together hold fewer tokens.
    """
    pool = forward_pass.kv_pool
    row_tokens = forward_pass.max_seq_len
    num_rows = -(-num_tokens // row_tokens)
    if num_rows > pool.num_rows:
        raise ValueError(
            f"prefill graph of {num_tokens} tokens: {pool.num_rows} rows of {row_tokens} tokens "
            f"hold {pool.num_rows * row_tokens}, so no step has as many: leave that size out"
        )
    lengths = np.full(num_rows, row_tokens)
    lengths[-1] = num_tokens - row_tokens * (num_rows - 1)
    return _stand_in(forward_pass, lengths)


def draft_stand_in(
    forward_pass: ForwardPass,
    size: int,
    *,
    num_tokens: int,
    num_slots: int = 0,
    is_drawn: bool = False,
    has_probs: bool = False,
) -> DraftBatch:
    """Returns ``size`` sequences of two tokens to draft after.

    Args:
        num_tokens: First drafts of each, or 1, its last token.
        num_slots: Slots that its drafts are stored in.
        is_drawn: Whether drafts are drawn.
        has_probs: Whether the first drafts were.
    """
    device = forward_pass.kv_pool.device
    seq_lens_cpu = torch.full((size,), 2)
    probs = None
    if has_probs:
        probs = torch.zeros(size, forward_pass.vocab_size, dtype=torch.float32, device=device)
    return DraftBatch(
        step=Step((size,), DpPaddingMode.MAX_LEN, size),
        req_pool_indices=_rows(forward_pass, size),
        seq_lens=seq_lens_cpu.to(device),
        seq_lens_cpu=seq_lens_cpu,
        out_cache_loc=torch.zeros(size * num_slots, dtype=torch.int64, device=device),
        tokens=torch.zeros(size, num_tokens, dtype=torch.int64, device=device),
        scores=torch.zeros(size, num_tokens, dtype=torch.float32, device=device),
        hidden_states=forward_pass.new_hidden(size),
        probs=probs,
        draws=_draws(size, device) if is_drawn else None,
    )


def extend_stand_in_of_drafts(
    forward_pass: ForwardPass,
    size: int,
    width: int,
    *,
    num_layers: int = 1,
    is_drawn: bool = False,
) -> ExtendBatch:
    """Returns ``size`` sequences of ``width`` rows each, the first of which is a token.

    Args:
        num_layers: Draft layers that take one another's output.
        is_drawn: Whether drafts are drawn.
    """
    device = forward_pass.kv_pool.device
    batch = _stand_in(forward_pass, np.full(size, width))
    batch.hidden_states = forward_pass.new_hidden(size * width)
    starts = torch.arange(size, device=device) * width
    carries = None
    if num_layers > 1:
        carries = forward_pass.new_hidden(size * (num_layers - 1)).view(size, num_layers - 1, -1)
    draws = _draws(size, device) if is_drawn else None
    return ExtendBatch(batch, width, starts, starts, carries, draws)


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


def _rows(forward_pass: ForwardPass, size: int) -> torch.Tensor:
    pool = forward_pass.kv_pool
    return torch.arange(size, device=pool.device).clamp_(max=pool.num_rows - 1)


def _draws(size: int, device: torch.device) -> Draws:
    """Returns draws of the likeliest token."""
    whole = torch.zeros(2, size, dtype=torch.int64, device=device)
    return Draws(torch.zeros(size, dtype=torch.float32, device=device), whole[0], whole[1])
