"""Sockets that gloo opened, so that they can be shut down while it waits on them.

Gloo's abort does nothing, and its collectives hold their connections until peers answer or a timeout
runs out. A peer that is stopped, or behind a cut cable, does neither. What has been shut down fails at
once, and nothing that such a peer sends later is written into buffers that the next epoch uses.

Found through /proc, so only on Linux; elsewhere nothing is found, and timeouts remain.
"""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_DESCRIPTORS = Path("/proc/self/fd")


class _Address(NamedTuple):
    """A socket's own port, if it has one, and whether it listens there."""

    port: int | None
    listens: bool


class Connections:
    """Sockets of this process, by what the kernel calls them."""

    def __init__(self) -> None:
        self._by_name: dict[str, int] = {}
        self._ending = threading.Lock()

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collects the connections that open meanwhile, except what others open to this process.

        A connection to a port that was listened on before is not the library's. Sockets that listen
        stay open: a library need not expect them to end.
        """
        before = _open_sockets()
        ports = {_address(number).port for number in before.values() if _address(number).listens}
        yield
        for name, number in _open_sockets().items():
            address = _address(number)
            if name not in before and not address.listens and address.port not in ports:
                self._by_name[name] = number

    def shut_down(self) -> None:
        """Ends the collected connections that are still open. Their owner closes them.

        Any thread may call it. It returns when all have ended, whichever thread ends them.
        """
        with self._ending:
            still_open = _open_sockets()
            while self._by_name:
                name, collected = self._by_name.popitem()
                # Either may be one that another thread borrows for a moment.
                for number in {collected, still_open.get(name, collected)}:
                    with suppress(OSError), _borrowed(number) as connection:
                        if _name(connection.fileno()) == name:  # it may be another's by now
                            connection.shutdown(socket.SHUT_RDWR)


def _open_sockets() -> dict[str, int]:
    """Returns the descriptor of each socket, by the name of its inode."""
    found = {}
    if _DESCRIPTORS.is_dir():
        for entry in os.listdir(_DESCRIPTORS):
            with suppress(OSError):  # closed meanwhile
                name = _name(int(entry))
                if name.startswith("socket:"):
                    found[name] = int(entry)
    return found


def _name(number: int) -> str:
    return os.readlink(_DESCRIPTORS / str(number))


def _address(number: int) -> _Address:
    with suppress(OSError), _borrowed(number) as found:
        name = found.getsockname()
        if isinstance(name, tuple):  # of the internet's families
            listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return _Address(name[1], bool(listens))
    return _Address(None, False)


@contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """Gives a descriptor's socket under another descriptor, and closes that one."""
    duplicate = os.dup(number)
    try:
        found = socket.socket(fileno=duplicate)
    except OSError:  # no socket's any more
        os.close(duplicate)
        raise
    with found:
        yield found
