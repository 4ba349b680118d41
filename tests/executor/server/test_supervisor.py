"""Supervisor of trivial processes: when it forks another one, and how it ends."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from executor.server.supervisor import STUCK
from protos.settings import BAD_CONFIGURATION

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a supervisor takes Linux")
LIMIT_S = 60.0
PROGRAM = "tests.executor.server.supervised"


@contextmanager
def started(max_restarts: int = 0, **environment: str) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(
        [sys.executable, "-m", PROGRAM, str(max_restarts)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
        bufsize=0,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def send(process: "subprocess.Popen[bytes]", orders: str) -> None:
    assert process.stdin is not None
    process.stdin.write(orders.encode())


def line(process: "subprocess.Popen[bytes]") -> list[str]:
    """Returns the words of the next line, none if all that could write one have ended."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], LIMIT_S)[0], "no line comes"
    return process.stdout.readline().decode().split()


def run(orders: str, max_restarts: int, **environment: str) -> tuple[int, int, list[Any]]:
    """Returns the exit code, how many processes served, and the log."""
    with started(max_restarts, **environment) as process:
        written, log = process.communicate(orders.encode(), timeout=LIMIT_S)
    return (
        process.returncode,
        written.count(b"serves"),
        [json.loads(each) for each in log.split(b"\n") if each],
    )


@pytest.mark.parametrize("code", [0, 1, BAD_CONFIGURATION])
def test_a_process_that_ends_by_itself_is_not_started_again(code: int):
    assert run(f"{code}KKK", 3) == (code, 1, [])


def test_one_that_is_killed_or_stuck_is_followed_by_others_up_to_a_number():
    exit_code, num_processes, log = run(f"K{STUCK}K0", 2)

    assert (exit_code, num_processes) == (128 + signal.SIGKILL, 3)
    assert [(each["event"], each["signal"], each["exit_code"]) for each in log] == [
        ("restarting", "Killed", 128 + signal.SIGKILL),
        ("restarting", None, STUCK),
        ("restarts_used_up", "Killed", 128 + signal.SIGKILL),
    ]
    assert [each.get("restarts_left") for each in log] == [1, 0, None]
    assert [each["served_s"] for each in log] == [None] * 3


def test_the_last_one_s_own_code_is_the_supervisor_s():
    assert run(f"K{STUCK}", 1)[0] == STUCK


def test_service_in_between_makes_deaths_before_it_count_no_more():
    exit_code, num_processes, log = run("RKRKRKKK", 1, SETTLED_S="0")

    assert (exit_code, num_processes) == (128 + signal.SIGKILL, 4)
    assert [each["served_s"] is None for each in log] == [False, False, False, True]


def test_each_process_knows_how_many_were_before_it():
    with started(2) as process:
        lives = []
        for order in "KK0":
            lives.append(line(process))
            send(process, order)
        assert process.wait(LIMIT_S) == 0
    assert [life[2] for life in lives] == ["0", "1", "2"]
    assert len({life[1] for life in lives} - {str(process.pid)}) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_that_end_it_are_passed_on_and_it_waits(number: signal.Signals):
    with started(3) as process:
        assert line(process)[0] == "serves"
        send(process, "W")
        assert line(process) == ["waits"]
        process.send_signal(number)
        assert line(process) == [number.name]
        process.send_signal(number)
        assert line(process) == [number.name]
        assert process.wait(LIMIT_S) == 0


def test_one_that_is_killed_after_it_was_told_to_end_is_not_started_again():
    with started(3) as process:
        _, pid, _ = line(process)
        send(process, "W")
        assert line(process) == ["waits"]
        process.terminate()
        assert line(process) == ["SIGTERM"]
        os.kill(int(pid), signal.SIGKILL)
        assert process.wait(LIMIT_S) == 128 + signal.SIGKILL
        assert line(process) == []


def test_ctrl_c_in_a_terminal_comes_to_the_process_once():
    """To the whole process group, which is the supervisor's alone."""
    with started(3) as process:
        _, pid, _ = line(process)
        assert os.getpgid(int(pid)) != os.getpgid(process.pid)


def test_a_process_ends_with_its_supervisor():
    with started(3) as process:
        assert line(process)[0] == "serves"
        process.kill()
        assert line(process) == []  # nobody has the pipe any more


def test_orphans_are_reaped_and_not_taken_for_the_process():
    with started(1) as process:
        assert line(process)[0] == "serves"
        send(process, "O")
        _, pid = line(process)
        send(process, "K")
        assert line(process)[0] == "serves"
        deadline_s = time.monotonic() + LIMIT_S
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline_s, "nobody reaps it"
            os.sched_yield()
        send(process, "0")
        assert process.wait(LIMIT_S) == 0


def test_a_process_with_threads_says_so_and_serves_itself():
    with started(3, THREAD="1") as process:
        _, pid, _ = line(process)
        assert int(pid) == process.pid
        send(process, "5")
        assert process.wait(LIMIT_S) == 5
        assert process.stderr is not None
        assert "threads that run here" in json.loads(process.stderr.read())["problem"]
