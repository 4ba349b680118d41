"""Credentials towards executors: the settings of a router, and the channels that use them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc

from protos.settings import ON_OFF, setting
from protos.transport.credentials import (
    TlsBytes,
    TlsFiles,
    Watched,
    channel_credentials,
    read_tokens,
    token_sender,
    watch,
)
from protos.transport.interceptors import with_token
from protos.transport.port import check_files, check_pair, is_loopback
from router.executors.discovery import DNS, DnsGroup

Option = tuple[str, str | int]


@dataclass(frozen=True, kw_only=True)
class ExecutorSecurity:
    """Settings for the way to executors."""

    executor_ca: Path | None = setting(None, unset="no TLS to executors")
    """CA certificates, in PEM; one of them signed the certificate of each executor."""
    executor_cert: Path | None = None
    """Certificate that executors are shown, in PEM."""
    executor_key: Path | None = None
    """Its private key, in PEM."""
    executor_name: str | None = setting(None, unset="host of the address, or a group's DNS name")
    """Name in executors' certificates."""
    executor_token: Path | None = None
    """File whose first token goes with every call to executors; read again when it changes."""
    executor_plaintext: str = setting("off", ON_OFF)
    """on lets plain text to executors leave loopback."""

    def check_executor_security(self, addresses: Sequence[str]) -> None:
        """Checks the settings, and that their files are there and make sense.

        Args:
            addresses: Of all groups, as the operator gave them.

        Raises:
            ValueError: Says what is wrong and what fits.
        """
        check_pair("executor_cert", self.executor_cert, "executor_key", self.executor_key)
        for name in ("executor_cert", "executor_name"):
            if getattr(self, name) is not None and self.executor_ca is None:
                raise ValueError(
                    f"{name} without executor_ca: TLS to executors takes the CA of their "
                    f"certificates"
                )
        check_files("executor_ca", self._executor_files.read_whole)
        if self.executor_token is not None:
            check_files("executor_token", partial(read_tokens, self.executor_token))
        if self.executor_ca is not None or self.executor_plaintext == "on":
            return
        for address in addresses:
            if not is_loopback(address.removeprefix(DNS)):
                raise ValueError(
                    f"group: {address.removeprefix(DNS)} is not on loopback, and what goes there "
                    f"would be plain text that others can read: set executor_ca, and tls_cert and "
                    f"tls_key of the executors; or, where the network itself keeps others out, "
                    f"executor_plaintext=on"
                )

    @property
    def _executor_files(self) -> TlsFiles:
        return TlsFiles(self.executor_cert, self.executor_key, self.executor_ca)

    def opener(self, group: Sequence[str]) -> "ChannelOpener":
        """Returns what opens the channels to one group.

        Args:
            group: Its addresses, as the operator gave them.
        """
        name = self.executor_name
        if name is None and group[0].startswith(DNS):
            name = DnsGroup.parse(group[0]).name  # its addresses are numbers that change
        tls = None if self.executor_ca is None else watch("executor_ca", self._executor_files)
        token = None if self.executor_token is None else token_sender(self.executor_token)
        return ChannelOpener(tls, name, token)


class ChannelOpener:
    """Opens channels to executors, with the files as they are then.

    Args:
        tls: Follows the files; None is plain text.
        name: What certificates must be for, if not for the host of the address.
        token: Returns what goes with every call.
    """

    def __init__(
        self,
        tls: Watched[TlsBytes, TlsBytes] | None = None,
        name: str | None = None,
        token: Callable[[], str] | None = None,
    ) -> None:
        self._tls = tls
        self._name = name
        self._token = token
        self._used = None if tls is None else tls.value()

    def has_changed(self) -> bool:
        """Returns, once for each change, whether channels that are open have other files."""
        if self._tls is None or self._tls.value() is self._used:
            return False
        self._used = self._tls.value()
        return True

    def open(self, address: str, options: Sequence[Option]) -> grpc.aio.Channel:
        """Returns a channel to "host:port"."""
        if self._used is None:
            channel = grpc.aio.insecure_channel(address, options)
        else:
            if self._name is not None:
                options = [*options, ("grpc.ssl_target_name_override", self._name)]
            channel = grpc.aio.secure_channel(address, channel_credentials(self._used), options)
        return channel if self._token is None else with_token(channel, self._token)
