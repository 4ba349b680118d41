"""Runners of the target model: eager, decode graphs, prefill graphs, and the choice by a step's layout.

    eager        any batch as it comes

    decode       batch [raw] ─fill─▶ buffers [size], padded ─replay─▶ logits [size], [raw] of them real

    breakable    graph │ attention │ graph │ attention │ … │ graph    one entry of the backend per size

    piecewise    piece 0          embed, first layer up to attention        writes calls [size]
                 attention        eager, the batch's real sequences         writes attended [size]
                 piece 1 … n - 1  rest of a layer, next up to attention     reads attended, writes calls
                 piece n          rest of the last layer, last norm         reads attended, writes hidden

In prefills, breakable or piecewise, attention sees the batch's real sequences; everything else sees
padded token rows. Logits are computed behind the graphs, for the rows that need them. Calls (q, k, v),
attended and hidden are buffers of the runner, one set for all layers and sizes, so graphs of different
sizes share all other memory.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import fields, replace
from functools import partial

import numpy as np
import torch

from executor.batch.forward_batch import ForwardBatch, ForwardMode
from executor.graph.backend import RunnerBackend, Work
from executor.graph.cuda_graph_buffer_registry import CudaGraphBufferRegistry
from executor.model.layers.attention import AttentionCall, Stages
from executor.parallel.layout import Place, Topology
from executor.runners import Capturable, GraphRunner, Runner
from executor.runners.dummy_batches import dummy_decode, dummy_extend
from executor.runners.forward_pass import ForwardPass, RunnerGraphs, fill


class RunnerSelection:
    """Runs each batch the way its layout says, which all ranks were told alike.

    Args:
        eager: Runs what no graph was chosen for.
        decode: Runs graphs of steps in which no rank extends; None if there are none.
        prefill: Runs graphs of the other steps; None if there are none.
        verify: Runs graphs of speculative steps; None if there are none.
        draft_runners: Graphs of the draft model's runners; they are captured with the others, and
            last.
        binds_group: Whether what is captured holds on to the process group, and must be captured
            anew for another one.
        place: Where this executor stands; what is captured is for that.
    """

    def __init__(
        self,
        eager: Runner,
        *,
        decode: GraphRunner | None = None,
        prefill: GraphRunner | None = None,
        verify: GraphRunner | None = None,
        draft_runners: Sequence[Capturable] = (),
        binds_group: bool = True,
        place: Place | None = None,
    ) -> None:
        self._eager = eager
        self._decode = decode
        self._prefill = prefill
        self._verify = verify
        self._draft_runners = tuple(draft_runners)
        self._binds_group = binds_group
        self._place = place or Place()
        self._captured_for: Topology | None = None

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns float32 logits [L, V] of ``batch.logits_indices``."""
        return self._choose(batch).run(batch)

    def verify(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns float32 logits [T, V] of a speculative step's rows, all of which need them."""
        if batch.layout.graph_size is None:
            return self._eager.run(batch)
        assert self._verify is not None, "steps with a graph size were refused"
        return self._verify.run(batch)

    def capture(self) -> None:
        """Captures all graphs, prefill before decode before drafts, once per process group or place.

        All ranks must call it, at the same time: a captured pass makes collective calls.

        Raises:
            CaptureError: A size cannot be captured.
        """
        if self._captured_for == self._place.topology and not self._binds_group:
            return
        target = (self._prefill, self._decode, self._verify)
        runners: list[Capturable] = [runner for runner in target if runner is not None]
        runners += self._draft_runners
        self._captured_for = None
        for runner in runners:  # all of them first: they share memory, and the old group is gone
            runner.discard()
        for runner in runners:
            runner.capture()
        self._captured_for = self._place.topology

    def _choose(self, batch: ForwardBatch) -> Runner:
        if batch.layout.graph_size is None:
            return self._eager
        runner = self._prefill if batch.layout.has_extend else self._decode
        assert runner is not None, "steps with a graph size were refused, as nothing is captured"
        return runner


class EagerRunner:
    """Runs any batch as it comes, without a graph: plans attention, then calls the model.

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


class DecodeRunner:
    """Replays steps in which no rank extends.

    Where attention cannot be captured, the graphs break around it.

    Args:
        forward_pass: What to record.
        registry: Its inputs (``build_decode_registry``), for the largest size.
        backend: Records and replays.
        sizes: Sequences to capture, ascending.
        num_tokens_per_bs: Tokens of each sequence; above 1, drafts are verified so.
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
        self.num_tokens_per_bs = num_tokens_per_bs
        self._pass = forward_pass
        self._has_tree = registry.has_slot("tree_mask")
        padded_len = registry.get_slot("seq_lens").pad_value or 0
        assert padded_len >= num_tokens_per_bs or num_tokens_per_bs == 1, (
            f"a padded sequence of {padded_len} tokens cannot run {num_tokens_per_bs}"
        )
        self._logits = forward_pass.new_logits(self.graphs.sizes[-1] * num_tokens_per_bs)
        self._attend = self.graphs.attend(forward_pass.attention)
        # Inputs of models that are not served: no batch has them, and nothing reads their padding.
        read = {field.name for field in fields(ForwardBatch)}
        self._skip_slots = frozenset(registry.slot_names()) - read
        self._views: dict[int, ForwardBatch] = {}  # by size, what its graph reads

    def discard(self) -> None:
        """Drops what was captured."""
        self.graphs.discard()

    def capture(self) -> None:
        """Captures every size."""
        label = "decode" if self.num_tokens_per_bs == 1 else "verify"
        attentions = [self._pass.attention]
        self.graphs.capture_sizes(label, attentions, self._load_dummy, may_put_off=True)

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns float32 logits [T, V] of the batch's real rows, a view of the runner's buffer."""
        assert batch.layout.graph_size is not None, "the step names a graph"
        assert (batch.tree_mask is not None) == self._has_tree, "captured for trees, or for none"
        size = batch.layout.graph_size // self.num_tokens_per_bs
        self.graphs.ensure_captured(size)
        self.graphs.registry.fill_from(  # an idle rank's rows are padding then
            batch,
            raw_bs=batch.batch_size,
            padded_bs=size,
            raw_num_tokens=len(batch.input_ids),
            padded_num_tokens=batch.layout.graph_size,
            skip_slots=self._skip_slots,
        )
        self._pass.plan(self._views[size])
        self.graphs.replay(size)
        return self._logits[: len(batch.input_ids)]

    def _load_dummy(self, size: int) -> tuple[Work, list[Work]]:
        """Fills the buffers, plans attention, and keeps the batch that a graph of ``size`` sees."""
        width = self.num_tokens_per_bs
        view = fill(
            self.graphs.registry,
            dummy_decode(self._pass, size, width, has_tree=self._has_tree),
            padded_bs=size,
            padded_num_tokens=size * width,
            layout=self._pass.captured_layout(size * width, has_extend=False),
        )
        self._views[size] = view = replace(
            view,
            forward_mode=ForwardMode.DECODE,
            extend_seq_lens_cpu=None if width == 1 else np.full(size, width),
        )
        self._pass.plan(view)
        run = partial(self._forward, view)
        return run, [run]

    def _forward(self, view: ForwardBatch) -> None:
        hidden = self._pass.run(view, self._attend)
        self._pass.compute_logits(hidden, self._logits[: len(hidden)])


class BreakablePrefillRunner:
    """Replays steps in which some rank extends and none is idle: a capture breaks at attention.

    Args:
        forward_pass: What to record, up to the hidden states.
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
        self.graphs = RunnerGraphs(registry, backend, sizes)
        self._pass = forward_pass
        self._hidden = forward_pass.new_hidden(self.graphs.sizes[-1])
        self._attend = self.graphs.attend(forward_pass.attention, breaks=True)

    def discard(self) -> None:
        """Drops what was captured."""
        self.graphs.discard()

    def capture(self) -> None:
        """Captures every size."""
        attentions = [self._pass.attention]
        self.graphs.capture_sizes(
            "prefill", attentions, self._load_dummy, breaks=True, may_put_off=True
        )

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns float32 logits [L, V] of ``batch.logits_indices``."""
        size = len(_load_real(self._pass, self.graphs, batch).input_ids)
        self.graphs.replay(size)
        return self._pass.compute_logits(self._hidden.index_select(0, batch.logits_indices))

    def _load_dummy(self, size: int) -> tuple[Work, list[Work]]:
        run = partial(self._forward, _load(self._pass, self.graphs, dummy_extend(self._pass, size)))
        return run, [run]

    def _forward(self, view: ForwardBatch) -> None:
        hidden = self._pass.run(view, self._attend)
        self._hidden[: len(hidden)].copy_(hidden)


class PiecewisePrefillRunner:
    """Replays steps in which some rank extends and none is idle: a graph for each piece of a pass.

    The model attends once per layer of the KV pool, in order. The arguments are those of
    ``BreakablePrefillRunner``.
    """

    def __init__(
        self,
        forward_pass: ForwardPass,
        registry: CudaGraphBufferRegistry,
        backend: RunnerBackend,
        sizes: Sequence[int],
    ) -> None:
        self.graphs = RunnerGraphs(registry, backend, sizes)
        self._pass = forward_pass
        pool, rows = forward_pass.kv_pool, self.graphs.sizes[-1]
        self._num_layers = pool.shape.num_layers
        self._hidden = forward_pass.new_hidden(rows)
        zeros = partial(torch.zeros, dtype=forward_pass.dtype, device=pool.device)
        parts, value_width = pool.shape.parts, pool.shape.value_width
        self._q = zeros(rows, forward_pass.num_heads, parts[0].width)
        self._kv = [zeros(rows, part.num_heads, part.width) for part in parts]
        self._attended = zeros(rows, forward_pass.num_heads * value_width)
        self._cut_passes: dict[int, _CutPass] = {}

    def discard(self) -> None:
        """Drops what was captured."""
        self.graphs.discard()

    def capture(self) -> None:
        """Captures every size."""
        self.graphs.capture_sizes(
            "prefill",
            [self._pass.attention],
            self._load_dummy,
            num_pieces=self._num_layers + 1,
            breaks=False,
            may_put_off=True,
        )

    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns float32 logits [L, V] of ``batch.logits_indices``."""
        size = len(_load_real(self._pass, self.graphs, batch).input_ids)
        attention = self._pass.attention
        attention.init_forward_metadata_in_graph()
        q, attended = self._q[:size], self._attended[:size]
        k, v = (*(x[:size] for x in self._kv), None)[:2]
        with closing(self._cut_passes[size]):
            for layer_id in range(self._num_layers):
                self.graphs.replay(size, layer_id)
                attended.copy_(attention.forward(q, k, v, layer_id))
            self.graphs.replay(size, self._num_layers)
        return self._pass.compute_logits(self._hidden.index_select(0, batch.logits_indices))

    def _load_dummy(self, size: int) -> tuple[Callable[[], object], list[Work]]:
        view = _load(self._pass, self.graphs, dummy_extend(self._pass, size))
        cut = _CutPass(
            partial(self._pass.stages, view),
            attended=self._attended[:size],
            on_call=self._keep_call,
            on_end=self._keep_hidden,
        )
        self._cut_passes[size] = cut
        return partial(self._pass.run, view), cut.pieces(self._num_layers)

    def _keep_call(self, call: AttentionCall) -> None:
        kept = [x for x in (call.k, call.v) if x is not None]
        for buffer, x in zip((self._q, *self._kv), (call.q, *kept), strict=True):
            buffer[: len(x)].copy_(x)

    def _keep_hidden(self, out: torch.Tensor) -> None:
        hidden = self._pass.keep_features(out)
        self._hidden[: len(hidden)].copy_(hidden)


class _CutPass:
    """A forward pass, cut at its attention calls. Each piece goes on where the last one stopped.

    Args:
        stages: Starts the pass.
        attended: Where attention's result is when a piece goes on, [T, H * D].
        on_call: Takes what a piece hands to attention.
        on_end: Takes what the pass returns.
    """

    def __init__(
        self,
        stages: Callable[[], Stages],
        *,
        attended: torch.Tensor,
        on_call: Callable[[AttentionCall], None],
        on_end: Callable[[torch.Tensor], None],
    ) -> None:
        self._start_stages = stages
        self._attended = attended
        self._on_call = on_call
        self._on_end = on_end
        self._stages: Stages | None = None

    def pieces(self, num_calls: int) -> list[Callable[[], None]]:
        """Returns the pieces of a pass that calls attention ``num_calls`` times, to run in order."""
        return [self._start, *[self._go_on] * (num_calls - 1), self._end]

    def close(self) -> None:
        """Ends a pass that stopped halfway; nothing if it has ended, or was replayed by a graph."""
        if self._stages is not None:
            self._stages.close()
            self._stages = None

    def _start(self) -> None:
        self._stages = self._start_stages()
        self._on_call(next(self._stages))

    def _go_on(self) -> None:
        assert self._stages is not None, "pieces run in order"
        self._on_call(self._stages.send(self._attended))

    def _end(self) -> None:
        assert self._stages is not None, "pieces run in order"
        stages, self._stages = self._stages, None
        try:
            stages.send(self._attended)
        except StopIteration as end:
            self._on_end(end.value)
        else:
            raise AssertionError("the model attends more often than the KV pool has layers")


def _load_real(
    forward_pass: ForwardPass, graphs: RunnerGraphs, batch: ForwardBatch
) -> ForwardBatch:
    """Fills the buffers with a batch that is no dummy; captures its size first if that was put off."""
    if batch.layout.graph_size is not None:
        graphs.ensure_captured(batch.layout.graph_size)
    return _load(forward_pass, graphs, batch)


def _load(forward_pass: ForwardPass, graphs: RunnerGraphs, batch: ForwardBatch) -> ForwardBatch:
    """Fills the buffers, plans attention, and returns the batch that its layout's graph sees."""
    size = batch.layout.graph_size
    assert size is not None, "the step names a graph"
    view = fill(
        graphs.registry,
        batch,
        padded_bs=batch.batch_size,
        padded_num_tokens=size,
        layout=forward_pass.captured_layout(size, has_extend=True),
    )
    forward_pass.plan(view)
    return view
