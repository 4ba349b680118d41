"""The graphs of a draft-extend of one width: their inputs, and how their results are left."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from executor.batch.forward_batch import ForwardBatch, ForwardMode
from executor.runners.draft_graphs import PhaseGraphs, layout_of, put, step_of_graph
from executor.runners.draft_inputs import ExtendInputs, draw_inputs
from executor.runners.dummy_batches import extend_stand_in_of_drafts
from executor.runners.forward_pass import ForwardPass
from executor.speculative.draft_batch import ExtendBatch, Extended

Run = Callable[[ExtendBatch], Extended]


class ExtendGraphs:
    """Graphs over sequences of equally many rows, each of which samples.

    Args:
        forward_pass: Of the draft model, or of its first layer.
        graphs: What to capture with (``draft_extend_slots``).
        run: What to record: device work alone, on a planned batch.
        room: Where results stay, for the largest graph at least.
        width: Rows of each sequence.
        num_layers: Draft layers that take one another's output.
        is_drawn: Whether batches say how drafts are drawn.
    """

    def __init__(
        self,
        forward_pass: ForwardPass,
        graphs: PhaseGraphs,
        run: Run,
        room: Extended,
        *,
        width: int,
        num_layers: int = 1,
        is_drawn: bool = False,
    ) -> None:
        self._pass = forward_pass
        self._graphs = graphs
        self._run = run
        self._room = room
        self._width = width
        self._num_layers = num_layers
        self._is_drawn = is_drawn
        # Also of padding: its drafts must not be written into the rows of a real sequence.
        places = torch.arange(graphs.sizes[-1], device=forward_pass.kv_pool.device)
        self._starts = places * width

    def capture(self, label: str) -> None:
        """Captures every size, under the runner's name."""

        def load(size: int) -> Callable[[], None]:
            stand_in = extend_stand_in_of_drafts(
                self._pass, size, self._width, num_layers=self._num_layers, is_drawn=self._is_drawn
            )
            return partial(self._run_and_keep, *self._load(stand_in, size))

        self._graphs.capture(label, [self._pass.attention], load)

    def replay(self, batch: ExtendBatch) -> Extended:
        """Runs the graph that a batch's layout names. Only ``outputs`` are the graphs' own."""
        assert batch.width == self._width, f"captured with {self._width} rows for each sequence"
        assert batch.batch.layout.graph_size is not None, "the step names a graph"
        size = batch.batch.layout.graph_size // self._width
        self._load(batch, size)
        self._graphs.replay(size)
        count, room = len(batch.lasts), self._room
        return Extended(
            tokens=room.tokens[:count].clone(),
            scores=room.scores[:count].clone(),
            hidden=room.hidden[:count].clone(),
            outputs=tuple(states[: count * self._width] for states in room.outputs),
            probs=None if room.probs is None else room.probs[:count].clone(),
        )

    def discard(self) -> None:
        """Drops what was captured."""
        self._graphs.discard()

    def _load(self, batch: ExtendBatch, size: int) -> tuple[ExtendBatch, torch.Tensor]:
        """Fills the buffers and plans attention.

        An idle rank runs the graph as well: every row is padding then.

        Returns:
            What a graph of ``size`` reads, ``lasts`` excepted, and how far these are from
            ``starts``.
        """
        width, topology = self._width, self._pass.topology
        count = batch.batch.batch_size
        assert len(batch.lasts) == count, "every sequence samples"
        inputs = self._graphs.fill(_inputs(batch), count, size, width)
        view = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=size,
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            out_cache_loc=inputs.out_cache_loc,
            req_pool_indices=inputs.req_pool_indices,
            seq_lens=inputs.seq_lens,
            seq_lens_cpu=inputs.seq_lens_cpu,
            layout=layout_of(step_of_graph(size, topology), width, topology),
            logits_indices=inputs.last_offsets[:0],
            extend_prefix_lens_cpu=inputs.seq_lens_cpu.numpy() - width,
            extend_seq_lens_cpu=np.full(size, width),
            num_token_non_padded=inputs.num_token_non_padded,
            global_num_tokens_gpu=inputs.global_num_tokens_gpu,
            global_num_tokens_for_logprob_gpu=inputs.global_num_tokens_for_logprob_gpu,
            hidden_states=inputs.hidden_states,
        )
        self._pass.plan(view)
        starts = self._starts[:size]
        return (
            ExtendBatch(view, width, starts, starts, inputs.carries, inputs.draws),
            inputs.last_offsets,
        )

    def _run_and_keep(self, batch: ExtendBatch, last_offsets: torch.Tensor) -> None:
        extended = self._run(replace(batch, lasts=batch.starts + last_offsets))
        room = self._room
        put(extended.tokens, room.tokens)
        put(extended.scores, room.scores)
        put(extended.hidden, room.hidden)
        put(extended.probs, room.probs)
        for states, into in zip(extended.outputs, room.outputs, strict=True):
            put(states, into)


def _inputs(extend: ExtendBatch) -> ExtendInputs:
    batch = extend.batch
    assert batch.hidden_states is not None, "a draft reads hidden states"
    return ExtendInputs(
        input_ids=batch.input_ids,
        positions=batch.positions,
        out_cache_loc=batch.out_cache_loc,
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        seq_lens_cpu=batch.seq_lens_cpu,
        hidden_states=batch.hidden_states,
        last_offsets=extend.lasts - extend.starts,
        carries=extend.carries,
        **draw_inputs(extend.draws),
    )
