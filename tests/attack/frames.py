"""HTTP/2 frames as no well-behaved client writes them (RFC 9113, header blocks of RFC 7541)."""

import socket
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW_SIZE = 4  # a setting
CANCEL = struct.pack(">I", 8)
MAX_FRAME = 1 << 14
DEFAULT_WINDOW = (1 << 16) - 1
FIRST_INDEXED = b"\xbe"  # refers to the newest entry of the header table

STRANGER = "127.0.0.2"  # where attackers call from; honest callers are at 127.0.0.1
TIMEOUT_S = 5  # a server that reads nothing for so long is given up


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    length = struct.pack(">I", len(payload))[1:]
    return length + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def literal(name: str, value: str, *, is_indexed: bool = False) -> bytes:
    """Returns a header as a literal, which enters the header table if it is to be indexed."""
    return (b"\x40" if is_indexed else b"\x00") + _text(name) + _text(value)


def _text(text: str) -> bytes:
    if len(text) < 127:
        return bytes((len(text),)) + text.encode()
    left, length = len(text) - 127, bytearray([127])
    while left >= 128:
        length.append(128 | left & 127)
        left >>= 7
    return bytes([*length, left]) + text.encode()


def call_headers(path: str, token: str | None = None) -> bytes:
    """Returns the header block that opens a gRPC call."""
    headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "attack"}
    headers |= {"content-type": "application/grpc", "te": "trailers"}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    return b"".join(literal(*header) for header in headers.items())


def message(content: bytes = b"", length: int | None = None) -> bytes:
    """Returns a gRPC message, which may announce another length than it has."""
    return b"\0" + struct.pack(">I", len(content) if length is None else length) + content


class Connection:
    """A connection that sends any frames, and reads what comes back.

    Args:
        address: host:port.
        window: What the server may send on each stream before we take more, which we never do.
        acks_settings: Whether the server may know that we heard its settings, and so must keep to
            them itself.

    Attributes:
        frames: Frames that came, by kind.
        answered: Streams that the server has ended.
        is_closed: Whether the server, or an error, has ended the connection.
    """

    def __init__(
        self, address: str, *, window: int = DEFAULT_WINDOW, acks_settings: bool = False
    ) -> None:
        host, _, port = address.rpartition(":")
        self.frames: Counter[int] = Counter()
        self.answered: set[int] = set()
        self.is_closed = False
        self._acks_settings = acks_settings
        self._last_stream = -1
        self._credit = Counter({0: DEFAULT_WINDOW})  # bytes that may be sent; 0: all streams'
        self._stream_credit = DEFAULT_WINDOW
        self._credit_came = threading.Condition()
        self._socket = socket.create_connection((host, int(port)), source_address=(STRANGER, 0))
        limit = struct.pack("ll", TIMEOUT_S, 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self.send(PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, window)))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()

    def send(self, data: bytes) -> bool:
        """Sends bytes as they are. Returns False once the connection has ended."""
        try:
            self._socket.sendall(data)
        except OSError:
            self.is_closed = True
        return not self.is_closed

    def next_stream(self) -> int:
        self._last_stream += 2
        return self._last_stream

    def open(self, headers: bytes, *, ends: bool = False) -> int:
        """Opens a stream with these headers. Returns its id."""
        stream = self.next_stream()
        self._credit[stream] += self._stream_credit
        self.send(frame(HEADERS, END_HEADERS | (END_STREAM if ends else 0), stream, headers))
        return stream

    def ask(self, headers: bytes, content: bytes) -> int:
        """Opens a stream and sends one whole message."""
        stream = self.open(headers)
        self.send(frame(DATA, END_STREAM, stream, message(content)))
        return stream

    def fill(self, streams: Sequence[int], size: int, deadline_s: float) -> int:
        """Sends a message without its last byte on each stream, as the windows allow.

        Returns the bytes sent when all are, or no window opened for so long.
        """
        for stream in streams:
            self.send(frame(DATA, 0, stream, message(length=size)))
            self._take_credit(stream, 5)
        left, num_sent = dict.fromkeys(streams, size - 1), 0
        while left and not self.is_closed:
            sent = 0
            for stream in list(left):
                count = min(left[stream], self._credit[stream], self._credit[0], MAX_FRAME)
                if count > 0 and stream not in self.answered:
                    self._take_credit(stream, count)
                    self.send(frame(DATA, 0, stream, bytes(count)))
                    left[stream] -= count
                    sent += count
                if not left[stream] or stream in self.answered:
                    del left[stream]
            num_sent += sent
            if not sent and left:
                with self._credit_came:
                    if not self._credit_came.wait(deadline_s):
                        break
        return num_sent

    def _take_credit(self, stream: int, count: int) -> None:
        with self._credit_came:
            self._credit[stream] -= count
            self._credit[0] -= count

    def _read(self) -> None:
        stream = self._socket.makefile("rb")
        while not self.is_closed:
            try:
                head = stream.read(9)
                payload = stream.read(int.from_bytes(head[:3], "big"))
            except OSError:
                break
            if len(head) < 9:
                break
            self._note(head[3], head[4], int.from_bytes(head[5:], "big"), payload)
        self.is_closed = True
        with self._credit_came:
            self._credit_came.notify_all()

    def _note(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self.frames[kind] += 1
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self.answered.add(stream)
        with self._credit_came:
            if kind == WINDOW_UPDATE:
                self._credit[stream] += int.from_bytes(payload, "big")
            elif kind == SETTINGS and not flags & ACK:
                for number, value in struct.iter_unpack(">HI", payload):
                    if number == INITIAL_WINDOW_SIZE:
                        self._grow(value)
                if self._acks_settings:
                    self.send(frame(SETTINGS, ACK, 0))
            self._credit_came.notify_all()

    def _grow(self, window: int) -> None:
        """Takes note of another initial window of every stream."""
        for stream in self._credit:
            if stream:
                self._credit[stream] += window - self._stream_credit
        self._stream_credit = window
