"""Draft-extend runners: a draft model runs the tokens that the target has run.

    rows of B sequences ─▶ one pass ─▶ hidden states of the last rows ─▶ head ─▶ first drafts [S, K]

The head runs on the last row of each sequence that samples, on no other. With a layer for each step:

    row of the last token      +0              +1              +2
    layer 0, target's h        draft 1
    layer 1, layer 0's h       -               draft 2         each draft is the next row's token
    layer 2, layer 1's h       -               -               draft 3

Layer k takes with each token what layer k - 1 gave for the token before: hidden states move on by one
row from layer to layer, and a sequence's first row takes what was kept for it. All layers run all rows,
of the same tokens but for the drafts, so they share one plan of attention and one set of buffers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from executor.model.layers.attention import Attend
from executor.runners.draft_extend_graphs import DraftExtendGraphs
from executor.runners.draft_picks import pick
from executor.runners.forward_pass import ForwardPass, RunnerGraphs
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

    Attributes:
        graphs: What runs draft-extend, and is captured.
    """

    def __init__(
        self,
        forward_pass: ForwardPass,
        topk: int,
        *,
        target_ids: torch.Tensor | None = None,
        is_drawn: bool = False,
        graphs: Mapping[int, RunnerGraphs] | None = None,
    ) -> None:
        self._pass = forward_pass
        self._topk = topk
        self._target_ids = target_ids
        self.graphs = DraftExtendGraphs(
            "draft_extend",
            forward_pass,
            self._run,
            num_drafts=topk,
            is_drawn=is_drawn,
            graphs=graphs or {},
        )

    def extend(self, batch: ExtendBatch) -> Extended:
        """Returns what the next step drafts from. Every DP rank must call it, also without rows."""
        return self.graphs.extend(batch)

    def _run(self, attend: Attend, batch: ExtendBatch) -> Extended:
        hidden = self._pass.run(batch, attend).index_select(0, batch.lasts)
        logits = self._pass.compute_logits(hidden)
        picks = pick(logits, self._topk, self._target_ids, batch.draws, 0)
        return Extended(picks.tokens, picks.scores, hidden, probs=picks.probs)


class MultiLayerDraftExtendRunner:
    """Draft and draft-extend of MTP with several layers: what it returns holds whole chains.

    One graph holds all layers of a size, in order: nothing happens on the host between them, and
    each reads what the one before has left. A graph for each layer would be D replays.

    Args:
        passes: Of each layer, D of them, with one attention among them.
        target_ids: int64 [V], the target's id of each of the draft's; None if they are the same.
        is_drawn: Whether batches say how drafts are drawn.
        graphs: What to capture with (``draft_extend_slots``), by the rows of each sequence; none
            runs everything eagerly.

    Attributes:
        graphs: What runs draft-extend, and is captured.
    """

    def __init__(
        self,
        passes: Sequence[ForwardPass],
        *,
        target_ids: torch.Tensor | None = None,
        is_drawn: bool = False,
        graphs: Mapping[int, RunnerGraphs] | None = None,
    ) -> None:
        self._passes = tuple(passes)
        first = self._passes[0]
        assert all(x.attention is first.attention for x in passes), "layers share one plan"
        self._target_ids = target_ids
        self.graphs = DraftExtendGraphs(
            "multi_layer_draft_extend",
            first,
            self._run,
            num_drafts=len(passes),
            num_layers=len(passes),
            is_drawn=is_drawn,
            graphs=graphs or {},
        )

    def extend(self, batch: ExtendBatch) -> Extended:
        """Returns whole chains, and the layers' outputs.

        Every DP rank must call it, also without rows.
        """
        return self.graphs.extend(batch)

    def _run(self, attend: Attend, batch: ExtendBatch) -> Extended:
        at = batch.lasts
        ids = batch.input_ids.clone()  # drafts are written to it; the batch stays as it is
        hidden, picked = batch.hidden_states, []
        outputs: list[torch.Tensor] = []
        last = batch.hidden_states
        for layer, forward_pass in enumerate(self._passes):
            if layer > 0:
                assert batch.carries is not None, "layers take one another's output"
                hidden = outputs[-1].roll(1, 0)
                hidden.index_copy_(0, batch.starts, batch.carries[:, layer - 1])
            out = forward_pass.run(replace(batch, input_ids=ids, hidden_states=hidden), attend)
            last = out.index_select(0, at)
            logits = forward_pass.compute_logits(last)
            picked.append(pick(logits, 1, self._target_ids, batch.draws, layer))
            if layer + 1 < len(self._passes):
                outputs.append(out.clone())  # the next layer may overwrite it
                at = at + 1
                ids.index_copy_(0, at, picked[-1].tokens[:, 0])
        assert last is not None, "there is a layer"
        probs = [picks.probs for picks in picked if picks.probs is not None]
        return Extended(
            tokens=torch.cat([picks.tokens for picks in picked], dim=1),
            scores=torch.cat([picks.scores for picks in picked], dim=1),
            hidden=last,
            outputs=tuple(outputs),
            probs=torch.stack(probs, dim=1) if probs else None,
        )
