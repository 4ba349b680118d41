"""Credentials in files that may be replaced while a process runs: certificates, keys, tokens.

A server looks at its TLS files at every handshake: the next connection gets the new certificate,
and open connections go on. A client's channel keeps what it was opened with; its owner opens
another.

A file of tokens has one a line, behind the name of its caller and a blank if it has one; empty lines
and lines that begin with # do not count. A server takes any of them, a caller sends the first. To
replace a token, add the new one where it is checked, then change it where it is sent, then remove
the old one: under one name, both are one caller's. A token's text is in no log and no error: a bad
line is named by its number.
"""

import hashlib
import hmac
import logging
import re
import secrets
import ssl
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

from protos.transport.certificates import Validity, validities, warn_of_dates

if TYPE_CHECKING:  # gRPC takes long to import, and a configuration is checked without it
    import grpc

log = logging.getLogger(__name__)

NUM_READS = 5  # of TLS files, while somebody writes them
TOKEN_RELOAD_S = 1.0  # a file of tokens is looked at so often at most, since every call asks
MIN_TOKEN_LENGTH = 16
AUTHORIZATION, SCHEME = "authorization", "Bearer "  # of the metadata that bring a token
UNAUTHENTICATED = "UNAUTHENTICATED"  # reason of a caller without what is asked for

_NAME_KEY = secrets.token_bytes(16)  # without it, no guess at a token can be tried on its name

Raw = TypeVar("Raw")
Parsed = TypeVar("Parsed")


class Watched(Generic[Raw, Parsed]):
    """Contents of some files, read again whenever any thread asks for them.

    Contents are compared, not times: a symbolic link that points elsewhere, as Kubernetes replaces
    a Secret, counts, and so does a second change within a clock's tick. Files that cannot be read
    or make no sense, such as half of a new pair, change nothing until they do.

    Args:
        name: The setting that names the files, for the log.
        read: Reads all files. May raise OSError or ValueError.
        parse: Makes the value of their contents. May raise OSError or ValueError.
        interval_s: Contents are taken for current so long.

    Raises:
        OSError: A file cannot be read now.
        ValueError: It makes no sense now.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], Raw],
        parse: Callable[[Raw], Parsed],
        *,
        interval_s: float = 0.0,
    ) -> None:
        self._name = name
        self._read = read
        self._parse = parse
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._raw = read()
        self._value = parse(self._raw)
        self._look_time = time.monotonic()
        self._problem = ""
        _watched.add(self)

    @property
    def name(self) -> str:
        return self._name

    @property
    def is_stale(self) -> bool:
        """Whether the files make no sense now, so that what they were before is still in force."""
        self.value()
        return bool(self._problem)

    def value(self) -> Parsed:
        """Returns the same object for as long as the files are the same."""
        if time.monotonic() - self._look_time < self._interval_s:
            return self._value
        with self._lock:
            self._look()
            return self._value

    def _look(self) -> None:
        self._look_time = time.monotonic()
        try:
            raw = self._read()
            if raw != self._raw:
                self._value = self._parse(raw)
                self._raw = raw
                log.info("files_reloaded", extra={"setting": self._name})
        except (OSError, ValueError) as error:
            if str(error) != self._problem:  # once, not at each call
                said = {"setting": self._name, "problem": str(error)}
                log.warning("files_not_reloaded", extra=said)
            self._problem = str(error)
        else:
            self._problem = ""


_watched: WeakSet[Watched[Any, Any]] = WeakSet()  # of this process


def stale_files() -> dict[str, float]:
    """Returns, by setting, how many of its files' readers go on with what the files were before."""
    counts: dict[str, float] = {}
    for each in list(_watched):
        counts[each.name] = counts.get(each.name, 0.0) + each.is_stale
    return counts


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of one side's TLS files, all of them PEM.

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
                if b"ENCRYPTED" in self.key.read_bytes():
                    raise ValueError(
                        f"{self.key} is encrypted: write it without a password, as does: openssl pkey "
                        f"-in {self.key} -out NEW"
                    ) from None
                raise ValueError(
                    f"{self.cert} and {self.key} are no certificate with its key, in PEM"
                    + f": {error.reason}" * bool(error.reason)
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
    """Contents of TLS files. Never shown: the key is a secret."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None


class WatchedTls(Watched[TlsBytes, TlsBytes]):
    """Contents of TLS files, which follow their changes.

    Args:
        name: The setting that names the files, for the log.
        files: Their paths.
        cert, ca: Settings that name the certificate and the CAs.
        interval_s: They are looked at so often at most.

    Raises:
        OSError: One cannot be read.
        ValueError: They do not fit together.
    """

    def __init__(
        self, name: str, files: TlsFiles, *, cert: str, ca: str, interval_s: float = 0.0
    ) -> None:
        self._files = files
        self._settings = (cert, ca)
        super().__init__(name, files.read, self._parse, interval_s=interval_s)

    def _parse(self, raw: TlsBytes) -> TlsBytes:
        whole = self._files.read_whole()
        for setting, pem in self._certificates(whole):
            warn_of_dates(setting, pem, time.time())
        return whole

    def _certificates(self, tls: TlsBytes) -> list[tuple[str, bytes]]:
        """Returns the settings that name certificates, each with its file's content."""
        files = zip(self._settings, (tls.cert, tls.ca), strict=True)
        return [(setting, pem) for setting, pem in files if pem is not None]

    def validities(self) -> Iterator[tuple[str, Validity]]:
        """Yields the validity of each certificate in force, with the setting that names its file."""
        for setting, pem in self._certificates(self.value()):
            for validity in validities(pem):
                yield setting, validity


def first_to_expire() -> dict[str, Validity]:
    """Returns, by setting, the certificate of this process that expires first."""
    found = [
        pair
        for watched in list(_watched)
        if isinstance(watched, WatchedTls)
        for pair in watched.validities()
    ]
    latest_first = sorted(found, key=lambda pair: pair[1].end, reverse=True)
    return dict(latest_first)


def server_credentials(files: TlsFiles) -> "grpc.ServerCredentials":
    """Returns a port's credentials, which follow the files. With a CA, every client needs a
    certificate.

    Raises:
        OSError: A file cannot be read.
        ValueError: They do not fit together.
    """
    import grpc

    watched = WatchedTls("tls_cert", files, cert="tls_cert", ca="tls_client_ca")

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
    """Returns the credentials of a new channel."""
    import grpc

    return grpc.ssl_channel_credentials(tls.ca, tls.key, tls.cert)


def read_tokens(path: Path) -> dict[str, str]:
    """Returns the names of a file's tokens, in order.

    A token that the file gives no name has a hash for one, the same for as long as this process
    runs.

    Raises:
        OSError: It cannot be read.
        ValueError: It has none, or a line that is none.
    """
    tokens = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        *name, token = line.decode("ascii", errors="replace").split() or [""]
        if not token or (name or [token])[0].startswith("#"):
            continue
        if len(name) > 1 or re.fullmatch(r"[!-~]+", "".join([*name, token])) is None:
            raise ValueError(
                f"{path}, line {number}: need TOKEN or NAME TOKEN, of visible ASCII characters only"
            )
        if name and len(name[0]) >= MIN_TOKEN_LENGTH:
            raise ValueError(
                f"{path}, line {number}: the first of two is a name, and a name is shorter than "
                f"{MIN_TOKEN_LENGTH} characters, as no token is; write one token on each line"
            )
        if len(token) < MIN_TOKEN_LENGTH:
            raise ValueError(
                f"{path}, line {number}: a token of {len(token)} characters can be guessed; need "
                f"{MIN_TOKEN_LENGTH}, such as those of: openssl rand -hex 32"
            )
        digest = hashlib.blake2b(token.encode(), key=_NAME_KEY, digest_size=16)
        tokens[token] = name[0] if name else digest.hexdigest()
    if not tokens:
        raise ValueError(f"{path} has no token: write one on each line")
    return tokens


class AcceptedTokens:
    """Tokens that a port takes. Only their hashes are kept.

    Args:
        path: File of the tokens.
        setting: That names the file, for the log.

    Raises:
        OSError: The file cannot be read.
        ValueError: It makes no sense.
    """

    def __init__(self, path: Path, setting: str = "auth_tokens") -> None:
        self._hashes = Watched(
            setting,
            lambda: [(_hash(token), name) for token, name in read_tokens(path).items()],
            lambda hashes: hashes,
            interval_s=TOKEN_RELOAD_S,
        )

    def name_of(self, token: str) -> str | None:
        """Returns the token's name; None, in a time that is the same for all, if it is none of them."""
        given, found = _hash(token), None
        for known, name in self._hashes.value():
            if hmac.compare_digest(given, known):
                found = name
        return found

    def name_of_bearer(self, value: str) -> str | None:
        """Returns the name of the token in "Bearer TOKEN"; None if there is none that is taken."""
        is_bearer = value[: len(SCHEME)].lower() == SCHEME.lower()
        return self.name_of(value[len(SCHEME) :]) if is_bearer else None

    def name_of_password(self, value: str) -> str | None:
        """Returns the same for "Basic ..." as browsers send it, with any user and the token."""
        scheme, _, encoded = value.partition(" ")
        if scheme.lower() != "basic":
            return None
        try:
            return self.name_of(b64decode(encoded, validate=True).decode().partition(":")[2])
        except ValueError:  # neither base64 nor text
            return None


def token_sender(path: Path, setting: str = "token") -> Callable[[], str]:
    """Returns a function that returns the first token of a file, as it is then.

    Args:
        path: The file.
        setting: That names it, for the log.

    Raises:
        OSError: The file cannot be read.
        ValueError: It makes no sense.
    """
    return Watched(
        setting, lambda: next(iter(read_tokens(path))), lambda t: t, interval_s=TOKEN_RELOAD_S
    ).value


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
