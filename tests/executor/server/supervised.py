"""Program with a supervisor, that does what its input says: ``python -m tests.executor.server.supervised N``.

Each process writes a line with its pid and how many were before it, and then takes bytes off the input
that all of them share: K has it killed, a digit has it end with that code, R begins its service, O leaves
an orphan to whom it falls and writes its pid, W has it write the signals that come and end with the second.
"""

import ctypes
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

from executor.server.supervisor import Life, supervise
from protos.telemetry.logs import configure_logging

PR_SET_CHILD_SUBREAPER = 36  # from linux/prctl.h


def tell(*words: object) -> None:
    print(*words, flush=True)


def obey(life: Life) -> NoReturn:
    while byte := os.read(0, 1):
        if byte == b"K":
            os.kill(os.getpid(), signal.SIGKILL)
        elif byte == b"R":
            life.note_ready()
        elif byte == b"O":
            tell("orphan", orphan())
        elif byte == b"W":
            write_signals()
        else:
            os._exit(int(byte))
    os._exit(0)


def orphan() -> int:
    """Returns the pid of a process whose parent has ended, and which ends after that."""
    pids, sent = os.pipe()
    alive, gone = os.pipe()
    if (parent := os.fork()) == 0:
        os.close(gone)
        if (pid := os.fork()) == 0:
            os.read(alive, 1)
            os._exit(7)
        os.write(sent, str(pid).encode())
        os._exit(0)
    os.waitpid(parent, 0)
    os.close(gone)
    return int(os.read(pids, 20))


def write_signals() -> NoReturn:
    def note(number: int, _: FrameType | None) -> None:
        tell(signal.Signals(number).name)
        if seen:
            os._exit(0)
        seen.append(number)

    seen: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    tell("waits")
    while True:
        signal.pause()


def main() -> None:
    """Its environment may have a thread named THREAD run before the fork, and SETTLED_S."""
    configure_logging()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # as a container's first process is
    if "THREAD" in os.environ:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    life = supervise(int(sys.argv[1]), float(os.environ.get("SETTLED_S", "60")))
    tell("serves", os.getpid(), life.num_restarts)
    obey(life)


if __name__ == "__main__":
    main()
