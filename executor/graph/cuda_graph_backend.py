"""CUDA graph backend: recordings, and what they ask of PyTorch's CUDA.

    a capture                         a breakable capture
    ┌───────────┐                     ┌─────────┐          ┌─────────┐
    │   graph   │                     │  graph  │▶ region ▶│  graph  │▶ region ▶ …
    └───────────┘                     └─────────┘          └─────────┘
                                           region's result ─copy─▶ output in the next graph

All graphs of a process share one memory pool: a graph takes for its intermediate results what
other graphs use for theirs. That is right as long as replays run one after another, on one stream,
and no tensor is kept from one to the next. A region's arguments and the output tensor are
remembered as addresses, so they too are memory that later segments and sizes take.
"""

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import structlog
import torch
from torch.utils._pytree import tree_map_only

from executor.errors import CaptureError
from executor.graph.backend import Captures, ShapeKey, copy_result

log = structlog.stdlib.get_logger(__name__)

# The first makes what libraries make on first use; some choose an algorithm in the second.
_NUM_WARM_UPS = 2

# Only what the capturing thread does can spoil a capture. "global" would let a thread that waits
# for an NCCL event or pins memory spoil it; "relaxed" would record work that waits for the host
# without telling us.
_ERROR_MODE = "thread_local"

_GIB = 1 << 30


Graph = torch.cuda.CUDAGraph


class CudaDevice:
    """One GPU: what recording asks of PyTorch's CUDA, call by call, so that a test can replace it.

    Pools and streams are passed around, never looked into.

    Args:
        device: With its index; what is current does not matter.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_graph(self) -> Graph:
        return torch.cuda.CUDAGraph()

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        """Makes it the current stream. It waits for the caller's stream, and then the reverse."""
        caller = torch.cuda.current_stream(self._device)
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            yield
        caller.wait_stream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def release_cached(self) -> None:
        """Gives memory that PyTorch holds but nobody uses back to the device."""
        torch.cuda.empty_cache()

    def memory(self) -> tuple[int, int]:
        """Returns the bytes that are free on the device, and all that it has."""
        return torch.cuda.mem_get_info(self._device)


class CaptureResources:
    """The memory pool and the capture stream that all backends of a process share.

    One stream, because libraries keep workspaces per stream: those that warm-ups made are there
    when the recording asks.

    Attributes:
        device: Where graphs are recorded.
        stream: Warm-ups and captures run on it.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        self.stream = device.new_stream()
        self._pool: Any = None
        self._num_graphs = 0

    def take_pool(self) -> Any:
        """Returns the pool for one more graph.

        PyTorch ends a pool when its last graph goes, and does not take its handle again.
        """
        if self._num_graphs == 0:
            self._pool = self.device.new_pool()
        self._num_graphs += 1
        return self._pool

    def drop(self, graph: Graph) -> None:
        """Drops a graph that took the pool."""
        graph.reset()
        self._num_graphs -= 1


class CUDAGraphBackend:
    """Records what runs on the capture stream, and launches it again as a whole.

    Replays run on the caller's stream, which is the same for all backends.

    Args:
        resources: The process's.
        barrier: Waits for all ranks; called before each warm-up run, so that none waits in a
            collective while another still captures. A rank without peers needs none.
    """

    def __init__(
        self, resources: CaptureResources, *, barrier: Callable[[], None] = lambda: None
    ) -> None:
        self._resources = resources
        self._device = resources.device
        self._barrier = barrier
        self._captures: Captures[list[Graph | _Region]] = Captures()
        self._progress = _Progress("", 0, self._device)
        self._breakable: _Recording | None = None

    @property
    def outlives_group(self) -> bool:
        return False

    @contextmanager
    def session(self, *, label: str, num_captures: int) -> Iterator[None]:
        with self._captures.session(), _frozen_garbage():
            self._progress = _Progress(label, num_captures, self._device)
            try:
                yield
            finally:
                self._progress.report()

    def warm_up(self, run: Callable[[], object]) -> None:
        self._captures.check_session()
        with self._progress.explaining("a warm-up run"), self._on_capture_stream():
            for _ in range(_NUM_WARM_UPS):
                self._device.synchronize()
                self._barrier()
                run()

    def capture(self, key: ShapeKey, run: Callable[[], None]) -> None:
        self._capture(key, run, is_breakable=False)

    def capture_breakable(self, key: ShapeKey, run: Callable[[], None]) -> None:
        self._capture(key, run, is_breakable=True)

    def eager_region(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(function)
        def region(*args: Any, **kwargs: Any) -> torch.Tensor:
            recording, self._breakable = self._breakable, None
            try:
                if recording is None:
                    return function(*args, **kwargs)
                return recording.break_for(function, args, kwargs)
            finally:
                self._breakable = recording

        return region

    def replay(self, key: ShapeKey) -> None:
        steps = self._captures[key]
        if len(steps) == 1:
            steps[0].replay()
            return
        with torch.inference_mode():
            for step in steps:
                step.replay()

    def discard(self) -> None:
        captures = self._captures.take_all()
        if not captures:
            return
        self._device.synchronize()
        for steps in captures:
            for step in steps:
                if not isinstance(step, _Region):
                    self._resources.drop(step)
        self._device.release_cached()

    def _capture(self, key: ShapeKey, run: Callable[[], None], *, is_breakable: bool) -> None:
        with self._captures.making(key), self._progress.explaining(str(key)):
            self._device.synchronize()
            if not key.piece:
                # A graph cannot take memory that warm-ups left in the cache. Once per size: pieces
                # after the first find what they need in the pool.
                self._device.release_cached()
            recording = _Recording(self._resources)
            with self._on_capture_stream():
                self._breakable = recording if is_breakable else None
                try:
                    recording.begin()
                    run()
                    recording.end()
                except BaseException:
                    recording.abandon()
                    raise
                finally:
                    self._breakable = None
            self._captures.add(key, recording.steps)
            self._progress.note(key)

    @contextmanager
    def _on_capture_stream(self) -> Iterator[None]:
        with torch.inference_mode(), self._device.on_stream(self._resources.stream):
            yield


@dataclass(slots=True)
class _Region:
    """An eager region between two graphs.

    Attributes:
        args, kwargs: Those of the capture. Tensors are views that own nothing.
        output: Such a view of where the next graph reads the result.
    """

    function: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: torch.Tensor

    def replay(self) -> None:
        copy_result(self.function(*self.args, **self.kwargs), self.output)


@dataclass(slots=True)
class _Recording:
    """Graphs and regions under construction.

    Each graph but the last runs once it is recorded, so that a region sees real values: it may
    index with them. Recording itself runs nothing.
    """

    resources: CaptureResources
    steps: "list[Graph | _Region]" = field(default_factory=list)
    _open: Graph | None = None
    _collects: bool = False
    _result: torch.Tensor | None = None  # of the last region, until the graph that reads it runs

    def begin(self) -> None:
        # A collection might free what may not be freed during a capture, such as another graph.
        self._collects = gc.isenabled()
        gc.disable()
        pool = self.resources.take_pool()
        self._open = self.resources.device.new_graph()
        self._open.capture_begin(pool=pool, capture_error_mode=_ERROR_MODE)

    def end(self) -> None:
        self.steps.append(self._end_graph())
        self._close()

    def break_for(
        self, function: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Ends a graph, calls the function, begins the next. Returns the output tensor."""
        self.end()
        self._run_last_graph()
        weak_args, weak_kwargs = tree_map_only(torch.Tensor, weak_view, (args, kwargs))
        self._result = function(*args, **kwargs)
        self.begin()
        output = torch.empty_like(self._result)  # in the pool, like the graph's own memory
        self.steps.append(_Region(function, weak_args, weak_kwargs, weak_view(output)))
        return output

    def _run_last_graph(self) -> None:
        *_, region, graph = (None, *self.steps)
        if isinstance(region, _Region) and self._result is not None:
            copy_result(self._result, region.output)
        assert graph is not None
        graph.replay()

    def abandon(self) -> None:
        """Ends what is open, however far it came, and drops everything."""
        if self._open is not None:
            with suppress(RuntimeError):  # a spoilt capture says so again; the cause is under way
                self._end_graph()
            with suppress(RuntimeError):
                self.resources.drop(self._open)
            self._close()
        for step in self.steps:
            if not isinstance(step, _Region):
                self.resources.drop(step)

    def _end_graph(self) -> Graph:
        assert self._open is not None
        with warnings.catch_warnings():
            # Nothing may lie before the first region, or between two.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            self._open.capture_end()
        return self._open

    def _close(self) -> None:
        self._open = None
        if self._collects:
            gc.enable()


class _Progress:
    """Logs each size once all of its pieces are captured."""

    def __init__(self, label: str, num_captures: int, device: CudaDevice) -> None:
        self._label = label
        self._num_captures = num_captures
        self._device = device
        self._num_done = 0
        self._size: int | None = None
        self._from = self._to = (time.perf_counter(), 0)
        if num_captures:
            self._from = self._to = self._mark()

    def note(self, key: ShapeKey) -> None:
        """A capture is done."""
        if key.size != self._size:
            self.report()
        self._size = key.size
        self._num_done += 1
        self._to = self._mark()

    def report(self) -> None:
        """Logs the size that is done, if it was not logged before."""
        if self._size is None:
            return
        log.info(
            "captured",
            runner=self._label,
            size=self._size,
            captures=f"{self._num_done}/{self._num_captures}",
            seconds=round(self._to[0] - self._from[0], 3),
            memory_mib=round((self._from[1] - self._to[1]) / (1 << 20), 1),
            free_gib=round(self._to[1] / _GIB, 2),
        )
        self._from = self._to
        self._size = None

    @contextmanager
    def explaining(self, what: str) -> Iterator[None]:
        """Raises CaptureError for what the device refuses within it."""
        try:
            yield
        except RuntimeError as error:
            if "out of memory" not in str(error) and "ALLOC_FAILED" not in str(error):
                if isinstance(error, torch.AcceleratorError):
                    raise CaptureError(
                        f"{what} of {self._label} cannot be captured on this device: {error}; if "
                        f"it lacks an operator that graphs can hold, turn {self._label} graphs off"
                    ) from error
                error.add_note(f"while {self._label} captured {what}")
                raise
            free, total = self._device.memory()
            raise CaptureError(
                f"memory ran out at {what} of {self._label}, after {self._num_done} of "
                f"{self._num_captures} captures, with {free / _GIB:.2f} of {total / _GIB:.2f} GiB "
                f"free: lower the largest capture size, max_num_seqs or the KV pool's share"
            ) from error

    def _mark(self) -> tuple[float, int]:
        return time.perf_counter(), self._device.memory()[0]


def weak_view(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor on the same memory that does not keep it alive.

    Its owner may free it while the view stays; its reader must know that the memory holds what it
    should.
    """
    last = sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True))
    num_bytes = (last + 1) * x.element_size() if x.numel() else 0
    new_storage = torch._C._construct_storage_from_data_pointer
    storage = new_storage(x.data_ptr(), x.device, num_bytes)
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, x.shape, x.stride())


@contextmanager
def _frozen_garbage() -> Iterator[None]:
    """Spares collections the objects that are there already; a model has many."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()
