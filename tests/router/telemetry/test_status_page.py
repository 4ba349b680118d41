"""The status page shows people what GetStatus tells programs, and nothing else."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from google.protobuf.json_format import ParseDict

from protos.serving.v1 import serving_pb2 as pb
from protos.telemetry.scrapes import serve_metrics
from router.app import pages_of
from router.config import RouterConfig
from router.telemetry.status_page import status_pages
from tests.router.support.fake_engines import FakeEngines
from tests.router.support.running_engines import complete, running
from tests.router.support.statuses import rank, ready
from tests.support.scraping import scrape_text

PROBLEM = "10.0.0.7:50061 </script><script>alert(1)</script>"


@asynccontextmanager
async def served(engines: object, *, tells_operators: bool = True) -> AsyncIterator[str]:
    pages = status_pages(engines, "1.2.3", tells_operators=tells_operators)  # type: ignore[arg-type]
    port = serve_metrics("127.0.0.1:0", lambda: (), pages=pages)
    try:
        yield f"127.0.0.1:{port.number}"
    finally:
        await asyncio.to_thread(port.close)


async def status_at(address: str) -> pb.GetStatusResponse:
    told = json.loads(await scrape_text(address, "/status.json"))
    return ParseDict(told, pb.GetStatusResponse())


async def test_its_numbers_are_those_of_get_status() -> None:
    async with running() as engines, served(engines) as address:
        await complete(engines, "a", [1, 2, 3], max_tokens=6)
        shown, told = await status_at(address), engines.overview("1.2.3")
    for status in (shown, told):
        status.groups[0].ClearField("last_step_age")
        for event in status.events:
            event.ClearField("age")
    assert shown == told
    assert shown.groups[0].ranks


async def test_numbers_that_are_0_are_there_too() -> None:
    async with served(FakeEngines()) as address:
        told = json.loads(await scrape_text(address, "/status.json"))
    assert told == {
        "groups": [],
        "events": [],
        "version": "1.2.3",
        "model": "",
        "is_ready": False,
        "is_draining": False,
        "num_live_requests": 0,
        "num_resumed_requests": "0",
        "router_id": "",
    }


async def test_browsers_are_told_to_take_nothing_from_elsewhere() -> None:
    async with served(FakeEngines()) as address:
        page = await scrape_text(address, "/?reload")
        named = re.findall(r'(?:href|src)="(?!data:)([^"]+)"', page)
        assert {"status.css", "status.js", "status.json"} <= set(named)
        types = {}
        for path in ("", *named):
            with await asyncio.to_thread(urlopen, f"http://{address}/{path}") as answer:
                types[path] = answer.headers["Content-Type"].partition(";")[0]
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert types[""] == "text/html"
    assert types["status.css"] == "text/css"
    assert types["status.js"] == "text/javascript"
    assert types["status.json"] == "application/json"
    assert types["metrics"] == "text/plain"


@pytest.mark.parametrize(("setting", "has_page"), [("on", True), ("off", False)])
async def test_an_operator_can_do_without_it(setting: str, has_page: bool) -> None:
    config = RouterConfig(groups=(("127.0.0.1:1",),), status_page=setting)
    pages = pages_of(config, FakeEngines())  # type: ignore[arg-type]
    assert ("/" in pages, "/status.json" in pages) == (has_page, has_page)


async def test_a_path_without_a_page_says_which_there_are() -> None:
    port = serve_metrics("127.0.0.1:0", lambda: ())
    with pytest.raises(HTTPError, match="404: only /metrics") as caught:
        await scrape_text(f"127.0.0.1:{port.number}", "/")
    caught.value.close()
    await asyncio.to_thread(port.close)


@pytest.mark.parametrize("tells_operators", [True, False])
async def test_executors_are_shown_where_scrapes_are_the_operators(tells_operators: bool) -> None:
    engines = FakeEngines()
    engines.groups = [ready(rank(0, address="10.0.0.7:50061"), problem=PROBLEM)]
    engines.events = [pb.Event(name="group_lost", problem=PROBLEM)]
    async with served(engines, tells_operators=tells_operators) as address:
        shown = await status_at(address)
        assert ("10.0.0.7" in await scrape_text(address, "/status.json")) == tells_operators
    assert shown.groups[0].ranks[0].num_running == 8


def test_scrapes_are_the_operators_where_they_need_a_token_or_nobody_does(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("caller 0123456789abcdef\n")
    for auth_tokens, metrics_tokens, tells in (
        (None, None, True),
        (tokens, None, False),
        (tokens, tokens, True),
    ):
        config = RouterConfig(
            groups=(("127.0.0.1:1",),), auth_tokens=auth_tokens, metrics_tokens=metrics_tokens
        )
        assert config.tells_scrapes == tells
