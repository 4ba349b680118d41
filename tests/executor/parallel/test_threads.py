"""If this fails, a forming may wait for one that was called off, or each takes a new thread."""

import threading

import pytest

from executor.parallel.threads import ReusedThreads
from tests.executor.support.ranks.ranks import TIMEOUT_S

NUM_CALLS = 3


def test_calls_run_at_the_same_time_and_the_next_ones_in_the_same_threads() -> None:
    threads, together = ReusedThreads("test"), threading.Barrier(NUM_CALLS, timeout=TIMEOUT_S)

    def call() -> int:
        together.wait()
        return threading.get_ident()

    def run_all() -> set[int]:
        calls = [threads.submit(call) for _ in range(NUM_CALLS)]
        return {each.result() for each in calls}

    first = run_all()
    assert len(first) == NUM_CALLS
    assert run_all() == first


def test_a_thread_whose_call_has_failed_is_used_again() -> None:
    threads = ReusedThreads("test")
    idents: list[int] = []

    def fail() -> None:
        idents.append(threading.get_ident())
        raise ValueError("it fails")

    for _ in range(2):
        with pytest.raises(ValueError, match="it fails"):
            threads.submit(fail).result()
    assert len(set(idents)) == 1
