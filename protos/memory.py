"""Memory: what is free of it, and what collections of garbage spare.

Free memory is kept from step to step, and given back to the system after a burst of calls.

By itself glibc gives back at once what is freed at the end of its heap, from 128 KiB on, and each larger
piece. The columns of a large step are such pieces: the next step would get other pages, which the
system clears first. On the other hand glibc keeps what is freed between pieces that are in use, also
when it is most of the process: after 3,000 calls of a flood 80 MB, of which 78 were free.
"""

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

INTERVAL_S = 1.0
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
# What is as large has pages of its own, given back when it is freed. The first arrays of KV pools would leave
# holes instead, through all of which the columns of steps would go, one after the other, and be in no cache.
OWN_PAGES_BYTES = 1 << 20
TRIM_BYTES = 16 << 20  # to give them back takes some 30 ms, in which allocations may wait


@contextmanager
def uncollected() -> Iterator[None]:
    """Spares what is imported meanwhile every collection, now and later.

    PyTorch makes so many objects that stay that looking for garbage among them is a sixth of the time in
    which a process is there again, and takes 0.1 s later on; what a router imports, 18 ms.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _Mallinfo(ctypes.Structure):
    """What mallinfo2(3) returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


class Trimmer:
    """Gives memory back whenever so much more of it is free than there was since the last time.

    Args:
        free_bytes: Returns how much is free, whether or not it was given back.
        trim: Gives it back.
    """

    def __init__(self, free_bytes: Callable[[], int], trim: Callable[[], object]) -> None:
        self._free_bytes = free_bytes
        self._trim = trim
        self._least = free_bytes()  # since the last time

    def check(self) -> None:
        free = self._free_bytes()
        if free >= self._least + TRIM_BYTES:
            self._trim()
            self._least = free
        self._least = min(self._least, free)


def manage_memory() -> None:
    """Keeps what is free, and starts a thread that gives back what is too much, where the C library can."""
    library = ctypes.CDLL(None)
    try:
        mallinfo, malloc_trim = library.mallinfo2, library.malloc_trim
    except AttributeError:  # it is not glibc, or an old one
        return
    library.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
    library.mallopt(M_MMAP_THRESHOLD, OWN_PAGES_BYTES)
    mallinfo.restype = _Mallinfo
    trimmer = Trimmer(lambda: int(mallinfo().fordblks), lambda: malloc_trim(0))

    def watch() -> None:
        while True:
            time.sleep(INTERVAL_S)
            trimmer.check()

    Thread(target=watch, name="memory", daemon=True).start()
