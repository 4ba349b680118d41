"""Log records and metrics of processes: lines come when they come, and not all are ours."""

import asyncio
import json
from pathlib import Path
from typing import Any

from deploy.local.processes import Process
from tests.support.scraping import Samples, scrape


def records(path: Path, event: str) -> list[dict[str, Any]]:
    """Returns the records of an event that a log has so far, without what gRPC writes there."""
    lines = path.read_text().splitlines()
    written = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    return [record for record in written if record["event"] == event]


async def logged(process: Process, event: str, count: int = 1) -> list[dict[str, Any]]:
    """Returns the records of an event once there are so many. Earlier lines are in the log, too.

    A process's answer may be here before the line that it wrote before it: another thread copies
    its lines into the log.
    """
    while len(found := records(process.log_path, event)) < count:
        assert not process.has_ended, process.log_tail
        await asyncio.sleep(0.02)
    return found


async def scraped(process: Process) -> Samples:
    """Returns the samples of a process that was started with --metrics-listen."""
    return await scrape((await process.event("metrics_listening"))["address"])
