"""Prometheus' port is open to whoever reaches it, and its threads are the service's."""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError

import pytest

from protos.telemetry import scrapes
from protos.telemetry.metrics import Family
from protos.telemetry.scrapes import MetricsPort, serve_metrics
from protos.transport.credentials import stale_files
from protos.transport.port import ServiceConfig
from tests.support.scraping import scrape, scrape_text

HALF = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"


@contextmanager
def open_port(collect: Callable[[], Iterable[Family]], **limits: object) -> Iterator[MetricsPort]:
    port = serve_metrics("127.0.0.1:0", collect, **limits)  # type: ignore[arg-type]
    try:
        yield port
    finally:
        port.close()


def send_half(port: MetricsPort) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port.number))
    connection.sendall(HALF)
    return connection


async def test_half_requests_take_no_more_threads_than_there_are_scrapes_and_hold_up_none():
    refused = Counter[str]()
    num_threads = threading.active_count()
    with open_port(
        lambda: (), max_scrapes=2, on_refused=lambda reason: refused.update([reason])
    ) as port:
        halves = [send_half(port) for _ in range(20)]
        assert "process_resident_memory_bytes" in await scrape(f"127.0.0.1:{port.number}")
        assert threading.active_count() <= num_threads + 4  # with the port's and the scrape's own
        assert refused == {"SCRAPE_EVICTED": 19}
        for half in halves[:19]:
            assert await asyncio.to_thread(half.recv, 1) == b""
        for half in halves:
            half.close()


async def test_a_page_is_made_once_for_many_scrapes(monkeypatch: pytest.MonkeyPatch):
    num_pages = 0

    def collect() -> Iterable[Family]:
        nonlocal num_pages
        num_pages += 1
        return [Family("pages", "gauge", "h", (), [((), float(num_pages))])]

    monkeypatch.setattr(scrapes, "PAGE_AGE_S", 3600.0)
    with open_port(collect) as port:
        address = f"127.0.0.1:{port.number}"
        pages = [(await scrape(address))["pages"][()] for _ in range(5)]
    assert pages == [1.0] * 5
    monkeypatch.setattr(scrapes, "PAGE_AGE_S", 0.0)
    with open_port(collect) as port:
        address = f"127.0.0.1:{port.number}"
        assert [(await scrape(address))["pages"][()] for _ in range(2)] == [2.0, 3.0]


async def test_a_connection_without_a_byte_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scrapes._Handler, "timeout", 0.05)
    with open_port(lambda: ()) as port:
        silent = socket.create_connection(("127.0.0.1", port.number))
        assert await asyncio.to_thread(silent.recv, 1) == b""
        silent.close()


async def test_a_scrape_needs_one_of_the_tokens_where_there_are_some(tmp_path: Path):
    (tmp_path / "tokens").write_text("prometheus right-token-0123456789\nother-token-9876543210\n")
    config = ServiceConfig(metrics_listen="127.0.0.1:0", metrics_tokens=tmp_path / "tokens")
    refused, num_pages = Counter[str](), 0

    def collect() -> Iterable[Family]:
        nonlocal num_pages
        num_pages += 1
        return ()

    port = config.serve_metrics(collect, lambda reason: refused.update([reason]))
    assert port is not None
    address = f"127.0.0.1:{port.number}"
    num_made = num_pages  # as the port opens
    try:
        wrong = ("right-token-0123456788", "prometheus", "right-token-0123456789:", "me:")
        for token in (None, "", *wrong):
            with pytest.raises(HTTPError) as caught:
                await scrape_text(address, token=token)
            assert (caught.value.code, caught.value.read()) == (401, b"")
            assert caught.value.headers["WWW-Authenticate"] == "Bearer"
            assert caught.value.headers["Server"] == "lockstep"
        assert (refused, num_pages) == ({"UNAUTHENTICATED": 6}, num_made)
        # As browsers send them.
        passwords = ("me:right-token-0123456789", ":other-token-9876543210")
        for token in ("right-token-0123456789", "other-token-9876543210", *passwords):
            assert "process_resident_memory_bytes" in await scrape_text(address, token=token)
        assert refused.total() == 6
        assert stale_files()["metrics_tokens"] == 0
    finally:
        port.close()
