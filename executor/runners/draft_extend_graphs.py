"""Draft-extend, eager or from graphs: what its runners have in common.

behind a speculative step, all ranks' sequences have the same rows ─┐
behind a step of decodes, they have fewer ──────────────────────────┴─▶ the graphs of that width
behind any other step, and without graphs ───────────────────────────▶ the runner's pass as it is
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from executor.batch.forward_batch import ForwardMode
from executor.graph.backend import Work
from executor.model.layers.attention import Attend
from executor.runners.draft_picks import copy_results
from executor.runners.dummy_batches import dummy_draft_extend
from executor.runners.forward_pass import ForwardPass, RunnerGraphs, fill
from executor.speculative.draft_batch import ExtendBatch, Extended

Run = Callable[[Attend, ExtendBatch], Extended]


class DraftExtendGraphs:
    """Runs draft-extend. The graphs of a width are over sequences that all sample.

    Args:
        label: The runner's name.
        forward_pass: Of the draft model, or of its first layer.
        run: The runner's device work on a planned batch, given what calls attention.
        num_drafts: Drafts of each sequence: K, or the whole chain.
        num_layers: Draft layers that take one another's output.
        is_drawn: Whether batches say how drafts are drawn.
        graphs: What to capture with (``draft_extend_slots``), by the rows of each sequence; empty
            runs everything eagerly. All have the same sizes.

    Attributes:
        sizes: Sequences of each graph, ascending.
        graphs: By the rows of each sequence, in the order of their captures: the widest first.
    """

    def __init__(
        self,
        label: str,
        forward_pass: ForwardPass,
        run: Run,
        *,
        num_drafts: int,
        num_layers: int = 1,
        is_drawn: bool,
        graphs: Mapping[int, RunnerGraphs],
    ) -> None:
        self._label = label
        self._pass = forward_pass
        self._run = run
        self._num_layers = num_layers
        self._is_drawn = is_drawn
        self.graphs = {width: graphs[width] for width in sorted(graphs, reverse=True)}
        self._attends = {
            width: of_width.attend(forward_pass.attention)
            for width, of_width in self.graphs.items()
        }
        self.sizes: tuple[int, ...] = ()
        if graphs:
            widest, *others = self.graphs.values()
            self.sizes = widest.sizes
            assert all(other.sizes == self.sizes for other in others), "one list for all widths"
            num_rows = self.sizes[-1] * max(graphs)
            self._results = self._new_results(self.sizes[-1], num_rows, num_drafts)

    def extend(self, batch: ExtendBatch) -> Extended:
        """Runs the graph that the batch's layout and width name, else the runner's pass.

        Of a graph's results only ``outputs`` are its own.
        """
        assert (batch.draws is not None) == self._is_drawn, "drafts are drawn always or never"
        width, graph_size = batch.width, batch.layout.graph_size
        if graph_size is None:
            self._pass.plan(batch)
            return self._run(self._pass.attention.forward, batch)
        assert width in self.graphs, f"captured with {[*self.graphs]} rows for a sequence"
        count, size, kept = batch.batch_size, graph_size // width, self._results
        assert len(batch.lasts) == count, "every sequence samples"
        self._load(batch, width, size)
        self.graphs[width].replay(size)
        return Extended(
            tokens=kept.tokens[:count].clone(),
            scores=kept.scores[:count].clone(),
            hidden=kept.hidden[:count].clone(),
            outputs=tuple(states[: count * width] for states in kept.outputs),
            probs=None if kept.probs is None else kept.probs[:count].clone(),
        )

    def discard(self) -> None:
        """Drops what was captured."""
        for graphs in self.graphs.values():
            graphs.discard()

    def capture(self) -> None:
        """Captures every size of every width."""
        for width, graphs in self.graphs.items():
            load = partial(self._load_dummy, width)
            graphs.capture_sizes(self._label, [self._pass.attention], load)

    def _load_dummy(self, width: int, size: int) -> tuple[Work, list[Work]]:
        dummy = dummy_draft_extend(
            self._pass, size, width, num_layers=self._num_layers, is_drawn=self._is_drawn
        )
        run = partial(self._run_and_keep, self._attends[width], self._load(dummy, width, size))
        return run, [run]

    def _load(self, batch: ExtendBatch, width: int, size: int) -> ExtendBatch:
        """Fills the buffers, plans attention, and returns what a graph of ``size`` reads.

        An idle rank runs the graph as well: every row is padding then.
        """
        view = fill(
            self.graphs[width].registry,
            batch,
            padded_bs=size,
            padded_num_tokens=size * width,
            layout=self._pass.captured_layout(size * width, has_extend=False),
        )
        view = replace(
            view,
            forward_mode=ForwardMode.EXTEND,
            extend_seq_lens_cpu=np.full(size, width),
        )
        self._pass.plan(view)
        return view

    def _run_and_keep(self, attend: Attend, batch: ExtendBatch) -> None:
        copy_results(_tensors(self._run(attend, batch)), _tensors(self._results))

    def _new_results(self, size: int, num_rows: int, num_drafts: int) -> Extended:
        """Returns output buffers of every graph: memory that none of them owns."""
        device, new_hidden = self._pass.kv_pool.device, self._pass.new_hidden
        zeros = partial(torch.zeros, dtype=torch.float32, device=device)
        probs = None
        if self._is_drawn:
            shape = (size, num_drafts) if self._num_layers > 1 else (size,)
            probs = zeros(*shape, self._pass.vocab_size)
        return Extended(
            tokens=zeros(size, num_drafts, dtype=torch.int64),
            scores=zeros(size, num_drafts),
            hidden=new_hidden(size),
            outputs=tuple(new_hidden(num_rows) for _ in range(self._num_layers - 1)),
            probs=probs,
        )


def _tensors(extended: Extended) -> Iterator[torch.Tensor | None]:
    yield from (extended.tokens, extended.scores, extended.hidden, extended.probs)
    yield from extended.outputs
