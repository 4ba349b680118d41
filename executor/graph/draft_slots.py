"""Slots of draft models and tree verification: specs only, nothing is allocated here.

Every tail is reset, that of hidden states as well: a padded row really runs, and what it stores in the
scratch block has to be finite, since a sequence that is padded reads it there.
"""

from functools import partial

import torch

from executor.graph.graph_slot import GraphSlot, PaddingPolicy

_per_sequence = partial(GraphSlot, axis="bs", padding_policy=PaddingPolicy.ZERO)
_per_token = partial(GraphSlot, axis="tokens", padding_policy=PaddingPolicy.ZERO)
# One line of rows for each pass of a phase.
_of_passes = partial(GraphSlot, slice_fn=lambda buffer, count: buffer[:, :count])


def eagle_draft_slots(
    *,
    num_steps: int,
    topk: int,
    hidden_size: int,
    dtype: torch.dtype,
    drawn_vocab_size: int = 0,
) -> list[GraphSlot]:
    """Returns the inputs of an EAGLE draft phase (``DraftInputs``), ``topk`` rows per sequence.

    Args:
        num_steps: Drafts on the longest path.
        topk: Drafts that each step goes on from.
        hidden_size: Width of hidden states.
        dtype: Their type.
        drawn_vocab_size: The draft's vocabulary if drafts are drawn from it, else 0.
    """
    passes = num_steps - 1
    by_token = partial(_of_passes, axis="tokens", padding_policy=PaddingPolicy.ZERO)
    # A padded sequence has room for the last pass's drafts, so that no pass has a negative prefix.
    by_sequence = partial(
        _of_passes,
        axis="bs",
        padding_policy=PaddingPolicy.FILL_SENTINEL,
        pad_value=1 + passes * topk,
    )
    slots = [
        by_token("positions", lambda _, tokens: (passes, tokens), torch.int64),
        by_token("out_cache_loc", lambda _, tokens: (passes, tokens), torch.int64),
        _per_sequence("req_pool_indices", lambda bs, _: (bs,), torch.int64),
        by_sequence("seq_lens", lambda bs, _: (passes, bs), torch.int64),
        by_sequence("seq_lens_cpu", lambda bs, _: (passes, bs), torch.int64, device="cpu"),
        _per_sequence("tokens", lambda bs, _: (bs, topk), torch.int64),
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
    """Returns the inputs of a frozen-KV draft phase (``DraftInputs``).

    To attention each row is a sequence, so what attention reads has an entry for each row.

    Args:
        num_steps: Drafts on the longest path.
        hidden_size: Width of hidden states.
        dtype: Their type.
        is_drawn: Whether drafts are drawn.
    """
    lens = partial(
        GraphSlot, axis="tokens", padding_policy=PaddingPolicy.FILL_SENTINEL, pad_value=1
    )
    slots = [
        _per_token(
            "positions",
            lambda _, tokens: (num_steps, tokens),
            torch.int64,
            slice_fn=lambda buffer, count: buffer[:, :count],
        ),
        _per_token("req_pool_indices", lambda _, tokens: (tokens,), torch.int64),
        lens("seq_lens", lambda _, tokens: (tokens,), torch.int64),
        lens("seq_lens_cpu", lambda _, tokens: (tokens,), torch.int64, device="cpu"),
        _per_sequence("tokens", lambda bs, _: (bs, 1), torch.int64),
        _per_sequence("hidden_states", lambda bs, _: (bs, hidden_size), dtype),
    ]
    return slots + _draw_slots() if is_drawn else slots


def draft_extend_slots(
    *,
    width: int,
    hidden_size: int,
    dtype: torch.dtype,
    num_layers: int = 1,
    is_drawn: bool = False,
) -> list[GraphSlot]:
    """Returns the inputs of a draft-extend (``ExtendInputs``), ``width`` rows per sequence.

    Args:
        width: Rows of each sequence, and the length of a padded one.
        hidden_size: Width of hidden states.
        dtype: Their type.
        num_layers: Draft layers that take one another's output.
        is_drawn: Whether drafts are drawn.
    """
    lens = partial(
        GraphSlot, axis="bs", padding_policy=PaddingPolicy.FILL_SENTINEL, pad_value=width
    )
    slots = [
        _per_token("input_ids", lambda _, tokens: (tokens,), torch.int64),
        _per_token("positions", lambda _, tokens: (tokens,), torch.int64),
        _per_token("out_cache_loc", lambda _, tokens: (tokens,), torch.int64),
        _per_token("hidden_states", lambda _, tokens: (tokens, hidden_size), dtype),
        _per_sequence("req_pool_indices", lambda bs, _: (bs,), torch.int64),
        lens("seq_lens", lambda bs, _: (bs,), torch.int64),
        lens("seq_lens_cpu", lambda bs, _: (bs,), torch.int64, device="cpu"),
        _per_sequence("last_offsets", lambda bs, _: (bs,), torch.int64),
    ]
    if num_layers > 1:
        slots.append(
            _per_sequence("carries", lambda bs, _: (bs, num_layers - 1, hidden_size), dtype)
        )
    return slots + _draw_slots() if is_drawn else slots


def tree_mask_slot(num_nodes: int) -> GraphSlot:
    """Returns the slot of a verify graph that says who sees whom.

    A padded node sees all: seeing nothing, it would come out of attention as NaN.

    Args:
        num_nodes: Of each sequence's tree, the root included.
    """
    return GraphSlot(
        "tree_mask",
        lambda bs, _: (bs, num_nodes, num_nodes),
        torch.bool,
        axis="bs",
        padding_policy=PaddingPolicy.FILL_SENTINEL,
        pad_value=1,
    )


def _draw_slots() -> list[GraphSlot]:
    return [
        _per_sequence("temperature", lambda bs, _: (bs,), torch.float32),
        _per_sequence("seeds", lambda bs, _: (bs,), torch.int64),
        _per_sequence("draw_positions", lambda bs, _: (bs,), torch.int64),
    ]
