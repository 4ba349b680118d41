"""How an error crosses the wire.

Either side raises an RpcError; `abort_on_error` turns it into a status with google.rpc details,
and `error_details` reads the details back on the other end.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "lockstep"


class RpcError(Exception):
    """An error that the caller should see, with the status and reason it arrives with.

    Any other exception that leaves a handler is a bug and arrives as UNKNOWN.

    Attributes:
        code: gRPC status code.
        reason: UPPER_SNAKE_CASE constant that callers may match on; never reworded.
        field: Path of the request's field at fault, if one is.
        retry_delay_s: When to try again, if that can help.
    """

    code: ClassVar[grpc.StatusCode]
    reason: ClassVar[str]

    def __init__(
        self, message: str, *, field: str | None = None, retry_delay_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.field = field
        self.retry_delay_s = retry_delay_s

    def to_status(self) -> status_pb2.Status:
        """Returns the google.rpc.Status: ErrorInfo, then BadRequest and RetryInfo if they apply."""
        details: list[Message] = [
            error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN),
        ]
        if self.field is not None:
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=self.field, description=str(self)
            )
            details.append(error_details_pb2.BadRequest(field_violations=[violation]))
        if self.retry_delay_s is not None:
            delay = duration_pb2.Duration()
            delay.FromNanoseconds(int(self.retry_delay_s * 1e9))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        return status_pb2.Status(
            code=code_pb2.Code.Value(self.code.name),
            message=str(self),
            details=[_pack(detail) for detail in details],
        )


@asynccontextmanager
async def abort_on_error(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Ends the RPC with an RpcError's status, message and details."""
    try:
        yield
    except RpcError as error:
        status = rpc_status.to_status(error.to_status())
        await context.abort(error.code, str(error), status.trailing_metadata)


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """What an RpcError said, as the caller reads it. Empty where the status had no details."""

    reason: str = ""
    field: str = ""
    retry_delay_s: float | None = None


def error_details(error: grpc.aio.AioRpcError) -> ErrorDetails:
    """Reads the google.rpc details of a failed call."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            return _read_details(status_pb2.Status.FromString(value))
    return ErrorDetails()


def _read_details(status: status_pb2.Status) -> ErrorDetails:
    reason, field, retry_delay_s = "", "", None
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(bad_request) and bad_request.field_violations:
            field = bad_request.field_violations[0].field
        elif detail.Unpack(retry):
            retry_delay_s = retry.retry_delay.ToNanoseconds() / 1e9
    return ErrorDetails(reason, field, retry_delay_s)


def _pack(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
