"""Worker threads that share the independent pieces of a layer, each on one core.

Left alone, PyTorch splits every operator over its OpenMP threads. A layer of experts is tens of
operators of a tenth of a millisecond, and if waiting threads sleep (OMP_WAIT_POLICY=PASSIVE, which
ranks on shared cores need) each pays for waking them. Here a layer is split once, and an operator
runs on the core that called it: decode on two threads takes 60 % of the time then. If waiting
threads spin, a pool of one is faster: OpenMP's threads are there at once, and these would compete
with them for the cores (``tests/bench/executor/bench_cpu_model.py``).

Operators release the GIL. A piece computes the same on any thread, so results do not
depend on the number of threads.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from operator import itemgetter
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

_OPENMP_ROWS = 256  # a prompt of 512 tokens is 7 % slower when shared

T = TypeVar("T")
_Outcomes = SimpleQueue[tuple[int, Any, BaseException | None]]
_Tasks = SimpleQueue[tuple[int, Callable[[], Any], _Outcomes] | None]


class WorkerPool:
    """The calling thread and ``size - 1`` daemon threads, which end with the pool.

    One thread at a time may call it. A pool of one has no threads and leaves OpenMP alone.

    Args:
        size: Pieces that run at once; the calling thread's number of OpenMP threads if None.
    """

    def __init__(self, size: int | None = None) -> None:
        num_threads = torch.get_num_threads()
        self.size = num_threads if size is None else size
        self._is_sharing = False
        self._tasks: _Tasks = SimpleQueue()
        started = threading.Barrier(self.size)
        for _ in range(self.size - 1):
            threading.Thread(target=_work, args=(self._tasks, started), daemon=True).start()
        started.wait()
        # A thread that first computes later starts from the last number set by any thread.
        torch.set_num_threads(num_threads)

    @property
    def is_sharing(self) -> bool:
        return self._is_sharing

    @contextmanager
    def sharing(self, num_rows: int) -> Iterator[None]:
        """Within it, ``run`` shares, and the calling thread's operators keep to its own core.

        Many rows are left to OpenMP: their operators are long, the small ones too.
        """
        if self.size == 1 or not 0 < num_rows < _OPENMP_ROWS:
            yield
            return
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # of this thread; takes a quarter of a microsecond
        self._is_sharing = True
        try:
            yield
        finally:
            self._is_sharing = False
            torch.set_num_threads(num_threads)

    def run(self, pieces: Sequence[Callable[[], T]]) -> list[T]:
        """Returns the result of each piece, in order.

        If pieces fail, raises what the first of them raised, after all have ended.
        """
        if not self._is_sharing or len(pieces) < 2:
            return [piece() for piece in pieces]
        done: _Outcomes = SimpleQueue()
        for i in range(1, len(pieces)):
            self._tasks.put((i, pieces[i], done))
        _finish(0, pieces[0], done)
        outcomes = sorted((done.get() for _ in pieces), key=itemgetter(0))
        for _, _, error in outcomes:
            if error is not None:
                raise error
        return [result for _, result, _ in outcomes]

    def shares(self, costs: Sequence[int]) -> list[slice]:
        """Cuts a sequence of things with these costs into at most ``size`` runs of like cost."""
        ends = list(accumulate(costs, initial=0))
        inner = [
            min(range(len(ends)), key=lambda i: abs(ends[i] * self.size - share * ends[-1]))
            for share in range(1, self.size)
        ]
        cuts = [0, *inner, len(costs)]
        return [slice(start, stop) for start, stop in pairwise(cuts) if start < stop]

    def __del__(self) -> None:
        for _ in range(self.size - 1):
            self._tasks.put(None)


@torch.inference_mode()  # which is a thread's own
def _work(tasks: _Tasks, started: threading.Barrier) -> None:
    torch.set_num_threads(1)
    started.wait()
    while (task := tasks.get()) is not None:
        _finish(*task)
        del task  # so that an idle thread keeps no tensors


def _finish(index: int, piece: Callable[[], Any], done: _Outcomes) -> None:
    try:
        done.put((index, piece(), None))
    except BaseException as error:  # the thread that waits for the piece raises it
        done.put((index, None, error))
