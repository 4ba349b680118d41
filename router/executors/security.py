"""Security of the way to executors: settings of a router, and the channels that they open."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from protos.settings import ON_OFF, setting
from protos.transport.addresses import is_loopback
from protos.transport.channel import ChannelOpener
from protos.transport.credentials import TlsFiles, WatchedTls, read_tokens, token_sender
from protos.transport.port import check_files, check_tls
from router.executors.discovery import DNS, DnsGroup


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
        check_tls(self._executor_files, "executor_cert", "executor_key", "executor_ca")
        for name in ("executor_cert", "executor_name"):
            if getattr(self, name) is not None and self.executor_ca is None:
                raise ValueError(
                    f"{name} without executor_ca: TLS to executors takes the CA of their "
                    f"certificates"
                )
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

    def opener(self, group: Sequence[str]) -> ChannelOpener:
        """Returns the opener of the channels to one group.

        Args:
            group: Its addresses, as the operator gave them.
        """
        name = self.executor_name
        if name is None and group[0].startswith(DNS):
            name = DnsGroup.parse(group[0]).name  # its addresses are numbers that change
        tls = None
        if self.executor_ca is not None:
            files = self._executor_files
            tls = WatchedTls("executor_ca", files, cert="executor_cert", ca="executor_ca")
        token = None
        if self.executor_token is not None:
            token = token_sender(self.executor_token, "executor_token")
        return ChannelOpener(tls, name, token)
