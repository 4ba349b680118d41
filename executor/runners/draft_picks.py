"""Picks of a draft model: the tokens that it proposes, and output buffers for them.

Only device work of fixed shapes.

S rows of logits    K tokens of each    V the draft's vocabulary
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from executor.budget.speculation import SpeculationPlan
from executor.model.sampling.logits import invert, temper
from executor.runners.forward_pass import ForwardPass
from executor.speculative.accept import DRAFT_STREAM, stream_samples
from executor.speculative.draft_batch import Draws
from executor.speculative.tree import Beams, Drafts, Level, next_level, num_candidates


class Picks(NamedTuple):
    """What is proposed after each of S tokens.

    Attributes:
        tokens: int64 [S, K], target ids, the likeliest first.
        scores: float32 [S, K], their log probabilities.
        probs: float32 [S, V], what they were drawn from; None if they are the likeliest.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    probs: torch.Tensor | None


def pick(
    logits: torch.Tensor,
    count: int,
    target_ids: torch.Tensor | None,
    draws: Draws | None,
    offset: int,
) -> Picks:
    """Proposes the likeliest tokens, or draws one.

    Args:
        logits: float32 [S, V].
        count: K; 1 if it is drawn.
        target_ids: int64 [V], the target's id of each of the draft's; None if they are the same.
        draws: How to draw, [S] each; None takes the likeliest.
        offset: How far the token's position is from ``draws.positions``.
    """
    probs = None
    if draws is None:
        scores, ids = torch.log_softmax(logits, dim=-1).topk(count, dim=-1)
    else:
        assert count == 1, "only chains are drawn"
        probs = distribution(logits, draws.temperature)
        uniform = stream_samples(draws.seeds, draws.positions + offset, DRAFT_STREAM)
        ids = invert(probs, uniform).unsqueeze(1)
        scores = probs.gather(1, ids).log()
    tokens = ids if target_ids is None else target_ids.index_select(0, ids.flatten()).view_as(ids)
    return Picks(tokens, scores, probs)


def pick_level(
    logits: torch.Tensor, beams: Beams, target_ids: torch.Tensor | None, step: int
) -> tuple[Level, Beams]:
    """Returns a tree's next level, and the beams that go on from it.

    Args:
        logits: float32 [B * K, V], after each beam.
        beams: What the step ran.
        target_ids: As in ``pick``.
        step: Levels before this one.
    """
    count, width = beams.tokens.shape
    picks = pick(logits, width, target_ids, None, step)
    size = (count, width, width)
    num_before = num_candidates(step, width)
    return next_level(beams, picks.tokens.view(size), picks.scores.view(size), num_before)


def chain_of(tokens: Sequence[torch.Tensor], probs: Sequence[torch.Tensor | None]) -> Drafts:
    """Returns a chain of drafts.

    Args:
        tokens: int64 [B, 1], one for each draft.
        probs: float32 [B, V], what each was drawn from; None where nothing is drawn.
    """
    drawn_from = [x for x in probs if x is not None]
    return Drafts(
        torch.cat(list(tokens), dim=1), None, torch.stack(drawn_from, dim=1) if drawn_from else None
    )


def distribution(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Returns what drafts are drawn from, float32 [S, V].

    Args:
        logits: float32 [S, V].
        temperature: float32 [S]; at 0 all goes to the likeliest token.
    """
    is_greedy = (temperature <= 0).unsqueeze(1)
    tempered = temper(logits, torch.where(temperature <= 0, 1.0, temperature))
    likeliest = torch.zeros_like(logits).scatter_(1, logits.argmax(dim=1, keepdim=True), 1.0)
    return torch.where(is_greedy, likeliest, torch.softmax(tempered, dim=-1))


def new_drafts(
    forward_pass: ForwardPass, plan: SpeculationPlan, count: int, *, is_drawn: bool
) -> Drafts:
    """Returns output buffers for the drafts of ``count`` sequences: memory that no graph owns.

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


def copy_results(
    results: Iterable[torch.Tensor | None], buffers: Iterable[torch.Tensor | None]
) -> None:
    """Copies a graph's results to the front of their buffers; None where there are none."""
    for result, buffer in zip(results, buffers, strict=True):
        if result is not None:
            assert buffer is not None, "every result has a buffer"
            buffer[: len(result)].copy_(result)
