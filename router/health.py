"""grpc.health.v1 and server reflection: what load balancers, probes and grpcurl ask."""

from grpc.aio import Server
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos.serving.v1 import serving_pb2

SERVICE = serving_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
LIVENESS = "liveness"
READINESS = "readiness"

_READY_NAMES = ("", SERVICE, READINESS)  # "" is what asks who knows no names


class Health:
    """Says whether this router should get requests, and whether it should be killed.

    It is alive from the start: an executor's loss is no reason to restart the router. It is ready
    while the owner says so.
    """

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()

    async def start(self, server: Server) -> None:
        """Adds the service to a server that has not started: alive, and not ready yet."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        await self._servicer.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)

    async def set_ready(self, is_ready: bool) -> None:
        """Tells everyone who asks or watches."""
        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        for name in _READY_NAMES:
            await self._servicer.set(name, serving if is_ready else not_serving)


def enable_reflection(server: Server, *services: str) -> None:
    """Lets tools such as grpcurl list the API. Call it before the server starts.

    Args:
        services: Full names of services beside ours and the health service.
    """
    names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME, *services)
    reflection.enable_server_reflection(names, server)
