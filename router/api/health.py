"""Health of this router for load balancers and Kubernetes."""

from grpc.aio import Server
from grpc_health.v1 import health_pb2_grpc

from protos.serving.v1 import serving_pb2
from protos.transport.health import HealthServicer

SERVICE = serving_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
LIVENESS = "liveness"
READINESS = "readiness"


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
        self._ready_names = ["", SERVICE, READINESS]  # "" is what asks who knows no names
        self.set_ready(False)

    def add_to(self, server: Server) -> None:
        """Adds the service to a server that has not started."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def add_name(self, service: str) -> None:
        """Answers for one more service of this router."""
        self._ready_names.append(service)
        self._servicer.set(service, self.is_ready)

    def set_ready(self, is_ready: bool) -> None:
        """Tells everyone who asks or watches."""
        self.is_ready = is_ready
        for name in self._ready_names:
            self._servicer.set(name, is_ready)
