"""Decodes: one graph per number of sequences, from token ids to logits.

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
from executor.graph.backend import RunnerBackend, ShapeKey
from executor.graph.cuda_graph_buffer_registry import CudaGraphBufferRegistry
from executor.runners.dummy_batches import decode_stand_in
from executor.runners.forward_pass import ForwardPass, fill


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
        self.sizes = tuple(sizes)
        self.num_tokens_per_bs = num_tokens_per_bs
        self._pass = forward_pass
        self._registry = registry
        self._backend = backend
        self._has_tree = registry.has_slot("tree_mask")
        padded_len = registry.get_slot("seq_lens").pad_value or 0
        assert padded_len >= num_tokens_per_bs or num_tokens_per_bs == 1, (
            f"a padded sequence of {padded_len} tokens cannot run {num_tokens_per_bs}"
        )
        self._logits = forward_pass.new_logits(self.sizes[-1] * num_tokens_per_bs)
        attend = forward_pass.attention.forward
        is_whole = forward_pass.attention.is_capturable
        self._attend = attend if is_whole else backend.eager_region(attend)
        self._record = backend.capture if is_whole else backend.capture_breakable

    def discard(self) -> None:
        """Drops what was captured."""
        self._backend.discard()

    def capture(self) -> None:
        """Captures every size, the largest first, so that smaller ones fit into its memory."""
        self._registry.reset_for_capture()
        label = "decode" if self.num_tokens_per_bs == 1 else "verify"
        with self._backend.session(label=label, num_captures=len(self.sizes)):
            for size in reversed(self.sizes):
                stand_in = decode_stand_in(
                    self._pass, size, self.num_tokens_per_bs, has_tree=self._has_tree
                )
                view = self._load(stand_in, size)
                run = partial(self._forward, view)
                self._backend.warm_up(run)
                self._pass.attention.on_after_cuda_graph_warmup()
                self._record(ShapeKey(size), run)

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns float32 logits [T, V] of the batch's real rows, a view of the runner's buffer."""
        assert batch.layout.graph_size is not None, "the step names a graph"
        size = batch.layout.graph_size // self.num_tokens_per_bs
        self._load(batch, size)
        self._backend.replay(ShapeKey(size))
        return self._logits[: len(batch.input_ids)]

    def _load(self, batch: ForwardBatch, size: int) -> ForwardBatch:
        """Fills the buffers, plans attention, and returns the batch that a graph of ``size`` sees.

        An idle rank runs it as well: every row is padding then.
        """
        width = self.num_tokens_per_bs
        assert (batch.tree_mask is not None) == self._has_tree, "captured for trees, or for none"
        view = fill(
            self._registry,
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
