"""Processes that log JSON lines: their log, their events, their end.

A thread reads the log, so a Process belongs to no event loop: one loop may start it and another
wait for it.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")

ROOT = Path(__file__).resolve().parents[2]
NUM_LAST_LINES = 12  # of a log that an error shows


class ProcessEnded(Exception):
    """A process ended before the event that was waited for."""


def spawn(
    args: Sequence[str], env: Mapping[str, str], root: Path = ROOT
) -> "subprocess.Popen[str]":
    """Starts ``python ARGS`` of a checkout, in a session of its own."""
    child = [sys.executable, "-S", "-m", "deploy.local.child"]  # which needs nothing installed
    return subprocess.Popen(
        [*child, str(os.getpid()), *args],
        cwd=root,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        encoding="utf-8",
        errors="replace",
    )


class Process:
    """A running ``python ARGS``, in a session of its own so that Ctrl-C reaches only its parent.

    Start it from a thread that lives as long as it should: on Linux it is killed when that thread
    ends.

    Args:
        name: For people.
        args: What ``python`` is given.
        log_path: Gets all that the process writes; appended to.
        env: Added to this process's environment.
    """

    def __init__(
        self, name: str, args: Sequence[str], *, log_path: Path, env: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._lock = threading.Lock()
        self._events: dict[str, Future[dict[str, Any]]] = {}
        self._exit_code: Future[int] = Future()
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._popen = spawn(args, {**os.environ, **env})
        self._reader = threading.Thread(target=self._read, name=f"log of {name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def has_ended(self) -> bool:
        return self._exit_code.done()

    @property
    def log_tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self._last_lines)

    async def event(self, name: str) -> dict[str, Any]:
        """Returns the first line of the log whose ``event`` is this; waits for it.

        Raises:
            ProcessEnded: The process ended without it.
        """
        return await _wait_for(self._future_of(name))

    async def exited(self) -> int:
        """Returns the exit code when the process has ended and its log is whole."""
        return await _wait_for(self._exit_code)

    async def kill(self) -> int:
        """Ends the process at once. Returns its exit code."""
        self._signal(signal.SIGKILL)
        return await self.exited()

    def pause(self) -> None:
        """Lets the process stand still, as if it hung. Its connections stay open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets a paused process go on."""
        self._signal(signal.SIGCONT)

    async def stop(self, timeout_s: float) -> int:
        """Asks the process to end, and ends it if it has not done so in time, as `kill` does."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.exited()
        return await self.kill()

    @property
    def is_left(self) -> bool:
        """Whether the process, or one that it started, still runs."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        return _has_running(self.pid)

    def _signal(self, number: signal.Signals) -> None:
        # To the whole session, so that nothing that the process started is left behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _future_of(self, event: str) -> "Future[dict[str, Any]]":
        with self._lock:
            future = self._events.setdefault(event, Future())
            if self.has_ended and not future.done():
                future.set_exception(self.ended())
            return future

    def ended(self) -> ProcessEnded:
        """Returns the error that says how it ended."""
        return ProcessEnded(
            f"{self.name} ended with exit code {self._popen.returncode}; the end of its log "
            f"({self.log_path}):\n{self.log_tail}"
        )

    def _read(self) -> None:
        """Runs in a thread until the process ends."""
        assert self._popen.stdout is not None
        with self.log_path.open("a", encoding="utf-8") as log, self._popen.stdout as lines:
            for line in lines:
                log.write(line)
                log.flush()
                self._last_lines.append(line.rstrip("\n"))
                self._note(line)
        exit_code = self._popen.wait()
        with self._lock:
            self._exit_code.set_result(exit_code)
            for future in self._events.values():
                if not future.done():
                    future.set_exception(self.ended())

    def _note(self, line: str) -> None:
        try:
            record = json.loads(line)
        except ValueError:
            return  # a line of a library, or of a traceback
        if isinstance(record, dict) and isinstance(record.get("event"), str):
            future = self._future_of(record["event"])
            if not future.done():
                future.set_result(record)


async def _wait_for(future: "Future[Result]") -> Result:
    # Shielded: a waiter that is cancelled must not cancel what others wait for.
    return await asyncio.shield(asyncio.wrap_future(future))


def cancel_at_signals() -> None:
    """Cancels the current task at SIGTERM, and at Ctrl-C also where it is ignored.

    A shell's background job inherits SIGINT ignored, and Python then leaves it so.
    """
    running = asyncio.current_task()
    assert running is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)


def _has_running(group: int) -> bool:
    """Whether a process group has more than zombies, which init takes away when it comes to it."""
    if sys.platform != "linux":
        return True
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(of_group) == group and state != "Z":
                return True
    return False
