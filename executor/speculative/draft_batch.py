"""What the runners of a draft model take and give. Data only.

B sequences    D draft steps    K drafts that each goes on from (topk)    H hidden size
V the draft's vocabulary
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from executor.batch.forward_batch import ForwardBatch
from executor.parallel.layout import DpPaddingMode


@dataclass(frozen=True, slots=True)
class Draws:
    """How drafts are drawn from the draft's distribution, for rejection sampling.

    Attributes:
        temperature: float32 [B]; 0 takes the likeliest token.
        seeds: int64 [B], of the requests.
        positions: int64 [B], where each sequence's first draft would stand.
    """

    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """What every rank knows of a speculative step; layouts of all phases follow from it.

    Attributes:
        num_requests: Sequences of each DP rank.
        padding_mode: How the ranks' rows are gathered.
        graph_requests: Sequences of the graph that all ranks replay; None: all run eagerly.
    """

    num_requests: tuple[int, ...]
    padding_mode: DpPaddingMode
    graph_requests: int | None = None


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """The sequences of a draft phase, each with L tokens so far. B may be 0.

    Attributes:
        step: Counts of all ranks.
        req_pool_indices: int64 [B], rows of the block table.
        seq_lens: int64 [B], L: the first draft stands at this position.
        seq_lens_cpu: The same on the host.
        out_cache_loc: int64 [B * (D - 1) * K], slots of the drafts that the draft model runs, those
            of a sequence step after step: behind its L tokens. Empty where it stores none.
        tokens: int64 [B, K], the first drafts, target ids. Where the draft model reads the
            target's KV: int64 [B, 1], the last token.
        scores: float32 [B, K], log probabilities of the first drafts; unused with the last token.
        hidden_states: [B, H], what the draft model takes with them: of the position before.
        probs: float32 [B, V], what each first draft was drawn from; None if it is the likeliest.
        draws: How later drafts are drawn; None takes the likeliest.
    """

    step: Step
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    out_cache_loc: torch.Tensor
    tokens: torch.Tensor
    scores: torch.Tensor
    hidden_states: torch.Tensor
    probs: torch.Tensor | None = None
    draws: Draws | None = None


@dataclass(frozen=True, slots=True)
class ExtendBatch:
    """What the draft model runs over tokens that the target has run: R rows of B sequences.

    Attributes:
        batch: The rows of each sequence, in order, with the hidden states that the first draft
            layer takes. With more than one layer, every sequence that samples has a row more for
            each further layer, which its drafts fill in; the last rows of a captured batch may
            stand for tokens that were not accepted.
        width: Rows of every sequence; None if they differ, and then no graph is replayed.
        starts: int64 [B], row in which each sequence begins.
        lasts: int64 [S], row of the last token of each sequence that samples.
        carries: [B, layers - 1, H], what each further layer takes with a sequence's first token:
            the output of the layer before, one position before. None with one layer.
        draws: How drafts are drawn, [S] entries; None takes the likeliest.
    """

    batch: ForwardBatch
    width: int | None
    starts: torch.Tensor
    lasts: torch.Tensor
    carries: torch.Tensor | None = None
    draws: Draws | None = None


class Extended(NamedTuple):
    """What a draft-extend leaves for the next step. The runner's own buffers are not among it.

    Attributes:
        tokens: int64 [S, K], the likeliest first drafts, target ids, the likeliest first; of a
            draft model with a layer for each step [S, D], the whole chain.
        scores: float32, their log probabilities.
        hidden: [S, H], what the next draft step takes.
        outputs: Hidden states [R, H] of every layer but the last. Valid until the next pass.
        probs: float32 [S, V] or [S, D, V], what they were drawn from; None if they are the
            likeliest.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    hidden: torch.Tensor
    outputs: tuple[torch.Tensor, ...] = ()
    probs: torch.Tensor | None = None
