"""The graphs of one phase of the draft model: one for each number of sequences.

    inputs [B] ──fill──▶ buffers [size], padded ──replay──▶ the runner's results [size]

Every phase has a width, the token rows of a sequence, and gets its layout from the step's numbers of
requests: eagerly, at warm-up, at capture and at each replay.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from executor.graph.backend import RunnerBackend, ShapeKey
from executor.graph.cuda_graph_buffer_registry import CudaGraphBufferRegistry
from executor.model.layers.attention import Attend, Attention
from executor.parallel.layout import DpLayout, DpPaddingMode
from executor.parallel.topology import Topology
from executor.speculative.draft_batch import Step

Inputs = TypeVar("Inputs")


class PhaseGraphs:
    """What a runner of a phase captures with, if it has graphs.

    Args:
        registry: Its inputs, for the largest size.
        backend: Records and replays; the phase's own.
        sizes: Sequences to capture, ascending.
    """

    def __init__(
        self, registry: CudaGraphBufferRegistry, backend: RunnerBackend, sizes: Sequence[int]
    ) -> None:
        self.sizes = tuple(sizes)
        self._registry = registry
        self._backend = backend

    def attends(self, attentions: Sequence[Attention]) -> list[Attend]:
        """Returns what a pass calls of each attention: what cannot be captured breaks a graph."""
        return [
            attention.forward
            if attention.is_capturable
            else self._backend.eager_region(attention.forward)
            for attention in attentions
        ]

    def capture(
        self,
        label: str,
        attentions: Sequence[Attention],
        load: Callable[[int], Callable[[], None]],
    ) -> None:
        """Captures every size, the largest first, so that smaller ones fit into its memory.

        Args:
            label: The runner's name.
            attentions: Of its passes.
            load: Fills the buffers for a size with what is safe to run, plans, and returns what
                to record.
        """
        self._registry.reset_for_capture()
        is_whole = all(attention.is_capturable for attention in attentions)
        record = self._backend.capture if is_whole else self._backend.capture_breakable
        with self._backend.session(label=label, num_captures=len(self.sizes)):
            for size in reversed(self.sizes):
                run = load(size)
                self._backend.warm_up(run)
                for attention in attentions:
                    attention.on_after_cuda_graph_warmup()
                record(ShapeKey(size), run)

    def fill(self, inputs: Inputs, count: int, size: int, width: int) -> Inputs:
        """Puts inputs into the buffers and returns them as a graph reads them.

        Args:
            inputs: Of ``count`` sequences.
            count: May be 0: an idle rank runs padding alone.
            size: Sequences of the graph.
            width: Rows of each.
        """
        self._registry.fill_from(
            inputs,
            raw_bs=count,
            padded_bs=size,
            raw_num_tokens=count * width,
            padded_num_tokens=size * width,
        )
        return self._registry.extract_buffer(
            padded_bs=size, padded_num_tokens=size * width, forward_batch_template=inputs
        )

    def replay(self, size: int) -> None:
        """Runs the graph of ``size`` sequences."""
        self._backend.replay(ShapeKey(size))

    def discard(self) -> None:
        """Drops what was captured."""
        self._backend.discard()


def layout_of(step: Step, width: int, topology: Topology) -> DpLayout:
    """Returns the layout of a step's phase that has ``width`` rows for each sequence."""
    return DpLayout.of_requests(
        step.num_requests,
        width,
        topology,
        step.padding_mode,
        graph_requests=step.graph_requests,
    )


def step_of_graph(size: int, topology: Topology) -> Step:
    """Returns the step that a graph sees: ``size`` sequences on every DP rank."""
    return Step((size,) * topology.dp_size, DpPaddingMode.MAX_LEN, size)


def put(results: torch.Tensor | None, into: torch.Tensor | None) -> None:
    """Copies a graph's results to where they stay; nothing if there are none."""
    if results is not None:
        assert into is not None, "there is room for every result"
        into[: len(results)].copy_(results)
