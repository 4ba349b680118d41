"""Brings a draft model with one layer up to the tokens that the target has run.

    rows of B sequences ─▶ one pass ─▶ hidden states of the last rows ─▶ head ─▶ first drafts [S, K]

The head runs on the last row of each sequence that samples, on no other.
"""

from collections.abc import Mapping

import torch

from executor.model.layers.attention import Attend
from executor.runners.draft_graphs import PhaseGraphs
from executor.runners.draft_picks import pick
from executor.runners.extend_phase import ExtendPhase
from executor.runners.forward_pass import ForwardPass
from executor.speculative.draft_batch import ExtendBatch, Extended


class EagleDraftExtendRunner:
    """Draft-extend of an EAGLE head, or of MTP with one layer.

    Args:
        forward_pass: Of the draft model.
        topk: K, drafts that the next step goes on from.
        target_ids: int64 [V], the target's id of each of the draft's; None if they are the same.
        is_drawn: Whether batches say how drafts are drawn.
        graphs: What to capture with (``draft_extend_slots``), by the rows of each sequence; none
            runs everything eagerly.
    """

    def __init__(
        self,
        forward_pass: ForwardPass,
        topk: int,
        *,
        target_ids: torch.Tensor | None = None,
        is_drawn: bool = False,
        graphs: Mapping[int, PhaseGraphs] | None = None,
    ) -> None:
        self._pass = forward_pass
        self._topk = topk
        self._target_ids = target_ids
        self._phase = ExtendPhase(
            "draft_extend",
            forward_pass,
            self._run,
            num_drafts=topk,
            is_drawn=is_drawn,
            graphs=graphs or {},
        )
        self.sizes = self._phase.sizes

    def extend(self, batch: ExtendBatch) -> Extended:
        """Returns what the next step drafts from. Every DP rank must call it, also without rows."""
        return self._phase.extend(batch)

    def discard(self) -> None:
        """Drops what was captured."""
        self._phase.discard()

    def capture(self) -> None:
        """Captures every size, if there are any. All ranks must call it, at the same time."""
        self._phase.capture()

    def _run(self, attend: Attend, batch: ExtendBatch) -> Extended:
        hidden = self._pass.run(batch.batch, attend).index_select(0, batch.lasts)
        logits = self._pass.compute_logits(hidden)
        picks = pick(logits, self._topk, self._target_ids, batch.draws, 0)
        return Extended(picks.tokens, picks.scores, hidden, probs=picks.probs)
