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


class _Connection(NamedTuple):
    """A descriptor under which a connection was found, its own port, and its ends."""

    number: int
    port: int
    ends: Ends


class Connections:
    """Sockets of this process, by their inodes."""

    def __init__(self) -> None:
        self._by_inode: dict[int, _Connection] = {}
        self._listening: dict[int, int] = {}
        self._before: _Before | None = None  # the listening ones were collected
        self._ending = threading.Lock()

    @contextmanager
    def collect_listening(self) -> Iterator[None]:
        """Collects the sockets that begin to listen meanwhile."""
        with LISTENING:
            self._before = before = _Before.now()
            yield
            for inode, number in _open_sockets().items():
                if inode not in before.sockets and _port_listened_on(number) is not None:
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

        And those that have opened since the listening ones were collected. A connection to a port on
        which something else listens is not the library's. Sockets that listen stay open: a library
        need not expect them to end.
        """
        if (before := self._before) is None:
            with LISTENING:  # hence no socket is there that will listen
                before = _Before.now()
        yield
        new = _open_sockets()
        for inode in before.sockets.keys() | self._listening.keys():
            new.pop(inode, None)
        others = before.ports.union(map(_port_listened_on, new.values()))
        for inode, number in new.items():
            if (found := _connection(number)) is not None and found.port not in others:
                self._by_inode[inode] = found

    def ends(self) -> set[Ends]:
        """Returns both ends of each collected connection."""
        return {connection.ends for connection in self._by_inode.values()}

    def ports(self) -> set[int]:
        """Returns the ports on which the collected sockets listen."""
        ports = map(_port_listened_on, self._listening.values())
        return {port for port in ports if port is not None}

    def keep_members(self, held: Set[Ends]) -> None:
        """Forgets the connections whose other end no member holds, and ends strangers' calls.

        What this process calls is another thread's, then: it forms another group.

        Args:
            held: By the members: ends of their connections.
        """
        own = self.ports()
        with self._ending:
            strangers: dict[int, int] = {}
            for inode, (number, port, ends) in list(self._by_inode.items()):
                if Ends(ends.peer, ends.own) not in held:
                    del self._by_inode[inode]
                    if port in own:
                        strangers[inode] = number
            _shut_down(strangers)

    def shut_down(self) -> None:
        """Ends the collected connections that are still open. Their owner closes them.

        Any thread may call it. It returns when all have ended, whichever thread ends them.
        """
        with self._ending:
            _shut_down({inode: found.number for inode, found in self._by_inode.items()})
            self._by_inode.clear()


class _Before(NamedTuple):
    """What sockets there were, and the ports on which some of them listened."""

    sockets: dict[int, int]
    ports: set[int | None]

    @classmethod
    def now(cls) -> "_Before":
        """Returns those that there are."""
        sockets = _open_sockets()
        return cls(sockets, set(map(_port_listened_on, sockets.values())))


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


def _shut_down(sockets: Mapping[int, int]) -> None:
    for _, connection in still_open(sockets):
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


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


def _port_listened_on(number: int) -> int | None:
    """Returns the port of the internet's on which a socket listens; None if it does not."""
    with suppress(OSError):  # of one that was closed meanwhile
        if _listens(number):
            with _duplicate(number) as found:
                name = found.getsockname()
                return name[1] if isinstance(name, tuple) else None
    return None


def _listens(number: int) -> bool:
    # Of any family: naming one spares the calls that find it out, and this option asks for none.
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, number)
    try:
        return found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 0
    finally:
        found.detach()


def _connection(number: int) -> _Connection | None:
    """Returns a connection of the internet's; None of what is none."""
    with suppress(OSError), _duplicate(number) as found:
        own = found.getsockname()
        if isinstance(own, tuple):
            return _Connection(number, own[1], Ends(_told(own), _told(found.getpeername())))
    return None


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
