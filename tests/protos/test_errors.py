"""Errors on the wire: a client matches on reason, domain and metadata, never on words."""

from typing import Any

import pytest
from google.rpc import error_details_pb2 as pb
from google.rpc import status_pb2
from grpc import StatusCode

from protos.transport.errors import Resource, RpcError


class NotThere(RpcError):
    code, reason = StatusCode.NOT_FOUND, "NOT_THERE"


def details(error: RpcError, request_id: str = "") -> dict[str, Any]:
    """Returns the details that end a call, by the name of their type."""
    [(_, packed)] = error.trailing_metadata(request_id)
    return {
        any_.TypeName().rpartition(".")[2]: getattr(
            pb, any_.TypeName().rpartition(".")[2]
        ).FromString(any_.value)
        for any_ in status_pb2.Status.FromString(packed).details
    }


def test_an_error_has_the_details_of_aip_193():
    error = NotThere(
        "size: 7 is too large",
        field="size",
        retry_delay_s=1.5,
        metadata={"value": 7, "limit": 6},
        resource=Resource("Model", "m" * 1000),
    )
    assert details(error, "mine") == {
        "ErrorInfo": pb.ErrorInfo(
            reason="NOT_THERE", domain="lockstep.internal", metadata={"value": "7", "limit": "6"}
        ),
        "BadRequest": pb.BadRequest(
            field_violations=[{"field": "size", "description": "7 is too large"}]
        ),
        "RetryInfo": pb.RetryInfo(retry_delay={"seconds": 1, "nanos": 500_000_000}),
        "ResourceInfo": pb.ResourceInfo(
            resource_type="lockstep.internal/Model", resource_name="m" * 64
        ),
        "RequestInfo": pb.RequestInfo(request_id="mine"),
    }


@pytest.mark.parametrize("message", ["not here", "\N{ROCKET}" * 1000])
def test_what_does_not_apply_is_left_out(message: str):
    assert list(details(NotThere(message))) == ["ErrorInfo"]
