"""What recording asks of PyTorch's CUDA, call by call, so that a test can stand in for a GPU."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """A recording; ``torch.cuda.CUDAGraph`` is one."""

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        """Starts recording the current stream. Memory comes from ``pool``."""
        ...

    def capture_end(self) -> None:
        """Ends it, on the stream where it began. Nothing recorded has run yet."""
        ...

    def replay(self) -> None:
        """Launches the recording on the current stream."""
        ...

    def reset(self) -> None:
        """Drops the recording and its claim on the pool."""
        ...


class GraphDevice(Protocol):
    """A device that records. Pools and streams are passed around, never looked into."""

    def new_graph(self) -> Graph: ...

    def new_pool(self) -> Any: ...

    def new_stream(self) -> Any: ...

    def on_stream(self, stream: Any) -> AbstractContextManager[None]:
        """Makes it the current stream. It waits for the caller's stream, and then the reverse."""
        ...

    def synchronize(self) -> None:
        """Waits for everything that was launched."""
        ...

    def release_cached(self) -> None:
        """Gives memory that PyTorch holds but nobody uses back to the device."""
        ...

    def memory(self) -> tuple[int, int]:
        """Returns the bytes that are free on the device, and all that it has."""
        ...


class CudaDevice:
    """One GPU.

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
        caller = torch.cuda.current_stream(self._device)
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            yield
        caller.wait_stream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def memory(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self._device)
