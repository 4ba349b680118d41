"""TLS on both hops, with files that may be replaced while a process runs.

A server looks at its files at every handshake: the next connection gets the new certificate, and
what is open goes on. A client's channel keeps what it was opened with; its owner opens another.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from protos.transport.watched import Watched

if TYPE_CHECKING:  # gRPC takes long to import, and a configuration is checked without it
    import grpc

NUM_READS = 5  # while somebody writes


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the files of one side are, all of them PEM.

    Attributes:
        cert: Own certificate, followed by those between it and its CA.
        key: Its private key, not encrypted.
        ca: Certificates of the CAs that the other side's certificate is checked against.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def read(self) -> "TlsBytes":
        """Reads them as they are.

        Raises:
            OSError: One cannot be read.
        """
        files = (self.cert, self.key, self.ca)
        return TlsBytes(*[None if path is None else path.read_bytes() for path in files])

    def read_whole(self) -> "TlsBytes":
        """Reads them when they fit together.

        Raises:
            OSError: One cannot be read.
            ValueError: They do not fit together; names the file.
        """
        for _ in range(NUM_READS):
            before = self.read()
            self._check()
            if self.read() == before:
                return before
        raise ValueError(f"{self.cert or self.ca} is written again and again: replace it at once")

    def _check(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if self.cert is not None and self.key is not None:
            try:
                # A password, so that an encrypted key is an error instead of a question.
                context.load_cert_chain(self.cert, self.key, password="-")
            except ssl.SSLError as error:
                raise ValueError(
                    f"{self.cert} and {self.key} are no certificate with its key, in PEM and not "
                    f"encrypted: {error.reason or error}"
                ) from None
        if self.ca is not None:
            try:
                context.load_verify_locations(self.ca)
            except ssl.SSLError as error:
                raise ValueError(
                    f"{self.ca} has no CA certificate in PEM: {error.reason or error}"
                ) from None


@dataclass(frozen=True, slots=True, repr=False)
class TlsBytes:
    """What the files hold. Never shown: the key is a secret."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None


def watch(name: str, files: TlsFiles, *, interval_s: float = 0.0) -> Watched[TlsBytes, TlsBytes]:
    """Returns what the files hold, whenever it is asked for.

    Args:
        name: For the log.
        files: Where.
        interval_s: They are looked at so often at most.

    Raises:
        OSError: One cannot be read.
        ValueError: They do not fit together.
    """
    return Watched(name, files.read, lambda _: files.read_whole(), interval_s=interval_s)


def server_credentials(files: TlsFiles) -> "grpc.ServerCredentials":
    """Returns a port's credentials, which follow the files. With a CA, every client needs a
    certificate.

    Raises:
        OSError: A file cannot be read.
        ValueError: They do not fit together.
    """
    import grpc

    watched = watch("tls_cert", files)

    def configuration(tls: TlsBytes) -> grpc.ServerCertificateConfiguration:
        assert tls.key is not None
        assert tls.cert is not None
        return grpc.ssl_server_certificate_configuration([(tls.key, tls.cert)], tls.ca)

    used = watched.value()
    first = configuration(used)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Runs before each handshake, on a thread of gRPC. None: as before."""
        nonlocal used
        current = watched.value()
        if current is used:
            return None
        used = current
        return configuration(current)

    return grpc.dynamic_ssl_server_credentials(
        first,
        fetch,  # type: ignore[arg-type]  # its type stub knows no None
        require_client_authentication=files.ca is not None,
    )


def channel_credentials(tls: TlsBytes) -> "grpc.ChannelCredentials":
    """Returns what a new channel is opened with."""
    import grpc

    return grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)
