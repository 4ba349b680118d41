"""How the router shows executors who it is, and knows that they are its executors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from protos.transport.credentials import (
    TlsBytes,
    TlsFiles,
    Watched,
    channel_credentials,
    token_sender,
    watch,
)
from protos.transport.interceptors import with_token
from protos.transport.port import check_files, check_hop, check_on_off, check_pair, check_tokens
from router.executors.discovery import DNS, DnsGroup

Option = tuple[str, str | int]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorSecurity:
    """Settings for the way to executors; RouterConfig has them behind ``executor_``.

    Attributes:
        ca: CAs of which one signed every executor's certificate; None is plain text.
        cert: Certificate that executors are shown; None: none.
        key: Its private key.
        name: What every executor's certificate is for; None: the host of its address, or the name
            that stands for a group.
        token: File whose first token goes with every call; None: none does.
        plaintext: "on" lets plain text leave loopback.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    name: str | None = None
    token: Path | None = None
    plaintext: str = "off"

    def check(self, addresses: Sequence[str]) -> None:
        """Checks the settings, and that their files are there and make sense.

        Args:
            addresses: Of all groups, as the operator gave them.

        Raises:
            ValueError: Says what is wrong and what fits.
        """
        check_on_off("executor_plaintext", self.plaintext)
        check_pair("executor_cert", self.cert, "executor_key", self.key)
        for field in ("cert", "name"):
            if getattr(self, field) is not None and self.ca is None:
                raise ValueError(
                    f"executor_{field} without executor_ca: TLS to executors takes the CA of their "
                    f"certificates"
                )
        check_files("executor_ca", self._files)
        if self.token is not None:
            check_tokens("executor_token", self.token)
        if self.ca is None and self.plaintext == "off":
            hosts = [a.removeprefix(DNS) if a.startswith(DNS) else a for a in addresses]
            check_hop(
                "group",
                hosts,
                "set executor_ca, and tls_cert and tls_key of the executors; or, where the network "
                "itself keeps others out, executor_plaintext=on",
            )

    @property
    def _files(self) -> TlsFiles:
        return TlsFiles(self.cert, self.key, self.ca)

    def opener(self, group: Sequence[str]) -> "ChannelOpener":
        """Returns what opens the channels to one group.

        Args:
            group: Its addresses, as the operator gave them.
        """
        name = self.name
        if name is None and group[0].startswith(DNS):
            name = DnsGroup.parse(group[0]).name  # its addresses are numbers that change
        tls = None if self.ca is None else watch("executor_ca", self._files)
        token = None if self.token is None else token_sender(self.token)
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
