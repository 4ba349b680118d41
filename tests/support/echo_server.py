"""Echo server behind a port's settings, and its callers."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from protos.transport.admission import Refusals
from protos.transport.channel import ChannelOpener
from protos.transport.credentials import TlsFiles, channel_credentials
from protos.transport.interceptors import RequestReader, caller_of
from protos.transport.port import ServiceConfig
from tests.support.certificates import Authority

ANY = "127.0.0.1:0"
ECHO, STREAM, WHO = "/test.Echo/One", "/test.Echo/Many", "/test.Echo/Who"
HEALTH = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"

# How gRPC's client reports a failed handshake: CANCELLED if it was just ending its side of the call.
NOT_CONNECTED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

Channel = grpc.aio.Channel
Refused = grpc.aio.AioRpcError


def mutual_tls(authority: Authority) -> dict[str, Path | None]:
    """Settings of a server on loopback."""
    own = authority.issue("server", "127.0.0.1")
    return {"tls_cert": own.cert, "tls_key": own.key, "tls_client_ca": own.ca}


async def echo(request: bytes, context: Any) -> bytes:
    return request


async def tell_caller(request: bytes, context: Any) -> bytes:
    return "|".join(caller_of(context)).encode()


async def echo_all(requests: AsyncIterator[bytes], context: Any) -> None:
    async for request in requests:
        await context.write(request)


async def reflect(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


@asynccontextmanager
async def serving(
    refused: Counter[str] | None = None,
    is_ready: Callable[[], bool] = lambda: True,
    **settings: Any,
) -> AsyncIterator[str]:
    """Yields the address of a server, with these settings, that sends back what it gets.

    Args:
        refused: Gets the reasons of calls that are refused.
        is_ready: What it says of its health. It answers all the same.
    """

    async def check(request: bytes, context: Any) -> bytes:
        status: Any = "SERVING" if is_ready() else "NOT_SERVING"
        return health_pb2.HealthCheckResponse(status=status).SerializeToString()

    config = ServiceConfig(listen=ANY, **settings)
    reasons = Counter[str]() if refused is None else refused
    refusals = Refusals(lambda reason: reasons.update([reason]))
    server = grpc.aio.server(
        interceptors=[*config.interceptors(refusals), RequestReader(config, refusals)],
        options=config.server_options(),
    )
    one = grpc.unary_unary_rpc_method_handler(echo)
    health = grpc.unary_unary_rpc_method_handler(check)
    handlers = {
        "One": one,
        "Many": grpc.stream_stream_rpc_method_handler(echo_all),
        "Who": grpc.unary_unary_rpc_method_handler(tell_caller),
    }
    info = grpc.stream_stream_rpc_method_handler(reflect)
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler("test.Echo", handlers),
            grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": health}),
            grpc.method_handlers_generic_handler(
                REFLECTION.split("/")[1], {"ServerReflectionInfo": info}
            ),
        )
    )
    port = await config.start(server)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def calling(
    address: str, files: TlsFiles | None = None, token: str | None = None, name: str | None = None
) -> AsyncIterator[Channel]:
    """Yields a channel, with these credentials, to a server whose certificate has this name."""
    opener = ChannelOpener(
        None if files is None else channel_credentials(files.read()),
        name,
        None if token is None else lambda: token,
    )
    # A pool of its own: a connection that another channel made would tell nothing of this one.
    async with opener.open(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


async def ask(channel: Channel, method: str = ECHO) -> bytes:
    return await channel.unary_unary(method)(b"hello")


async def exchange(stream: Any, message: bytes) -> None:
    """Sends a message on a stream that is open, and gets it back."""
    await stream.write(message)
    assert await stream.read() == message


async def refusal(channel: Channel, method: str = ECHO) -> Refused:
    with pytest.raises(Refused) as caught:
        await ask(channel, method)
    return caught.value
