"""The status page in a real browser, on the numbers of real processes."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from deploy.local.demo import idle_group
from deploy.local.launch import LocalStack
from deploy.local.ports import held_port
from protos.serving.v1 import serving_pb2 as pb
from protos.telemetry.scrapes import serve_metrics
from router.telemetry.status_page import status_pages
from tests.e2e.support.browser import Browser, browsing, chromium
from tests.router.support.fake_engines import FakeEngines
from tests.router.support.statuses import rank, ready

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(not chromium(), reason="no Chromium here: apt-get install chromium"),
]
AXE = "axe-core@4.11.0"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lockstep" / AXE
VIOLATIONS = "axe.run().then(told => told.violations.map(v => [v.id, v.nodes.map(n => n.html)]))"
NOTICE = "document.querySelector('#notice').innerText"
PROBLEM = "10.0.0.7:50061 said </script><script>document.title='taken'</script>"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    path = chromium()
    assert path is not None
    async with browsing(path, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def axe() -> str:
    """The script that finds what people with a screen reader, or without a mouse, would miss."""
    script = CACHE / "node_modules" / "axe-core" / "axe.min.js"
    if not script.is_file():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("no npm here, which gets axe-core")
        got = subprocess.run([npm, "install", "--prefix", CACHE, AXE], capture_output=True)
        if got.returncode:
            pytest.skip(f"npm cannot get {AXE}: {got.stderr.decode()[-200:]}")
    return script.read_text()


def troubled() -> FakeEngines:
    """Returns engines with all that a router in good health does not show."""
    engines, times = FakeEngines(), {"history": pb.History(), "step_cost": pb.StepCostStatus()}
    lost = ready(rank(0, address="10.0.0.7:50061"), problem=PROBLEM, step=1234, **times)
    engines.groups = [lost, pb.GroupStatus(group=1, state=pb.GROUP_STATE_MISMATCHED, **times)]
    levels = ("info", "warning", "error")
    engines.events = [pb.Event(name="group_lost", level=level) for level in levels]
    return engines


@asynccontextmanager
async def served(engines: FakeEngines, number: int = 0) -> AsyncIterator[str]:
    pages = status_pages(engines, "1.2.3", tells_operators=True)  # type: ignore[arg-type]
    port = serve_metrics(f"127.0.0.1:{number}", lambda: (), pages=pages)
    try:
        yield f"http://127.0.0.1:{port.number}/"
    finally:
        await asyncio.to_thread(port.close)


async def text_of(browser: Browser, selector: str) -> str:
    text: str = await browser.run(f"document.querySelector({selector!r}).innerText")
    return text


def cells(selector: str) -> str:
    """JavaScript for the texts of a table's cells, row by row."""
    return (
        f"[...document.querySelectorAll('{selector} tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.innerText.trim()))"
    )


async def test_it_shows_what_get_status_tells_and_goes_on_by_itself(
    browser: Browser, stack: LocalStack
) -> None:
    await browser.show(await stack.status_page())
    await browser.until("document.querySelector('#group-0')")
    await browser.run("window.isFirst = true")  # which a reload would undo
    steps = "document.querySelector('section .facts').innerText.match(/Steps\\s+([\\d,]*\\d)/)[1]"
    before = await browser.run(steps)
    async with stack.client() as client:
        answers = [client.complete(f"\n{n}+25=", max_tokens=16) for n in range(17, 25)]
        await asyncio.gather(*answers)
        await idle_group(client)  # the last step's blocks are held until it is back
        told = await client.get_router_status()
    [group] = told.groups
    assert before != f"{group.step:,}"
    await browser.until(f"{steps} === '{group.step:,}'")
    assert await browser.run("window.isFirst")

    assert "ready" in await text_of(browser, "#state")
    assert told.model in await text_of(browser, "#facts")
    assert f"{group.num_waiting} sequences" in await text_of(browser, "section .facts")
    rows = await browser.run(cells('[aria-label="Ranks of group 0"]'))
    assert [row[:2] for row in rows] == [[str(r.dp_rank), r.address] for r in group.ranks]
    shares = [r.num_cached_blocks / (r.num_cached_blocks + r.num_free_blocks) for r in group.ranks]
    assert [row[7] for row in rows] == [f"{int(100 * share + 0.5)} %" for share in shares]
    events = await browser.run("[...document.querySelectorAll('li strong')].map(e => e.innerText)")
    assert events == [e.name.replace("_", " ") for e in told.events][:20]
    peak = "document.querySelector('.chart').getAttribute('aria-label').match(/at most ([\\d,]+)/)"
    await browser.until(f"Number({peak}[1].replace(',', ''))")


async def test_it_says_when_the_router_drains_or_does_not_answer(browser: Browser) -> None:
    engines = troubled()
    with held_port() as number:
        async with served(engines, number) as url:
            await browser.show(url, width=400)
            await browser.until("document.querySelector('.problem')")
            assert PROBLEM in await text_of(browser, ".problem")
            assert "not ready" in await text_of(browser, "#state")
            wide = "document.documentElement.scrollWidth > innerWidth"
            assert not await browser.run(wide), "a narrow window scrolls its tables, not the page"
            engines.is_draining = True
            await browser.until(f"{NOTICE}.includes('told to stop')")
            assert await browser.run("document.title") == "◆ draining · Lockstep router"
        await browser.until(f"{NOTICE}.includes('does not answer')")
        assert "no answer" in await text_of(browser, "#state")
        assert "1,234" in await text_of(browser, "main"), "what it last said stays"
        engines.is_draining, engines.groups = False, []
        async with served(engines, number):
            await browser.until("document.querySelector('main').innerText.includes('no groups')")
            assert "no group can step" in await text_of(browser, "#notice")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_nobody_is_shut_out(
    browser: Browser, stack: LocalStack, axe: str, scheme: str
) -> None:
    async with served(troubled()) as troubled_page:
        for url in (await stack.status_page(), troubled_page):
            await browser.show(url, scheme=scheme)
            await browser.until("document.querySelector('li strong')")
            await browser.run(axe)
            assert await browser.run(VIOLATIONS) == [], url
