"""Speculator: the draft model's part in every step, in terms of runners.

    speculative step   draft ─▶ verify (target) ─▶ accept ─▶ draft-extend over what was gained
    any other step              run (target) ───▶ sample ─▶ draft-extend over what was run

A row with L tokens has its last one, at position L - 1, still to run. The draft model's entry at
position p takes token p and the hidden state of position p - 1, so draft-extend comes up to
position L - 1, and what it gives are the first drafts of the next step.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from executor.batch.columns import Int64Array
from executor.batch.forward_batch import ForwardBatch, ForwardMode
from executor.batch.kv_pool import KVPool
from executor.batch.read_step import StepColumns
from executor.batch.staging import to_device
from executor.budget.speculation import SpeculationPlan
from executor.model.sampling.sampler import Sampler
from executor.parallel.layout import DpLayout
from executor.speculative.accept import Accepted
from executor.speculative.draft_batch import DraftBatch, ExtendBatch, Extended
from executor.speculative.ragged import Filled, Ragged, filled_blocks
from executor.speculative.state import DraftState
from executor.speculative.tree import Drafts
from executor.speculative.verifier import Verification


class Drafter(Protocol):
    """Runs the draft phase."""

    def draft(self, batch: DraftBatch) -> Drafts: ...


class Extender(Protocol):
    """Runs draft-extend."""

    def extend(self, batch: ExtendBatch) -> Extended: ...


class Speculator:
    """The draft model's part in every step. One thread calls it.

    B sequences    N tokens that each verifies    D drafts on the longest path    T token rows

    Args:
        plan: How the draft model drafts.
        state: What it goes on from.
        drafter: Runs the draft phase; None if draft-extend leaves whole chains.
        extender: Runs draft-extend; None if the draft model keeps no KV.
        project: Takes the target's features [T, F] to what the draft model takes, [T, H].
        features: Where the target leaves them, a row for each of its tokens.
        kv_pool: The target's.
        sampler: Says what plain decoding would take.
        max_position: The last position of any sequence.
        is_drawn: Whether drafts are drawn and accepted by rejection sampling.
    """

    def __init__(
        self,
        plan: SpeculationPlan,
        state: DraftState,
        *,
        drafter: Drafter | None,
        extender: Extender | None,
        project: Callable[[torch.Tensor], torch.Tensor],
        features: torch.Tensor,
        kv_pool: KVPool,
        sampler: Sampler,
        max_position: int,
        is_drawn: bool = False,
    ) -> None:
        self.plan = plan
        self._state = state
        self._drafter = drafter
        self._extender = extender
        self._project = project
        self._features = features
        self._kv_pool = kv_pool
        self._sampler = sampler
        self._max_position = max_position
        self._is_drawn = is_drawn
        self._device = kv_pool.device
        self._block_size = kv_pool.block_size

    # ---- the phases

    def start(self, columns: StepColumns) -> None:
        """Readies the rows that begin with a step; their blocks are in the block table."""
        if columns.starts is None:
            return
        is_starting = np.isin(columns.rows, columns.starts.rows)
        rows, computed = columns.rows[is_starting], columns.num_computed_tokens[is_starting]
        last = np.maximum(computed // self._kv_pool.block_size - 1, 0)
        table = self._kv_pool.tables_cpu[0].numpy()
        self._state.start(rows, computed, table[rows, last].astype(np.int64))

    def draft(self, columns: StepColumns, at: torch.Tensor) -> Drafts:
        """Runs the draft phase of a speculative step. Every rank must, also without sequences.

        Args:
            columns: The step.
            at: int64 [B], its rows, on the device.
        """
        state, plan = self._state, self.plan
        if self._drafter is None:
            probs = None if state.probs is None else state.probs.index_select(0, at)
            return Drafts(state.tokens.index_select(0, at), None, probs)
        rows, seq_lens = columns.rows, columns.num_computed_tokens + 1
        num_slots = (plan.num_draft_steps - 1) * plan.topk if plan.extends else 0
        _, locations = self._locate(rows, seq_lens, np.full(len(rows), num_slots))
        lens = self._to_device(seq_lens)
        if plan.extends:
            tokens, hidden = state.tokens.index_select(0, at), state.hidden.index_select(0, at)
        else:
            tokens = self._sampler.last_tokens.index_select(0, at)
            hidden = state.carries[:, 0].index_select(0, at)
        return self._drafter.draft(
            DraftBatch(
                forward_mode=ForwardMode.DECODE if len(rows) else ForwardMode.IDLE,
                batch_size=len(rows),
                input_ids=tokens.flatten(),
                positions=lens,
                out_cache_loc=self._to_device(locations),
                req_pool_indices=at,
                seq_lens=lens,
                seq_lens_cpu=torch.from_numpy(seq_lens),
                layout=self._layout(columns, plan.topk),
                logits_indices=at[:0],
                hidden_states=hidden,
                scores=state.scores.index_select(0, at),
                probs=None if state.probs is None else state.probs.index_select(0, at),
                **self._draws(at, lens),
            )
        )

    def extend_accepted(self, verification: Verification, accepted: Accepted) -> None:
        """Runs draft-extend over the tokens gained. Every rank must call it."""
        columns, plan, at = verification.columns, self.plan, verification.at
        size, width, count = plan.num_draft_tokens, plan.num_extend_rows, len(columns.rows)
        hidden = self._project(self._features[: count * size])
        firsts = torch.arange(count, device=self._device)
        path = accepted.path + (firsts * size).unsqueeze(1)  # rows of ``hidden``
        if not plan.extends:  # behind the tokens gained, the path stays at the last
            self._state.keep_carries(at, 0, hidden, path[:, -1])
            return
        depth, nodes, tokens = path.shape[1], path, accepted.tokens
        if depth != width:
            entry = torch.arange(width, device=self._device).clamp_(max=depth - 1)
            nodes, tokens = path.index_select(1, entry), tokens.index_select(1, entry)
        starts = columns.num_computed_tokens + 1  # position of each sequence's first entry
        lasts = firsts * width + accepted.num_tokens - 1
        first_positions = verification.positions.view(count, size)[:, 0]
        batch = self._extend_batch(
            columns,
            starts,
            np.full(count, width),
            layout=self._layout(columns, width),
            input_ids=tokens.flatten(),
            hidden_states=hidden.index_select(0, nodes.flatten()),
            width=width,
            starts=firsts * width,
            lasts=lasts,
            carries=self._carries(at),
            **self._draws(at, first_positions + accepted.num_tokens),
        )
        # Blocks that end within the longest path: where less was accepted, the next steps will
        # have written them again before anybody can find them.
        places, depths = np.arange(count), np.full(count, depth)
        drafted = filled_blocks(starts, depths, places * width, self._block_size)
        self._run_extend(columns, batch, at, lasts, drafted)
        target = filled_blocks(starts - 1, depths, places * depth, self._block_size)
        if target[0].size:
            rows_at = path.flatten().index_select(0, self._to_device(target[2]))
            self._keep_blocks(columns, target, 0, hidden, rows_at)

    def extends(self, columns: StepColumns) -> bool:
        """Whether draft-extend runs behind a step that is not speculative.

        The router has decided for all ranks: one that plans no speculative steps spares it.
        """
        return bool(columns.draft_counts) or not self.plan.extends

    def extend(self, columns: StepColumns, batch: ForwardBatch, tokens: torch.Tensor) -> None:
        """Runs draft-extend over what such a step ran. Every rank must call it.

        Args:
            columns: The step.
            batch: What the target ran.
            tokens: int64 [S], sampled, on the device.
        """
        plan, at = self.plan, batch.req_pool_indices
        hidden = self._project(self._features[: len(batch.input_ids)])
        computed, num_tokens = columns.num_computed_tokens, columns.num_tokens
        ends = np.cumsum(num_tokens)
        last_rows = self._to_device(ends - 1)
        if plan.extends:
            ragged = Ragged.of(columns, plan.num_layers)
            source = torch.cat((hidden, self._state.carries[:, 0].index_select(0, at)))
            ids = torch.cat((batch.input_ids, tokens)) if len(tokens) else batch.input_ids
            layout, lasts = self._plain_layout(columns), self._to_device(ragged.lasts)
            sampled = self._to_device(columns.rows[ragged.samples])
            extend = self._extend_batch(
                columns,
                ragged.positions,
                ragged.num_rows,
                layout=layout,
                input_ids=ids.index_select(0, self._to_device(ragged.token_index)),
                hidden_states=source.index_select(0, self._to_device(ragged.hidden_index)),
                width=None if layout.graph_size is None else plan.num_layers,
                starts=self._to_device(ragged.starts),
                lasts=self._to_device(ragged.lasts[ragged.samples]),
                carries=self._carries(at),
                **self._draws(
                    sampled, self._to_device((computed + num_tokens + 1)[ragged.samples])
                ),
            )
            drafted = filled_blocks(
                ragged.positions, ragged.num_entries, ragged.starts, self._block_size
            )
            self._run_extend(columns, extend, sampled, lasts, drafted)
            ran = filled_blocks(computed, num_tokens, ends - num_tokens, self._block_size)
            self._keep_blocks(columns, ran, 0, hidden, self._to_device(ran[2]))
        self._state.keep_carries(at, 0, hidden, last_rows)

    # ---- parts of them

    def _layout(self, columns: StepColumns, width: int) -> DpLayout:
        """Returns the layout of a phase of a speculative step, ``width`` rows for each sequence."""
        layout, size = columns.layout, columns.num_draft_tokens
        return layout.of_requests(
            [count // size for count in layout.global_num_tokens_cpu],
            width,
            graph_requests=None if layout.graph_size is None else layout.graph_size // size,
        )

    def _plain_layout(self, columns: StepColumns) -> DpLayout:
        """Returns the layout of draft-extend behind a step that is not speculative.

        Where all ranks decode in a graph, a token of each sequence, each has as many rows of the
        draft model as that has layers: draft-extend is a graph as well. All ranks know it from
        the agreement.
        """
        layout, num_layers = columns.layout, self.plan.num_layers
        decodes = not layout.has_extend and columns.draft_counts == layout.global_num_tokens_cpu
        if layout.graph_size is not None and decodes:
            return layout.of_requests(
                columns.num_sampled, num_layers, graph_requests=layout.graph_size
            )
        counts = tuple(
            rows + (num_layers - 1) * sampled
            for rows, sampled in zip(columns.draft_counts, columns.num_sampled, strict=True)
        )
        return replace(layout, global_num_tokens_cpu=counts, graph_size=None)

    def _extend_batch(
        self, columns: StepColumns, begins: Int64Array, num_rows: Int64Array, **more: Any
    ) -> ExtendBatch:
        """Returns a batch of the draft model: ``num_rows`` of each sequence from ``begins`` on.

        Args:
            more: Its other fields.
        """
        positions, locations = self._locate(columns.rows, begins, num_rows)
        seq_lens = begins + num_rows
        return ExtendBatch(
            forward_mode=ForwardMode.EXTEND if len(positions) else ForwardMode.IDLE,
            batch_size=len(columns.rows),
            positions=self._to_device(np.minimum(positions, self._max_position)),
            out_cache_loc=self._to_device(locations),
            req_pool_indices=self._to_device(columns.rows),
            seq_lens=self._to_device(seq_lens),
            seq_lens_cpu=torch.from_numpy(seq_lens),
            logits_indices=self._to_device(begins[:0]),
            extend_seq_lens_cpu=num_rows,
            **more,
        )

    def _run_extend(
        self,
        columns: StepColumns,
        batch: ExtendBatch,
        sampled: torch.Tensor,
        lasts: torch.Tensor,
        filled: Filled,
    ) -> None:
        """Runs draft-extend and stores what it leaves for the next step.

        Args:
            sampled: int64 [S], the rows that sample.
            lasts: int64 [B], the row of ``batch`` in which each sequence's last token is.
            filled: Blocks that it has filled.
        """
        assert self._extender is not None, "a draft model with KV has a draft-extend"
        extended = self._extender.extend(batch)
        self._state.keep(sampled, extended)
        for layer, states in enumerate(extended.outputs, start=1):
            self._state.keep_carries(batch.req_pool_indices, layer, states, lasts)
            self._keep_blocks(columns, filled, layer, states, self._to_device(filled[2]))

    def _locate(
        self, rows: Int64Array, starts: Int64Array, counts: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Returns the positions of some rows from ``starts`` on, row after row, and their slots."""
        ends = np.cumsum(counts)
        positions = np.arange(int(counts.sum())) + np.repeat(starts - (ends - counts), counts)
        locations = np.empty_like(positions)
        self._kv_pool.locate(np.repeat(rows, counts), positions, out=locations)
        return positions, locations

    def _keep_blocks(
        self,
        columns: StepColumns,
        filled: Filled,
        layer: int,
        states: torch.Tensor,
        index: torch.Tensor,
    ) -> None:
        """Stores what a layer takes behind each block that was filled: see ``filled_blocks``."""
        sequence, block, _ = filled
        if sequence.size:
            table = self._kv_pool.tables_cpu[0].numpy()
            blocks = table[columns.rows[sequence], block].astype(np.int64)
            self._state.keep_blocks(self._to_device(blocks), layer, states, index)

    def _carries(self, at: torch.Tensor) -> torch.Tensor | None:
        """Returns what the draft's further layers take with rows' first tokens; None without any."""
        if self.plan.num_layers == 1:
            return None
        return self._state.carries.index_select(0, at)[:, 1:]

    def _draws(self, at: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
        """Returns how the drafts of rows are drawn, the first of which stand at ``positions``."""
        if not self._is_drawn:
            return {}
        parameters = self._sampler.parameters.at(at)
        return {
            "temperature": parameters["temperature"],
            "seeds": parameters["seed"],
            "draw_positions": positions,
        }

    def _to_device(self, values: Int64Array) -> torch.Tensor:
        return to_device(values, self._device)
