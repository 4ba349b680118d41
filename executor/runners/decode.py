"""Decode runner: one graph per number of sequences, from token ids to logits.

    batch [raw] ──fill──▶ buffers [size], padded ──replay──▶ logits [size], of which [raw] are real

At width ``num_tokens_per_bs`` above 1 every sequence runs that many tokens: so draft tokens are
verified.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from executor.batch.forward_batch import ForwardBatch, ForwardMode
from executor.graph.backend import RunnerBackend
from executor.graph.cuda_graph_buffer_registry import CudaGraphBufferRegistry
from executor.runners.dummy_batches import dummy_decode
from executor.runners.forward_pass import ForwardPass, fill
from executor.runners.runner_graphs import RunnerGraphs, Work


class DecodeRunner:
    """Replays steps in which no rank extends.

    Where attention cannot be captured, the graphs break around it.

    Args:
        forward_pass: What to record.
        registry: Its inputs (``build_decode_registry``), for the largest size.
        backend: Records and replays.
        sizes: Sequences to capture, ascending.
        num_tokens_per_bs: Tokens of each sequence.
    """

    def __init__(
        self,
        forward_pass: ForwardPass,
        registry: CudaGraphBufferRegistry,
        backend: RunnerBackend,
        sizes: Sequence[int],
        *,
        num_tokens_per_bs: int = 1,
    ) -> None:
        self.graphs = RunnerGraphs(registry, backend, sizes)
        self.sizes = self.graphs.sizes
        self.num_tokens_per_bs = num_tokens_per_bs
        self._pass = forward_pass
        self._has_tree = registry.has_slot("tree_mask")
        padded_len = registry.get_slot("seq_lens").pad_value or 0
        assert padded_len >= num_tokens_per_bs or num_tokens_per_bs == 1, (
            f"a padded sequence of {padded_len} tokens cannot run {num_tokens_per_bs}"
        )
        self._logits = forward_pass.new_logits(self.sizes[-1] * num_tokens_per_bs)
        self._attend = self.graphs.attend(forward_pass.attention)

    def discard(self) -> None:
        """Drops what was captured."""
        self.graphs.discard()

    def capture(self) -> None:
        """Captures every size."""
        label = "decode" if self.num_tokens_per_bs == 1 else "verify"
        self.graphs.capture_sizes(label, [self._pass.attention], self._load_dummy)

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns float32 logits [T, V] of the batch's real rows, a view of the runner's buffer."""
        assert batch.layout.graph_size is not None, "the step names a graph"
        size = batch.layout.graph_size // self.num_tokens_per_bs
        self._load(batch, size)
        self.graphs.replay(size)
        return self._logits[: len(batch.input_ids)]

    def _load_dummy(self, size: int) -> tuple[Work, list[Work]]:
        dummy = dummy_decode(self._pass, size, self.num_tokens_per_bs, has_tree=self._has_tree)
        run = partial(self._forward, self._load(dummy, size))
        return run, [run]

    def _load(self, batch: ForwardBatch, size: int) -> ForwardBatch:
        """Fills the buffers, plans attention, and returns the batch that a graph of ``size`` sees.

        An idle rank runs it as well: every row is padding then.
        """
        width = self.num_tokens_per_bs
        assert (batch.tree_mask is not None) == self._has_tree, "captured for trees, or for none"
        view = fill(
            self.graphs.registry,
            batch,
            padded_bs=size,
            padded_num_tokens=size * width,
            layout=self._pass.captured_layout(size * width, has_extend=False),
        )
        new_lens = None if width == 1 else np.full(size, width)
        prefix_lens = None if new_lens is None else view.seq_lens_cpu.numpy() - new_lens
        view = replace(
            view,
            forward_mode=ForwardMode.DECODE,
            extend_seq_lens_cpu=new_lens,
            extend_prefix_lens_cpu=prefix_lens,
        )
        self._pass.plan(view)
        return view

    def _forward(self, view: ForwardBatch) -> None:
        hidden = self._pass.run(view, self._attend)
        self._logits[: len(hidden)].copy_(self._pass.compute_logits(hidden))
