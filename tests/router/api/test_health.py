"""Probes and load balancers act on these answers: a wrong one kills or starves a router."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.transport.health import HealthServicer
from router.api.health import Health
from router.client import Client, Rejected
from tests.router.support.fake_engines import FakeEngines, serve

Status = health_pb2.HealthCheckResponse
READY_NAMES = ["", "lockstep.serving.v1.GenerationService", "readiness"]


@asynccontextmanager
async def connected(health: Health) -> AsyncIterator[tuple[Client, Any]]:
    """Yields a client, and a stub of the service as such."""
    async with (
        serve(FakeEngines(), health=health) as target,
        Client(target) as client,
        grpc.aio.insecure_channel(target) as channel,
    ):
        yield client, health_pb2_grpc.HealthStub(channel)


async def test_a_new_router_is_alive_but_not_ready():
    async with connected(Health()) as (client, _):
        assert await client.health("liveness")
        assert [await client.health(name) for name in READY_NAMES] == [False] * 3


async def test_ready_comes_and_goes_while_liveness_stays():
    health = Health()
    health.add_name("vllm.grpc.engine.VllmEngine")
    names = [*READY_NAMES, "vllm.grpc.engine.VllmEngine"]
    async with connected(health) as (client, _):
        for is_ready in (True, False, True):
            health.set_ready(is_ready)
            assert [await client.health(name) for name in names] == [is_ready] * 4
            assert await client.health("liveness")


async def test_a_service_that_nobody_knows_is_not_found():
    async with connected(Health()) as (client, _):
        with pytest.raises(Rejected) as caught:
            await client.health("lunch")
        assert "'lunch' is not known here; known are '', 'liveness'" in str(caught.value)
        assert caught.value.code is grpc.StatusCode.NOT_FOUND


def asked_for(name: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=name)


async def test_who_watches_is_told_of_each_change():
    health = Health()
    async with connected(health) as (_, stub):
        watch = stub.Watch(asked_for("readiness"))
        assert (await watch.read()).status == Status.NOT_SERVING
        health.set_ready(True)
        assert (await watch.read()).status == Status.SERVING
        health.set_ready(True)  # no change
        health.set_ready(False)
        assert (await watch.read()).status == Status.NOT_SERVING
        watch.cancel()


async def test_a_watch_of_an_unknown_service_says_so_and_goes_on():
    health = Health()
    async with connected(health) as (_, stub):
        watch = stub.Watch(asked_for("lunch"))
        assert (await watch.read()).status == Status.SERVICE_UNKNOWN
        health.set_ready(True)
        assert (await stub.Check(asked_for("readiness"))).status == Status.SERVING
        assert not watch.done()
        watch.cancel()


async def test_all_names_are_listed_with_their_status():
    async with connected(Health()) as (_, stub):
        statuses = (await stub.List(health_pb2.HealthListRequest())).statuses
        assert {name: status.status for name, status in statuses.items()} == {
            "liveness": Status.SERVING,
            **dict.fromkeys(READY_NAMES, Status.NOT_SERVING),
        }


async def test_a_watcher_that_reads_nothing_holds_up_nobody():
    """Its write never ends: with one lock for writes and changes, no status could change."""
    servicer = HealthServicer()
    servicer.set("", True)
    stuck = StuckContext()
    watching = asyncio.create_task(servicer.Watch(asked_for(""), stuck))  # type: ignore[arg-type]
    await stuck.is_writing.wait()

    servicer.set("", False)

    answer = await servicer.Check(asked_for(""), StuckContext())  # type: ignore[arg-type]
    assert answer.status == Status.NOT_SERVING
    watching.cancel()


class StuckContext:
    """Of a client that takes no byte."""

    def __init__(self) -> None:
        self.is_writing = asyncio.Event()

    async def write(self, message: Any) -> None:
        self.is_writing.set()
        await asyncio.Event().wait()
