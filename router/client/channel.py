"""How a client of the router connects: in plain text or by TLS, with a token or without."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc

from protos.transport.auth import with_token
from protos.transport.port import is_loopback
from protos.transport.tls import TlsFiles, channel_credentials, watch
from protos.transport.tokens import SentToken

RELOAD_S = 1.0  # TLS files are looked at so often at most, since every call asks

Option = tuple[str, str | int]
Credentials = grpc.ChannelCredentials | TlsFiles | None


class Connector:
    """Opens channels to a router, and tells when TLS files have changed since.

    Args:
        target: What gRPC calls a target.
        credentials: For TLS; files are read again when they change. None is plain text.
        token: It, or the file whose first line it is, which is read again when it changes.
        plaintext: Whether a token may leave this machine in plain text.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file makes no sense, or the token would be sent in plain text.
    """

    def __init__(
        self,
        target: str,
        credentials: Credentials = None,
        token: str | Path | None = None,
        *,
        plaintext: bool = False,
    ) -> None:
        if token is not None and credentials is None and not plaintext and not _is_here(target):
            raise ValueError(
                f"target {target}: the token would be sent in plain text that others can read: give "
                f"credentials, or plaintext=True where the network itself keeps others out"
            )
        self._target = target
        self._credentials = credentials
        self._token = _sender(token)
        if isinstance(credentials, TlsFiles):
            self._watched = watch("tls", credentials, interval_s=RELOAD_S)
            self._used = self._watched.value()

    def has_changed(self) -> bool:
        """Returns, once for each change, whether open channels have files that are replaced."""
        if not isinstance(self._credentials, TlsFiles) or self._watched.value() is self._used:
            return False
        self._used = self._watched.value()
        return True

    def open(self, options: Sequence[Option]) -> grpc.aio.Channel:
        """Returns a channel, which connects when it is used."""
        credentials = self._credentials
        if isinstance(credentials, TlsFiles):
            credentials = channel_credentials(self._used)
        if credentials is None:
            channel = grpc.aio.insecure_channel(self._target, options)
        else:
            channel = grpc.aio.secure_channel(self._target, credentials, options)
        return channel if self._token is None else with_token(channel, self._token)


def _sender(token: str | Path | None) -> Callable[[], str] | None:
    if isinstance(token, Path):
        return SentToken(token)
    return None if token is None else lambda: token


def _is_here(target: str) -> bool:
    """Returns whether a target names this machine only."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    addresses = re.sub(r"^(dns:(//[^/]*/)?|ipv[46]:(///)?)", "", target).split(",")
    return all(is_loopback(address) for address in addresses)
