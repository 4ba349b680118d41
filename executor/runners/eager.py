"""Runs any batch as it comes, without a graph."""

import torch

from executor.batch.forward_batch import ForwardBatch
from executor.graph.cuda_graph_buffer_registry import CudaGraphBufferRegistry
from executor.runners.forward_pass import ForwardPass, fill


class EagerRunner:
    """Plans attention on the host, then calls the model.

    Args:
        forward_pass: What to run.
        registry: Its inputs, sized for the largest step (``build_eager_registry``).
    """

    def __init__(self, forward_pass: ForwardPass, registry: CudaGraphBufferRegistry) -> None:
        self._pass = forward_pass
        self._registry = registry

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns float32 logits [L, V] of ``batch.logits_indices``."""
        view = fill(
            self._registry,
            batch,
            padded_bs=batch.batch_size,
            padded_num_tokens=len(batch.input_ids),
            layout=batch.layout,
        )
        self._pass.plan(view)
        hidden = self._pass.run(view)
        return self._pass.compute_logits(hidden.index_select(0, batch.logits_indices))
