"""Health of this router for load balancers and Kubernetes, and reflection for tools."""

from grpc.aio import Server
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos.serving.v1 import serving_pb2
from protos.transport.health import SERVICE_NAME, HealthServicer

SERVICE = serving_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
LIVENESS = "liveness"
READINESS = "readiness"

_READY_NAMES = ("", SERVICE, READINESS)  # "" is what asks who knows no names


class Health:
    """Says whether this router should get requests, and whether it should be killed.

    It is alive from the start, and as long as its event loop turns, since the answer comes from
    there: an executor's loss or a drain is no reason to restart it. It is ready while the owner
    says so.

    Attributes:
        is_ready: What the owner said last.
    """

    is_ready: bool

    def __init__(self) -> None:
        self._servicer = HealthServicer()
        self._servicer.set(LIVENESS, True)
        self.set_ready(False)

    def add_to(self, server: Server) -> None:
        """Adds the service to a server that has not started."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def set_ready(self, is_ready: bool) -> None:
        """Tells everyone who asks or watches."""
        self.is_ready = is_ready
        for name in _READY_NAMES:
            self._servicer.set(name, is_ready)


def enable_reflection(server: Server, *services: str) -> None:
    """Lets tools such as grpcurl list the API. Call it before the server starts.

    Args:
        services: Full names of services beside ours and the health service.
    """
    names = (SERVICE, SERVICE_NAME, reflection.SERVICE_NAME, *services)
    reflection.enable_server_reflection(names, server)
