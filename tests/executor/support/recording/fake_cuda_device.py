"""A stand-in for the device under CUDAGraphBackend: notes what it is asked for, in order.

Its graphs record as RecordingBackend does.
"""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.executor.support.recording.recording_backend import Recorder, Recording, living_memory


class FakeGraph:
    """Records operators between begin and end."""

    def __init__(self, device: "FakeDevice") -> None:
        self.device = device
        self.recording = Recording()
        self.recorder: Recorder | None = None

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        device = self.device
        assert device.current == "capture stream", "a capture needs a stream of its own"
        assert device.num_open == 0, "captures do not nest"
        assert not gc.isenabled(), "a collection could free memory"
        assert gc.get_freeze_count()
        assert capture_error_mode == "thread_local"
        device.num_open += 1
        device.pools.append(pool)
        device.log.append("begin")
        self.recorder = Recorder(self.recording, living_memory())
        self.recorder.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        assert self.recorder is not None, "end without begin"
        self.recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.device.num_open -= 1
        self.device.log.append("end")
        if not self.recording.steps:
            warnings.warn("The CUDA Graph is empty. This usually means...", stacklevel=2)

    def replay(self) -> None:
        assert self.device.num_open == 0, "a replay while another graph is captured"
        self.device.log.append("replay")
        with torch.inference_mode():
            self.recording.replay()

    def reset(self) -> None:
        self.device.log.append("reset")
        self.recording.poison()


class FakeDevice:
    """Notes what it is asked for, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pools: list[object] = []
        self.current = "default stream"
        self.num_open = 0
        self.free = 8 << 30

    def new_graph(self) -> FakeGraph:
        return FakeGraph(self)

    def new_pool(self) -> object:
        return object()

    def new_stream(self) -> str:
        return "capture stream"

    @contextmanager
    def on_stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def release_cached(self) -> None:
        self.log.append("release")

    def memory(self) -> tuple[int, int]:
        self.free -= 1 << 20
        return self.free, 16 << 30
