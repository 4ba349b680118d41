"""Envoy with the configuration of deploy/envoy, between an echo server and callers who break rules."""

import asyncio
import struct
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError

import grpc
import pytest
import pytest_asyncio
import yaml

from tests.attack.frames import (
    CANCEL,
    END_HEADERS,
    END_STREAM,
    FIRST_INDEXED,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    call_headers,
    frame,
    literal,
)
from tests.e2e.support.envoy import CONFIG, PASSWORD, SCRAPER, Envoy, envoy_before
from tests.support.echo_server import ECHO, STREAM, ask, calling, exchange, refusal, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_STREAMS, MAX_CONNECTIONS = 100, 12
REFUSED_STREAM = 7

Frame = tuple[int, int, bytes]  # kind, stream, payload


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Envoy]:
    def change(config: Any) -> None:
        [_, connections] = config["overload_manager"]["resource_monitors"]
        connections["typed_config"]["max_active_downstream_connections"] = MAX_CONNECTIONS

    folder = tmp_path_factory.mktemp("envoy")
    async with serving() as router, envoy_before([router], folder, change) as running:
        yield running


def http_of(config: Any) -> Any:
    """Returns what the listener for callers does with HTTP."""
    [listener, _] = config["static_resources"]["listeners"]
    [http] = [each["typed_config"] for each in listener["filter_chains"][0]["filters"]]
    return http


def routes(config: Any) -> Any:
    [host] = http_of(config)["route_config"]["virtual_hosts"]
    return host["routes"]


CALL = call_headers(STREAM)


async def sent(address: str, data: bytes, until: int | None = None, count: int = 1) -> list[Frame]:
    """Returns what Envoy answers to bytes, to the connection's end or so many frames of a kind."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    frames: list[Frame] = []
    try:
        writer.write(PREFACE + frame(SETTINGS, 0, 0) + data)
        while sum(kind == until for kind, _, _ in frames) < count:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            frames.append((head[3], int.from_bytes(head[5:], "big"), payload))
    except (ConnectionError, asyncio.IncompleteReadError):
        assert until is None, frames
    finally:
        writer.close()
    return frames


async def test_a_caller_within_the_limits_passes(gateway: Envoy) -> None:
    async with calling(gateway.address) as channel:
        one, large = channel.unary_unary(ECHO), bytes(1 << 20)
        assert await one(large, metadata=[("x-trace", "a" * 4000)]) == large
        streams = [channel.stream_stream(STREAM)() for _ in range(MAX_STREAMS)]
        await asyncio.gather(*[exchange(stream, b"hello") for stream in streams])
        for stream in streams:
            stream.cancel()


async def test_long_and_numerous_headers_are_refused(gateway: Envoy) -> None:
    async with calling(gateway.address) as channel:
        for metadata in ([("x", "a" * 9000)], [(f"x{i}", "a") for i in range(65)]):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(ECHO)(b"", metadata=metadata)
            assert caught.value.code() is not grpc.StatusCode.OK
        assert await ask(channel) == b"hello"
    assert await gateway.counted("http2_header_(?:list_size_too_large|overflow)") == 2


async def test_small_frames_that_stand_for_large_headers_cost_nothing(gateway: Envoy) -> None:
    """15,000 references of a byte to an entry of 3.9 KB: 58 MB of headers from each frame."""
    entry = frame(HEADERS, END_HEADERS, 1, CALL + literal("x", "a" * 3900, is_indexed=True))
    bombs = [
        frame(HEADERS, END_HEADERS, 3 + 2 * i, CALL + FIRST_INDEXED * 15_000) for i in range(100)
    ]
    before = gateway.memory_mb
    async with calling(gateway.address) as channel:
        data = entry + b"".join(bombs)
        attacks = [sent(gateway.address, data, RST_STREAM, len(bombs)) for _ in range(4)]
        attacking = asyncio.gather(*attacks)
        while not attacking.done():
            assert await ask(channel) == b"hello"
        await attacking
    assert gateway.memory_mb - before < 30
    assert await gateway.counted("http2_header_list_size_too_large") >= 4 * len(bombs)


async def test_a_connection_has_so_many_streams_and_no_more(gateway: Envoy) -> None:
    calls = [frame(HEADERS, END_HEADERS, 1 + 2 * i, CALL) for i in range(MAX_STREAMS + 1)]
    frames = await sent(gateway.address, b"".join(calls), until=RST_STREAM)
    _, stream, code = frames[-1]
    assert (stream, int.from_bytes(code, "big")) == (1 + 2 * MAX_STREAMS, REFUSED_STREAM)
    [settings, *_] = [payload for kind, _, payload in frames if kind == SETTINGS]
    assert (3, MAX_STREAMS) in struct.iter_unpack(">HI", settings)
    assert await gateway.counted("http2_stream_refused_errors") == 1


async def test_a_connection_that_resets_its_streams_at_once_is_ended(gateway: Envoy) -> None:
    pairs = [
        frame(HEADERS, END_HEADERS, 1 + 2 * i, CALL) + frame(RST_STREAM, 0, 1 + 2 * i, CANCEL)
        for i in range(5000)
    ]
    ping = frame(PING, 0, 0, b"honestly")  # is answered if the connection gets as far
    async with calling(gateway.address) as channel:
        frames = await sent(gateway.address, b"".join(pairs) + ping)
        assert b"honestly" not in {payload for _, _, payload in frames}
        assert await ask(channel) == b"hello"
    assert await gateway.counted("http_downstream_rq_too_many_premature_resets") == 1


async def test_callers_share_no_connection_to_a_router(gateway: Envoy) -> None:
    """It limits each connection: what one holds on to would be kept from all."""
    count = partial(gateway.counted, "cluster_upstream_cx_total", '"routers"')
    before = await count()
    for _ in range(3):
        async with calling(gateway.address) as channel:
            assert [await ask(channel) for _ in range(3)] == 3 * [b"hello"]
    assert await count() - before == 3


async def test_what_is_not_grpc_goes_no_further(gateway: Envoy) -> None:
    call = CALL.replace(literal("content-type", "application/grpc"), b"")
    frames = await sent(
        gateway.address, frame(HEADERS, END_HEADERS | END_STREAM, 1, call), until=HEADERS
    )
    assert frames[-1][1] == 1
    async with calling(gateway.address) as channel:
        assert (await refusal(channel, "/test.Echo/None")).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_connections_beyond_their_number_are_closed(gateway: Envoy) -> None:
    host, _, port = gateway.address.rpartition(":")
    async with calling(gateway.address) as channel:
        assert await ask(channel) == b"hello"
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(MAX_CONNECTIONS)]
        reads = [asyncio.create_task(reader.read(1)) for reader, _ in opened]
        closed, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        assert {read.result() for read in closed} == {b""}
        assert await ask(channel) == b"hello"
        for _, writer in opened:
            writer.close()
        await asyncio.gather(*reads)
    assert await gateway.counted("listener_downstream_global_cx_overflow") > 0


async def test_envoy_tells_nothing_without_a_password_but_that_it_is_ready(gateway: Envoy) -> None:
    assert await gateway.page("/ready") == "LIVE\n"
    for path in ("/stats/prometheus", "/ready/../stats/prometheus", "/stats", "/config_dump", "/"):
        for password in (None, f"{SCRAPER}:{PASSWORD[1:]}", f"other:{PASSWORD}", PASSWORD):
            with pytest.raises(HTTPError, match="401"):
                await gateway.page(path, password)
    with pytest.raises(HTTPError, match="404"):
        await gateway.page("/config_dump", f"{SCRAPER}:{PASSWORD}")
    assert await gateway.counted("http_basic_auth_denied") == 20


RETRIES = "cluster_upstream_rq_retry", "routers"


async def test_a_router_that_dies_just_after_another_one_changed_gets_no_more_calls(
    tmp_path: Path,
) -> None:
    """Envoy would by itself note within a second what it learns of routers within one."""
    is_ready = True
    async with AsyncExitStack() as routers, AsyncExitStack() as exits:
        dies = await routers.enter_async_context(serving())
        other = await exits.enter_async_context(serving(is_ready=lambda: is_ready))
        gateway = await exits.enter_async_context(envoy_before([dies, other], tmp_path))
        channel = await exits.enter_async_context(calling(gateway.address))
        await _until_healthy(gateway, 2)
        is_ready = False
        await _until_healthy(gateway, 1)
        await routers.aclose()

        assert await ask(channel) == b"hello"
        assert await gateway.counted(*RETRIES) < 10


async def test_a_call_that_a_router_died_of_is_sent_to_no_other(tmp_path: Path) -> None:
    """It may be why. Its caller knows how often it broke off, and sends it again if that makes sense."""
    async with (
        serving() as router,
        _Relay(router) as relay,
        envoy_before([relay.address], tmp_path) as gateway,
        calling(gateway.address) as channel,
    ):
        assert await ask(channel) == b"hello"
        before = await gateway.counted(*RETRIES)
        relay.is_dying = True
        error = await refusal(channel)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert await gateway.counted(*RETRIES) == before


async def _until_healthy(gateway: Envoy, count: int) -> None:
    while await gateway.counted("cluster_membership_healthy", "routers") != count:
        await asyncio.sleep(0.01)


class _Relay:
    """A way to a router, which dies of the next bytes once this is said.

    Attributes:
        address: Where it listens.
        is_dying: Whether it is.
    """

    def __init__(self, router: str) -> None:
        self._router = router
        self.is_dying = False

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _take(self, reader: StreamReader, writer: StreamWriter) -> None:
        host, _, port = self._router.rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(self._pass(reader, back), self._pass(there, writer))

    async def _pass(self, reader: StreamReader, writer: StreamWriter) -> None:
        with suppress(ConnectionError):
            while (data := await reader.read(1 << 16)) and not self.is_dying:
                writer.write(data)
        writer.close()


async def test_no_limit_of_time_ends_a_request_that_waits_or_is_answered_for_long() -> None:
    config = yaml.safe_load(CONFIG.read_text())
    http = http_of(config)
    for route in routes(config):
        assert route["route"]["timeout"] == "0s"
        assert route["route"]["max_stream_duration"] == {"grpc_timeout_header_max": "0s"}
    assert "request_timeout" not in http, "a GenerateMany stream is one request for hours"
    assert int(http["stream_idle_timeout"].removesuffix("s")) >= 3600
    assert "max_connection_duration" not in http["common_http_protocol_options"]
