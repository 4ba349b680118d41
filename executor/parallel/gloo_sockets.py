"""Sockets that gloo opened, so that they can be shut down while it waits on them.

Gloo's abort does nothing, and its collectives hold their connections until peers answer or a timeout
runs out. A peer that is stopped, or behind a cut cable, does neither. What has been shut down fails at
once, and nothing that such a peer sends later is written into buffers that the next epoch uses.

Gloo takes a caller for the peer whose number it names, and the numbers are 0, 1, 2. So members tell one
another, under the epoch's secret, of which connections they hold an end; one whose other end no member
holds is a stranger's, and ended. Gloo listens for as long as its group lives, and dies of a socket that
stops listening, or of more callers than it may have files; so the kernel is told to bring it no more.

Found through /proc, so only on Linux; elsewhere nothing is found, and timeouts remain.
"""

import ctypes
import os
import socket
import stat
import struct
import threading
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from typing import NamedTuple

_DESCRIPTORS = "/proc/self/fd"
_SO_ATTACH_FILTER = 26  # of Linux; Python has no name for it
_DROP = struct.pack("=HBBI", 0x06, 0, 0, 0)  # one instruction: return, 0 bytes are taken

# Held by a thread from when it makes a socket until that listens, so that another can tell which are
# its own.
LISTENING = threading.Lock()


class Ends(NamedTuple):
    """Both ends of a connection, host and port, as one of its owners sees it."""

    own: str
    peer: str


class _Address(NamedTuple):
    """A socket's own port, if it has one, and what it is there."""

    port: int | None = None
    listens: bool = False
    is_connected: bool = False


class Connections:
    """Sockets of this process, by their inodes."""

    def __init__(self) -> None:
        self._by_inode: dict[int, int] = {}
        self._listening: dict[int, int] = {}
        self._ending = threading.Lock()

    @contextmanager
    def collect_listening(self) -> Iterator[None]:
        """Collects the sockets that begin to listen meanwhile."""
        with LISTENING:
            before = _open_sockets()
            yield
            for inode, number in _open_sockets().items():
                if inode not in before and _address(number).listens:
                    self._listening[inode] = number

    def take_no_more(self) -> None:
        """Has the kernel drop every packet for the collected sockets that listen.

        To a caller they are not there. What they accepted before goes on. Does nothing where the
        kernel has no such filters.
        """
        code = ctypes.create_string_buffer(_DROP)
        drop_all = struct.pack("@HP", 1, ctypes.addressof(code))
        for _, listening in still_open(self._listening):
            with suppress(OSError):
                listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, drop_all)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collects the connections that open meanwhile, except what others open to this process.

        A connection to a port on which something else listens is not the library's. Sockets that
        listen stay open: a library need not expect them to end.
        """
        with LISTENING:  # hence no socket is there that will listen
            before = _open_sockets()
            others = _ports_listened_on(before)
        yield
        new = {
            inode: (number, _address(number))
            for inode, number in _open_sockets().items()
            if inode not in before and inode not in self._listening
        }
        others |= {address.port for _, address in new.values() if address.listens}
        for inode, (number, address) in new.items():
            if address.is_connected and address.port not in others:
                self._by_inode[inode] = number

    def ends(self) -> set[Ends]:
        """Returns both ends of each collected connection that is still connected."""
        found = set()
        for _, connection in still_open(self._by_inode):
            with suppress(OSError):
                found.add(_ends(connection))
        return found

    def keep_members(self, held: Set[Ends]) -> None:
        """Forgets the connections whose other end no member holds, and ends strangers' calls.

        What this process calls is another thread's, then: it forms another group.

        Args:
            held: By the members: ends of their connections.
        """
        own = _ports_listened_on(self._listening)
        with self._ending:
            for inode, connection in still_open(dict(self._by_inode)):
                with suppress(OSError):
                    ends = _ends(connection)
                    if Ends(ends.peer, ends.own) not in held:
                        del self._by_inode[inode]
                        if connection.getsockname()[1] in own:
                            connection.shutdown(socket.SHUT_RDWR)

    def shut_down(self) -> None:
        """Ends the collected connections that are still open. Their owner closes them.

        Any thread may call it. It returns when all have ended, whichever thread ends them.
        """
        with self._ending:
            for _, connection in still_open(self._by_inode):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._by_inode.clear()


def still_open(sockets: Mapping[int, int]) -> Iterator[tuple[int, socket.socket]]:
    """Gives those of the sockets that are open, each for a moment under another descriptor.

    The descriptor under which one was collected, or is found now, may be one that another thread
    borrowed for a moment.
    """
    now: dict[int, int] | None = None
    for inode, collected in sockets.items():
        if (found := _borrowed(collected, inode)) is None:
            now = _open_sockets() if now is None else now
            found = _borrowed(now[inode], inode) if inode in now else None
        if found is not None:
            with found:
                yield inode, found


def _ends(connection: socket.socket) -> Ends:
    return Ends(_told(connection.getsockname()), _told(connection.getpeername()))


def _ports_listened_on(sockets: Mapping[int, int]) -> set[int | None]:
    addresses = map(_address, sockets.values())
    return {address.port for address in addresses if address.listens}


def _told(address: tuple[str, int]) -> str:
    return f"{address[0].partition('%')[0]} {address[1]}"  # a link's name is this machine's own


def _open_sockets() -> dict[int, int]:
    """Returns the descriptor of each socket, by its inode."""
    found = {}
    with suppress(FileNotFoundError):
        for entry in os.listdir(_DESCRIPTORS):
            if (inode := _inode(int(entry))) is not None:
                found[inode] = int(entry)
    return found


def _inode(number: int) -> int | None:
    """Returns what tells an open socket from every other; None of what is none."""
    try:
        status = os.fstat(number)
    except OSError:  # closed meanwhile
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _address(number: int) -> _Address:
    with suppress(OSError), _duplicate(number) as found:
        name = found.getsockname()
        if isinstance(name, tuple):  # of the internet's families
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return _Address(name[1], listens=True)
            with suppress(OSError):
                found.getpeername()
                return _Address(name[1], is_connected=True)
            return _Address(name[1])
    return _Address()


def _borrowed(number: int, inode: int) -> socket.socket | None:
    """Returns a socket under another descriptor, to be closed; None if this one is not its."""
    with suppress(OSError):
        found = _duplicate(number)
        if _inode(found.fileno()) == inode:  # it may be another's by now
            return found
        found.close()
    return None


def _duplicate(number: int) -> socket.socket:
    """Returns a descriptor's socket under another descriptor.

    Raises:
        OSError: It is none's any more.
    """
    duplicate = os.dup(number)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise
