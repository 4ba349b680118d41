"""Weights on their way to a fake GPU."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from executor.model import families
from executor.model.weights import load, uploads
from tests.support.paths import DEMO_MODEL
from tests.together.cuda.support.fake_cell import FakeCell
from tests.together.cuda.support.fake_gpu import FakeGpu
from tests.together.cuda.support.requests import SMALL


class InTurn:
    """A pool of threads that has none: the fake device is this thread's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "InTurn":
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def submit(self, run: Callable[..., None], *args: Any) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(run(*args))
        return future


def test_weights_are_copied_from_pinned_buffers_which_are_all_that_is_waited_for(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of a model's thousands of tensors was copied from the file's pages, and waited for."""
    seen: list[tuple[list[str], list[str], int]] = []

    def load_weights(*args: Any, **options: Any) -> None:
        num_pinned = len(gpu.pinned)
        with gpu.step():  # in which a copy that waits is a fault
            load.load_weights(*args, **options)
        seen.append(([*gpu.launched], [*gpu.waits], len(gpu.pinned) - num_pinned))

    monkeypatch.setattr(load, "ThreadPoolExecutor", InTurn)
    monkeypatch.setattr(families, "load_weights", load_weights)
    FakeCell(gpu, model=DEMO_MODEL, **SMALL)
    [(launched, waits, num_pinned)] = seen
    assert launched.count("copy") > 100
    assert num_pinned == uploads.NUM_BUFFERS
    assert waits.count("Uploads.wait") == uploads.NUM_BUFFERS
    assert set(waits) == {"Uploads._take", "Uploads.wait"}
