"""The settings of a gRPC port that say who may call it and how: TLS, tokens, names, probes.

Both services have them, under the same names. Without any, a port is for loopback.
"""

import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from protos.transport.credentials import AcceptedTokens, TlsFiles, read_tokens, server_credentials

if TYPE_CHECKING:  # gRPC takes long to import, and a configuration is checked without it
    import grpc

ON_OFF = ("on", "off")
PLAINTEXT = ("off", "side-ports", "on")
OPEN_SERVICES = {
    "health": "grpc.health.v1.Health",
    "reflection": "grpc.reflection.v1alpha.ServerReflection",
}

HELP = {
    "tls_cert": "Certificate of this port, in PEM; read again when it changes.  [default: no TLS]",
    "tls_key": "Its private key, in PEM.",
    "tls_client_ca": "CA certificates; callers then need a certificate that one of them signed.",
    "tls_client_names": "Names, with commas, of which a caller's certificate needs one.",
    "auth_tokens": "File of tokens, one a line; callers then need one. Read again when it changes.",
    "open_services": "What needs no token: health, reflection, both with a comma, or none.",
    "plaintext": "Off loopback in plain text: no port, those for probes and metrics, or any.",
    "health_listen": "A second port, HOST:PORT, for probes alone, in plain text.  [default: none]",
}
PATHS = ("tls_cert", "tls_key", "tls_client_ca", "auth_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class PortSecurity:
    """Who may call a gRPC port. Secrets are in files: this holds their paths.

    Attributes:
        tls_cert: Certificate that the port shows, with those between it and its CA; None is plain
            text.
        tls_key: Its private key.
        tls_client_ca: CAs of which one signed the certificate of every caller (mutual TLS); None
            asks for none.
        tls_client_names: Names with commas, where that CA signs certificates of others too: the
            caller's needs one of them as a DNS, URI or IP alternative name; None takes any.
        auth_tokens: File with the bearer tokens that are taken, one a line; None asks for none.
        open_services: Which of "health" and "reflection" may be called without a token and with any
            name; both with a comma, or "none".
        plaintext: What may be plain text off loopback: "off" is nothing, "side-ports" the ports for
            probes and metrics, which never have TLS, and "on" the port itself too.
        health_listen: Where probes may ask for grpc.health.v1 alone, in plain text and without a
            certificate, such as a kubelet's; None: at the port itself only.
    """

    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    tls_client_names: str | None = None
    auth_tokens: Path | None = None
    open_services: str = "health"
    plaintext: str = "off"
    health_listen: str | None = None

    def check_security(self, listen: str, *, metrics_listen: str | None = None) -> None:
        """Checks these settings, and that their files are there and make sense.

        Args:
            listen: host:port of the port.
            metrics_listen: host:port of the one for metrics; None: there is none.

        Raises:
            ValueError: Says what is wrong and what fits.
        """
        if self.plaintext not in PLAINTEXT:
            raise ValueError(f"plaintext={self.plaintext}: need one of {', '.join(PLAINTEXT)}")
        check_pair("tls_cert", self.tls_cert, "tls_key", self.tls_key)
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca without tls_cert: without TLS nobody has a certificate")
        if self.tls_client_names is not None and self.tls_client_ca is None:
            raise ValueError(
                "tls_client_names without tls_client_ca: names are those of certificates, so say "
                "which CA signs them"
            )
        services = set(_split(self.open_services)) - {"none"}
        if not services <= OPEN_SERVICES.keys():
            raise ValueError(
                f"open_services={self.open_services}: need health, reflection, both with a comma, "
                f"or none"
            )
        check_files("tls_cert", self._tls_files)
        if self.auth_tokens is not None:
            check_tokens("auth_tokens", self.auth_tokens)
        if self.tls_cert is None and self.plaintext != "on" and not is_loopback(listen):
            raise ValueError(
                f"listen={listen}: without TLS this would be plain text that others can read: set "
                f"tls_cert and tls_key; or listen on loopback, such as 127.0.0.1:50051; or, where "
                f"the network itself keeps others out, plaintext=on"
            )
        sides = {"health_listen": self.health_listen, "metrics_listen": metrics_listen}
        for name, address in sides.items():
            if address is not None and self.plaintext == "off" and not is_loopback(address):
                raise ValueError(
                    f"{name}={address}: this port is plain text without a token: listen on "
                    f"loopback, such as 127.0.0.1:9090; or, where the network itself keeps others "
                    f"out, plaintext=side-ports"
                )

    @property
    def asks_who_calls(self) -> bool:
        """Whether a caller needs a certificate or a token."""
        return self.tls_client_ca is not None or self.auth_tokens is not None

    @property
    def _tls_files(self) -> TlsFiles:
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)

    def interceptors(
        self, on_refused: Callable[[str], None] = lambda reason: None
    ) -> "list[grpc.aio.ServerInterceptor]":
        """Returns what checks every call; a server runs them before its others.

        Args:
            on_refused: Told the reason of each call that is refused.

        Raises:
            OSError: The file of tokens cannot be read.
            ValueError: It makes no sense.
        """
        from protos.transport.interceptors import NameInterceptor, TokenInterceptor

        names = set(_split(self.open_services)) - {"none"}
        services = [OPEN_SERVICES[name] for name in names]
        interceptors: list[grpc.aio.ServerInterceptor] = []
        if self.tls_client_names is not None:
            interceptors.append(
                NameInterceptor(_split(self.tls_client_names), services, on_refused)
            )
        if self.auth_tokens is not None:
            tokens = AcceptedTokens(self.auth_tokens)
            interceptors.append(TokenInterceptor(tokens, services, on_refused))
        return interceptors

    def open_port(self, server: "grpc.aio.Server", listen: str) -> int:
        """Has a server that has not started listen. Returns the port's number.

        Raises:
            OSError: The address cannot be bound, or a file cannot be read.
            ValueError: The files do not fit together.
        """
        try:
            if self.tls_cert is None:
                return server.add_insecure_port(listen)
            return server.add_secure_port(listen, server_credentials(self._tls_files))
        except RuntimeError as error:
            raise OSError(f"listen={listen}: the address cannot be bound: {error}") from error


async def serve_health(
    listen: str, add_to: "Callable[[grpc.aio.Server], None]"
) -> "tuple[grpc.aio.Server, int]":
    """Serves grpc.health.v1 alone, in plain text. Returns the server and its port.

    Args:
        listen: host:port; port 0 takes a free one.
        add_to: Adds the service, which may be that of another server of this event loop.

    Raises:
        OSError: The address cannot be bound.
    """
    import grpc

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add_to(server)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(f"health_listen={listen}: the address cannot be bound: {error}") from error
    await server.start()
    return server, port


def is_loopback(address: str) -> bool:
    """Returns whether what goes to host:port stays on this machine, as far as the name tells."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_on_off(name: str, value: str) -> None:
    """Raises ValueError if it is neither."""
    if value not in ON_OFF:
        raise ValueError(f"{name}={value}: need one of {', '.join(ON_OFF)}")


def check_pair(cert_name: str, cert: Path | None, key_name: str, key: Path | None) -> None:
    """Raises ValueError if a certificate is there without its key, or the key alone."""
    if (cert is None) != (key is None):
        given, other = (cert_name, key_name) if key is None else (key_name, cert_name)
        raise ValueError(f"{given} without {other}: a certificate goes with its private key")


def check_files(name: str, files: TlsFiles) -> None:
    """Raises ValueError if they cannot be read or do not fit together."""
    try:
        files.read_whole()
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error


def check_tokens(name: str, path: Path) -> None:
    """Raises ValueError if the file cannot be read or has no tokens."""
    try:
        read_tokens(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error


def check_hop(name: str, addresses: Iterable[str], fix: str) -> None:
    """Raises ValueError if what goes to one of these would be plain text off loopback.

    Args:
        name: The setting that has the addresses.
        addresses: "host:port" each.
        fix: What to set instead.
    """
    for address in addresses:
        if not is_loopback(address):
            raise ValueError(
                f"{name}: {address} is not on loopback, and what goes there would be plain text "
                f"that others can read: {fix}"
            )


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
