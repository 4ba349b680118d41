"""Supervisor: a parent that has imported what takes long, and forks the process that serves.

    supervisor ──fork──▶ serves ──▶ killed, or stuck
               ──fork──▶ serves, a moment later

A fork has one thread, and all that its parent has. So the supervisor starts no thread, makes no
channel, event loop or CUDA context, and opens no port: it imports, forks and waits.
"""

import ctypes
import mmap
import os
import signal
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

import structlog

log = structlog.stdlib.get_logger(__name__)

STUCK = 3  # exit code of a process whose step never ends
SETTLED_S = 60.0  # of service, after which deaths before it no longer count
PASSED_ON = (signal.SIGTERM, signal.SIGINT)
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class Life:
    """One of the processes that serve, one after another, as it tells its supervisor of itself.

    Attributes:
        num_restarts: How many there were before it.
    """

    def __init__(self, num_restarts: int = 0) -> None:
        self.num_restarts = num_restarts
        self._ready_at_s = mmap.mmap(-1, 8)  # which a fork shares

    def note_ready(self) -> None:
        """Service begins."""
        self._ready_at_s[:] = struct.pack("d", time.monotonic())

    @property
    def served_s(self) -> float | None:
        """Time since it was ready; None if it never was."""
        [ready_at_s] = struct.unpack("d", self._ready_at_s)
        return time.monotonic() - ready_at_s if ready_at_s else None


def supervise(max_restarts: int, settled_s: float = SETTLED_S) -> Life:
    """Makes this process a supervisor, and returns in each process that it forks.

    It forks another one when the last was killed or stuck, and otherwise ends in here with the exit
    code of the last: when that ended by itself or was told to, or after too many deaths. Where a fork
    would lack something, the log says so, and this process serves itself.

    Args:
        max_restarts: How often it does so without `settled_s` of service in between.
    """
    if problem := _problem():
        log.warning("restarts_off", problem=problem)
        return Life()
    own_pid, num_left = os.getpid(), max_restarts
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # some parents leave it ignored
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    life = Life()
    while child := os.fork():
        status, was_told = _ended(child)
        code = status if status >= 0 else 128 - status  # as a shell has it
        if was_told or (status >= 0 and status != STUCK):
            os._exit(code)
        served_s = life.served_s
        if served_s is not None and served_s >= settled_s:
            num_left = max_restarts
        death = log.bind(
            exit_code=code,
            signal=signal.strsignal(-status) if status < 0 else None,
            served_s=None if served_s is None else round(served_s, 3),
        )
        if num_left == 0:
            death.error("restarts_used_up")
            os._exit(code)
        num_left -= 1
        death.error("restarting", restarts_left=num_left)
        life = Life(life.num_restarts + 1)
    # Out of the terminal's reach: Ctrl-C would come twice, from there and from the supervisor.
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != own_pid:  # it ended before we were tied to it
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return life


def _problem() -> str:
    """Says why a fork of this process could not serve; empty if it could."""
    if sys.platform != "linux":
        return "a process that dies with its parent takes Linux"
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    if len(names) > 1:
        return f"a fork would lack threads that run here: {', '.join(names)}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a fork cannot use CUDA, which is initialised here"
    return ""


def _ended(child: int) -> tuple[int, bool]:
    """Waits for a process, and passes on what tells it to end.

    Reaps others, too, as a container's first process must. Returns the exit code, or the negative
    number of the signal that ended it, and whether it was told to.
    """
    was_told = False
    while True:
        number = signal.sigwait({*PASSED_ON, signal.SIGCHLD})
        if number != signal.SIGCHLD:
            was_told = True
            os.kill(child, number)
            continue
        statuses = {}
        with suppress(ChildProcessError):  # when no other is left
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                statuses[ended[0]] = ended[1]
        if child in statuses:
            return os.waitstatus_to_exitcode(statuses[child]), was_told
