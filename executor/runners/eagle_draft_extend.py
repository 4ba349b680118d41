"""Brings a draft model with one layer up to the tokens that the target has run.

    rows of B sequences ─▶ one pass ─▶ hidden states of the last rows ─▶ head ─▶ first drafts [S, K]

The head runs on the last row of each sequence that samples, on no other.
"""

import torch

from executor.layers.attention import Attend
from executor.runners.draft_picks import pick
from executor.runners.extend_graphs import ExtendGraphs
from executor.runners.forward_pass import ForwardPass
from executor.runners.phase_graphs import PhaseGraphs
from executor.speculative.draft_batch import ExtendBatch, Extended


class EagleDraftExtendRunner:
    """Draft-extend of an EAGLE head, or of MTP with one layer.

    Args:
        forward_pass: Of the draft model.
        topk: K, drafts that the next step goes on from.
        width: Rows of each sequence in a graph.
        target_ids: int64 [V], the target's id of each of the draft's; None if they are the same.
        is_drawn: Whether batches say how drafts are drawn.
        graphs: What to capture with (``draft_extend_slots``); None runs everything eagerly.
    """

    def __init__(
        self,
        forward_pass: ForwardPass,
        topk: int,
        *,
        width: int,
        target_ids: torch.Tensor | None = None,
        is_drawn: bool = False,
        graphs: PhaseGraphs | None = None,
    ) -> None:
        self._pass = forward_pass
        self._topk = topk
        self._target_ids = target_ids
        self._is_drawn = is_drawn
        self._attend: Attend = forward_pass.attention.forward
        self._graphs: ExtendGraphs | None = None
        self.sizes: tuple[int, ...] = ()
        if graphs is not None:
            self.sizes = graphs.sizes
            [self._attend] = graphs.attends([forward_pass.attention])
            self._graphs = ExtendGraphs(
                forward_pass, graphs, width=width, num_drafts=topk, is_drawn=is_drawn
            )

    def extend(self, batch: ExtendBatch) -> Extended:
        """Returns what the next step drafts from. Every DP rank must call it, also without rows."""
        assert (batch.draws is not None) == self._is_drawn, "drafts are drawn always or never"
        if self._graphs is not None and batch.batch.layout.graph_size is not None:
            return self._graphs.replay(batch)
        self._pass.plan(batch.batch)
        return self._run(batch)

    def discard(self) -> None:
        """Drops what was captured."""
        if self._graphs is not None:
            self._graphs.discard()

    def capture(self) -> None:
        """Captures every size, if there are any. All ranks must call it, at the same time."""
        if self._graphs is not None:
            self._graphs.capture("draft_extend", self._run)

    def _run(self, batch: ExtendBatch) -> Extended:
        hidden = self._pass.run(batch.batch, self._attend).index_select(0, batch.lasts)
        logits = self._pass.compute_logits(hidden)
        picks = pick(logits, self._topk, self._target_ids, batch.draws, 0)
        return Extended(picks.tokens, picks.scores, hidden, probs=picks.probs)
