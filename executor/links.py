"""Connections between all executors of an epoch, over which each shows the others a few bytes.

The calling thread itself writes and reads. A collective of gloo's passes through two more threads on
each side, and takes nearly ten times as long to tell two executors 16 bytes.

    rank 0  listens ◀──────────┬────────────┐
    rank 1  listens ◀──────────┼── calls ───┤      every pair has one connection;
    rank 2  listens    calls ──┴────────────┘      the higher rank calls the lower

A caller says a token that stood beside the address in the epoch's store, so that nobody is taken for
an executor who came upon the port.
"""

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

TOKEN_BYTES = 16
RANK_BYTES = 4
HELLO_TIMEOUT_S = 5.0  # for a caller to say its token, as executors do at once


class Links:
    """One executor's connections to all others, of one epoch.

    Every executor sends a message, and then receives those of all; all are of the same length. One
    thread does so; any may close.

    Args:
        rank: This executor's world rank.
        by_rank: The connection to each other one.
        timeout_s: Longest wait for a message.
    """

    def __init__(
        self,
        rank: int = 0,
        by_rank: Mapping[int, socket.socket] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._rank = rank
        self._by_rank = dict(sorted((by_rank or {}).items()))
        self._timeout_s = timeout_s
        self._own = b""
        self._in_use = threading.Lock()  # a number must not be another file's while it is read
        self._ending = threading.Lock()  # nor while it is shut down
        for connection in self._by_rank.values():
            connection.settimeout(timeout_s)

    def send(self, message: bytes) -> None:
        """Sends a message to every other executor. Does not wait for them.

        Args:
            message: At most a few KiB, which the kernel keeps until they read it.

        Raises:
            OSError: One of them has left.
        """
        self._own = message
        with self._in_use:
            for connection in self._by_rank.values():
                connection.sendall(message)

    def receive(self) -> list[bytes]:
        """Returns every executor's message, this one's too, by world rank.

        Raises:
            OSError: One of them has left, or sent nothing in time. No other may be received then.
        """
        with self._in_use:
            messages = [self._message(rank) for rank in self._by_rank]
        messages.insert(self._rank, self._own)
        return messages

    def close(self) -> None:
        """Ends the connections. Who waits for a message at either end gets an error at once.

        Any thread may call it. It returns when all have ended, whichever thread ends them.
        """
        with self._ending:
            for connection in self._by_rank.values():
                with suppress(OSError):  # the other end has gone, or close() was called before
                    connection.shutdown(socket.SHUT_RDWR)
            with self._in_use:
                for connection in self._by_rank.values():
                    connection.close()

    def _message(self, rank: int) -> bytes:
        try:
            return _read(self._by_rank[rank], len(self._own))
        except TimeoutError:
            raise TimeoutError(
                f"world rank {rank} sent nothing for {self._timeout_s:g} s"
            ) from None
        except OSError as error:
            raise ConnectionError(f"world rank {rank}: {error}") from error


def connect_all(
    store: Any,
    rank: int,
    world_size: int,
    host: str | None,
    timeout_s: float,
    *,
    form_timeout_s: float | None = None,
) -> Links:
    """Connects to every other executor. Returns when all of them have connected to this one.

    Args:
        store: Of torch.distributed, with keys of nobody else's. PyTorch publishes no types for it.
        rank: This executor's world rank.
        world_size: Executors.
        host: This executor's own address as peers see it; the host name's if None.
        timeout_s: How long to wait for each message.
        form_timeout_s: How long to wait for peers now; None: as long.

    Raises:
        RuntimeError: One of them did not come in time.
    """
    try:
        by_rank = _connect(store, rank, world_size, host, form_timeout_s or timeout_s)
    except OSError as error:
        raise RuntimeError(f"world rank {rank} has no connection to all others: {error}") from error
    return Links(rank, by_rank, timeout_s)


def _connect(
    store: Any, rank: int, world_size: int, host: str | None, timeout_s: float
) -> dict[int, socket.socket]:
    by_rank: dict[int, socket.socket] = {}
    deadline = time.monotonic() + timeout_s
    token = secrets.token_bytes(TOKEN_BYTES)
    with ExitStack() as opened, _listen(host, world_size) as listener:
        address, port = listener.getsockname()[:2]
        store.set(str(rank), f"{token.hex()} {port} {address}")
        for peer in range(rank):
            call = _call(store.get(str(peer)).decode(), rank, timeout_s)
            by_rank[peer] = opened.enter_context(call)
        missing = set(range(rank + 1, world_size))
        while missing:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                caller = opened.enter_context(listener.accept()[0])
            except TimeoutError:
                raise TimeoutError(f"world ranks {sorted(missing)} did not connect") from None
            calling = _rank_of(caller, token)
            if calling in missing:
                by_rank[calling] = caller
                missing.remove(calling)
            else:
                caller.close()
        for connection in by_rank.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        opened.pop_all()
    return by_rank


def _listen(host: str | None, backlog: int) -> socket.socket:
    """Listens on a host's first address that can be; on loopback if this one's name has none."""
    try:
        found = socket.getaddrinfo(host or socket.gethostname(), 0, type=socket.SOCK_STREAM)
    except OSError:
        if host is not None:
            raise
        found = socket.getaddrinfo("127.0.0.1", 0, type=socket.SOCK_STREAM)
    for family, _, _, _, address in found:
        with suppress(OSError):
            return socket.create_server(address, family=family, backlog=backlog)
    raise OSError(f"no address of {host or 'this host'} can be listened on")


def _call(entry: str, rank: int, timeout_s: float) -> socket.socket:
    """Connects to who wrote an entry of the store."""
    token, port, address = entry.split(" ", 2)
    connection = socket.create_connection((address, int(port)), timeout_s)
    connection.sendall(bytes.fromhex(token) + rank.to_bytes(RANK_BYTES, "little"))
    return connection


def _rank_of(caller: socket.socket, token: bytes) -> int | None:
    """Returns the rank that a caller says it has; None if it is no executor of the epoch."""
    caller.settimeout(HELLO_TIMEOUT_S)
    with suppress(OSError):
        if hmac.compare_digest(_read(caller, TOKEN_BYTES), token):
            return int.from_bytes(_read(caller, RANK_BYTES), "little")
    return None


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    message = connection.recv(num_bytes)
    while len(message) < num_bytes:
        more = connection.recv(num_bytes - len(message))
        if not more:
            raise ConnectionResetError("the connection was closed")
        message += more
    return message
