"""Tools such as grpcurl know a service by its reflection only."""

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2 as pb

from protos.serving.v1 import serving_pb2
from protos.transport.reflection import enable_reflection

SERVICE = serving_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_both_versions_list_the_services_and_describe_them(version: str):
    server = grpc.aio.server()
    enable_reflection(server, [SERVICE])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=pb.ServerReflectionRequest.SerializeToString,
            response_deserializer=pb.ServerReflectionResponse.FromString,
        )
        questions = [{"list_services": ""}, {"file_containing_symbol": SERVICE}]
        call = ask(iter([pb.ServerReflectionRequest(**each) for each in questions]))
        listed, described = [answer async for answer in call]
    await server.stop(None)
    names = [service.name for service in listed.list_services_response.service]
    assert set(names) == {SERVICE, "grpc.reflection.v1alpha.ServerReflection"}
    assert b"GenerationService" in described.file_descriptor_response.file_descriptor_proto[0]
