"""Rendezvous store, where the executors of an epoch find one another; one of them opens it.

It is a board: what one member writes is sent to all, and each keeps its own copy. Where each member
writes an entry, as most often, they are sent once all have: one message for each member, not for each
entry.

    member 0 ── entry ──▶ ┌───────┐ ── all entries ──▶ member 0
    member 1 ── entry ──▶ │ store │ ── all entries ──▶ member 1
    stranger ── ?  ─────▶ └───────┘ ── nothing, and the connection ends

Each entry carries an HMAC under the epoch's secret, which the router draws and gives to every member
over its authenticated port. The first entry lets a caller in; who has written none within a moment is
cut off. Nothing is encrypted: who reads the network reads addresses, and can let itself in by
repeating an entry, but can write none. PyTorch's own store would take entries from anybody, any amount
of them, for as long as it lives, and listens on every address of the machine unless told otherwise.

The store listens at one address until the group has formed, or has failed to. An executor keeps a port
for all stores that it opens (``StorePort``), so that members know the address before there is a store.
"""

import errno
import hmac
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

from executor.parallel.epochs import join_address
from executor.parallel.mesh import (
    ARRIVALS_AT_ONCE,
    MAX_STRANGERS,
    QUEUED_CONNECTIONS,
    RETRY_DELAY_S,
    bind,
)

HELLO_TIMEOUT_S = 0.5  # of a caller's first entry
SEND_TIMEOUT_S = 1.0  # of an entry to a member
NO_FILES_DELAY_S = 0.01  # until a caller is let in again, where no more files could be opened
MAX_ENTRY_BYTES = 1 << 16

CONNECT_TIMEOUT_S = 0.3  # of one try
CUT_OFF = (TimeoutError, ConnectionAbortedError, ConnectionResetError, BrokenPipeError)
NOT_OPEN_S = 1.0  # for which a member may come before the store is opened

# Bytes of key and value, HMAC of all else, bytes of the key, entries of its round.
_HEADER = struct.Struct("!I32sHH")
_GREETING = ""  # key of a member's first entry, which only lets it in


class StoreLost(RuntimeError):
    """The store is not there, does not let this member in, or has not what it waits for."""


class _Entry(NamedTuple):
    sealed: bytes
    key: str
    value: bytes
    num_in_round: int

    @property
    def round(self) -> str:
        return self.key.rpartition("/")[0]


@dataclass(eq=False, slots=True)
class _Caller:
    connection: socket.socket
    deadline: float  # of its first entry
    received: bytearray = field(default_factory=bytearray)


class RendezvousStore:
    """The store of an epoch, in a thread of its own.

    Args:
        listening: Where it listens; the store's from here on.
        secret: The epoch's.
        on_refused: Called, in that thread, for each connection that brought no entry.

    Attributes:
        port: Where it listens.
    """

    def __init__(
        self, listening: socket.socket, secret: bytes, on_refused: Callable[[], object]
    ) -> None:
        self.port: int = listening.getsockname()[1]
        self._secret = secret
        self._on_refused = on_refused
        self._entries: list[bytes] = []  # those that were sent
        self._rounds: dict[str, dict[str, bytes]] = {}  # those that wait for others, by key
        self._members: dict[_Caller, None] = {}
        self._strangers: dict[_Caller, None] = {}  # the oldest first
        self._listening = listening
        self._listening.setblocking(False)
        self._closing, self._close = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for each in (self._listening, self._closing):
            self._selector.register(each, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends every connection and frees the port. Members keep what was sent to them."""
        self._close.close()
        self._thread.join()

    def _run(self) -> None:
        with self._selector, self._listening, self._closing:
            while self._turn():
                pass
            for caller in (*self._members, *self._strangers):
                caller.connection.close()

    def _turn(self) -> bool:
        """Does what there is to do. Returns whether to go on."""
        now = time.monotonic()
        while self._strangers and (oldest := next(iter(self._strangers))).deadline <= now:
            self._end(oldest)
        wait_s = oldest.deadline - now if self._strangers else None
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._closing:
                return False
            if key.fileobj is self._listening:
                self._accept()
            else:
                self._read(key.data)
        return True

    def _accept(self) -> None:
        for _ in range(ARRIVALS_AT_ONCE):
            try:
                connection, _ = self._listening.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._wait_for_files()
                return  # else there are no more
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller = _Caller(connection, time.monotonic() + HELLO_TIMEOUT_S)
            self._strangers[caller] = None
            self._selector.register(connection, selectors.EVENT_READ, caller)
            if len(self._strangers) > MAX_STRANGERS:
                self._end(next(iter(self._strangers)))

    def _wait_for_files(self) -> None:
        """Lets callers wait where this process may open no more files, but for the strangers' own."""
        if self._strangers:
            self._end(next(iter(self._strangers)))
        else:
            time.sleep(NO_FILES_DELAY_S)

    def _read(self, caller: _Caller) -> None:
        try:
            received = caller.connection.recv(MAX_ENTRY_BYTES)
            caller.received += received
            while received and (entry := _first_entry(self._secret, caller.received)) is not None:
                if caller in self._strangers:
                    self._let_in(caller)
                if entry.key == _GREETING:
                    self._send(caller, entry.sealed)
                else:
                    self._take(entry)
            if not received:
                self._end(caller)
        except (OSError, ValueError):
            self._end(caller)

    def _take(self, entry: _Entry) -> None:
        """Sends a round's entries to all members once it has all of them."""
        entries = self._rounds.setdefault(entry.round, {})
        entries[entry.key] = entry.sealed
        if len(entries) < entry.num_in_round:
            return
        sent = b"".join(self._rounds.pop(entry.round).values())
        self._entries.append(sent)
        for member in list(self._members):
            self._send(member, sent)

    def _let_in(self, caller: _Caller) -> None:
        del self._strangers[caller]
        self._members[caller] = None
        caller.connection.settimeout(SEND_TIMEOUT_S)
        self._send(caller, b"".join(self._entries))

    def _send(self, member: _Caller, entries: bytes) -> None:
        try:
            member.connection.sendall(entries)
        except OSError:
            self._end(member)

    def _end(self, caller: _Caller) -> None:
        """Ends a connection that may have ended before."""
        if caller in self._strangers:
            self._on_refused()
        elif caller not in self._members:
            return
        self._strangers.pop(caller, None)
        self._members.pop(caller, None)
        self._selector.unregister(caller.connection)
        caller.connection.close()


class MemberStore(Store):
    """A member's copy of the store, as PyTorch's process groups use one.

    Its methods have PyTorch's names. One thread waits for entries; after `close` nobody can, and any
    thread may ask for those that are there: NCCL's looks every second whether a peer has failed. Who
    gives it to PyTorch keeps it, since C++ refers to half of it.

    It calls the store when it is made, and waits to be let in when it is first used: what its owner has
    to do meanwhile takes no longer.

    Args:
        host: Where the store listens.
        port: Its port.
        secret: The epoch's.
        timeout_s: How long to wait for the store, from now on, and for each entry.
    """

    def __init__(self, host: str, port: int, secret: bytes, timeout_s: float) -> None:
        super().__init__()
        self._address = (host, port)
        self._secret = secret
        self._timeout_s = timeout_s
        self._entries: dict[str, bytes] = {}
        self._received = bytearray()
        self._begun = time.monotonic()
        self._called: socket.socket | None = None  # and it has not answered yet
        self._connection: socket.socket | None = None  # once it has
        self._has_left = False
        with suppress(OSError, ValueError):  # of one that is not there yet, or cannot be
            self._called = self._call()

    def set(self, key: str, value: bytes | str, num_in_round: int = 1) -> None:
        """Writes an entry for all members.

        Args:
            key: Of the entry, no other's.
            value: What it says.
            num_in_round: How many entries whose keys differ only behind the last slash are sent on
                together, when all of them are there.
        """
        value = value.encode() if isinstance(value, str) else value
        if self._has_left:
            self._entries[key] = value
            return
        with self._failing_as_one():
            connection = self._enter()
            connection.settimeout(self._timeout_s)
            connection.sendall(_seal(self._secret, key, value, num_in_round))

    def get(self, key: str) -> bytes:
        """Returns a member's entry once it is there.

        Raises:
            StoreLost: It did not come in time, or the store has closed.
        """
        self.wait([key])
        return self._entries[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns when all entries are there. Its errors are those of `get`.

        Args:
            keys: Of the entries.
            timeout: PyTorch's, of what it does with them; members may come later than that.
        """
        deadline = time.monotonic() + self._timeout_s
        while missing := [key for key in keys if key not in self._entries]:
            with self._failing_as_one(f" for {missing[0]}"):
                self._take_entry(self._enter(), deadline)

    def tell_all(self, key: str, value: bytes, rank: int, world_size: int) -> list[bytes]:
        """Returns what all members of a group say under a key, by rank, once they have."""
        self.set(f"{key}/{rank}", value, world_size)
        return [self.get(f"{key}/{other}") for other in range(world_size)]

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all entries are there already."""
        return all(key in self._entries for key in keys)

    def clone(self) -> "MemberStore":
        """Returns a store that another thread may use."""
        return self

    def close(self) -> None:
        """Leaves the store; entries that were read stay."""
        self._has_left = True
        for connection in (self._connection, self._called):
            if connection is not None:
                connection.close()

    def _call(self) -> socket.socket:
        """Connects and greets the store, which answers if it lets this member in."""
        called = socket.create_connection(self._address, CONNECT_TIMEOUT_S)
        try:
            called.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            called.sendall(_seal(self._secret, _GREETING, b"", 1))
        except OSError:
            called.close()
            raise
        return called

    def _enter(self) -> socket.socket:
        """Returns the connection when the store has answered on it: it has let this member in."""
        if self._has_left:
            raise ConnectionAbortedError("this member has left it")
        deadline, problem = self._begun + self._timeout_s, ""
        while self._connection is None:
            self._received.clear()
            called, self._called = self._called, None
            try:
                called = called or self._call()
                self._take_entry(called, deadline)
                self._connection = called
            except (OSError, ValueError) as error:
                if called is not None:
                    called.close()
                is_early = isinstance(error, ConnectionRefusedError)
                is_early &= time.monotonic() < self._begun + NOT_OPEN_S
                if not (is_early or isinstance(error, CUT_OFF)):
                    raise
                # Not the error, which refers to this frame and by its callers' to the group: both
                # would live on until they are collected.
                if not (problem and isinstance(error, TimeoutError)):
                    problem = str(error)  # it says more than that the time was over
                if time.monotonic() > deadline:
                    raise ConnectionAbortedError(problem) from None
                time.sleep(RETRY_DELAY_S)  # it was not there yet, or strangers were in the way
        return self._connection

    def _take_entry(self, connection: socket.socket, deadline: float) -> None:
        while (entry := _first_entry(self._secret, self._received)) is None:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            received = connection.recv(MAX_ENTRY_BYTES)
            if not received:
                raise ConnectionAbortedError("it has closed")
            self._received += received
        self._entries[entry.key] = entry.value

    @contextmanager
    def _failing_as_one(self, waiting: str = "") -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            host, port = self._address
            raise StoreLost(
                f"the rendezvous store at {host}, port {port}{waiting}: {error or 'timed out'}"
            ) from error


class StorePort:
    """Port of an executor's stores, which is kept until `close`, and closed while none of them is open.

    Args:
        host: Address that the other ranks can reach.
        bind_host: Address of this machine to listen on; None is that of `host`.
        on_refused: Called for each connection that brought no entry.

    Attributes:
        address: host:port, as the other ranks can reach it; "" where none is kept, as the system cannot
            or the address is not this machine's: each store then takes a port of its own.
    """

    def __init__(
        self,
        host: str,
        *,
        bind_host: str | None = None,
        on_refused: Callable[[], object] = lambda: None,
    ) -> None:
        self._bind_host, self._port, self.address = bind_host or host, 0, ""
        self._on_refused = on_refused
        self._kept: socket.socket | None = None
        with suppress(OSError):
            if sys.platform == "linux":
                self._kept = _bind(self._bind_host, 0)
                self._bind_host, self._port = self._kept.getsockname()[:2]
                self.address = join_address(host, self._port)

    def open(self, secret: bytes) -> RendezvousStore:
        """Opens the store of an epoch.

        Args:
            secret: The epoch's.

        Raises:
            OSError: The store of another epoch is open, or this machine has no such address.
        """
        listening = _listen(self._bind_host, self._port)
        return RendezvousStore(listening, secret, self._on_refused)

    def close(self) -> None:
        """Lets go of the port. A store that is open stays open."""
        if self._kept is not None:
            self._kept.close()


def open_store(
    host: str,
    secret: bytes,
    *,
    bind_host: str | None = None,
    port: int = 0,
    on_refused: Callable[[], object] = lambda: None,
) -> RendezvousStore:
    """Opens the store where the ranks of an epoch find one another.

    Args:
        host: Address that the other ranks can reach.
        secret: The epoch's.
        bind_host: Address of this machine to listen on; None is that of `host`.
        port: 0 picks a free one.
        on_refused: Called for each connection that brought no entry.

    Raises:
        OSError: This machine has no such address, or the port is taken; says which.
    """
    return RendezvousStore(_listen(bind_host or host, port), secret, on_refused)


def _listen(host: str, port: int) -> socket.socket:
    listening = _bind(host, port)
    try:
        listening.listen(QUEUED_CONNECTIONS)
    except OSError as error:
        listening.close()
        raise _cannot_listen(host, port, error) from error
    return listening


def _bind(host: str, port: int) -> socket.socket:
    try:
        return bind(host, port)
    except (OSError, ValueError) as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: Exception) -> OSError:
    return OSError(
        f"the rendezvous store cannot listen on {host}, port {port or 'any'}: {error}; the "
        f"first executor of a group needs a host of its own machine: set advertised_host, or "
        f"listen on every address, such as 0.0.0.0"
    )


def _seal(secret: bytes, key: str, value: bytes, num_in_round: int) -> bytes:
    name = key.encode()
    body, numbers = name + value, (len(name), num_in_round)
    return _HEADER.pack(len(body), _mac(secret, *numbers, body), *numbers) + body


def _first_entry(secret: bytes, received: bytearray) -> _Entry | None:
    """Takes the first entry off what was received; None if it is not whole.

    Raises:
        ValueError: It is none.
    """
    if len(received) < _HEADER.size:
        return None
    size, mac, key_size, num_in_round = _HEADER.unpack_from(received)
    if size > MAX_ENTRY_BYTES:
        raise ValueError(f"an entry of {size} bytes; {MAX_ENTRY_BYTES} is the most")
    end = _HEADER.size + size
    if len(received) < end:
        return None
    sealed = bytes(received[:end])
    del received[:end]
    body = sealed[_HEADER.size :]
    if not hmac.compare_digest(mac, _mac(secret, key_size, num_in_round, body)):
        raise ValueError("an entry that is not sealed with the epoch's secret")
    return _Entry(sealed, body[:key_size].decode(), body[key_size:], num_in_round)


def _mac(secret: bytes, key_size: int, num_in_round: int, body: bytes) -> bytes:
    return hmac.digest(secret, b"store %d of %d " % (key_size, num_in_round) + body, "sha256")
