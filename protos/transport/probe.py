"""Probe of a port's health, for what starts programs and cannot ask grpc.health.v1 by itself.

    python -m protos.transport.probe 127.0.0.1:50051 [readiness]

Exit code 0: it is SERVING. 1: it is not, or does not answer within 5 s.
"""

import sys

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

CHECK = "/grpc.health.v1.Health/Check"
SERVING = 1  # of grpc.health.v1
TIMEOUT_S = 5.0


def is_serving(address: str, service: str = "") -> bool:
    """Returns whether a service, "" for all of the port, is SERVING at a port without TLS."""
    with grpc.insecure_channel(address) as channel:
        # Its messages have one field each, as these have.
        check = channel.unary_unary(
            CHECK,
            request_serializer=StringValue.SerializeToString,
            response_deserializer=Int32Value.FromString,
        )
        try:
            status: Int32Value = check(StringValue(value=service), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return False
    return status.value == SERVING


if __name__ == "__main__":
    sys.exit(not is_serving(*sys.argv[1:]))
