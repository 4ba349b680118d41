"""Drafts with a model that reads the target's keys and values and stores none.

    last token ─▶ pass 0 ─▶ K likeliest ─▶ pass 1 ─▶ K best of K * K ─▶ … ─▶ chain or best nodes

B sequences of L tokens    D drafts on the longest path    K drafts that each step goes on from

Every pass sees the L - 1 positions that the target has run, so one plan of attention serves all D of
them, and a sequence of K rows is K sequences of one row to attention. Pass i stands at position
L - 1 + i. In pass 0 the K rows of a sequence are equal, so that all passes have one layout.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

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
from executor.speculative.tree import Drafts, best_nodes, first_level


class FrozenKvMtpRunner:
    """The draft phase of a frozen-KV MTP draft, which has no draft-extend.

    What a replay returns is valid until the next one.

    Args:
        forward_pass: Of the draft model, over the target's KV pool.
        plan: How it drafts.
        target_ids: int64 [V], the target's id of each of the draft's; None if they are the same.
        is_drawn: Whether batches say how drafts are drawn.
        graphs: What to capture with (``frozen_kv_slots``); None runs everything eagerly.
    """

    def __init__(
        self,
        forward_pass: ForwardPass,
        plan: SpeculationPlan,
        *,
        target_ids: torch.Tensor | None = None,
        is_drawn: bool = False,
        graphs: PhaseGraphs | None = None,
    ) -> None:
        self._pass = forward_pass
        self._plan = plan
        self._topk = plan.topk
        self._target_ids = target_ids
        self._is_drawn = is_drawn
        self._graphs = graphs
        self._attend: Attend = forward_pass.attention.forward
        self.sizes: tuple[int, ...] = ()
        if graphs is not None:
            self.sizes = graphs.sizes
            [self._attend] = graphs.attends([forward_pass.attention])
            self._room = new_room(forward_pass, plan, self.sizes[-1], is_drawn=is_drawn)

    def draft(self, batch: DraftBatch) -> Drafts:
        """Returns the drafts of each sequence. Every DP rank must call it, also with none."""
        assert (batch.draws is not None) == self._is_drawn, "drafts are drawn always or never"
        inputs, size = self._inputs(batch), batch.step.graph_requests
        if self._graphs is None or size is None:
            layout = layout_of(batch.step, self._topk, self._pass.topology)
            return self._run(inputs, self._planned(inputs, layout))
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
            self._graphs.capture("frozen_kv_mtp", [self._pass.attention], self._record)

    # ---- a graph

    def _record(self, size: int) -> Callable[[], None]:
        """Fills the buffers with ``size`` sequences and returns what a graph of that size does."""
        stand_in = draft_stand_in(self._pass, size, num_tokens=1, is_drawn=self._is_drawn)
        return partial(self._run_and_keep, *self._load(self._inputs(stand_in), size))

    def _load(self, inputs: DraftInputs, size: int) -> tuple[DraftInputs, ForwardBatch]:
        """Fills the buffers, plans attention, and returns what a graph of ``size`` reads."""
        assert self._graphs is not None, "there are graphs"
        view = self._graphs.fill(inputs, len(inputs.tokens), size, self._topk)
        topology = self._pass.topology
        layout = layout_of(step_of_graph(size, topology), self._topk, topology)
        return view, self._planned(view, layout)

    def _run_and_keep(self, inputs: DraftInputs, batch: ForwardBatch) -> None:
        put_drafts(self._run(inputs, batch), self._room)

    # ---- the phase

    def _inputs(self, batch: DraftBatch) -> DraftInputs:
        """Says what each pass reads of a batch."""
        before = torch.arange(self._plan.num_draft_steps, device=batch.seq_lens.device)[:, None]
        positions = (batch.seq_lens - 1 + before).clamp_(max=self._pass.max_seq_len - 1)
        return DraftInputs(
            positions=positions.repeat_interleave(self._topk, dim=1),
            req_pool_indices=batch.req_pool_indices.repeat_interleave(self._topk),
            seq_lens=(batch.seq_lens - 1).repeat_interleave(self._topk),
            seq_lens_cpu=(batch.seq_lens_cpu - 1).repeat_interleave(self._topk),
            tokens=batch.tokens,
            hidden_states=batch.hidden_states,
            **draw_inputs(batch.draws),
        )

    def _planned(self, inputs: DraftInputs, layout: DpLayout) -> ForwardBatch:
        """Plans attention of all passes, and returns a batch that stands for each of them."""
        num_rows = len(inputs.req_pool_indices)
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if num_rows else ForwardMode.IDLE,
            batch_size=num_rows,
            input_ids=inputs.positions[0],  # its length alone counts: see ``_run``
            positions=inputs.positions[0],
            out_cache_loc=inputs.positions[0],  # nothing is stored
            req_pool_indices=inputs.req_pool_indices,
            seq_lens=inputs.seq_lens,
            seq_lens_cpu=inputs.seq_lens_cpu,
            layout=layout,
            logits_indices=inputs.req_pool_indices[:0],
            num_token_non_padded=inputs.num_token_non_padded,
            global_num_tokens_gpu=inputs.global_num_tokens_gpu,
            global_num_tokens_for_logprob_gpu=inputs.global_num_tokens_for_logprob_gpu,
        )
        self._pass.plan(batch)
        return batch

    def _run(self, inputs: DraftInputs, batch: ForwardBatch) -> Drafts:
        return (self._chain if self._topk == 1 else self._tree)(inputs, batch)

    def _chain(self, inputs: DraftInputs, batch: ForwardBatch) -> Drafts:
        token, hidden = inputs.tokens, inputs.hidden_states
        tokens, probs = [], []
        for step in range(self._plan.num_draft_steps):
            hidden = self._pass_at(inputs, batch, step, token, hidden.unsqueeze(1))
            logits = self._pass.compute_logits(hidden)
            hidden = hidden.clone()  # the next pass may overwrite it
            picks = pick(logits, 1, self._target_ids, inputs.draws, step)
            token = picks.tokens
            tokens.append(token)
            probs.append(picks.probs)
        return chain_of(tokens, probs)

    def _tree(self, inputs: DraftInputs, batch: ForwardBatch) -> Drafts:
        count, width, size = len(inputs.tokens), self._topk, inputs.hidden_states.shape[1]
        given = inputs.hidden_states.unsqueeze(1).expand(-1, width, -1)
        hidden = self._pass_at(inputs, batch, 0, inputs.tokens.expand(-1, width), given)
        first = hidden.view(count, width, size)[:, 0].contiguous()
        logits = self._pass.compute_logits(first)
        picks = pick(logits, width, self._target_ids, None, 0)
        level, beams = first_level(picks.tokens, picks.scores)
        levels, given = [level], first.unsqueeze(1)
        for step in range(1, self._plan.num_draft_steps):
            given = given.gather(1, beams.origins.unsqueeze(2).expand(-1, -1, size))
            hidden = self._pass_at(inputs, batch, step, beams.tokens, given)
            given = hidden.view(count, width, size)
            logits = self._pass.compute_logits(hidden)
            level, beams = pick_level(logits, beams, self._target_ids, step)
            levels.append(level)
        return best_nodes(levels, self._plan.num_draft_tokens - 1)

    def _pass_at(
        self,
        inputs: DraftInputs,
        batch: ForwardBatch,
        step: int,
        tokens: torch.Tensor,
        given: torch.Tensor,
    ) -> torch.Tensor:
        """Returns hidden states [B * K, H] of tokens [B, K] and of what goes with them [B, K, H]."""
        batch = replace(
            batch,
            positions=inputs.positions[step],
            input_ids=tokens.flatten(),
            hidden_states=given.flatten(0, 1),
        )
        return self._pass.run(batch, self._attend)
