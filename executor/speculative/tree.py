"""Draft tree: how draft steps grow it, which nodes are verified, and which nodes a node sees.

    last token ─┬─ a ─┬─ c        storage   0     1  2  3  4  5
                │     └─ d        token     last  a  b  c  d  e
                └─ b ─── e        parent    -     0  0  1  1  2

A parent lies before its children. With one draft per step the tree is a chain. Pure functions on
tensors of fixed shapes, so that a graph can record them.

    B sequences    K drafts that each step goes on from (topk)    M candidates    N nodes, root included

Source: Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", section 4.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Drafts(NamedTuple):
    """What is proposed for B sequences: N - 1 nodes each.

    Attributes:
        tokens: int64 [B, N - 1], target ids.
        parents: int64 [B, N - 1], storage index of each one's parent; None for a chain.
        probs: float32 [B, N - 1, V], the distribution that each draft of a chain was drawn from;
            None if it is the likeliest token.
    """

    tokens: torch.Tensor
    parents: torch.Tensor | None = None
    probs: torch.Tensor | None = None


class Level(NamedTuple):
    """What one draft step adds: M candidates for each sequence.

    Attributes:
        tokens: int64 [B, M], target ids.
        scores: float32 [B, M], log probability of the path to each.
        parents: int64 [B, M], the candidate that each goes on from, counted over all levels from
            1; 0 is the last token.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor


class Beams(NamedTuple):
    """The candidates of a level that the next step goes on from.

    Attributes:
        tokens: int64 [B, K], target ids.
        scores: float32 [B, K].
        nodes: int64 [B, K], each one's number over all levels, from 1.
        origins: int64 [B, K], the beam of the step before that each goes on from.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    nodes: torch.Tensor
    origins: torch.Tensor


def first_level(tokens: torch.Tensor, scores: torch.Tensor) -> tuple[Level, Beams]:
    """Returns the likeliest tokens after the last one as a level, all of which go on.

    Args:
        tokens: int64 [B, K], target ids.
        scores: float32 [B, K], their log probabilities.
    """
    parents = torch.zeros_like(tokens)
    nodes = torch.arange(1, tokens.shape[1] + 1, device=tokens.device).expand_as(tokens)
    return Level(tokens, scores, parents), Beams(tokens, scores, nodes, parents)


def next_level(
    beams: Beams, tokens: torch.Tensor, scores: torch.Tensor, num_before: int
) -> tuple[Level, Beams]:
    """Returns what a draft step makes of its beams, and the K best of it.

    Args:
        beams: What the step ran.
        tokens: int64 [B, K, K], the likeliest tokens after each beam, target ids.
        scores: float32 [B, K, K], their log probabilities after it.
        num_before: Candidates of the levels before.
    """
    width = beams.tokens.shape[1]
    tokens = tokens.flatten(1)
    scores = (beams.scores[:, :, None] + scores).flatten(1)
    parents = beams.nodes.repeat_interleave(width, dim=1)
    best = scores.topk(width, dim=1)
    level = Level(tokens, scores, parents)
    nodes = best.indices + (num_before + 1)
    return level, Beams(tokens.gather(1, best.indices), best.values, nodes, best.indices // width)


def best_nodes(levels: Sequence[Level], count: int) -> Drafts:
    """Returns the ``count`` candidates with the likeliest paths, as a tree.

    A path is no likelier than a part of it, and of equals the earlier ones are taken, so that
    every parent is among them.

    Args:
        levels: Of all draft steps, in order.
        count: N - 1; at most all candidates.
    """
    scores = torch.cat([level.scores for level in levels], dim=1)
    tokens = torch.cat([level.tokens for level in levels], dim=1)
    parents = torch.cat([level.parents for level in levels], dim=1)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    chosen = order.sort(dim=1).values
    places = torch.zeros(len(scores), scores.shape[1] + 1, dtype=torch.int64, device=scores.device)
    storage = torch.arange(1, count + 1, device=scores.device).expand_as(chosen)
    places.scatter_(1, chosen + 1, storage)
    return Drafts(tokens.gather(1, chosen), places.gather(1, parents.gather(1, chosen)))


def num_candidates(num_steps: int, topk: int) -> int:
    """Returns how many nodes there are to choose from, the last token not counted."""
    return topk + (num_steps - 1) * topk * topk


def ancestors(parents: torch.Tensor, max_depth: int) -> torch.Tensor:
    """Returns which nodes each node sees: itself and its ancestors, the root included.

    Args:
        parents: int64 [B, N - 1], as in ``Drafts``.
        max_depth: Drafts on the longest path, or more.

    Returns:
        bool [B, N, N].
    """
    size = parents.shape[1] + 1
    above = torch.nn.functional.pad(parents, (1, 0))  # the root is its own parent
    node = torch.arange(size, device=parents.device).expand_as(above)
    sees = torch.eye(size, dtype=torch.bool, device=parents.device).repeat(len(parents), 1, 1)
    for _ in range(max_depth):
        node = above.gather(1, node)
        sees.scatter_(2, node.unsqueeze(2), True)
    return sees


def beam_ancestors(seen: torch.Tensor | None, beams: Beams) -> torch.Tensor:
    """Returns which slots of a tree's drafts each beam sees: [B, K, S * K] for draft step S.

    Every draft step stores K slots, behind those of the steps before.

    Args:
        seen: bool [B, K, (S - 1) * K] of the step before; None for the first.
        beams: What the step runs.
    """
    num_sequences, width = beams.tokens.shape
    itself = torch.eye(width, dtype=torch.bool, device=beams.tokens.device)
    itself = itself.expand(num_sequences, width, width)
    if seen is None:
        return itself
    index = beams.origins.unsqueeze(2).expand(-1, -1, seen.shape[2])
    return torch.cat((seen.gather(1, index), itself), dim=2)
