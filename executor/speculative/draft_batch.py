"""Batches of a draft model, and what its draft-extend leaves. Data only.

B sequences    D draft steps    K drafts that each goes on from (topk)    H hidden size
V the draft's vocabulary

They are ``ForwardBatch``es with more fields, so that a buffer registry fills a graph's inputs from
them and hands them back like any other.
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import torch

from executor.batch.forward_batch import ForwardBatch


class Draws(NamedTuple):
    """How drafts are drawn from the draft's distribution, for rejection sampling.

    Attributes:
        temperature: float32 [B]; 0 takes the likeliest token.
        seeds: int64 [B], of the requests.
        positions: int64 [B], where each sequence's first draft would stand.
    """

    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


@dataclass(slots=True, kw_only=True)
class DrawnBatch(ForwardBatch):
    """A batch whose drafts may be drawn.

    Attributes:
        temperature, seeds, draw_positions: As in ``Draws``; None takes the likeliest.
    """

    temperature: torch.Tensor | None = None
    seeds: torch.Tensor | None = None
    draw_positions: torch.Tensor | None = None

    @property
    def draws(self) -> Draws | None:
        temperature, seeds, positions = self.temperature, self.seeds, self.draw_positions
        if temperature is None or seeds is None or positions is None:
            return None
        return Draws(temperature, seeds, positions)

    @classmethod
    def of(cls, batch: ForwardBatch, **more: Any) -> Self:
        """Returns a batch with more fields."""
        return cls(**{field.name: getattr(batch, field.name) for field in fields(batch)}, **more)


@dataclass(slots=True, kw_only=True)
class DraftBatch(DrawnBatch):
    """The sequences of a draft phase, each with L tokens so far. B may be 0.

    ``layout`` is that of a pass, K rows for each sequence. A runner gives ``positions``,
    ``out_cache_loc`` and the lengths a line for each pass.

    Attributes:
        input_ids: int64 [B * K], the first drafts, target ids. Where the draft model reads the
            target's KV: int64 [B], the last token.
        positions, seq_lens: int64 [B], L: the first draft stands at this position.
        out_cache_loc: int64 [B * (D - 1) * K], slots of the drafts that the draft model runs, those
            of a sequence step after step: behind its L tokens. Empty where it stores none.
        hidden_states: [B, H], what the draft model takes with them: of the position before.
        scores: float32 [B, K], log probabilities of the first drafts; None with the last token.
        probs: float32 [B, V], what each first draft was drawn from; None if it is the likeliest.
    """

    scores: torch.Tensor | None = None
    probs: torch.Tensor | None = None


@dataclass(slots=True, kw_only=True)
class ExtendBatch(DrawnBatch):
    """What the draft model runs over tokens that the target has run: R rows of B sequences.

    ``hidden_states`` are those that the first draft layer takes. With more than one layer, every
    sequence that samples has a row more for each further layer, which its drafts fill in; the last
    rows of a captured batch may stand for tokens that were not accepted. Draws have [S] entries.

    Attributes:
        width: Rows of every sequence; None if they differ, and then no graph is replayed.
        starts: int64 [B], row in which each sequence begins.
        lasts: int64 [S], row of the last token of each sequence that samples.
        carries: [B, layers - 1, H], what each further layer takes with a sequence's first token:
            the output of the layer before, one position before. None with one layer.
    """

    width: int | None
    starts: torch.Tensor
    lasts: torch.Tensor
    carries: torch.Tensor | None = None


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
