"""A draft-extend, eager or from graphs: what its runners have in common.

behind a speculative step, all ranks' sequences have the same rows ─┐
behind a step of decodes, they have fewer ──────────────────────────┴─▶ the graphs of that width
behind any other step, and without graphs ───────────────────────────▶ the runner's pass as it is
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from executor.model.layers.attention import Attend
from executor.runners.draft_extend_graphs import ExtendGraphs
from executor.runners.draft_graphs import PhaseGraphs
from executor.runners.forward_pass import ForwardPass
from executor.speculative.draft_batch import ExtendBatch, Extended

Run = Callable[[Attend, ExtendBatch], Extended]


class ExtendPhase:
    """Draft-extend of one runner.

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
        graphs: Mapping[int, PhaseGraphs],
    ) -> None:
        self._label = label
        self._pass = forward_pass
        self._run = run
        self._is_drawn = is_drawn
        self._graphs: dict[int, ExtendGraphs] = {}
        self.sizes: tuple[int, ...] = ()
        if not graphs:
            return
        widest = max(graphs)
        self.sizes = graphs[widest].sizes
        room = _new_room(
            forward_pass, self.sizes[-1], widest, num_drafts, num_layers, is_drawn=is_drawn
        )
        for width in sorted(graphs, reverse=True):  # in the order of their captures
            phase_graphs = graphs[width]
            assert phase_graphs.sizes == self.sizes, "a step's graph size is one for all widths"
            [attend] = phase_graphs.attends([forward_pass.attention])
            self._graphs[width] = ExtendGraphs(
                forward_pass,
                phase_graphs,
                partial(run, attend),
                room,
                width=width,
                num_layers=num_layers,
                is_drawn=is_drawn,
            )

    def extend(self, batch: ExtendBatch) -> Extended:
        """Runs the graph that the batch's layout and width name, else the runner's pass."""
        assert (batch.draws is not None) == self._is_drawn, "drafts are drawn always or never"
        if batch.batch.layout.graph_size is None:
            self._pass.plan(batch.batch)
            return self._run(self._pass.attention.forward, batch)
        assert batch.width in self._graphs, f"captured with {[*self._graphs]} rows for a sequence"
        return self._graphs[batch.width].replay(batch)

    def discard(self) -> None:
        """Drops what was captured."""
        for graphs in self._graphs.values():
            graphs.discard()

    def capture(self) -> None:
        """Captures every size of every width, the widest first."""
        for graphs in self._graphs.values():
            graphs.capture(self._label)


def _new_room(
    forward_pass: ForwardPass,
    size: int,
    width: int,
    num_drafts: int,
    num_layers: int,
    *,
    is_drawn: bool,
) -> Extended:
    """Returns zeros for the results of every graph: memory that none of them owns."""
    device, probs = forward_pass.kv_pool.device, None
    if is_drawn:
        shape = (size, num_drafts) if num_layers > 1 else (size,)
        probs = torch.zeros(*shape, forward_pass.vocab_size, dtype=torch.float32, device=device)
    return Extended(
        tokens=torch.zeros(size, num_drafts, dtype=torch.int64, device=device),
        scores=torch.zeros(size, num_drafts, dtype=torch.float32, device=device),
        hidden=forward_pass.new_hidden(size),
        outputs=tuple(forward_pass.new_hidden(size * width) for _ in range(num_layers - 1)),
        probs=probs,
    )
