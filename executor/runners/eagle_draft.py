"""Drafts with a model that has keys and values of its own: all steps and the selection at once.

    first drafts ─▶ pass 1 ─▶ K best of K * K ─▶ pass 2 ─▶ … ─▶ pass D - 1 ─▶ chain or best nodes
    slots           L …       (K = 1: the best)  L + K …

B sequences of L tokens    D drafts on the longest path    K drafts that each step goes on from

Pass s runs level s of the tree at position L + s - 1, K rows of a sequence, and stores their keys in
K slots behind those of the passes before. In a tree, each row sees its ancestors among them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from executor.batch.forward_batch import ForwardBatch, ForwardMode
from executor.budget.speculation import SpeculationPlan
from executor.model.layers.attention import Attend
from executor.parallel.layout import DpLayout
from executor.runners.draft_graphs import PhaseGraphs, layout_of, step_of_graph
from executor.runners.draft_inputs import DraftInputs, draw_inputs
from executor.runners.draft_picks import chain_of, pick, pick_level
from executor.runners.draft_room import new_room, put_drafts, taken
from executor.runners.dummy_batches import draft_stand_in
from executor.runners.forward_pass import ForwardPass
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
    """

    def __init__(
        self,
        passes: Sequence[ForwardPass],
        plan: SpeculationPlan,
        *,
        target_ids: torch.Tensor | None = None,
        is_drawn: bool = False,
        graphs: PhaseGraphs | None = None,
    ) -> None:
        assert len(passes) == plan.num_draft_steps - 1, "a pass for each draft but the first"
        self._passes = tuple(passes)
        self._plan = plan
        self._topk = plan.topk
        self._target_ids = target_ids
        self._is_drawn = is_drawn
        self._graphs = graphs if passes else None  # a single draft needs no pass
        self._attentions = [forward_pass.attention for forward_pass in passes]
        self.sizes: tuple[int, ...] = ()
        self._attends: list[Attend] = [attention.forward for attention in self._attentions]
        self._masks: list[torch.Tensor] = []
        if self._graphs is not None:
            self.sizes = self._graphs.sizes
            self._attends = self._graphs.attends(self._attentions)
            self._room = new_room(passes[0], plan, self.sizes[-1], is_drawn=is_drawn)
            self._masks = self._new_masks(self.sizes[-1])

    def draft(self, batch: DraftBatch) -> Drafts:
        """Returns the drafts of each sequence. Every DP rank must call it, also with none."""
        assert (batch.draws is not None) == self._is_drawn, "drafts are drawn always or never"
        inputs, size = self._inputs(batch), batch.step.graph_requests
        if not self._passes:
            return self._run(inputs, [])
        if self._graphs is None or size is None:
            layout = layout_of(batch.step, self._topk, self._passes[0].topology)
            masks = self._new_masks(len(batch.tokens))
            return self._run(inputs, self._planned(inputs, layout, masks))
        self._load(inputs, size)
        self._graphs.replay(size)
        return taken(self._room, len(batch.tokens))

    def discard(self) -> None:
        """Drops what was captured."""
        if self._graphs is not None:
            self._graphs.discard()

    def capture(self) -> None:
        """Captures every size, if there are any. All ranks must call it, at the same time."""
        if self._graphs is not None:
            self._graphs.capture("draft", self._attentions, self._record)

    # ---- a graph

    def _record(self, size: int) -> Callable[[], None]:
        """Fills the buffers with ``size`` sequences and returns what a graph of that size does."""
        stand_in = draft_stand_in(
            self._passes[0],
            size,
            num_tokens=self._topk,
            num_slots=len(self._passes) * self._topk,
            is_drawn=self._is_drawn,
            has_probs=self._is_drawn,
        )
        return partial(self._run_and_keep, *self._load(self._inputs(stand_in), size))

    def _load(self, inputs: DraftInputs, size: int) -> tuple[DraftInputs, list[ForwardBatch]]:
        """Fills the buffers, plans attention, and returns what a graph of ``size`` reads."""
        assert self._graphs is not None, "there are graphs"
        view = self._graphs.fill(inputs, len(inputs.tokens), size, self._topk)
        topology = self._passes[0].topology
        layout = layout_of(step_of_graph(size, topology), self._topk, topology)
        return view, self._planned(view, layout, [mask[:size] for mask in self._masks])

    def _run_and_keep(self, inputs: DraftInputs, batches: Sequence[ForwardBatch]) -> None:
        put_drafts(self._run(inputs, batches), self._room)

    # ---- the phase

    def _inputs(self, batch: DraftBatch) -> DraftInputs:
        """Says what each pass reads of a batch."""
        num_passes, width, count = len(self._passes), self._topk, len(batch.seq_lens)
        before = torch.arange(num_passes)[:, None]
        # Made there: a copy would wait for the device.
        on_device = torch.arange(num_passes, device=batch.seq_lens.device)[:, None]
        positions = batch.seq_lens + on_device
        if self._passes:
            positions.clamp_(max=self._passes[0].max_seq_len - 1)
        if width > 1:
            positions = positions.repeat_interleave(width, dim=1)
        locations = batch.out_cache_loc.view(count, num_passes, width).transpose(0, 1)
        return DraftInputs(
            positions=positions,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens + (on_device + 1) * width,
            seq_lens_cpu=batch.seq_lens_cpu + (before + 1) * width,
            tokens=batch.tokens,
            hidden_states=batch.hidden_states,
            out_cache_loc=locations.reshape(num_passes, count * width),
            scores=batch.scores,
            probs=batch.probs,
            **draw_inputs(batch.draws),
        )

    def _planned(
        self, inputs: DraftInputs, layout: DpLayout, masks: Sequence[torch.Tensor]
    ) -> list[ForwardBatch]:
        """Plans attention of all passes, and returns their batches, tokens and hidden states
        excepted."""
        width, count = self._topk, len(inputs.tokens)
        mode = ForwardMode.DECODE if count else ForwardMode.IDLE
        assert inputs.out_cache_loc is not None, "keys and values are stored"
        batches = []
        for place, forward_pass in enumerate(self._passes):
            seq_lens_cpu = inputs.seq_lens_cpu[place]
            batch = ForwardBatch(
                forward_mode=mode,
                batch_size=count,
                input_ids=inputs.positions[place],  # its length alone counts: see ``_run``
                positions=inputs.positions[place],
                out_cache_loc=inputs.out_cache_loc[place],
                req_pool_indices=inputs.req_pool_indices,
                seq_lens=inputs.seq_lens[place],
                seq_lens_cpu=seq_lens_cpu,
                layout=layout,
                logits_indices=inputs.req_pool_indices[:0],
                num_token_non_padded=inputs.num_token_non_padded,
                global_num_tokens_gpu=inputs.global_num_tokens_gpu,
                global_num_tokens_for_logprob_gpu=inputs.global_num_tokens_for_logprob_gpu,
            )
            if width > 1:
                batch.extend_seq_lens_cpu = np.full(count, width)
                batch.extend_prefix_lens_cpu = seq_lens_cpu.numpy() - width
                batch.tree_mask = masks[place]
            forward_pass.plan(batch)
            batches.append(batch)
        return batches

    def _run(self, inputs: DraftInputs, batches: Sequence[ForwardBatch]) -> Drafts:
        return (self._chain if self._topk == 1 else self._tree)(inputs, batches)

    def _chain(self, inputs: DraftInputs, batches: Sequence[ForwardBatch]) -> Drafts:
        tokens, probs, hidden = [inputs.tokens], [inputs.probs], inputs.hidden_states
        passes = zip(self._passes, batches, self._attends, strict=True)
        for step, (forward_pass, batch, attend) in enumerate(passes, start=1):
            batch = replace(batch, input_ids=tokens[-1].flatten(), hidden_states=hidden)
            hidden = forward_pass.run(batch, attend).clone()  # the next pass may overwrite it
            logits = forward_pass.compute_logits(hidden)
            picks = pick(logits, 1, self._target_ids, inputs.draws, step)
            tokens.append(picks.tokens)
            probs.append(picks.probs)
        return chain_of(tokens, probs)

    def _tree(self, inputs: DraftInputs, batches: Sequence[ForwardBatch]) -> Drafts:
        count, width = inputs.tokens.shape
        size = inputs.hidden_states.shape[1]
        assert inputs.scores is not None, "first drafts have log probabilities"
        level, beams = first_level(inputs.tokens, inputs.scores)
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
        """Returns room for the tree mask of each pass."""
        width = self._topk
        if width == 1:
            return []
        device = self._passes[0].kv_pool.device
        return [
            torch.ones(count, width, step * width, dtype=torch.bool, device=device)
            for step in range(1, len(self._passes) + 1)
        ]
