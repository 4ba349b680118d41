"""Scrape of a real process, as Prometheus does it."""

import asyncio
import urllib.request

from deploy.local.processes import Process
from tests.router.telemetry.test_prometheus import Samples, read

TIMEOUT_S = 120.0


async def scrape(process: Process) -> Samples:
    """Returns the samples of a process that was started with --metrics-listen."""
    address = (await process.event("metrics_listening"))["address"]

    def get() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as answer:
            text: str = answer.read().decode()
            return text

    return read(await asyncio.to_thread(get))
