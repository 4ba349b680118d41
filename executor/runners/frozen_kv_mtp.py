"""Frozen-KV MTP runner: a draft model that reads the target's keys and values and stores none.

    last token ─▶ pass 0 ─▶ K likeliest ─▶ pass 1 ─▶ K best of K * K ─▶ … ─▶ chain or best nodes

B sequences of L tokens    D drafts on the longest path    K drafts that each step goes on from

Every pass sees the L - 1 positions that the target has run, so one plan of attention serves all D of
them, and a sequence of K rows is K sequences of one row to attention. Pass i stands at position
L - 1 + i. In pass 0 the K rows of a sequence are equal, so that all passes have one layout.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from executor.batch.forward_batch import ForwardBatch
from executor.budget.speculation import SpeculationPlan
from executor.model.layers.attention import Attend
from executor.runners.draft_graphs import DraftGraphs
from executor.runners.draft_picks import chain_of, pick, pick_level
from executor.runners.dummy_batches import dummy_draft
from executor.runners.forward_pass import ForwardPass, RunnerGraphs
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

    Attributes:
        graphs: What runs the phase, and is captured.
    """

    def __init__(
        self,
        forward_pass: ForwardPass,
        plan: SpeculationPlan,
        *,
        target_ids: torch.Tensor | None = None,
        is_drawn: bool = False,
        graphs: RunnerGraphs | None = None,
    ) -> None:
        self._pass = forward_pass
        self._plan = plan
        self._topk = plan.topk
        self._target_ids = target_ids
        self._is_drawn = is_drawn
        self.graphs = DraftGraphs(
            "frozen_kv_mtp", self, [forward_pass], plan, is_drawn=is_drawn, graphs=graphs
        )
        attention = forward_pass.attention
        self._attend: Attend = attention.forward if graphs is None else graphs.attend(attention)

    def draft(self, batch: DraftBatch) -> Drafts:
        """Returns the drafts of each sequence. Every DP rank must call it, also with none."""
        return self.graphs.draft(batch)

    # ---- the phase

    def dummy(self, size: int) -> DraftBatch:
        """Returns a batch of ``size`` sequences that is safe to run."""
        return dummy_draft(self._pass, size, self._topk, num_first=1, is_drawn=self._is_drawn)

    def spread(self, batch: DraftBatch) -> DraftBatch:
        """Returns positions [D, B * K] of each pass, and all else with an entry for each row."""
        before = torch.arange(self._plan.num_draft_steps, device=batch.seq_lens.device)[:, None]
        positions = (batch.seq_lens - 1 + before).clamp_(max=self._pass.max_seq_len - 1)
        return replace(
            batch,
            input_ids=batch.input_ids.repeat_interleave(self._topk),
            positions=positions.repeat_interleave(self._topk, dim=1),
            req_pool_indices=batch.req_pool_indices.repeat_interleave(self._topk),
            seq_lens=(batch.seq_lens - 1).repeat_interleave(self._topk),
            seq_lens_cpu=(batch.seq_lens_cpu - 1).repeat_interleave(self._topk),
            scores=None,
        )

    def plan(self, batch: DraftBatch) -> list[ForwardBatch]:
        """Plans attention, which is the same for all passes, and returns a batch for each."""
        batch = replace(
            batch,
            batch_size=len(batch.input_ids),
            out_cache_loc=batch.positions[0],  # nothing is stored
        )
        passes: list[ForwardBatch] = [replace(batch, positions=x) for x in batch.positions]
        self._pass.plan(passes[0])
        return passes

    def run(self, batch: DraftBatch, passes: Sequence[ForwardBatch]) -> Drafts:
        """Returns the drafts. Only device work."""
        return (self._chain if self._topk == 1 else self._tree)(batch, passes)

    def _chain(self, inputs: DraftBatch, passes: Sequence[ForwardBatch]) -> Drafts:
        assert inputs.hidden_states is not None, "a draft reads hidden states"
        token, hidden = inputs.input_ids, inputs.hidden_states
        tokens, probs = [], []
        for step, batch in enumerate(passes):
            hidden = self._run_pass(batch, token, hidden)
            logits = self._pass.compute_logits(hidden)
            hidden = hidden.clone()  # the next pass may overwrite it
            picks = pick(logits, 1, self._target_ids, inputs.draws, step)
            token = picks.tokens
            tokens.append(token)
            probs.append(picks.probs)
        return chain_of(tokens, probs)

    def _tree(self, inputs: DraftBatch, passes: Sequence[ForwardBatch]) -> Drafts:
        assert inputs.hidden_states is not None, "a draft reads hidden states"
        width, size = self._topk, inputs.hidden_states.shape[1]
        given = inputs.hidden_states.unsqueeze(1).expand(-1, width, -1)
        hidden = self._run_pass(passes[0], inputs.input_ids, given)
        first = hidden.view(-1, width, size)[:, 0].contiguous()
        logits = self._pass.compute_logits(first)
        picks = pick(logits, width, self._target_ids, None, 0)
        level, beams = first_level(picks.tokens, picks.scores)
        levels, given = [level], first.unsqueeze(1)
        for step, batch in enumerate(passes[1:], start=1):
            given = given.gather(1, beams.origins.unsqueeze(2).expand(-1, -1, size))
            hidden = self._run_pass(batch, beams.tokens, given)
            given = hidden.view(-1, width, size)
            logits = self._pass.compute_logits(hidden)
            level, beams = pick_level(logits, beams, self._target_ids, step)
            levels.append(level)
        return best_nodes(levels, self._plan.num_draft_tokens - 1)

    def _run_pass(
        self, batch: ForwardBatch, tokens: torch.Tensor, given: torch.Tensor
    ) -> torch.Tensor:
        """Returns hidden states [B * K, H] of tokens, and of what goes with them [B, K, H]."""
        batch = replace(
            batch, input_ids=tokens.flatten(), hidden_states=given.reshape(-1, given.shape[-1])
        )
        return self._pass.run(batch, self._attend)
