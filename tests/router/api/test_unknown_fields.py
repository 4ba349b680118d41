"""A newer caller's field that were ignored would make another answer than it asked for."""

from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import code_pb2
from smg_grpc_proto.generated import vllm_engine_pb2

from protos.serving.v1 import serving_pb2 as pb
from protos.transport.error_details import error_details
from router.api.unknown_fields import MAX_REPEATED, refuse_unknown_fields
from router.errors import InvalidRequest
from tests.router.support import calls, vllm_calls
from tests.router.support.calls import failure, prompt
from tests.router.support.fake_engines import FakeEngines

UNKNOWN = b"\xc0\x0c\x01"  # field 200, a varint
PARTS = [field.name for field in pb.GenerateRequest.DESCRIPTOR.fields if field.message_type]


def newer(message: Any, *path: str) -> Any:
    """Returns the message with a field 200 in one of its parts."""
    part = message
    for name in path:
        part = getattr(part, name)
    part.SetInParent()
    part.MergeFromString(UNKNOWN)
    return message


@pytest.mark.parametrize("part", [None, *PARTS])
def test_a_field_of_any_part_of_a_request_is_named(part: str | None):
    known = prompt()
    refuse_unknown_fields(known)
    assert known == prompt()  # looking at parts that are not there makes none
    path = [] if part is None else [part]
    with pytest.raises(InvalidRequest, match=r"knows no field 200 of .*built from other") as caught:
        refuse_unknown_fields(newer(prompt(), *path))
    assert caught.value.field == ".".join([*path, "200"])


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (newer(pb.GenerateManyRequest(), "start", "sampling"), "start.sampling.200"),
        (pb.GetStatusResponse(groups=[{}, newer(pb.GroupStatus())]), "groups[1].200"),
    ],
)
def test_parts_of_parts_are_looked_at_where_there_are_any(message: Message, field: str):
    with pytest.raises(InvalidRequest) as caught:
        refuse_unknown_fields(message)
    assert caught.value.field == field


def test_messages_in_lists_are_bounded_since_the_loop_looks_at_each():
    """Else one call of a megabyte of empty ones stops a router for more than a second."""
    chat = pb.Chat(messages=[pb.ChatMessage(role="user")] * (MAX_REPEATED - 1))
    request = pb.TokenizeRequest(chat=chat)
    request.chat.messages[7].tool_calls.add()
    refuse_unknown_fields(request)
    request.chat.messages[7].tool_calls.add()
    with pytest.raises(InvalidRequest, match=f"send at most {MAX_REPEATED}") as caught:
        refuse_unknown_fields(request)
    assert caught.value.field == "chat.messages"


@pytest.mark.parametrize(
    ("method", "request_type"),
    [
        ("Generate", pb.GenerateRequest),
        ("Complete", pb.GenerateRequest),
        ("Tokenize", pb.TokenizeRequest),
        ("CountTokens", pb.CountTokensRequest),
        ("Detokenize", pb.DetokenizeRequest),
        ("Cancel", pb.CancelRequest),
        ("GetModel", pb.GetModelRequest),
        ("GetStatus", pb.GetStatusRequest),
    ],
)
async def test_every_method_refuses_it(method: str, request_type: Any):
    engines = FakeEngines()
    async with calls.connected(engines) as stub:
        error = await failure(getattr(stub, method)(newer(request_type())))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    details = error_details(error)
    assert (details.reason, details.field) == ("INVALID_REQUEST", "200")
    assert +engines.measures.refused == {"INVALID_REQUEST": 1}


async def test_on_a_stream_a_requests_field_is_told_under_its_tag_and_the_streams_own_ends_it():
    engines = FakeEngines()
    async with calls.connected(engines) as stub:
        call = stub.GenerateMany()
        await call.write(pb.GenerateManyRequest(tag=7, start=newer(prompt(n=65), "sampling")))
        [error] = (await call.read()).errors
        assert (error.tag, error.code) == (7, code_pb2.INVALID_ARGUMENT)
        assert error.field == "sampling.200"
        await call.write(newer(pb.GenerateManyRequest(tag=8, cancel=pb.CancelTag())))
        assert error_details(await failure(call)).field == "200"
    assert +engines.measures.refused == {"INVALID_REQUEST": 2}


@pytest.mark.parametrize("path", [(), ("sampling_params",), ("kv_transfer_params",)])
async def test_a_gateways_field_is_refused_too(path: tuple[str, ...]):
    message = newer(vllm_calls.generate(n=65), *path)  # refused for that if not for the field
    async with vllm_calls.connected(FakeEngines()) as stub:
        error = await failure(stub.Generate(message))
    assert error_details(error).field == ".".join([*path, "200"])


async def test_every_method_of_gateways_refuses_it():
    engines = FakeEngines()
    [service] = vllm_engine_pb2.DESCRIPTOR.services_by_name.values()
    async with vllm_calls.connected(engines) as stub:
        for method in service.methods:
            message = newer(GetMessageClass(method.input_type)())
            error = await failure(getattr(stub, method.name)(message))
            assert error_details(error).field == "200", method.name
    assert +engines.measures.refused == {"INVALID_REQUEST": len(service.methods)}
