"""Headless Chromium, driven over its DevTools protocol through a pair of pipes."""

import asyncio
import fcntl
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
FLAGS = (*FLAGS, "--disable-dev-shm-usage", "--remote-debugging-pipe", "about:blank")
# Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
EXEC = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
MAX_ANSWER = 1 << 26


def chromium() -> str | None:
    """Returns the path of a Chromium, if this machine has one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a running Chromium."""

    def __init__(self, answers: asyncio.StreamReader, commands: int) -> None:
        self._answers, self._commands = answers, commands
        self._ids = count(1)
        self._session: str | None = None

    async def attach(self) -> None:
        """Opens the page that all calls go to."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", flatten=True, **target)
        self._session = attached["sessionId"]
        await self.call("Page.enable")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Returns a command's result."""
        command: dict[str, Any] = {"id": next(self._ids), "method": method, "params": params}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            answer = json.loads((await self._answers.readuntil(b"\0"))[:-1])
            if answer.get("id") == command["id"]:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    async def run(self, script: str) -> Any:
        """Returns the value of a JavaScript expression, which may be a promise."""
        told = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, script: str) -> None:
        """Returns as soon as an expression is true."""
        for _ in range(1200):
            if await self.run(f"Boolean({script})"):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{script}: not on {await self.run('document.body.innerText')}")

    async def show(self, url: str, *, scheme: str = "light", width: int = 1280) -> None:
        """Opens an address in a window of some width, in a light or a dark scheme."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)
        sizes = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **sizes)
        await self.call("Page.navigate", url=url)


@asynccontextmanager
async def browsing(path: str, profile: Path) -> AsyncIterator[Browser]:
    """Runs a Chromium and yields its page.

    Args:
        path: The program.
        profile: An empty folder for what it keeps.
    """
    ends = [*os.pipe(), *os.pipe()]
    theirs_in, ours_out, ours_in, theirs_out = (fcntl.fcntl(e, fcntl.F_DUPFD, 10) for e in ends)
    for end in ends:
        os.close(end)
    args = [str(theirs_in), str(theirs_out), path, f"--user-data-dir={profile}", *FLAGS]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", EXEC, *args),
        pass_fds=(theirs_in, theirs_out),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    answers = asyncio.StreamReader(limit=MAX_ANSWER)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(answers), os.fdopen(ours_in, "rb", 0)
    )
    try:
        browser = Browser(answers, ours_out)
        await browser.attach()
        yield browser
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        transport.close()
        os.close(ours_out)
