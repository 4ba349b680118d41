"""Dummy batches: all padding, and valid to run, for the capture of a size."""

from typing import Any

import numpy as np
import torch

from executor.batch.forward_batch import ForwardBatch, ForwardMode
from executor.runners.forward_pass import ForwardPass
from executor.speculative.draft_batch import DraftBatch, ExtendBatch


def dummy_decode(
    forward_pass: ForwardPass, size: int, width: int = 1, *, has_tree: bool = False
) -> ForwardBatch:
    """Returns ``size`` sequences of ``width`` tokens each, which is all that they have.

    Args:
        has_tree: Whether they are a tree, in which every token sees all others.
    """
    batch = _dummy(forward_pass, np.full(size, width))
    if has_tree:
        device = forward_pass.kv_pool.device
        batch.tree_mask = torch.ones(size, width, width, dtype=torch.bool, device=device)
    return batch


def dummy_extend(forward_pass: ForwardPass, num_tokens: int) -> ForwardBatch:
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
    return _dummy(forward_pass, lengths)


def dummy_draft(
    forward_pass: ForwardPass,
    size: int,
    width: int,
    *,
    num_first: int,
    num_slots: int = 0,
    is_drawn: bool = False,
    has_probs: bool = False,
) -> DraftBatch:
    """Returns ``size`` sequences of two tokens to draft after.

    Args:
        width: Rows of each in a pass.
        num_first: First drafts of each, or 1, its last token.
        num_slots: Slots that its drafts are stored in.
        is_drawn: Whether drafts are drawn.
        has_probs: Whether the first drafts were.
    """
    pool, device = forward_pass.kv_pool, forward_pass.kv_pool.device
    zeros = torch.zeros(size * max(num_first, num_slots), dtype=torch.int64, device=device)
    seq_lens_cpu = torch.full((size,), 2)
    seq_lens = seq_lens_cpu.to(device)
    probs = None
    if has_probs:
        probs = torch.zeros(size, forward_pass.vocab_size, dtype=torch.float32, device=device)
    return DraftBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=size,
        input_ids=zeros[: size * num_first],
        positions=seq_lens,
        out_cache_loc=zeros[: size * num_slots],
        req_pool_indices=torch.arange(size, device=device).clamp_(max=pool.num_rows - 1),
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens_cpu,
        layout=forward_pass.captured_layout(size * width, has_extend=False),
        logits_indices=zeros[:0],
        hidden_states=forward_pass.new_hidden(size),
        scores=torch.zeros(size, num_first, dtype=torch.float32, device=device),
        probs=probs,
        **_draws(size, device, is_drawn=is_drawn),
    )


def dummy_draft_extend(
    forward_pass: ForwardPass, size: int, width: int, *, num_layers: int = 1, is_drawn: bool = False
) -> ExtendBatch:
    """Returns ``size`` sequences of ``width`` rows each, the first of which is a token.

    Args:
        num_layers: Draft layers that take one another's output.
        is_drawn: Whether drafts are drawn.
    """
    device = forward_pass.kv_pool.device
    batch = _dummy(forward_pass, np.full(size, width))
    batch.hidden_states = forward_pass.new_hidden(size * width)
    starts = torch.arange(size, device=device) * width
    carries = None
    if num_layers > 1:
        carries = forward_pass.new_hidden(size * (num_layers - 1)).view(size, num_layers - 1, -1)
    return ExtendBatch.of(
        batch,
        width=width,
        starts=starts,
        lasts=starts,
        carries=carries,
        **_draws(size, device, is_drawn=is_drawn),
    )


def _dummy(forward_pass: ForwardPass, lengths: np.ndarray) -> ForwardBatch:
    """Returns new sequences in rows 0, 1, … Their tokens are written to the scratch block."""
    total = int(lengths.sum())
    device = forward_pass.kv_pool.device
    scratch = torch.zeros(total, dtype=torch.int64, device=device)
    return ForwardBatch.from_columns(
        rows=np.minimum(np.arange(len(lengths)), forward_pass.kv_pool.num_rows - 1),
        num_computed=np.zeros_like(lengths),
        num_tokens=lengths,
        input_ids=torch.zeros(total, dtype=torch.int64, device=device),
        out_cache_loc=scratch,
        window_cache_loc=scratch if forward_pass.has_window else None,
        layout=forward_pass.captured_layout(total, has_extend=total > len(lengths)),
    )


def _draws(size: int, device: torch.device, *, is_drawn: bool) -> dict[str, Any]:
    """Returns draws of the likeliest token."""
    if not is_drawn:
        return {}
    zeros = torch.zeros(size, dtype=torch.int64, device=device)
    return {"temperature": zeros.to(torch.float32), "seeds": zeros, "draw_positions": zeros}
