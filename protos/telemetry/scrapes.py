"""Port for Prometheus: a page of all metrics, and others beside it, each made at most four times a second.

In threads, so that a long computation elsewhere delays no scrape; but few of them, however many
connections there are and whatever these send.
"""

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
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
# Of every page, for browsers: it takes nothing from elsewhere, and nobody else takes it.
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


NO_PAGES: Mapping[str, "Page"] = {}


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
    pages: Mapping[str, "Page"] = NO_PAGES,
    tokens: AcceptedTokens | None = None,
    max_scrapes: int = MAX_SCRAPES,
    on_refused: Callable[[str], None] = lambda reason: None,
) -> MetricsPort:
    """Serves metrics, and the process's own, at http://HOST:PORT/metrics.

    Args:
        listen: host:port; port 0 takes a free one.
        collect: Returns everything there is, on a thread of the port.
        pages: Others, by path.
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
        pages = {"/metrics": _metrics_page(collect), **pages}
        server = _Server(family, address, pages, tokens, max_scrapes, on_refused)
    except (OSError, UnicodeError) as error:
        raise OSError(
            f"metrics_listen={listen}: the address cannot be bound: {error}; free it, or choose "
            f"another"
        ) from error
    log.info("metrics_listening", address=f"{host}:{server.server_address[1]}")
    return MetricsPort(server)


class Page:
    """Page of the port, as it was a moment ago.

    Args:
        content_type: Its Content-Type.
        make: Makes its text, on a thread of the port.
    """

    def __init__(self, content_type: str, make: Callable[[], bytes]) -> None:
        self.content_type = content_type
        self._make = make
        self._lock = Lock()
        self._text: bytes | None = None
        self._end_time = 0.0  # when the text is too old

    def text(self) -> bytes | None:
        """Returns its text, or None if that could not be made."""
        with self._lock:
            if time.monotonic() >= self._end_time:
                try:
                    self._text = self._make()
                except Exception as error:  # of whatever is collected
                    log.warning("metrics_not_collected", problem=repr(error))
                    self._text = None
                self._end_time = time.monotonic() + PAGE_AGE_S
            return self._text


def _metrics_page(collect: Callable[[], Iterable[Family]]) -> Page:
    from prometheus_client import generate_latest

    content_type = "text/plain; version=0.0.4; charset=utf-8"
    return Page(content_type, partial(generate_latest, new_registry(collect)))


class _Handler(BaseHTTPRequestHandler):
    server: "_Server"
    timeout = SOCKET_TIMEOUT_S

    def do_GET(self) -> None:
        if not self.server.takes(self.headers.get(AUTHORIZATION, "")):
            self.send_response(401)
            self.send_header("WWW-Authenticate", SCHEME.strip())
            self.send_header("WWW-Authenticate", 'Basic realm="any name, and a token"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            self.send_error(404, f"only {', '.join(self.server.pages)}")
            return
        text = page.text()
        if text is None:
            self.send_error(500, "the numbers cannot be collected now")
            return
        self.send_response(200)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(text)))
        for name, value in SECURITY_HEADERS.items():
            self.send_header(name, value)
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
        pages: Mapping[str, Page],
        tokens: AcceptedTokens | None,
        max_scrapes: int,
        on_refused: Callable[[str], None],
    ) -> None:
        self.address_family = family
        self.pages = pages
        self._tokens = tokens
        self._on_refused = on_refused
        self._free = BoundedSemaphore(max_scrapes)
        self._lock = Lock()
        self._open: dict[int, socket.socket] = {}  # by descriptor, oldest first
        super().__init__(address, _Handler)

    def takes(self, authorization: str) -> bool:
        """Returns whether a scrape brings a token, if it needs one; counts those that do not."""
        tokens = self._tokens
        if tokens is None or tokens.name_of_bearer(authorization) is not None:
            return True
        if tokens.name_of_password(authorization) is not None:
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
