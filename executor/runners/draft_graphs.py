"""Draft phase, eager or from graphs: what the runners of drafts have in common.

batch [B] ──fill──▶ buffers [size], padded ──replay──▶ drafts [size]
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from executor.batch.forward_batch import ForwardBatch, ForwardMode
from executor.budget.speculation import SpeculationPlan
from executor.graph.backend import Work
from executor.runners.draft_picks import copy_results, new_drafts
from executor.runners.forward_pass import ForwardPass, RunnerGraphs, fill
from executor.speculative.draft_batch import DraftBatch
from executor.speculative.tree import Drafts


class Phase(Protocol):
    """What differs between draft runners."""

    def spread(self, batch: DraftBatch) -> DraftBatch:
        """Returns a batch as the passes of a phase read it: a line of positions for each."""
        ...

    def plan(self, batch: DraftBatch) -> Sequence[ForwardBatch]:
        """Plans attention of every pass, and returns what each reads besides the drafts so far."""
        ...

    def run(self, batch: DraftBatch, passes: Sequence[ForwardBatch]) -> Drafts:
        """Returns the drafts. Only device work."""
        ...

    def dummy(self, size: int) -> DraftBatch:
        """Returns a batch of ``size`` sequences that is safe to run."""
        ...


class DraftGraphs:
    """Runs a draft phase.

    Args:
        label: The runner's name.
        phase: The runner's own part.
        passes: Of the draft model; none for a single draft.
        plan: How it drafts.
        is_drawn: Whether batches say how drafts are drawn.
        graphs: What to capture with; None runs everything eagerly.

    Attributes:
        sizes: Sequences of each graph, ascending.
    """

    def __init__(
        self,
        label: str,
        phase: Phase,
        passes: Sequence[ForwardPass],
        plan: SpeculationPlan,
        *,
        is_drawn: bool,
        graphs: RunnerGraphs | None,
    ) -> None:
        self._label = label
        self._phase = phase
        self._passes = passes
        self._topk = plan.topk
        self._is_drawn = is_drawn
        self.graphs = graphs if passes else None
        self.sizes: tuple[int, ...] = ()
        if self.graphs is not None:
            self.sizes = self.graphs.sizes
            self._drafts = new_drafts(passes[0], plan, self.sizes[-1], is_drawn=is_drawn)

    def draft(self, batch: DraftBatch) -> Drafts:
        """Returns the drafts of each sequence; those of a graph are valid until the next replay."""
        assert (batch.draws is not None) == self._is_drawn, "drafts are drawn always or never"
        count, size = batch.batch_size, batch.layout.graph_size
        batch = self._phase.spread(batch)
        if self.graphs is None or size is None:
            return self._phase.run(batch, self._phase.plan(batch))
        self._load(batch, size // self._topk)
        self.graphs.replay(size // self._topk)
        return Drafts(*(x if x is None else x[:count] for x in self._drafts))  # type: ignore[arg-type]

    def discard(self) -> None:
        """Drops what was captured."""
        if self.graphs is not None:
            self.graphs.discard()

    def capture(self) -> None:
        """Captures every size, if there are any."""
        if self.graphs is not None:
            attentions = [forward_pass.attention for forward_pass in self._passes]
            self.graphs.capture_sizes(self._label, attentions, self._load_dummy)

    def _load_dummy(self, size: int) -> tuple[Work, list[Work]]:
        batch = self._phase.spread(self._phase.dummy(size))
        run = partial(self._run_and_keep, *self._load(batch, size))
        return run, [run]

    def _load(self, batch: DraftBatch, size: int) -> tuple[DraftBatch, Sequence[ForwardBatch]]:
        """Fills the buffers, plans attention, and returns what a graph of ``size`` reads."""
        assert self.graphs is not None, "there are graphs"
        num_rows = size * self._topk
        view = fill(
            self.graphs.registry,
            batch,
            padded_bs=size,
            padded_num_tokens=num_rows,
            layout=self._passes[0].captured_layout(num_rows, has_extend=False),
        )
        view = replace(view, forward_mode=ForwardMode.DECODE)
        return view, self._phase.plan(view)

    def _run_and_keep(self, batch: DraftBatch, passes: Sequence[ForwardBatch]) -> None:
        copy_results(self._phase.run(batch, passes), self._drafts)
