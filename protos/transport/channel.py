"""Channels of a caller: in plain text or by TLS, with a token or without."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import grpc

from protos.transport.credentials import (
    AUTHORIZATION,
    SCHEME,
    TlsBytes,
    Watched,
    channel_credentials,
)

Option = tuple[str, str | int]
# Names of gRPC's four kinds of methods.
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class ChannelOpener:
    """Opens channels, with the TLS files as they are then.

    Args:
        tls: Follows the files, or credentials that stay; None is plain text.
        name: Name in the server's certificate, if not the host of the address.
        token: Returns the token of each call; None: calls have none.
    """

    def __init__(
        self,
        tls: Watched[Any, TlsBytes] | grpc.ChannelCredentials | None = None,
        name: str | None = None,
        token: Callable[[], str] | None = None,
    ) -> None:
        self._tls = tls
        self._name = name
        self._token = token
        self._used = tls.value() if isinstance(tls, Watched) else None

    def has_changed(self) -> bool:
        """Returns, once for each change, whether open channels have files that were replaced."""
        if not isinstance(self._tls, Watched) or self._tls.value() is self._used:
            return False
        self._used = self._tls.value()
        return True

    def open(self, target: str, options: Sequence[Option]) -> grpc.aio.Channel:
        """Returns a channel, which connects when it is used."""
        credentials = self._tls
        if isinstance(credentials, Watched):
            assert self._used is not None
            credentials = channel_credentials(self._used)
        if credentials is None:
            channel = grpc.aio.insecure_channel(target, options)
        else:
            if self._name is not None:
                options = [*options, ("grpc.ssl_target_name_override", self._name)]
            channel = grpc.aio.secure_channel(target, credentials, options)
        return channel if self._token is None else with_token(channel, self._token)


def with_token(channel: grpc.aio.Channel, token: Callable[[], str]) -> grpc.aio.Channel:
    """Returns a channel whose calls bring a token.

    gRPC's call credentials would refuse a channel without TLS, and its interceptors would put a
    queue before every message of a stream.

    Args:
        channel: Carries the calls.
        token: Returns the token, at each call.
    """
    return cast(grpc.aio.Channel, _TokenChannel(channel, token))


class _TokenChannel:
    def __init__(self, channel: grpc.aio.Channel, token: Callable[[], str]) -> None:
        self._channel = channel
        self._token = token

    def __getattr__(self, name: str) -> Any:
        """Returns the channel's own attribute; methods that make callables add the token."""
        found = getattr(self._channel, name)
        if name in KINDS:
            return lambda *args, **kwargs: self._bring_token(found(*args, **kwargs))
        return found

    async def __aenter__(self) -> "_TokenChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    def _bring_token(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            *args: Any, metadata: Sequence[tuple[str, str]] | None = None, **kwargs: Any
        ) -> Any:
            authorization = (AUTHORIZATION, f"{SCHEME}{self._token()}")
            return method(*args, metadata=(*(metadata or ()), authorization), **kwargs)

        return call
