"""Ports of a service: their settings, and the servers behind them.

Router and executor have the same settings under the same names. Without any, a port is for loopback.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from protos.settings import ADDRESS, check_settings, one_of, setting
from protos.telemetry.metrics import Family
from protos.telemetry.scrapes import NO_PAGES, MetricsPort, Page, serve_metrics
from protos.transport.addresses import is_loopback, try_to_bind
from protos.transport.credentials import AcceptedTokens, TlsFiles, read_tokens, server_credentials
from protos.transport.limits import PortLimits

if TYPE_CHECKING:  # gRPC takes long to import, and a configuration is checked without it
    import grpc

    from protos.transport.admission import Refusals
    from protos.transport.errors import OnRefused

log = structlog.stdlib.get_logger(__name__)

PROBE_BYTES = 4096  # longest message at a port for probes, which are a name
OPEN_SERVICES = {
    "health": ("grpc.health.v1.Health",),
    "reflection": (
        "grpc.reflection.v1alpha.ServerReflection",
        "grpc.reflection.v1.ServerReflection",
    ),
}


@dataclass(frozen=True, kw_only=True)
class ServiceConfig(PortLimits):
    """Settings of both services: their ports, the callers and limits of these, logs.

    Secrets are in files: this holds their paths.
    """

    listen: str = setting("127.0.0.1:50051", ADDRESS)
    """Where to serve; port 0 takes a free one."""
    tls_cert: Path | None = setting(None, unset="no TLS")
    """Certificate of the port, in PEM, followed by those between it and its CA; read again when it
    changes."""
    tls_key: Path | None = None
    """Its private key, in PEM."""
    tls_client_ca: Path | None = setting(None, unset="callers need no certificate")
    """CA certificates, in PEM; callers then need a certificate that one of them signed."""
    tls_client_names: str | None = setting(None, unset="any")
    """Names, with commas, for a CA that signs certificates of others too: a caller's certificate
    needs one of them as a DNS, URI or IP alternative name."""
    auth_tokens: Path | None = setting(None, unset="callers need no token")
    """File of bearer tokens, one a line; callers then need one of them. Read again when it
    changes."""
    open_services: str = "health"
    """Services that need no token and no certain name: health, reflection, both with a comma, or
    none."""
    plaintext: str = setting("off", one_of("off", "side-ports", "on"))
    """Ports that may be plain text off loopback: none, those for probes and metrics, which never
    have TLS, or any."""
    health_listen: str | None = setting(None, ADDRESS, unset="the port itself only")
    """A second port for probes, such as a kubelet's: grpc.health.v1 only, in plain text."""
    metrics_listen: str | None = setting(None, ADDRESS, unset="nowhere")
    """Where Prometheus may scrape metrics."""
    metrics_tokens: Path | None = setting(None, unset="anybody who reaches the port may scrape")
    """File of bearer tokens, one a line; scrapes then need one of them. Read again when it
    changes."""
    log_level: str = setting("info", one_of("debug", "info", "warning", "error"))
    """Least severe level that is logged."""

    def __post_init__(self) -> None:
        """Checks these settings, and that their files are there and make sense.

        Raises:
            ValueError: Says what is wrong and what fits.
        """
        check_settings(self)
        check_tls(self._tls_files, "tls_cert", "tls_key", "tls_client_ca")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError(
                "tls_client_ca without tls_cert: without TLS no caller has a certificate"
            )
        if self.tls_client_names is not None and self.tls_client_ca is None:
            raise ValueError(
                "tls_client_names without tls_client_ca: names are read in certificates, so set "
                "the CA that signs them"
            )
        if not set(_split(self.open_services)) <= {*OPEN_SERVICES, "none"}:
            raise ValueError(
                f"open_services={self.open_services}: need health, reflection, both with a comma, "
                f"or none"
            )
        for name in ("auth_tokens", "metrics_tokens"):
            path = getattr(self, name)
            if path is not None:
                check_files(name, partial(read_tokens, path))
        if self.tls_cert is None and self.plaintext != "on" and not is_loopback(self.listen):
            raise ValueError(
                f"listen={self.listen}: without TLS this would be plain text that others can read: "
                f"set tls_cert and tls_key; or listen on loopback, such as 127.0.0.1:50051; or, "
                f"where the network itself keeps others out, plaintext=on"
            )
        for name in ("health_listen", "metrics_listen"):
            address = getattr(self, name)
            if address is not None and self.plaintext == "off" and not is_loopback(address):
                raise ValueError(
                    f"{name}={address}: this port is plain text that others can read: listen on "
                    f"loopback, such as 127.0.0.1:9090; or, where the network itself keeps others "
                    f"out, plaintext=side-ports"
                )

    @property
    def identifies_callers(self) -> bool:
        """Whether a caller needs a certificate or a token."""
        return self.tls_client_ca is not None or self.auth_tokens is not None

    @property
    def _tls_files(self) -> TlsFiles:
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)

    def interceptors(self, refusals: "Refusals") -> "list[grpc.aio.ServerInterceptor]":
        """Returns the checks of every call, which a server runs before its other interceptors.

        Args:
            refusals: Where refused calls are counted.

        Raises:
            OSError: The file of tokens cannot be read.
            ValueError: It makes no sense.
        """
        from protos.transport.interceptors import NameInterceptor, TokenInterceptor

        names = [name for name in _split(self.open_services) if name != "none"]
        services = [service for name in names for service in OPEN_SERVICES[name]]
        interceptors: list[grpc.aio.ServerInterceptor] = []
        if self.tls_client_names is not None:
            names = _split(self.tls_client_names)
            interceptors.append(NameInterceptor(names, services, refusals))
        if self.auth_tokens is not None:
            tokens = AcceptedTokens(self.auth_tokens)
            interceptors.append(TokenInterceptor(tokens, services, refusals))
        return interceptors

    async def start(self, server: "grpc.aio.Server") -> int:
        """Opens the port and starts its server. Returns the port's number.

        Raises:
            OSError: The address cannot be bound, or a file cannot be read.
            ValueError: The files do not fit together.
        """
        credentials = None if self.tls_cert is None else server_credentials(self._tls_files)
        return await _start("listen", self.listen, server, credentials)

    async def serve_health(
        self, add_to: "Callable[[grpc.aio.Server], None]", refusals: "Refusals"
    ) -> "grpc.aio.Server | None":
        """Opens the port for probes, if there is to be one. Returns its server.

        Args:
            add_to: Adds the service, which may be that of another server of this event loop.
            refusals: Where refused calls are counted.

        Raises:
            OSError: The address cannot be bound.
        """
        if self.health_listen is None:
            return None
        import grpc

        from protos.transport.interceptors import RequestReader

        server = grpc.aio.server(
            interceptors=[RequestReader(self, refusals)],
            options=self.server_options(PROBE_BYTES),
        )
        add_to(server)
        await _start("health_listen", self.health_listen, server)
        return server

    def serve_metrics(
        self,
        collect: Callable[[], Iterable[Family]],
        on_refused: "OnRefused",
        pages: Mapping[str, Page] = NO_PAGES,
    ) -> MetricsPort | None:
        """Opens the port for metrics, if there is to be one; it ends with the process.

        Args:
            collect: Returns all metrics, on a thread of the port.
            on_refused: Called with the reason of each scrape that is refused, on such a thread.
            pages: Others of the port, by path.

        Raises:
            OSError: The address cannot be bound, or the file of tokens cannot be read.
            ValueError: It makes no sense.
        """
        if self.metrics_listen is None:
            return None
        path = self.metrics_tokens
        return serve_metrics(
            self.metrics_listen,
            collect,
            pages=pages,
            tokens=None if path is None else AcceptedTokens(path, "metrics_tokens"),
            max_scrapes=self.max_scrapes,
            on_refused=on_refused,
        )


async def _start(
    name: str,
    address: str,
    server: "grpc.aio.Server",
    credentials: "grpc.ServerCredentials | None" = None,
) -> int:
    try:
        try_to_bind(address)
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except (OSError, RuntimeError, UnicodeError) as error:
        raise OSError(
            f"{name}={address}: the address cannot be bound: {error}; free it, or choose another"
        ) from error
    await server.start()
    log.info(f"{name}ing", address=f"{address.rpartition(':')[0]}:{port}")
    return port


def check_tls(files: TlsFiles, cert: str, key: str, ca: str) -> None:
    """Checks that TLS files are there and make sense.

    Args:
        files: Their paths.
        cert, key, ca: The settings that name them.

    Raises:
        ValueError: A certificate is there without its key or the reverse, or a file is no good.
    """
    if (files.cert is None) != (files.key is None):
        given, other = (cert, key) if files.key is None else (key, cert)
        raise ValueError(f"{given} without {other}: a certificate goes with its private key")
    check_files(cert, TlsFiles(files.cert, files.key).read_whole)
    check_files(ca, TlsFiles(ca=files.ca).read_whole)


def check_files(name: str, read: Callable[[], object]) -> None:
    """Raises ValueError, with the setting's name, if files cannot be read or make no sense."""
    try:
        read()
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
