"""Extends, captured once per number of tokens; the capture breaks at each attention call.

    graph │ attention │ graph │ attention │ … │ graph        one entry of the backend per size

Attention sees the batch's real sequences; everything else sees padded token rows.
"""

from collections.abc import Sequence
from functools import partial

import torch

from executor.batch.forward_batch import ForwardBatch
from executor.graph.backend import RunnerBackend, ShapeKey
from executor.graph.cuda_graph_buffer_registry import CudaGraphBufferRegistry
from executor.runners.dummy_batches import extend_stand_in
from executor.runners.forward_pass import ForwardPass, load_extend


class BreakablePrefillRunner:
    """Replays steps in which some rank extends and none is idle.

    Args:
        forward_pass: What to record, up to the hidden states; logits are computed afterwards, for
            the rows that need them.
        registry: Its inputs (``build_prefill_registry``), for the largest size.
        backend: Records and replays.
        sizes: Token rows to capture, ascending.
    """

    def __init__(
        self,
        forward_pass: ForwardPass,
        registry: CudaGraphBufferRegistry,
        backend: RunnerBackend,
        sizes: Sequence[int],
    ) -> None:
        self.sizes = tuple(sizes)
        self._pass = forward_pass
        self._registry = registry
        self._backend = backend
        self._hidden = forward_pass.new_hidden(self.sizes[-1])
        self._attend = backend.eager_region(forward_pass.attention.forward)

    def discard(self) -> None:
        """Drops what was captured."""
        self._backend.discard()

    def capture(self) -> None:
        """Captures every size, the largest first, so that smaller ones fit into its memory."""
        self._registry.reset_for_capture()
        with self._backend.session(label="prefill", num_captures=len(self.sizes)):
            for size in reversed(self.sizes):
                view = load_extend(
                    self._pass, self._registry, extend_stand_in(self._pass, size), size
                )
                run = partial(self._forward, view)
                self._backend.warm_up(run)
                self._pass.attention.on_after_cuda_graph_warmup()
                self._backend.capture_breakable(ShapeKey(size), run)

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns float32 logits [L, V] of ``batch.logits_indices``."""
        size = batch.layout.graph_size
        assert size is not None, "the step names a graph"
        load_extend(self._pass, self._registry, batch, size)
        self._backend.replay(ShapeKey(size))
        return self._pass.compute_logits(self._hidden.index_select(0, batch.logits_indices))

    def _forward(self, view: ForwardBatch) -> None:
        hidden = self._pass.run(view, self._attend)
        self._hidden[: len(hidden)].copy_(hidden)
