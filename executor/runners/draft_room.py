"""Where replays of a draft phase leave their drafts: memory that no graph owns."""

import torch

from executor.budget.speculation import SpeculationPlan
from executor.runners.draft_graphs import put
from executor.runners.forward_pass import ForwardPass
from executor.speculative.tree import Drafts


def new_room(
    forward_pass: ForwardPass, plan: SpeculationPlan, count: int, *, is_drawn: bool
) -> Drafts:
    """Returns zeros for the drafts of ``count`` sequences.

    Args:
        forward_pass: Of the draft model.
        plan: How it drafts.
        count: Sequences of the largest graph.
        is_drawn: Whether drafts are drawn.
    """
    device, num_drafts = forward_pass.kv_pool.device, plan.num_draft_tokens - 1
    tokens, parents = torch.zeros(2, count, num_drafts, dtype=torch.int64, device=device)
    probs = None
    if is_drawn:
        size = (count, num_drafts, forward_pass.vocab_size)
        probs = torch.zeros(size, dtype=torch.float32, device=device)
    return Drafts(tokens, parents if plan.is_tree else None, probs)


def put_drafts(drafts: Drafts, room: Drafts) -> None:
    """Copies drafts to the front of the room. Device work alone."""
    for values, into in zip(drafts, room, strict=True):
        put(values, into)


def taken(room: Drafts, count: int) -> Drafts:
    """Returns the drafts of the first ``count`` sequences, views."""
    return Drafts(*(None if values is None else values[:count] for values in room))  # type: ignore[arg-type]
