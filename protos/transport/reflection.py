"""Reflection (grpc.reflection v1 and v1alpha) of both services, for tools such as grpcurl."""

from collections.abc import Sequence

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1 = "grpc.reflection.v1.ServerReflection"


def enable_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Lets tools list services and read their messages. Call it before the server starts.

    grpcio-reflection has v1alpha only; v1 is the same messages under another name.

    Args:
        services: Their full names.
    """
    names = (*services, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    servicer = reflection.aio.ReflectionServicer(service_names=names)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": method}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(V1, handlers),))
