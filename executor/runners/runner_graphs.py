"""Graphs of one runner: input buffers, backend, sizes, and the capture loop of all runners."""

from collections.abc import Callable, Sequence

from executor.graph.backend import RunnerBackend, ShapeKey
from executor.graph.cuda_graph_buffer_registry import CudaGraphBufferRegistry
from executor.model.layers.attention import Attend, Attention

Work = Callable[[], None]


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
    ) -> None:
        """Captures every size, the largest first, so that smaller ones fit into its memory.

        Args:
            label: The runner's name.
            attentions: Those of its passes.
            load: Fills the buffers for a size with a dummy batch, plans attention, and returns the
                pass to warm up and the pieces to record.
            num_pieces: Pieces of a size.
            breaks: Whether graphs break at eager regions; None: where attention cannot be captured.
        """
        if breaks is None:
            breaks = not all(attention.is_capturable for attention in attentions)
        self.registry.reset_for_capture()
        record = self.backend.capture_breakable if breaks else self.backend.capture
        with self.backend.session(label=label, num_captures=len(self.sizes) * num_pieces):
            for size in reversed(self.sizes):
                run, pieces = load(size)
                self.backend.warm_up(run)
                for attention in attentions:
                    attention.on_after_cuda_graph_warmup()
                for piece, work in enumerate(pieces):
                    record(ShapeKey(size, piece), work)

    def replay(self, size: int, piece: int = 0) -> None:
        """Runs the graph of a size."""
        self.backend.replay(ShapeKey(size, piece))

    def discard(self) -> None:
        """Drops what was captured."""
        self.backend.discard()
