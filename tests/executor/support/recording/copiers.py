"""Copiers whose host and device are two pieces of the CPU's memory, as CUDA's are. For tests."""

from collections.abc import Callable

import torch

from executor.batch.staging import Copier


class SeparateMemory(Copier):
    """Copies at once, and counts.

    Attributes:
        num_copies: Copies so far, in both directions.
    """

    is_shared = False

    def __init__(self) -> None:
        self.num_copies = 0

    def host_buffer(self, *size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    def device_buffer(self, host: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(host)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.num_copies += 1
        target.copy_(source)

    def enter_thread(self) -> None:
        pass

    def event(self) -> "_Point":
        return _Point(self.num_begun, self.run_until)

    def num_begun(self) -> int:
        return 0

    def run_until(self, point: int) -> None:
        pass


class LazyDevice(SeparateMemory):
    """A device so slow that it does nothing until somebody waits for it.

    Its work is a queue, as a CUDA stream is: copies, and what ``begin_work`` adds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._queue: list[Callable[[], object]] = []
        self._num_run = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.num_copies += 1
        self.begin_work(lambda: target.copy_(source))

    def begin_work(self, work: Callable[[], object]) -> None:
        self._queue.append(work)

    def num_begun(self) -> int:
        return len(self._queue)

    def run_until(self, point: int) -> None:
        """Does the first ``point`` pieces of work that were ever begun."""
        while self._num_run < point:
            self._queue[self._num_run]()
            self._num_run += 1

    def run_all(self) -> None:
        self.run_until(len(self._queue))


class _Point:
    def __init__(self, num_begun: Callable[[], int], run_until: Callable[[int], None]) -> None:
        self._num_begun = num_begun
        self._run_until = run_until
        self._point = 0

    def record(self) -> None:
        self._point = self._num_begun()

    def synchronize(self) -> None:
        self._run_until(self._point)
