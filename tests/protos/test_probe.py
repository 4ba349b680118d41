"""A probe that cannot tell a dead program from a live one restarts neither."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc

from protos.transport.health import HealthServicer
from protos.transport.probe import is_serving


@pytest.mark.parametrize(
    ("service", "answer"), [("", True), ("readiness", False), ("not known", False)]
)
async def test_it_asks_for_the_name_that_it_is_given(service: str, answer: bool):
    health = HealthServicer()
    health.set("", True)
    health.set("readiness", False)
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    assert await asyncio.to_thread(is_serving, f"127.0.0.1:{port}", service) is answer
    await server.stop(None)


def test_nobody_is_not_serving():
    assert not is_serving("127.0.0.1:1")
