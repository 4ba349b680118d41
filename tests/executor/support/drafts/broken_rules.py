"""Rules of rejection sampling that are wrong on purpose: tests of distributions must notice them."""

from typing import Any

import torch

from executor.model.sampling.logits import invert
from executor.speculative.accept import RESIDUAL_STREAM, Accepted, reject_chain, stream_samples


def always_accept(p: torch.Tensor, q: torch.Tensor, drafts: torch.Tensor, *rest: Any) -> Accepted:
    is_sure = torch.nn.functional.one_hot(drafts, p.shape[2]).float()
    return reject_chain(torch.cat((is_sure, p[:, -1:]), dim=1), is_sure, drafts, *rest)


def draw_from_all_of_p(
    p: torch.Tensor,
    q: torch.Tensor,
    drafts: torch.Tensor,
    limits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> Accepted:
    """What takes a refused draft's place is drawn from p, not from what p has more of than q."""
    accepted = reject_chain(p, q, drafts, limits, seeds, positions)
    last = (accepted.num_tokens - 1).unsqueeze(1)
    p_last = p.gather(1, last.unsqueeze(2).expand(-1, -1, p.shape[2])).squeeze(1)
    uniform = stream_samples(seeds, positions + last.squeeze(1), RESIDUAL_STREAM)
    own = invert(p_last, uniform).unsqueeze(1)
    return accepted._replace(tokens=accepted.tokens.scatter(1, last, own))
