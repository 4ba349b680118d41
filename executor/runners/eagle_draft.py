"""EAGLE draft runner: a draft model with keys and values of its own, all steps and the selection at once.

    first drafts ─▶ pass 1 ─▶ K best of K * K ─▶ pass 2 ─▶ … ─▶ pass D - 1 ─▶ chain or best nodes
    slots           L …       (K = 1: the best)  L + K …

B sequences of L tokens    D drafts on the longest path    K drafts that each step goes on from

Pass s runs level s of the tree at position L + s - 1, K rows of a sequence, and stores their keys in
K slots behind those of the passes before. In a tree, each row sees its ancestors among them.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from executor.batch.forward_batch import ForwardBatch
from executor.budget.speculation import SpeculationPlan
from executor.model.layers.attention import Attend
from executor.runners.draft_graphs import DraftGraphs
from executor.runners.draft_picks import chain_of, pick, pick_level
from executor.runners.dummy_batches import dummy_draft
from executor.runners.forward_pass import ForwardPass, RunnerGraphs
from executor.speculative.draft_batch import DraftBatch
from executor.speculative.tree import Drafts, beam_ancestors, best_nodes, first_level


class EagleDraftRunner:
    """The draft phase of an EAGLE head, or of MTP with one layer.

    What a replay returns is valid until the next one. Nothing that a graph reads is written by it,
    positions least of all, so a warm-up or a replay does the same again.

    Args:
        passes: D - 1 passes of the draft model, each with an attention of its own, since all are
            planned before the first one runs.
        plan: How it drafts.
        target_ids: int64 [V], the target's id of each of the draft's; None if they are the same.
        is_drawn: Whether batches say how drafts are drawn.
        graphs: What to capture with (``eagle_draft_slots``); None runs everything eagerly.

    Attributes:
        graphs: What runs the phase, and is captured.
    """

    def __init__(
        self,
        passes: Sequence[ForwardPass],
        plan: SpeculationPlan,
        *,
        target_ids: torch.Tensor | None = None,
        is_drawn: bool = False,
        graphs: RunnerGraphs | None = None,
    ) -> None:
        assert len(passes) == plan.num_draft_steps - 1, "a pass for each draft but the first"
        self._passes = tuple(passes)
        self._plan = plan
        self._topk = plan.topk
        self._target_ids = target_ids
        self._is_drawn = is_drawn
        self.graphs = DraftGraphs("draft", self, passes, plan, is_drawn=is_drawn, graphs=graphs)
        attentions = [forward_pass.attention for forward_pass in passes]
        self._attends: list[Attend] = [attention.forward for attention in attentions]
        self._masks: list[torch.Tensor] = []
        if graphs is not None and passes:
            self._attends = [graphs.attend(attention) for attention in attentions]
            self._masks = self._new_masks(self.graphs.sizes[-1])

    def draft(self, batch: DraftBatch) -> Drafts:
        """Returns the drafts of each sequence. Every DP rank must call it, also with none."""
        return self.graphs.draft(batch)

    # ---- the phase

    def dummy(self, size: int) -> DraftBatch:
        """Returns a batch of ``size`` sequences that is safe to run."""
        return dummy_draft(
            self._passes[0],
            size,
            self._topk,
            num_first=self._topk,
            num_slots=len(self._passes) * self._topk,
            is_drawn=self._is_drawn,
            has_probs=self._is_drawn,
        )

    def spread(self, batch: DraftBatch) -> DraftBatch:
        """Returns positions and slots [D - 1, B * K] and lengths [D - 1, B] of each pass."""
        num_passes, width, count = len(self._passes), self._topk, batch.batch_size
        before = torch.arange(num_passes)[:, None]
        # Made there: a copy would wait for the device.
        on_device = torch.arange(num_passes, device=batch.seq_lens.device)[:, None]
        positions = batch.seq_lens + on_device
        if self._passes:
            positions.clamp_(max=self._passes[0].max_seq_len - 1)
        locations = batch.out_cache_loc.view(count, num_passes, width).transpose(0, 1)
        return replace(
            batch,
            positions=positions.repeat_interleave(width, dim=1),
            # One behind another: kernels read them by their address.
            out_cache_loc=locations.reshape(num_passes, count * width).contiguous(),
            seq_lens=batch.seq_lens + (on_device + 1) * width,
            seq_lens_cpu=batch.seq_lens_cpu + (before + 1) * width,
        )

    def plan(self, batch: DraftBatch) -> list[ForwardBatch]:
        """Plans attention of all passes, and returns their batches, tokens and hidden states
        excepted."""
        width, count = self._topk, batch.batch_size
        masks = self._masks
        if batch.layout.graph_size is None or not masks:
            masks = self._new_masks(count)
        passes: list[ForwardBatch] = []
        for place, forward_pass in enumerate(self._passes):
            of_pass = replace(
                batch,
                positions=batch.positions[place],
                out_cache_loc=batch.out_cache_loc[place],
                seq_lens=batch.seq_lens[place],
                seq_lens_cpu=batch.seq_lens_cpu[place],
            )
            if width > 1:
                of_pass.extend_seq_lens_cpu = np.full(count, width)
                of_pass.tree_mask = masks[place][:count]
            forward_pass.plan(of_pass)
            passes.append(of_pass)
        return passes

    def run(self, batch: DraftBatch, passes: Sequence[ForwardBatch]) -> Drafts:
        """Returns the drafts. Only device work."""
        return (self._chain if self._topk == 1 else self._tree)(batch, passes)

    def _chain(self, inputs: DraftBatch, batches: Sequence[ForwardBatch]) -> Drafts:
        assert inputs.hidden_states is not None, "a draft reads hidden states"
        tokens, probs, hidden = [inputs.input_ids[:, None]], [inputs.probs], inputs.hidden_states
        passes = zip(self._passes, batches, self._attends, strict=True)
        for step, (forward_pass, batch, attend) in enumerate(passes, start=1):
            batch = replace(batch, input_ids=tokens[-1].flatten(), hidden_states=hidden)
            hidden = forward_pass.run(batch, attend).clone()  # the next pass may overwrite it
            logits = forward_pass.compute_logits(hidden)
            picks = pick(logits, 1, self._target_ids, inputs.draws, step)
            tokens.append(picks.tokens)
            probs.append(picks.probs)
        return chain_of(tokens, probs)

    def _tree(self, inputs: DraftBatch, batches: Sequence[ForwardBatch]) -> Drafts:
        assert inputs.hidden_states is not None, "a draft reads hidden states"
        assert inputs.scores is not None, "first drafts have log probabilities"
        count, width = inputs.scores.shape
        size = inputs.hidden_states.shape[1]
        level, beams = first_level(inputs.input_ids.view(count, width), inputs.scores)
        levels, seen = [level], None
        hidden = inputs.hidden_states.unsqueeze(1)
        passes = zip(self._passes, batches, self._attends, strict=True)
        for step, (forward_pass, batch, attend) in enumerate(passes, start=1):
            seen = beam_ancestors(seen, beams)
            assert batch.tree_mask is not None, "planned for a tree"
            batch.tree_mask.copy_(seen)
            given = hidden.gather(1, beams.origins.unsqueeze(2).expand(-1, -1, size))
            batch = replace(
                batch, input_ids=beams.tokens.flatten(), hidden_states=given.flatten(0, 1)
            )
            out = forward_pass.run(batch, attend)
            hidden = out.view(count, width, size)
            logits = forward_pass.compute_logits(out)
            level, beams = pick_level(logits, beams, self._target_ids, step)
            levels.append(level)
        return best_nodes(levels, self._plan.num_draft_tokens - 1)

    def _new_masks(self, count: int) -> list[torch.Tensor]:
        """Returns buffers for the tree mask of each pass."""
        width = self._topk
        if width == 1:
            return []
        device = self._passes[0].kv_pool.device if self._passes else None
        return [
            torch.ones(count, width, step * width, dtype=torch.bool, device=device)
            for step in range(1, len(self._passes) + 1)
        ]
