"""Calls one gRPC method over and over, at a rate: just enough HTTP/2 to cost next to nothing.

    python -m tests.bench.support.http2_load --address HOST:PORT --method /package.Service/Method
        --rate 5000 --seconds 2 --turns 5 [--message HEX] [--messages N]

gRPC's own Python client takes longer for a call than the server that refuses it. Here a call is one
HEADERS and one DATA frame, whose bytes are the same but for the stream's number, and its end is a
HEADERS frame with END_STREAM, which nobody decodes.

Rests for so many seconds and calls for as long, in turns. Prints a line of JSON for each turn: when
it began and ended, on the clock that all processes share, and how many calls were made and ended.
"""

import asyncio
import json
import struct
import time
from typing import cast

import uvloop

from tests.bench.support.options import parse_options

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
MAX_WINDOW = (1 << 31) - 1
BURST_S = 0.002  # how often calls are sent, those that are due by then
MAX_OPEN = 2000  # calls at once; past these, the server is behind and the rate falls


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """One header, not indexed and not compressed."""
    return b"\0" + b"".join(bytes([len(part)]) + part.encode() for part in (name, value))


class Load(asyncio.Protocol):
    """One connection.

    Args:
        method: Full path of the method.
        message: Of each call.
        num_messages: How often it is sent in a call.
    """

    def __init__(self, method: str, message: bytes, num_messages: int = 1) -> None:
        headers = [
            *((":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "x")),
            *(("te", "trailers"), ("content-type", "application/grpc")),
        ]
        block = b"".join(literal(name, value) for name, value in headers)
        self._headers = frame(HEADERS, END_HEADERS, 0, block)
        messages = (struct.pack(">BI", 0, len(message)) + message) * num_messages
        self._data = frame(DATA, END_STREAM, 0, messages)
        self._next_stream = 1
        self._window = 65_535  # of the connection: what the server takes before it has read some
        self._received = bytearray()
        self.num_made = self.num_ended = 0
        self.is_up = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        window = frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", MAX_WINDOW - 65_535))
        self._transport.write(PREFACE + frame(SETTINGS, 0, 0, b"") + window)

    def call(self, count: int) -> None:
        """Makes calls, as many as the server has room for."""
        size = len(self._data) - 9
        num_free = MAX_OPEN - (self.num_made - self.num_ended)
        count = min(count, num_free, self._window // size)
        parts = []
        for stream in range(self._next_stream, self._next_stream + 2 * count, 2):
            number = struct.pack(">I", stream)
            parts += [self._headers[:5], number, self._headers[9:]]
            parts += [self._data[:5], number, self._data[9:]]
        self._next_stream += 2 * count
        self._window -= size * count
        self.num_made += count
        self._transport.write(b"".join(parts))

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        at, end = 0, len(received)
        while at + 9 <= end:
            length = int.from_bytes(received[at : at + 3], "big")
            if at + 9 + length > end:
                break
            self._take(
                received[at + 3],
                received[at + 4],
                int.from_bytes(received[at + 5 : at + 9], "big"),
                bytes(received[at + 9 : at + 9 + length]),
            )
            at += 9 + length
        del received[:at]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == HEADERS and flags & END_STREAM:
            self.num_ended += 1
        elif kind == SETTINGS and not flags & ACK:
            self._transport.write(frame(SETTINGS, ACK, 0, b""))
            self.is_up.set()
        elif kind == PING and not flags & ACK:
            self._transport.write(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload, "big")
        elif kind == GOAWAY:
            raise ConnectionError(f"the server ended the connection: {payload!r}")


async def run(address: str, load: Load, rate: float, seconds: float, turns: int) -> None:
    host, _, port = address.rpartition(":")
    await asyncio.get_running_loop().create_connection(lambda: load, host, int(port))
    await load.is_up.wait()
    for _ in range(turns):
        await asyncio.sleep(seconds)
        began, num_made, num_ended = time.monotonic(), load.num_made, load.num_ended
        num_due = 0.0
        while (now := time.monotonic()) < began + seconds:
            due = (now - began) * rate
            load.call(int(due - num_due))
            num_due += int(due - num_due)
            await asyncio.sleep(BURST_S)
        made, ended = load.num_made - num_made, load.num_ended - num_ended
        print(json.dumps({"from": began, "to": now, "made": made, "ended": ended}), flush=True)
        while load.num_ended < load.num_made:
            await asyncio.sleep(BURST_S)


def main() -> None:
    call = {"method": str, "message": "", "messages": 1}  # the message in hexadecimal
    turns = {"rate": float, "seconds": float, "turns": int}
    options = parse_options(__doc__, address=str, **call, **turns)

    async def start() -> None:
        load = Load(options.method, bytes.fromhex(options.message), options.messages)
        await run(options.address, load, options.rate, options.seconds, options.turns)

    uvloop.run(start())


if __name__ == "__main__":
    main()
