"""Probes and load balancers act on these answers: a wrong one kills or starves a router."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from router.client import Client, Rejected
from router.health import SERVICE, Health, enable_reflection
from tests.router.fake_cell import FakeCell, serve

READY_NAMES = ["", "lockstep.serving.v1.GenerationService", "readiness"]


@asynccontextmanager
async def connected(health: Health) -> AsyncIterator[Client]:
    async with serve(FakeCell(), health=health) as target, Client(target) as client:
        yield client


async def test_a_new_router_is_alive_but_not_ready():
    async with connected(Health()) as client:
        assert await client.health("liveness")
        assert [await client.health(name) for name in READY_NAMES] == [False] * 3


async def test_ready_comes_and_goes_while_liveness_stays():
    health = Health()
    async with connected(health) as client:
        for is_ready in (True, False, True):
            await health.set_ready(is_ready)
            assert [await client.health(name) for name in READY_NAMES] == [is_ready] * 3
            assert await client.health("liveness")


async def test_a_service_that_nobody_knows_is_not_found():
    async with connected(Health()) as client:
        with pytest.raises(Rejected) as caught:
            await client.health("lunch")
        assert caught.value.code is grpc.StatusCode.NOT_FOUND


async def test_who_watches_is_told_of_each_change():
    health = Health()
    async with (
        serve(FakeCell(), health=health) as target,
        grpc.aio.insecure_channel(target) as channel,
    ):
        request = health_pb2.HealthCheckRequest(service="readiness")
        watch = health_pb2_grpc.HealthStub(channel).Watch(request)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await health.set_ready(True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


async def test_reflection_lists_the_api():
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    enable_reflection(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        await call.done_writing()
        names = [service.name for service in answer.list_services_response.service]
        assert SERVICE == "lockstep.serving.v1.GenerationService"
        assert {SERVICE, "grpc.health.v1.Health"} <= set(names)
    await server.stop(grace=None)
