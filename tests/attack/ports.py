"""Probe of every port of a stack, by a stranger without credentials."""

import contextlib
import socket
from collections.abc import Iterator

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from protos.executor.v1 import executor_pb2
from protos.serving.v1 import serving_pb2
from tests.attack.frames import STRANGER
from tests.attack.target import CHECK, WATCH, Outcome, Target

SERVICES: tuple[ServiceDescriptor, ...] = (
    *serving_pb2.DESCRIPTOR.services_by_name.values(),
    *executor_pb2.DESCRIPTOR.services_by_name.values(),
)
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
LIST = "/grpc.health.v1.Health/List"
METHODS = (
    *(f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods),
    *("/vllm.grpc.engine.VllmEngine/GetModelInfo", REFLECTION, CHECK, WATCH, LIST),
)
HEALTH = {CHECK, WATCH, LIST}
TIMEOUT_S = 0.5
TOLD = {"OK", "DEADLINE_EXCEEDED"}  # answered, or let in to wait for an answer


def every_port(target: Target) -> Outcome:
    """Everything that a stranger may ask, of each port that the stack listens on."""
    details, faults, num_asked = [], [], 0
    named = [("public", target.public), ("health", target.health)]
    named += [(f"executor {number}", a) for number, a in enumerate(target.executors)]
    for name, address in named:
        outcomes = {method: _called(address, method) for method in METHODS}
        num_asked += len(outcomes)
        told = {method for method, outcome in outcomes.items() if outcome in TOLD}
        codes = sorted({outcomes[method] for method in outcomes.keys() - told})
        learnt = ", ".join(sorted(method.rpartition("/")[2] for method in told)) or "nothing"
        details.append(f"{name}: answers {learnt}; to the rest {', '.join(codes)}")
        if told - HEALTH:
            faults.append(f"{name} tells {learnt}")
    pages = [("metrics", target.metrics, "/metrics")]
    if target.envoy_metrics is not None:
        pages.append(("Envoy's metrics", target.envoy_metrics, "/stats/prometheus"))
    for name, address, path in pages:
        status, num_names = _scraped(address, path)
        details.append(f"{name}: {status}, {num_names} names")
        if num_names:
            faults.append(f"{name} tells {num_names} names, counts and times")
    for host, port in target.inner_ports():
        answer = _said(host, port)
        details.append(f"among executors, {host}: {answer}")
        num_asked += 1
    return Outcome(f"{num_asked} calls to {len(details)} ports", "; ".join(faults), tuple(details))


def _called(address: str, method: str) -> str:
    """Makes a call with an empty message. Returns its code; OK once it is answered at all."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options) as channel:
        call = channel.stream_stream(method)(iter([b""]), timeout=TIMEOUT_S)
        try:
            next(call)
        except StopIteration:
            return "OK"
        except grpc.RpcError as error:
            return str(error.code().name)
        call.cancel()
        return "OK"


def _scraped(address: str, path: str) -> tuple[str, int]:
    """Returns the answer's first line, and how many metrics are in it."""
    host, _, port = address.rpartition(":")
    page = bytearray()
    with _connected(host, int(port)) as connection:
        connection.sendall(
            f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
        )
        with contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                page += data
    status, *lines = page.decode().splitlines() or ["no answer"]
    return status, sum(line.startswith("# TYPE") for line in lines)


def _said(host: str, port: int) -> str:
    try:
        with _connected(host, port) as connection:
            connection.sendall(b"\0" * 64)
            answer = connection.recv(64)
    except OSError as error:
        return f"says nothing ({type(error).__name__})"
    return f"says {answer.hex()}" if answer else "ends the connection"


@contextlib.contextmanager
def _connected(host: str, port: int) -> Iterator[socket.socket]:
    with socket.create_connection((host, port), TIMEOUT_S, (STRANGER, 0)) as connection:
        yield connection
