"""Backend of the CPU: calls what a GPU replays."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from executor.graph.backend import Captures, ShapeKey


class EagerBackend:
    """Calls instead of replaying, host code included.

    A capture runs nothing: there is nothing to record, and on a CPU a pass of every size would
    take as long as a long prompt, at each start.
    """

    def __init__(self) -> None:
        self._captures: Captures[Callable[[], None]] = Captures()

    @property
    def outlives_group(self) -> bool:
        return True

    @contextmanager
    def session(self, *, label: str, num_captures: int) -> Iterator[None]:
        with self._captures.session():
            yield

    def warm_up(self, run: Callable[[], object]) -> None:
        """Nothing to warm up."""
        self._captures.check_session()

    def capture(self, key: ShapeKey, run: Callable[[], None]) -> None:
        with self._captures.making(key):
            self._captures.add(key, run)

    def capture_breakable(self, key: ShapeKey, run: Callable[[], None]) -> None:
        self.capture(key, run)

    def eager_region(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return function

    def replay(self, key: ShapeKey) -> None:
        self._captures[key]()

    def discard(self) -> None:
        self._captures.take_all()
