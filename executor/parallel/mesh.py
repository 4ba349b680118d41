"""Connections over TCP between all executors of a group, and the bytes that they exchange.

Each executor listens while its group forms, calls those of lower ranks, and lets in those of higher ones.
Both sides of a call show that they know the epoch's secret, over numbers that the other has just drawn, so
that neither a stranger nor what it has overheard gets in:

    rank 2                                                    rank 0
      │ ◀──────────────── a number ──────────────────────────── │   to whoever calls
      │ ───────── rank, a number, HMAC over both numbers ─────▶ │
      │ ◀──────────────── HMAC over both numbers ────────────── │

Then nobody listens any more. An exchange is one system call to send to each peer, and one to receive from
it, in the thread that waits for the result: a collective of a step is a few kilobytes, and to hand it to
another thread takes longer than to move it.
"""

import errno
import hmac
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from executor.errors import PeerLost

NUMBER_BYTES = 16
_CALL = struct.Struct(f"!H{NUMBER_BYTES}s32s")  # rank, a number, HMAC
_ANSWER_BYTES = 32  # HMAC
_TIMEOUT = struct.Struct("@ll")  # of the kernel: seconds, microseconds

# Calls that have shown nothing; above it the oldest ends. A member whose call ends so calls again.
MAX_STRANGERS = 256
ARRIVALS_AT_ONCE = 16
QUEUED_CONNECTIONS = 4096  # in the kernel
RETRY_DELAY_S = 0.002
WAITS_S = 0.1  # in one exchange, after which a thread says that it waits
MAX_TIMEOUT_S = 1e6  # more milliseconds than that do not fit into what the kernel is given


class Mesh:
    """Connections of one executor to all others of its group.

    One thread exchanges; any thread may close.

    Args:
        rank: This executor's.
        connections: To each other rank.
        timeout_s: How long to wait for a peer.
    """

    def __init__(self, rank: int, connections: dict[int, socket.socket], timeout_s: float) -> None:
        world_size = len(connections) + 1
        # Each begins behind itself, so that not all wait for the same one.
        ring = [(rank + step) % world_size for step in range(1, world_size)]
        self._peers = [(peer, connections[peer]) for peer in ring]
        self._timeout_s = min(timeout_s, MAX_TIMEOUT_S)
        self._exchanging = threading.Lock()
        self._is_closed = False
        self._problem = ""  # of the exchange that failed: what it left unread is of no later one
        self._begun: float | None = None  # of the exchange that runs
        timeout = _TIMEOUT.pack(int(timeout_s), int(timeout_s % 1 * 1e6))
        for _, connection in self._peers:
            connection.setblocking(True)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)

    @property
    def is_waiting(self) -> bool:
        """Whether a thread has been in one exchange for WAITS_S."""
        begun = self._begun
        return begun is not None and time.monotonic() - begun > WAITS_S

    def exchange(self, sent: Sequence[memoryview], received: Sequence[memoryview]) -> None:
        """Sends each rank its bytes, and receives from each as many as there is place for.

        Args:
            sent: By rank; this one's own is not looked at.
            received: Likewise.

        Raises:
            PeerLost: A peer has left, or has not answered in time; or this executor has left.
        """
        with self._exchanging:
            if self._is_closed:
                raise PeerLost("this executor has left the group")
            if self._problem:
                raise PeerLost(self._problem)
            self._begun = time.monotonic()
            try:
                self._exchange(sent, received)
            except OSError as error:
                self._problem = self._problem_of(error)
                self._shut_down()
                raise PeerLost(self._problem) from error
            finally:
                self._begun = None

    def close(self) -> None:
        """Ends the connections: a peer that is in an exchange gets an error, and so does this one."""
        self._is_closed = True
        self._shut_down()
        with self._exchanging:  # whoever was in one has left it
            for _, connection in self._peers:
                connection.close()

    def _shut_down(self) -> None:
        for _, connection in self._peers:
            with suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)

    def _problem_of(self, error: OSError) -> str:
        if self._is_closed:
            return "this executor has left the group"
        if isinstance(error, BlockingIOError | TimeoutError):
            return f"another executor has not answered within {self._timeout_s:g} s"
        return f"another executor left the group: {error}"

    def _exchange(self, sent: Sequence[memoryview], received: Sequence[memoryview]) -> None:
        unsent = dict[socket.socket, memoryview]()
        for peer, connection in self._peers:
            if data := _send(connection, sent[peer]):
                unsent[connection] = data
        if unsent:
            self._exchange_in_parts(unsent, received)
            return
        for peer, connection in self._peers:
            data = received[peer]
            while data:
                data = data[_checked(connection.recv_into(data, 0, socket.MSG_WAITALL)) :]

    def _exchange_in_parts(
        self, unsent: dict[socket.socket, memoryview], received: Sequence[memoryview]
    ) -> None:
        """Sends and receives in turns, since peers may have to receive before they send on."""
        awaited = {connection: received[peer] for peer, connection in self._peers if received[peer]}
        with selectors.PollSelector() as selector:  # which takes no descriptor of this process
            for _, connection in self._peers:
                if events := _events(connection, unsent, awaited):
                    selector.register(connection, events, connection)
            while unsent or awaited:
                ready = selector.select(self._timeout_s)
                if not ready:
                    raise TimeoutError
                for key, events in ready:
                    connection, before = key.data, key.events
                    if events & selectors.EVENT_WRITE:
                        unsent[connection] = _send(connection, unsent[connection])
                        if not unsent[connection]:
                            del unsent[connection]
                    if events & selectors.EVENT_READ:
                        data = awaited[connection]
                        data = data[_checked(connection.recv_into(data)) :]
                        awaited[connection] = data
                        if not data:
                            del awaited[connection]
                    after = _events(connection, unsent, awaited)
                    if not after:
                        selector.unregister(connection)
                    elif after != before:
                        selector.modify(connection, after, connection)


def _send(connection: socket.socket, data: memoryview) -> memoryview:
    """Sends what the kernel takes at once. Returns the rest."""
    if not data:
        return data
    try:
        return data[connection.send(data, socket.MSG_DONTWAIT) :]
    except BlockingIOError:
        return data


def _checked(num_received: int) -> int:
    if not num_received:
        raise ConnectionResetError(errno.ECONNRESET, "connection closed by peer")
    return num_received


def _events(
    connection: socket.socket,
    unsent: dict[socket.socket, memoryview],
    awaited: dict[socket.socket, memoryview],
) -> int:
    return selectors.EVENT_WRITE * (connection in unsent) | selectors.EVENT_READ * (
        connection in awaited
    )


# ---- forming


def bind(host: str, port: int = 0) -> socket.socket:
    """Returns a socket at an address of this machine; 0 picks a free port.

    Raises:
        OSError, ValueError: There is no such address, or the port is taken. A name that can be none is a
            ValueError.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # it may be kept, too
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


class Place(NamedTuple):
    """A rank of a group that forms.

    Attributes:
        group: Name of the group, no other's under the same secret.
    """

    group: str
    rank: int
    world_size: int


@dataclass(eq=False, slots=True)
class _Call:
    """A connection on which nobody has shown that it knows the secret.

    Attributes:
        peer: Rank that was called; None: a call that came.
        number: That this side has drawn.
        received: What has come so far.
    """

    connection: socket.socket
    peer: int | None
    number: bytes = field(default_factory=lambda: os.urandom(NUMBER_BYTES))
    received: bytes = b""


def connect_all(
    listening: socket.socket,
    addresses: Sequence[tuple[str, int]],
    place: Place,
    secret: bytes,
    timeout_s: float,
) -> dict[int, socket.socket]:
    """Connects a member to all others. Returns the connections by rank.

    Args:
        listening: Where this one is called.
        addresses: Host and port where each rank listens.
        place: This one's.
        secret: The epoch's.
        timeout_s: How long to wait for the others.

    Raises:
        OSError: Some did not come in time, or are gone; says which.
    """
    with ExitStack() as left:
        forming = _Forming(listening, addresses, place, secret)
        left.callback(forming.close)
        forming.run(time.monotonic() + timeout_s)
        left.pop_all()
    forming.end_calls()
    return forming.connected


class _Forming:
    """The calls of one member while its group forms. Arguments as of `connect_all`.

    Attributes:
        connected: By rank, those that are proven.
    """

    def __init__(
        self,
        listening: socket.socket,
        addresses: Sequence[tuple[str, int]],
        place: Place,
        secret: bytes,
    ) -> None:
        self._listening = listening
        self._addresses = addresses
        self._place = place
        self._secret = secret
        self.connected: dict[int, socket.socket] = {}
        self._calls: dict[_Call, None] = {}  # the oldest first
        self._num_strangers = 0
        self._selector = selectors.DefaultSelector()

    def run(self, deadline: float) -> None:
        """Returns when every other member is connected."""
        self._listening.setblocking(False)
        self._selector.register(self._listening, selectors.EVENT_READ)
        for peer in range(self._place.rank):
            self._call(peer)
        while len(self.connected) < self._place.world_size - 1:
            left_s = deadline - time.monotonic()
            if left_s <= 0:  # also while strangers go on calling
                others = set(range(self._place.world_size)) - {self._place.rank, *self.connected}
                ranks = ", ".join(map(str, sorted(others)))
                raise TimeoutError(f"no connection to rank {ranks} in time")
            for key, _ in self._selector.select(left_s):
                if key.fileobj is self._listening:
                    self._accept()
                elif key.data in self._calls:  # else it has ended since
                    self._go_on(key.data)

    def close(self) -> None:
        """Ends every connection."""
        self.end_calls()
        for connection in self.connected.values():
            connection.close()

    def end_calls(self) -> None:
        """Ends the calls of strangers."""
        for call in list(self._calls):
            self._end(call)
        self._selector.close()

    def _call(self, peer: int) -> None:
        address = self._addresses[peer]
        try:
            family, kind, protocol, _, target = socket.getaddrinfo(
                *address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )[0]
            connection = socket.socket(family, kind, protocol)
        except OSError as error:
            raise OSError(f"rank {peer} at {address[0]}, port {address[1]}: {error}") from error
        connection.setblocking(False)
        call = _Call(connection, peer)
        self._calls[call] = None
        # Readable when the other side has drawn its number, or does not answer.
        self._selector.register(connection, selectors.EVENT_READ, call)
        problem = connection.connect_ex(target)
        if problem not in (0, errno.EINPROGRESS):
            raise self._unreachable(call, problem)

    def _accept(self) -> None:
        for _ in range(ARRIVALS_AT_ONCE):
            try:
                connection, _ = self._listening.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise
                return  # there are no more
            connection.setblocking(False)
            call = _Call(connection, None)
            self._calls[call] = None
            self._num_strangers += 1
            self._selector.register(connection, selectors.EVENT_READ, call)
            try:
                connection.send(call.number)
            except OSError:
                self._end(call)
            if self._num_strangers > MAX_STRANGERS:
                self._end(next(call for call in self._calls if call.peer is None))

    def _go_on(self, call: _Call) -> None:
        connection, has_called = call.connection, call.peer is not None
        size = NUMBER_BYTES + _ANSWER_BYTES if has_called else _CALL.size
        try:
            received = connection.recv(size - len(call.received))
        except BlockingIOError:
            return
        except OSError as error:
            if has_called and error.errno != errno.ECONNRESET:
                raise self._unreachable(call, error.errno or 0) from error
            received = b""
        if not received:
            self._end(call)
            if call.peer is not None:  # strangers were in the way
                time.sleep(RETRY_DELAY_S)
                self._call(call.peer)
            return
        before, call.received = len(call.received), call.received + received
        if call.peer is None:
            if len(call.received) == size:
                self._let_in(call)
        else:
            if before < NUMBER_BYTES <= len(call.received):
                self._show(call, call.peer)
            if len(call.received) == size:
                self._check_answer(call, call.peer)

    def _show(self, call: _Call, peer: int) -> None:
        """Shows the peer that was called that this member knows the secret."""
        own, numbers = self._place.rank, call.received[:NUMBER_BYTES] + call.number
        with suppress(OSError):  # then nothing more is received
            call.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            call.connection.send(
                _CALL.pack(own, call.number, self._mac("call", own, peer, numbers))
            )

    def _let_in(self, call: _Call) -> None:
        """Answers a call if it is a member's."""
        own, (peer, number, mac) = self._place.rank, _CALL.unpack(call.received)
        numbers = call.number + number
        if not hmac.compare_digest(mac, self._mac("call", peer, own, numbers)):
            self._end(call)
            return
        try:
            call.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            call.connection.send(self._mac("answer", own, peer, numbers))
        except OSError:
            self._end(call)
            return
        self._connected(call, peer)

    def _check_answer(self, call: _Call, peer: int) -> None:
        number, answer = call.received[:NUMBER_BYTES], call.received[NUMBER_BYTES:]
        expected = self._mac("answer", peer, self._place.rank, number + call.number)
        if not hmac.compare_digest(answer, expected):
            host, port = self._addresses[peer]
            raise OSError(f"rank {peer} at {host}, port {port} does not know the epoch's secret")
        self._connected(call, peer)

    def _connected(self, call: _Call, peer: int) -> None:
        self._forget(call)
        if peer in self.connected:  # and who calls again has lost that one
            self.connected[peer].close()
        self.connected[peer] = call.connection

    def _end(self, call: _Call) -> None:
        self._forget(call)
        call.connection.close()

    def _forget(self, call: _Call) -> None:
        del self._calls[call]
        self._num_strangers -= call.peer is None
        self._selector.unregister(call.connection)

    def _unreachable(self, call: _Call, problem: int) -> OSError:
        assert call.peer is not None
        host, port = self._addresses[call.peer]
        return OSError(f"rank {call.peer} at {host}, port {port}: {os.strerror(problem)}")

    def _mac(self, what: str, sender: int, receiver: int, numbers: bytes) -> bytes:
        text = f"{what} {self._place.group} {sender} {receiver} ".encode()
        return hmac.digest(self._secret, text + numbers, "sha256")
