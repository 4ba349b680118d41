"""If this fails, a forming may wait for one that was called off, or each takes a new thread."""

import threading

import pytest

from executor.parallel.threads import ReusedThreads
from tests.executor.support.ranks.ranks import TIMEOUT_S

NUM_CALLS = 3


def test_calls_run_at_the_same_time_and_the_next_ones_in_the_same_threads() -> None:
    threads, together = ReusedThreads("test"), threading.Barrier(NUM_CALLS, timeout=TIMEOUT_S)

    def call() -> threading.Thread:
        together.wait()
        return threading.current_thread()  # its number may be another one's later

    def run_all() -> set[threading.Thread]:
        calls = [threads.submit(call) for _ in range(NUM_CALLS)]
        return {each.result() for each in calls}

    first = run_all()
    assert len(first) == NUM_CALLS
    assert run_all() == first


def test_a_thread_whose_call_has_failed_is_used_again() -> None:
    threads = ReusedThreads("test")
    ran: list[threading.Thread] = []

    def fail() -> None:
        ran.append(threading.current_thread())
        raise ValueError("it fails")

    for _ in range(2):
        with pytest.raises(ValueError, match="it fails"):
            threads.submit(fail).result()
    assert ran[0] is ran[1]
