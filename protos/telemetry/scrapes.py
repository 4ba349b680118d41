"""Port for Prometheus: a page of all metrics, made at most four times a second.

In threads, so that a long computation elsewhere delays no scrape; but few of them, however many
connections there are and whatever these send.
"""

import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import BoundedSemaphore, Lock, Thread
from typing import Any

import structlog

from protos.telemetry.metrics import Family, new_registry
from protos.transport.credentials import AUTHORIZATION, SCHEME, UNAUTHENTICATED, AcceptedTokens

log = structlog.stdlib.get_logger(__name__)

MAX_SCRAPES = 16
SCRAPE_EVICTED = "SCRAPE_EVICTED"  # reason of a connection that was closed for a new one
PAGE_AGE_S = 0.25
SOCKET_TIMEOUT_S = 5.0  # without a byte


class MetricsPort:
    """An open port that is scraped; the threads behind it end with the process or by `close`."""

    def __init__(self, server: "_Server") -> None:
        self._server = server
        self._thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def number(self) -> int:
        number: int = self._server.server_address[1]
        return number

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(
    listen: str,
    collect: Callable[[], Iterable[Family]],
    *,
    tokens: AcceptedTokens | None = None,
    max_scrapes: int = MAX_SCRAPES,
    on_refused: Callable[[str], None] = lambda reason: None,
) -> MetricsPort:
    """Serves metrics, and the process's own, at http://HOST:PORT/metrics.

    Args:
        listen: host:port; port 0 takes a free one.
        collect: Returns everything there is, on a thread of the port.
        tokens: Of which a scrape needs one; None: anybody may scrape.
        max_scrapes: Connections open at once; a new one ends the oldest.
        on_refused: Called with SCRAPE_EVICTED for each that is ended so, and with UNAUTHENTICATED
            for each scrape without a token.

    Raises:
        OSError: The address cannot be bound.
    """
    host, _, number = listen.rpartition(":")
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(
            host.strip("[]"), int(number), type=socket.SOCK_STREAM
        )
        server = _Server(family, address, _Page(collect), tokens, max_scrapes, on_refused)
    except OSError as error:
        raise OSError(
            f"metrics_listen={listen}: the address cannot be bound: {error}; free it, or choose "
            f"another"
        ) from error
    log.info("metrics_listening", address=f"{host}:{server.server_address[1]}")
    return MetricsPort(server)


class _Page:
    """Text of all metrics, as it was a moment ago."""

    def __init__(self, collect: Callable[[], Iterable[Family]]) -> None:
        self._registry = new_registry(collect)
        self._lock = Lock()
        self._text: bytes | None = None
        self._end_time = 0.0  # when the text is too old

    def text(self) -> bytes | None:
        """Returns it, or None if it could not be made."""
        from prometheus_client import generate_latest

        with self._lock:
            if time.monotonic() >= self._end_time:
                try:
                    self._text = generate_latest(self._registry)
                except Exception as error:  # of whatever is collected
                    log.warning("metrics_not_collected", problem=repr(error))
                    self._text = None
                self._end_time = time.monotonic() + PAGE_AGE_S
            return self._text


class _Handler(BaseHTTPRequestHandler):
    server: "_Server"
    timeout = SOCKET_TIMEOUT_S

    def do_GET(self) -> None:
        if not self.server.takes(self.headers.get(AUTHORIZATION, "")):
            self.send_response(401)
            self.send_header("WWW-Authenticate", SCHEME.strip())
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        text = self.server.page.text()
        if text is None:
            self.send_error(500, "the metrics cannot be collected now")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def version_string(self) -> str:
        """Tells strangers nothing of Python's version."""
        return "lockstep"

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        family: int,
        address: Any,
        page: _Page,
        tokens: AcceptedTokens | None,
        max_scrapes: int,
        on_refused: Callable[[str], None],
    ) -> None:
        self.address_family = family
        self.page = page
        self._tokens = tokens
        self._on_refused = on_refused
        self._free = BoundedSemaphore(max_scrapes)
        self._lock = Lock()
        self._open: dict[int, socket.socket] = {}  # by descriptor, oldest first
        super().__init__(address, _Handler)

    def takes(self, authorization: str) -> bool:
        """Returns whether a scrape brings a token, if it needs one; counts those that do not."""
        if self._tokens is None or self._tokens.name_of_bearer(authorization) is not None:
            return True
        with self._lock:
            self._on_refused(UNAUTHENTICATED)
        return False

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._free.acquire(blocking=False):
            self._end_oldest()
            if self._free.acquire(timeout=SOCKET_TIMEOUT_S):
                break
        with self._lock:
            self._open[request.fileno()] = request
        super().process_request(request, client_address)

    def _end_oldest(self) -> None:
        with self._lock:
            oldest = next(iter(self._open.values()), None)
            if oldest is not None:
                self._on_refused(SCRAPE_EVICTED)
                del self._open[oldest.fileno()]
                with suppress(OSError):  # the other end was faster
                    oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request.fileno(), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of connections that break."""
