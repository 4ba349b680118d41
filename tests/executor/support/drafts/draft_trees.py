"""Random trees of drafts, and plain Python that says what is so of them. For tests."""

from collections.abc import Sequence

import torch

from executor.speculative.tree import Beams, Drafts, Level, first_level, next_level


def log_probs(shape: Sequence[int], seed: int, *, tie_every: float = 0) -> torch.Tensor:
    """Returns log probabilities, likeliest first along the last dimension.

    Args:
        tie_every: If above 0, values are rounded to so many steps per unit, and a third of all
            likeliest ones are exactly 0, which is a probability of 1.
    """
    generator = torch.Generator().manual_seed(seed)
    scores = -torch.rand(*shape, generator=generator) * 3
    if tie_every:
        scores = (scores * tie_every).round() / tie_every
        scores[..., 0][torch.rand(shape[:-1], generator=generator) < 1 / 3] = 0
    return scores.sort(dim=-1, descending=True).values


def grow(
    num_sequences: int, num_steps: int, topk: int, seed: int, *, tie_every: float = 0
) -> tuple[list[Level], list[Beams]]:
    """Returns the levels and the beams of a tree whose tokens are numbers given out in order."""
    count = num_sequences * topk
    tokens = torch.arange(count).view(num_sequences, topk)
    scores = log_probs((num_sequences, topk), seed, tie_every=tie_every)
    level, beams = first_level(tokens, scores)
    levels, all_beams, before = [level], [beams], topk
    for step in range(1, num_steps):
        size = (num_sequences, topk, topk)
        own = log_probs(size, seed + 1000 * step, tie_every=tie_every)
        tokens = count + torch.arange(own.numel()).view(size)
        level, beams = next_level(beams, tokens, own, before)
        levels.append(level)
        all_beams.append(beams)
        before, count = before + topk * topk, count + own.numel()
    return levels, all_beams


def random_parents(num_sequences: int, size: int, max_depth: int, seed: int) -> torch.Tensor:
    """Returns parents int64 [B, size - 1] of trees with paths of at most ``max_depth`` drafts."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.zeros(num_sequences, size - 1, dtype=torch.int64)
    for row in parents:
        depths = [0]
        for node in range(1, size):
            open_nodes = [i for i, depth in enumerate(depths) if depth < max_depth]
            chosen = int(torch.randint(len(open_nodes), (1,), generator=generator))
            row[node - 1] = open_nodes[chosen]
            depths.append(depths[open_nodes[chosen]] + 1)
    return parents


def random_drafts(parents: torch.Tensor, seed: int, vocab_size: int) -> Drafts:
    """Returns trees in which no two children of a node are the same token."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.empty_like(parents)
    for row, above in zip(tokens, parents.tolist(), strict=True):
        order = {parent: torch.randperm(vocab_size, generator=generator) for parent in set(above)}
        for place, parent in enumerate(above):
            row[place] = order[parent][above[:place].count(parent)]
    return Drafts(tokens, parents)


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Returns the nodes from the root to one."""
    return [0] if node == 0 else [*path_to(parents[node - 1], parents), node]


def walk(targets: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Returns the nodes that the target's own tokens lead through, from the root on."""
    path = [0]
    while True:
        matching = [
            node
            for node in range(1, len(tokens) + 1)
            if parents[node - 1] == path[-1] and tokens[node - 1] == targets[path[-1]]
        ]
        if not matching:
            return path
        path.append(matching[0])
