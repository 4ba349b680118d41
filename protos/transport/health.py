"""Health service (grpc.health.v1) of both services, for probes, load balancers and clients.

grpcio's own servicer holds a lock while it writes to a watcher, and takes the same lock to change
a status: one watcher that stops reading would hold up every change, a shutdown's included. Here a
change is a dictionary entry and an event, and no watcher can hold up another.
"""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.transport.errors import quoted

Status = health_pb2.HealthCheckResponse
Context = grpc.aio.ServicerContext[Any, Any]

SERVICE_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Status of each name that was set.

    For any other name, Check fails with NOT_FOUND, and Watch answers SERVICE_UNKNOWN and goes on,
    as the protocol wants it.
    """

    def __init__(self) -> None:
        self._is_serving: dict[str, bool] = {}
        self._change = asyncio.Event()  # of any name; replaced after each

    def set(self, name: str, is_serving: bool) -> None:
        """Sets a name's status; each Watch of it gets the change."""
        self._is_serving[name] = is_serving
        self._change.set()
        self._change = asyncio.Event()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._is_serving:
            known = ", ".join(repr(name) for name in sorted(self._is_serving))
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"service: {quoted(request.service)} is not known here; known are {known}",
            )
        return self._response(request.service)

    async def List(self, request: Any, context: Context) -> Any:
        messages: Any = health_pb2  # its type stubs are older than List
        statuses = {name: self._response(name) for name in self._is_serving}
        return messages.HealthListResponse(statuses=statuses)

    # A coroutine that writes: a generator that was abandoned would wait here until collected.
    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        sent = None
        while True:
            change = self._change
            response = self._response(request.service)
            if response.status != sent:
                sent = response.status
                await context.write(response)
            await change.wait()

    def _response(self, name: str) -> health_pb2.HealthCheckResponse:
        is_serving = self._is_serving.get(name)
        if is_serving is None:
            return Status(status=Status.SERVICE_UNKNOWN)
        return Status(status=Status.SERVING if is_serving else Status.NOT_SERVING)
