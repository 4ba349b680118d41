"""Child process that dies with its parent: ``python -m deploy.local.child PARENT ARGS...``.

When the process PARENT ends, even by SIGKILL, this one ends too. Linux only; elsewhere a child
outlives a parent that was killed before it could stop it.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # from linux/prctl.h; it stays set across exec


def die_with_parent(parent_pid: int) -> None:
    """Ties this process to its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it ended before we were tied to it
            sys.exit(1)


def main() -> None:
    """Becomes ``python ARGS``."""
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])


if __name__ == "__main__":
    main()
