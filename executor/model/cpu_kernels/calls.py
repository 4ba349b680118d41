"""Calls of kernels, noted while they are made, to be made again in one."""

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call that was made.

    Attributes:
        number: Of the kernel, in the order of ``library.SIGNATURES``.
        kinds: Of its arguments, as there.
        arguments: Those, kept alive.
    """

    number: int
    kinds: str
    arguments: tuple[Any, ...]


class _Thread(threading.local):
    note: Callable[[Call], None] | None = None


_THREAD = _Thread()


def noted(function: Callable[..., None], number: int, kinds: str) -> Callable[..., None]:
    """Returns a kernel whose calls are noted where the thread that makes them wants that."""

    def call(*arguments: Any) -> None:
        function(*arguments)
        if _THREAD.note is not None:
            _THREAD.note(Call(number, kinds, arguments))

    return call


@contextmanager
def noting(note: Callable[[Call], None]) -> Iterator[None]:
    """Has each call of this thread noted once it is made."""
    assert _THREAD.note is None, "calls are noted once"
    _THREAD.note = note
    try:
        yield
    finally:
        _THREAD.note = None


class Replay:
    """Makes calls again, one after another, with what is now where their pointers lead.

    Args:
        kernels: From ``library.load``.
        calls: In order. Structures that they were given are kept, tensors are not.
    """

    def __init__(self, kernels: ctypes.CDLL, calls: Sequence[Call]) -> None:
        words = []
        for number, kinds, arguments in calls:
            words += [number, *map(_word, kinds, arguments)]
        self._calls = tuple(calls)
        self._words = (ctypes.c_uint64 * len(words))(*words)
        self._replay = kernels.replay

    def __call__(self) -> None:
        self._replay(self._words, len(self._calls))


def _word(kind: str, argument: Any) -> int:
    if kind == "f":
        [bits] = struct.unpack("<I", struct.pack("<f", argument))
        return int(bits)
    if argument is None:
        return 0
    return argument if isinstance(argument, int) else ctypes.addressof(argument._obj)
