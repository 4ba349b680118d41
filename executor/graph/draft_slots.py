"""Slots of draft models and tree verification: specs only, nothing is allocated here.

Every tail is reset, that of hidden states as well: a padded row really runs, and what it stores in the
scratch block has to be finite, since a sequence that is padded reads it there.
"""

from functools import partial
from typing import Any

import torch

from executor.graph.graph_slot import FillContext, GraphSlot, PaddingPolicy, PostFill

_per_sequence = partial(GraphSlot, axis="bs", padding_policy=PaddingPolicy.ZERO)
_per_token = partial(GraphSlot, axis="tokens", padding_policy=PaddingPolicy.ZERO)
_lens = partial(GraphSlot, padding_policy=PaddingPolicy.FILL_SENTINEL)


def _lines(buffer: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the first rows of every pass of a phase: the buffer has a line for each."""
    return buffer[:, :count]


def eagle_draft_slots(
    *, num_steps: int, topk: int, hidden_size: int, dtype: torch.dtype, drawn_vocab_size: int = 0
) -> list[GraphSlot]:
    """Returns the inputs of an EAGLE draft phase (``DraftBatch``), ``topk`` rows per sequence.

    Args:
        num_steps: Drafts on the longest path.
        topk: Drafts that each step goes on from.
        hidden_size: Width of hidden states.
        dtype: Their type.
        drawn_vocab_size: The draft's vocabulary if drafts are drawn from it, else 0.
    """
    passes = num_steps - 1
    # A padded sequence has slots for the last pass's drafts, so that no pass has a negative prefix.
    lens = partial(_lens, axis="bs", pad_value=1 + passes * topk, slice_fn=_lines)
    slots = [
        _per_token("input_ids", lambda _, tokens: (tokens,), torch.int64),
        _per_token("positions", lambda _, tokens: (passes, tokens), torch.int64, slice_fn=_lines),
        _per_token(
            "out_cache_loc", lambda _, tokens: (passes, tokens), torch.int64, slice_fn=_lines
        ),
        _per_sequence("req_pool_indices", lambda bs, _: (bs,), torch.int64),
        lens("seq_lens", lambda bs, _: (passes, bs), torch.int64),
        lens("seq_lens_cpu", lambda bs, _: (passes, bs), torch.int64, device="cpu"),
        _per_sequence("scores", lambda bs, _: (bs, topk), torch.float32),
        _per_sequence("hidden_states", lambda bs, _: (bs, hidden_size), dtype),
    ]
    if drawn_vocab_size:
        probs = _per_sequence("probs", lambda bs, _: (bs, drawn_vocab_size), torch.float32)
        slots += [probs, *_draw_slots()]
    return slots


def frozen_kv_slots(
    *, num_steps: int, hidden_size: int, dtype: torch.dtype, is_drawn: bool = False
) -> list[GraphSlot]:
    """Returns the inputs of a frozen-KV draft phase (``DraftBatch``).

    To attention each row is a sequence, so what attention reads has an entry for each row.

    Args:
        num_steps: Drafts on the longest path.
        hidden_size: Width of hidden states.
        dtype: Their type.
        is_drawn: Whether drafts are drawn.
    """
    lens = partial(_lens, axis="tokens", pad_value=1)
    slots = [
        _per_token("input_ids", lambda _, tokens: (tokens,), torch.int64),
        _per_token(
            "positions", lambda _, tokens: (num_steps, tokens), torch.int64, slice_fn=_lines
        ),
        _per_token("req_pool_indices", lambda _, tokens: (tokens,), torch.int64),
        lens("seq_lens", lambda _, tokens: (tokens,), torch.int64),
        lens("seq_lens_cpu", lambda _, tokens: (tokens,), torch.int64, device="cpu"),
        _per_sequence("hidden_states", lambda bs, _: (bs, hidden_size), dtype),
    ]
    return slots + _draw_slots() if is_drawn else slots


def draft_extend_slots(
    *, width: int, hidden_size: int, dtype: torch.dtype, num_layers: int = 1, is_drawn: bool = False
) -> list[GraphSlot]:
    """Returns the inputs of a draft-extend (``ExtendBatch``), ``width`` rows per sequence.

    Args:
        width: Rows of each sequence, and the length of a padded one.
        hidden_size: Width of hidden states.
        dtype: Their type.
        num_layers: Draft layers that take one another's output.
        is_drawn: Whether drafts are drawn.
    """
    lens = partial(_lens, axis="bs", pad_value=width)
    first_rows = _own_first_rows(width)
    rows = partial(_per_sequence, padding_policy=PaddingPolicy.KEEP_PAD, post_fill=first_rows)
    slots = [
        _per_token("input_ids", lambda _, tokens: (tokens,), torch.int64),
        _per_token("positions", lambda _, tokens: (tokens,), torch.int64),
        _per_token("out_cache_loc", lambda _, tokens: (tokens,), torch.int64),
        _per_token("hidden_states", lambda _, tokens: (tokens, hidden_size), dtype),
        _per_sequence("req_pool_indices", lambda bs, _: (bs,), torch.int64),
        lens("seq_lens", lambda bs, _: (bs,), torch.int64),
        lens("seq_lens_cpu", lambda bs, _: (bs,), torch.int64, device="cpu"),
        rows("starts", lambda bs, _: (bs,), torch.int64),
        rows("lasts", lambda bs, _: (bs,), torch.int64),
    ]
    if num_layers > 1:
        shape = (num_layers - 1, hidden_size)
        slots.append(_per_sequence("carries", lambda bs, _: (bs, *shape), dtype))
    return slots + _draw_slots() if is_drawn else slots


def tree_mask_slot(num_nodes: int) -> GraphSlot:
    """Returns the slot of a verify graph that says who sees whom.

    A padded node sees all: seeing nothing, it would come out of attention as NaN.

    Args:
        num_nodes: Of each sequence's tree, the root included.
    """
    return _lens(
        "tree_mask", lambda bs, _: (bs, num_nodes, num_nodes), torch.bool, axis="bs", pad_value=1
    )


def _own_first_rows(width: int) -> PostFill:
    """Returns a hook that lets a padded sequence begin and end with the first of its own rows.

    Else its drafts would be written into the rows of a real sequence.
    """

    def fill(buffer: torch.Tensor, _: Any, context: FillContext) -> None:
        raw, padded = context.raw_bs, context.padded_bs
        torch.arange(raw * width, padded * width, width, out=buffer[raw:padded])

    return fill


def _draw_slots() -> list[GraphSlot]:
    return [
        _per_sequence("temperature", lambda bs, _: (bs,), torch.float32),
        _per_sequence("seeds", lambda bs, _: (bs,), torch.int64),
        _per_sequence("draw_positions", lambda bs, _: (bs,), torch.int64),
    ]
