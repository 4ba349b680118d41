"""Verifier: the target model runs the drafts of a step, and says how many of them it accepts."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from executor.batch.forward_batch import ForwardBatch, ForwardMode
from executor.batch.kv_pool import KVPool
from executor.batch.read_step import StepColumns
from executor.batch.staging import to_device
from executor.budget.speculation import SpeculationPlan
from executor.model.sampling.sampler import Sampler
from executor.speculative.accept import Accepted, match_chain, match_tree, reject_chain
from executor.speculative.tree import Drafts, ancestors


@dataclass(frozen=True, slots=True)
class Verification:
    """A speculative step between its draft phase and its acceptance.

    Attributes:
        columns: The step.
        at: int64 [B], its rows, on the device.
        drafts: What was proposed.
        sees: bool [B, N, N], the tree's ``ancestors``; None for a chain.
        locations: int64 [B, N], the nodes' KV slots, on the device.
        positions: int64 [B * N], position of the token behind each node, on the device.
    """

    columns: StepColumns
    at: torch.Tensor
    drafts: Drafts
    sees: torch.Tensor | None
    locations: torch.Tensor
    positions: torch.Tensor


class Verifier:
    """The target's side of a speculative step.

    B sequences    N tokens that each verifies    D drafts on the longest path

    Args:
        plan: How the draft model drafts.
        kv_pool: The target's.
        sampler: Says what plain decoding would take.
        max_position: The last position of any sequence.
        agree: Replaces a tensor by that of one executor among those of a DP rank; None without peers.
        target_ids: int64 [V], the target's id of each of the draft's; None if they are the same.
    """

    def __init__(
        self,
        plan: SpeculationPlan,
        kv_pool: KVPool,
        sampler: Sampler,
        *,
        max_position: int,
        agree: Callable[[torch.Tensor], None] | None = None,
        target_ids: torch.Tensor | None = None,
    ) -> None:
        self._plan = plan
        self._kv_pool = kv_pool
        self._sampler = sampler
        self._max_position = max_position
        self._agree = agree
        self._target_ids = target_ids

    def batch(
        self, columns: StepColumns, batch: ForwardBatch, drafts: Drafts
    ) -> tuple[ForwardBatch, Verification]:
        """Puts drafts into a step's batch.

        Args:
            columns: The step.
            batch: Its N rows for each sequence, the first of which is its last token.
            drafts: Of its sequences.
        """
        size, at = self._plan.num_draft_tokens, batch.req_pool_indices
        num_sequences = len(columns.rows)
        drafts = self._agreed_drafts(drafts)
        nodes = torch.cat((batch.input_ids.view(num_sequences, size)[:, :1], drafts.tokens), dim=1)
        sees, positions = None, batch.positions
        if drafts.parents is not None:
            sees = ancestors(drafts.parents, self._plan.num_draft_steps)
            root = positions.view(num_sequences, size)[:, :1]
            positions = (root + sees.sum(dim=2) - 1).flatten()
        verification = Verification(
            columns, at, drafts, sees, batch.out_cache_loc.view(num_sequences, size), positions + 1
        )
        batch = replace(
            batch,
            forward_mode=ForwardMode.DECODE if num_sequences else ForwardMode.IDLE,
            input_ids=nodes.flatten(),
            positions=positions.clamp(max=self._max_position),
            tree_mask=sees,
            extend_seq_lens_cpu=np.full(num_sequences, size),
        )
        return batch, verification

    def accept(self, verification: Verification, logits: torch.Tensor) -> Accepted:
        """Says what each sequence gains, and moves the KV of a tree's path to its front.

        Args:
            verification: From ``batch``.
            logits: [B * N, V].
        """
        columns, drafts = verification.columns, verification.drafts
        count, size = len(columns.rows), self._plan.num_draft_tokens
        rows = columns.rows.repeat(size)
        at = verification.at.unsqueeze(1).expand(-1, size).flatten()
        lens = (columns.num_computed_tokens[:, None] + np.arange(1, size + 1)).ravel()
        limits = to_device(columns.num_tokens, self._kv_pool.device)
        if drafts.probs is not None:
            p = self._sampler.probabilities(logits, rows, lens, at)
            p = p.view(count, size, logits.shape[1])
            q = self._over_target_ids(drafts.probs, p.shape[2])
            seeds = self._sampler.parameters.at(verification.at)["seed"]
            first = verification.positions.view(count, size)[:, 0]
            accepted = reject_chain(p, q, drafts.tokens, limits, seeds, first)
        else:
            # In a chain the host knows them: lens.
            positions = None if verification.sees is None else verification.positions
            targets = self._sampler.pick(logits, rows, lens, at, positions).view(count, size)
            if verification.sees is None:
                accepted = match_chain(targets, drafts.tokens, limits)
            else:
                # Nodes without a block lie in the row's spill blocks. Of the path gained, which
                # the limits bound, all move to where the row has blocks.
                depth = self._plan.num_draft_steps
                accepted = match_tree(targets, drafts, verification.sees, limits, depth)
        accepted = self._agreed(accepted)
        if verification.sees is not None:
            sources = verification.locations.gather(1, accepted.path)[:, 1:]
            targets_at = verification.locations[:, 1 : accepted.path.shape[1]]
            self._kv_pool.move(sources.flatten(), targets_at.flatten())
        return accepted

    def _over_target_ids(self, probs: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Returns a draft's distributions [B, D, V] over the target's vocabulary."""
        if self._target_ids is None:
            return probs
        wide = probs.new_zeros(*probs.shape[:2], vocab_size)
        return wide.index_copy_(2, self._target_ids, probs)

    def _agreed_drafts(self, drafts: Drafts) -> Drafts:
        """Returns what one executor of the DP rank drafted: others may have rounded otherwise, and
        would run other tokens under what that one accepts."""
        if self._agree is None:
            return drafts
        if drafts.parents is None:
            tokens = drafts.tokens.clone(memory_format=torch.contiguous_format)
            self._agree(tokens)
            return drafts._replace(tokens=tokens)
        both = torch.stack((drafts.tokens, drafts.parents))
        self._agree(both)
        return drafts._replace(tokens=both[0], parents=both[1])

    def _agreed(self, accepted: Accepted) -> Accepted:
        """Returns what one executor of the DP rank accepted: others may have rounded otherwise."""
        if self._agree is None:
            return accepted
        depth = accepted.path.shape[1]
        every = torch.cat(
            (accepted.num_tokens.unsqueeze(1), accepted.tokens[:, :depth], accepted.path), dim=1
        )
        self._agree(every)
        return Accepted(
            every[:, 0].contiguous(), every[:, 1 : depth + 1], every[:, depth + 1 :].contiguous()
        )
