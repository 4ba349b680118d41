"""Acceptance of drafts. Pure functions; the target model is the authority.

    match        a draft is accepted if it is the very token that plain decoding would have taken
                 there, with the same uniform sample: the output is that of plain decoding, token
                 for token
    rejection    a draft drawn from q is accepted with probability min(1, p / q), and replaced by a
                 draw from max(p - q, 0) if not: only the distribution is that of plain decoding

Either accepts drafts along one path from the root, and adds one token of the target's own.

    B sequences    N nodes, root included    D drafts on the longest path    V vocabulary

Source: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding",
ICML 2023, algorithm 1 and appendix A.1.
"""

from typing import NamedTuple

import torch

from executor.model.sampling.logits import invert, uniform_samples
from executor.speculative.tree import Drafts

# Independent streams of uniform samples, one for each purpose, out of a request's one seed.
DRAFT_STREAM = 0x5DEECE66D
ACCEPT_STREAM = 0x2545F4914F6CDD1D
RESIDUAL_STREAM = 0x1B873593CC9E2D51


class Accepted(NamedTuple):
    """What B sequences gained.

    Attributes:
        num_tokens: int64 [B], tokens gained: the accepted drafts, and one.
        tokens: int64 [B, D + 1], the tokens gained; behind them, some token.
        path: int64 [B, D + 1], the node whose logits gave each token: the root first. Behind the
            tokens gained, the last one's again.
    """

    num_tokens: torch.Tensor
    tokens: torch.Tensor
    path: torch.Tensor


def match_chain(targets: torch.Tensor, drafts: torch.Tensor, limits: torch.Tensor) -> Accepted:
    """Accepts the drafts of chains up to the first that is not the target's token.

    Args:
        targets: int64 [B, D + 1], the target's token behind each node.
        drafts: int64 [B, D].
        limits: int64 [B], tokens to gain at most, at least 1.
    """
    is_match = (targets[:, :-1] == drafts).to(torch.int64)
    num_tokens = torch.minimum(is_match.cumprod(dim=1).sum(dim=1) + 1, limits)
    nodes = torch.arange(targets.shape[1], device=targets.device)
    path = torch.minimum(nodes, (num_tokens - 1).unsqueeze(1))
    return Accepted(num_tokens, targets, path)


def match_tree(
    targets: torch.Tensor, drafts: Drafts, sees: torch.Tensor, limits: torch.Tensor, max_depth: int
) -> Accepted:
    """Accepts the path of a tree on which each draft is the target's token behind its parent.

    Args:
        targets: int64 [B, N], the target's token behind each node.
        drafts: The tree.
        sees: bool [B, N, N], its ``ancestors``.
        limits: int64 [B], tokens to gain at most, at least 1.
        max_depth: D.
    """
    assert drafts.parents is not None, "a chain has no parents"
    size = targets.shape[1]
    nodes = torch.arange(size, device=targets.device)
    is_wrong = drafts.tokens != targets.gather(1, drafts.parents)
    is_wrong = torch.nn.functional.pad(is_wrong, (1, 0))
    is_accepted = ~(sees & is_wrong.unsqueeze(1)).any(dim=2)
    num_tokens = torch.minimum(is_accepted.sum(dim=1), limits)
    # Children lie behind their parents: in order of storage, the path is in order of depth.
    order = torch.where(is_accepted, nodes, size).sort(dim=1).values[:, : max_depth + 1]
    at = torch.arange(order.shape[1], device=targets.device)
    path = order.gather(1, torch.minimum(at, (num_tokens - 1).unsqueeze(1)))
    return Accepted(num_tokens, targets.gather(1, path), path)


def reject_chain(
    p: torch.Tensor,
    q: torch.Tensor,
    drafts: torch.Tensor,
    limits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> Accepted:
    """Accepts the drafts of chains by chance, so that what is gained is distributed as ``p``.

    Args:
        p: float32 [B, D + 1, V], the target's distribution behind each node.
        q: float32 [B, D, V], what each draft was drawn from. A draft of one that is not a number
            counts for nothing: the token there is drawn from all of p.
        drafts: int64 [B, D].
        limits: int64 [B], tokens to gain at most, at least 1.
        seeds: int64 [B], of the requests.
        positions: int64 [B], of the first token to gain.
    """
    num_drafts = drafts.shape[1]
    at = torch.arange(num_drafts + 1, device=p.device)
    places = positions.unsqueeze(1) + at
    p_draft = p[:, :-1].gather(2, drafts.unsqueeze(2)).squeeze(2)
    q_draft = q.gather(2, drafts.unsqueeze(2)).squeeze(2)
    uniform = stream_samples(seeds, places[:, :-1], ACCEPT_STREAM)
    is_accepted = uniform * q_draft < p_draft
    # A draft beyond the limit is none: the token there is drawn from all of p.
    is_considered = at[:-1] < (limits - 1).unsqueeze(1)
    is_accepted &= is_considered
    num_accepted = is_accepted.to(torch.int64).cumprod(dim=1).sum(dim=1)
    last = num_accepted.view(-1, 1, 1).expand(-1, 1, p.shape[2])
    q_last = torch.nn.functional.pad(q * is_considered.unsqueeze(2), (0, 0, 0, 1)).gather(1, last)
    p_last = p.gather(1, last).squeeze(1)
    residual = (p_last - q_last.squeeze(1).nan_to_num(nan=0.0)).clamp_(min=0)
    is_empty = residual.sum(dim=1, keepdim=True) <= 0  # p and q are equal but for rounding
    residual = torch.where(is_empty, p_last, residual)
    place = positions + num_accepted
    own = invert(residual, stream_samples(seeds, place, RESIDUAL_STREAM))
    tokens = torch.nn.functional.pad(drafts, (0, 1)).scatter(
        1, num_accepted.unsqueeze(1), own.unsqueeze(1)
    )
    return Accepted(num_accepted + 1, tokens, torch.minimum(at, num_accepted.unsqueeze(1)))


def stream_samples(seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    """Returns uniform samples in [0, 1) of one stream, float64 in the shape of ``positions``.

    Args:
        seeds: int64 [B].
        positions: int64 [B] or [B, n].
        stream: One of the constants above.
    """
    own = seeds.view(-1, *(1,) * (positions.dim() - 1)).expand_as(positions) ^ stream
    return uniform_samples(own, positions)
