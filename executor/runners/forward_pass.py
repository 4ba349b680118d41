"""Forward pass and its graphs, of which every runner is made, the target's and the draft's.

ForwardPass      the model's stages with attention between them, run as they are
RunnerGraphs     input buffers, backend and sizes of one runner, and the capture loop of all
fill             a batch on its way into the input buffers
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch

from executor.batch.forward_batch import ForwardBatch
from executor.batch.kv_pool import KVPool
from executor.graph.backend import RunnerBackend, ShapeKey, Work
from executor.graph.cuda_graph_buffer_registry import CudaGraphBufferRegistry
from executor.model.layers.attention import Attend, Attention, Stages, run_stages
from executor.parallel.layout import DpLayout, Place, require_attn_tp_gather

Batch = TypeVar("Batch", bound=ForwardBatch)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardPass:
    """What runners call, and the sizes of what it returns.

    Attributes:
        stages: The model's pass, which stops at each attention call.
        compute_logits: Takes hidden states [L, D] to float32 logits [L, V]; the target's puts them
            into ``out``, if that is given.
        attention: The attention backend.
        kv_pool: Keys, values and block tables.
        num_heads: H, query heads of this executor.
        hidden_size: D.
        vocab_size: V.
        dtype: Type of hidden states.
        place: Where this executor stands; now, in a group as large as any.
        require_mlp_tp_gather: Whether some layer gathers the rows of every DP rank.
        features: [rows of the largest pass, F], where each pass leaves what a draft takes of its
            rows: what ``stages`` returns beside the hidden states, or these themselves. None if
            there is no draft.
        max_len: Tokens of the longest sequence; None: as many as a row of the block table holds,
            which may have room for drafts behind.
    """

    stages: Callable[[ForwardBatch], Stages]
    compute_logits: Callable[..., torch.Tensor]
    attention: Attention
    kv_pool: KVPool
    num_heads: int
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    place: Place = field(default_factory=Place)
    require_mlp_tp_gather: bool = False
    features: torch.Tensor | None = None
    max_len: int | None = None

    @property
    def max_seq_len(self) -> int:
        """Tokens of the longest sequence: no position beyond has a rotation."""
        row = self.kv_pool.max_blocks_per_row * self.kv_pool.block_size
        return row if self.max_len is None else min(row, self.max_len)

    @property
    def has_window(self) -> bool:
        """Whether the KV pool has a second group, so that batches have slots for both."""
        return self.kv_pool.shape.window is not None

    @property
    def require_gathered_buffer(self) -> bool:
        """Whether some layer gathers rows of other executors."""
        return self.require_mlp_tp_gather or require_attn_tp_gather(self.place.topology)

    def plan(self, batch: ForwardBatch) -> None:
        """Plans attention on the host: before each pass and each replay."""
        self.attention.init_forward_metadata_out_graph(batch, self.kv_pool)

    def run(self, batch: ForwardBatch, attend: Attend | None = None) -> torch.Tensor:
        """Returns hidden states [T, D] of a planned batch, and leaves its features.

        Args:
            attend: Takes the place of the attention backend's ``forward``.
        """
        self.attention.init_forward_metadata_in_graph()
        return self.keep_features(run_stages(self.stages(batch), attend or self.attention.forward))

    def keep_features(self, out: torch.Tensor) -> torch.Tensor:
        """Copies features to their buffer, if there is one; returns the hidden states [T, D].

        Only device work. A runner of ``stages`` without ``run`` calls it within its capture.

        Args:
            out: What ``stages`` returned, [T, D] or [T, D + F].
        """
        if self.features is None:
            return out
        is_beside = out.shape[1] > self.hidden_size
        self.features[: len(out)] = out[:, self.hidden_size :] if is_beside else out
        return out[:, : self.hidden_size].contiguous() if is_beside else out

    def captured_layout(self, num_rows: int, *, has_extend: bool) -> DpLayout:
        """Returns the layout of a graph in which every rank runs ``num_rows`` rows."""
        return DpLayout.captured(num_rows, self.place.topology, has_extend=has_extend)

    def new_hidden(self, num_rows: int) -> torch.Tensor:
        """Returns a buffer for hidden states [num_rows, D], zeros."""
        size = (num_rows, self.hidden_size)
        return torch.zeros(size, dtype=self.dtype, device=self.kv_pool.device)

    def new_logits(self, num_rows: int) -> torch.Tensor:
        """Returns a buffer for float32 logits [num_rows, V], zeros."""
        return torch.zeros(num_rows, self.vocab_size, device=self.kv_pool.device)


class RunnerGraphs:
    """What a runner captures with.

    Args:
        registry: The graphs' inputs, for the largest size.
        backend: Records and replays; the runner's own.
        sizes: What to capture, ascending: sequences of decodes and drafts, token rows of extends.
    """

    def __init__(
        self, registry: CudaGraphBufferRegistry, backend: RunnerBackend, sizes: Sequence[int]
    ) -> None:
        self.registry = registry
        self.backend = backend
        self.sizes = tuple(sizes)
        self._put_off: dict[int, Callable[[], None]] = {}  # captures, by size

    def attend(self, attention: Attention, *, breaks: bool = False) -> Attend:
        """Returns what a recorded pass calls of an attention.

        Args:
            breaks: A graph breaks at each call, as it does where attention cannot be captured.
        """
        if attention.is_capturable and not breaks:
            return attention.forward
        return self.backend.eager_region(attention.forward)

    def capture_sizes(
        self,
        label: str,
        attentions: Sequence[Attention],
        load: Callable[[int], tuple[Callable[[], object], Sequence[Work]]],
        *,
        num_pieces: int = 1,
        breaks: bool | None = None,
        may_put_off: bool = False,
    ) -> None:
        """Captures every size, the largest first, so that smaller ones fit into its memory.

        Args:
            label: The runner's name.
            attentions: Those of its passes.
            load: Fills the buffers for a size with a dummy batch, plans attention, and returns the
                pass to warm up and the pieces to record.
            num_pieces: Pieces of a size.
            breaks: Whether graphs break at eager regions; None: where attention cannot be captured.
            may_put_off: Whether the runner asks for each size (``ensure_captured``) before it fills the buffers.
                Where a capture runs nothing it is made then, as callers wait for a Join.
        """
        if breaks is None:
            breaks = not all(attention.is_capturable for attention in attentions)
        record = self.backend.capture_breakable if breaks else self.backend.capture

        def capture(sizes: Sequence[int]) -> None:
            self.registry.reset_for_capture()
            with self.backend.session(label=label, num_captures=len(sizes) * num_pieces):
                for size in reversed(sizes):
                    run, pieces = load(size)
                    self.backend.warm_up(run)
                    for attention in attentions:
                        attention.on_after_cuda_graph_warmup()
                    for piece, work in enumerate(pieces):
                        record(ShapeKey(size, piece if num_pieces > 1 else None), work)

        if may_put_off and self.backend.outlives_group:
            self._put_off = {size: partial(capture, [size]) for size in self.sizes}
        else:
            capture(self.sizes)

    def ensure_captured(self, size: int) -> None:
        """Captures a size if that was put off."""
        if (capture := self._put_off.get(size)) is not None:
            capture()
            del self._put_off[size]

    def replay(self, size: int, piece: int | None = None) -> None:
        """Runs the graph of a size."""
        self.backend.replay(ShapeKey(size, piece))

    def discard(self) -> None:
        """Drops what was captured."""
        self.backend.discard()
        self._put_off.clear()


def fill(
    registry: CudaGraphBufferRegistry,
    batch: Batch,
    *,
    padded_bs: int,
    padded_num_tokens: int,
    layout: DpLayout,
) -> Batch:
    """Puts a batch into a registry's buffers and returns it as a captured pass reads it.

    Args:
        registry: The runner's inputs.
        batch: Left as it is.
        padded_bs: Sequences that the pass runs.
        padded_num_tokens: Token rows that it runs.
        layout: The layout that it was captured with.
    """
    registry.fill_from(
        batch,
        raw_bs=batch.batch_size,
        padded_bs=padded_bs,
        raw_num_tokens=len(batch.input_ids),
        padded_num_tokens=padded_num_tokens,
    )
    view = registry.extract_buffer(
        padded_bs=padded_bs, padded_num_tokens=padded_num_tokens, forward_batch_template=batch
    )
    return replace(view, layout=layout)
