"""Threads for calls that run at the same time, however many they are; idle ones are used again.

One pool of the standard library counts its idle threads exactly on Python 3.11 only. Later ones may
take a busy thread for an idle one, so that a call waits behind another, and start threads without need.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class ReusedThreads:
    """Runs each call at once: in an idle thread, or a new one.

    Args:
        name: Which the names of the threads begin with.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[ThreadPoolExecutor] = []  # of one thread each

    def submit(self, call: Callable[..., ResultT], *arguments: Any) -> Future[ResultT]:
        """Begins a call. Any thread may do so.

        Raises:
            RuntimeError: There can be no more threads, as when the interpreter ends.
        """
        try:
            thread = self._idle.pop()
        except IndexError:
            thread = ThreadPoolExecutor(1, thread_name_prefix=self._name)

        def run() -> ResultT:
            try:
                return call(*arguments)
            finally:
                self._idle.append(thread)

        return thread.submit(run)
