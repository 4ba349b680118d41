"""Executor process whose model has random weights, and which times its replays on the device.

    python -m tests.gpu.figures.timed_executor --model FOLDER …      as python -m executor

At its end it logs the median time from the end of a replay to the end of the next one, and of a replay
itself, in milliseconds. A GPU takes both times itself, so that neither has any of the host's in it.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from executor.__main__ import main
from executor.graph.backend import EagerBackend
from executor.graph.cuda_graph_backend import CUDAGraphBackend
from executor.model import families
from executor.model.weights.targets import WeightGroup
from executor.server.service import ExecutorServicer
from tests.gpu.support.weights import fill, random_tensor

SKIPPED = 10  # replays at the beginning: prompts, and steps with few sequences

Marks = list[tuple[Any, Any]]


def _load(path: object, groups: Iterable[WeightGroup], **options: object) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def new(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return random_tensor(name, shape, std=0.02, dtype=torch.bfloat16, device=device)

    with torch.no_grad():
        fill(groups, new)


def _now() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_ms(start: Any, end: Any) -> float:
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


def _timed(replay: Callable[..., None], marks: Marks) -> Callable[..., None]:
    def timed(backend: object, key: object) -> None:
        start = _now()
        replay(backend, key)
        marks.append((start, _now()))

    return timed


def _report(marks: Marks) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    marks = marks[SKIPPED:]
    ends = [end for _, end in marks]
    period = statistics.median(map(_elapsed_ms, ends, ends[1:]))
    compute = statistics.median(_elapsed_ms(*each) for each in marks)
    print(json.dumps({"event": "timed", "period": period, "compute": compute}), flush=True)


def run() -> None:
    marks: Marks = []
    stop = ExecutorServicer.stop

    async def stop_and_report(servicer: ExecutorServicer) -> None:
        await stop(servicer)
        _report(marks)

    patched: Any = families
    patched.load_weights = _load
    for backend in (EagerBackend, CUDAGraphBackend):
        changed: Any = backend
        changed.replay = _timed(backend.replay, marks)
    server: Any = ExecutorServicer
    server.stop = stop_and_report
    main(prog_name="python -m executor")


if __name__ == "__main__":
    run()
