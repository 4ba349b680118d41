"""Errors on the wire.

Either side raises an RpcError, and `abort_on_error` turns it into a status with google.rpc details,
which `error_details.py` reads on the other end.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "lockstep.internal"  # of ErrorInfo; no name on the Internet ends so

# gRPC's clients take 8 KiB of metadata, and a message is there up to three times: as it is, which
# may take three bytes for one, and twice among the details.
MAX_MESSAGE_BYTES = 1000
MAX_QUOTED_LEN = 64

OnRefused = Callable[[str], None]  # is called with the reason of each call that is refused


class Resource(NamedTuple):
    """Kind and name of something that a call named."""

    kind: str
    name: str


class RpcError(Exception):
    """An error that the caller should see, with the status and reason it arrives with.

    Any other exception that leaves a handler is a bug and arrives as UNKNOWN.

    Attributes:
        code: gRPC status code.
        reason: UPPER_SNAKE_CASE constant that callers may match on; never reworded.
        field: Path of the request's field at fault, if one is.
        retry_delay_s: When to try again, if that can help; a class may have a default.
        metadata: Parts of the message for programs, such as the `value` given and the `limit`.
        resource: What the call named and is not there, if that is the error.
    """

    code: ClassVar[grpc.StatusCode]
    reason: ClassVar[str]
    retry_delay_s: float | None = None

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        retry_delay_s: float | None = None,
        metadata: Mapping[str, object] | None = None,
        resource: Resource | None = None,
    ) -> None:
        super().__init__(shorten(message))
        self.field = field
        if retry_delay_s is not None:
            self.retry_delay_s = retry_delay_s
        self.metadata = {name: str(value) for name, value in (metadata or {}).items()}
        self.resource = resource

    def trailing_metadata(self, request_id: str = "") -> Any:
        """Metadata that end a call: ErrorInfo, then the other details that apply.

        Args:
            request_id: Of the request that failed; empty if the call had none.
        """
        return _to_metadata(
            self.code,
            self.reason,
            str(self),
            self.field,
            self.retry_delay_s,
            tuple(self.metadata.items()),
            self.resource,
            request_id,
        )


@lru_cache(maxsize=64)  # thousands of calls a second may be refused in the same words
def _to_metadata(
    code: grpc.StatusCode,
    reason: str,
    message: str,
    field: str | None,
    retry_delay_s: float | None,
    metadata: tuple[tuple[str, str], ...],
    resource: Resource | None,
    request_id: str,
) -> Any:
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=dict(metadata))
    details: list[Message] = [info]
    if field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=field, description=message.removeprefix(f"{field}: ")
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if retry_delay_s is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=duration(retry_delay_s)))
    if resource is not None:
        kind, name = f"{DOMAIN}/{resource.kind}", resource.name[:MAX_QUOTED_LEN]
        details.append(error_details_pb2.ResourceInfo(resource_type=kind, resource_name=name))
    if request_id:
        details.append(error_details_pb2.RequestInfo(request_id=request_id))
    status = status_pb2.Status(
        code=code_pb2.Code.Value(code.name),
        message=message,
        details=[_pack(detail) for detail in details],
    )
    return rpc_status.to_status(status).trailing_metadata


def duration(seconds: float) -> Duration:
    """Returns seconds as a message, to the nanosecond."""
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def quoted(text: str) -> str:
    """Returns a caller's text as it can stand in a message: in quotes, and not too long."""
    if len(text) <= MAX_QUOTED_LEN:
        return repr(text)
    return f"{text[:MAX_QUOTED_LEN]!r}... ({len(text)} characters)"


def shorten(message: str) -> str:
    """Returns a message, or its beginning if it is long."""
    data = message.encode(errors="replace")
    if len(data) <= MAX_MESSAGE_BYTES:
        return message
    return f"{data[:MAX_MESSAGE_BYTES].decode(errors='ignore')}... ({len(message)} characters)"


@asynccontextmanager
async def abort_on_error(
    context: grpc.aio.ServicerContext[Any, Any], request_id: str = ""
) -> AsyncIterator[None]:
    """Ends the RPC with an RpcError's status, message and details, and the id of its request."""
    try:
        yield
    except RpcError as error:
        await context.abort(error.code, str(error), error.trailing_metadata(request_id))


def refuse(context: grpc.aio.ServicerContext[Any, Any], error: RpcError) -> None:
    """Sets the status of an RPC whose handler returns next. Cheaper than to raise; streams only."""
    context.set_code(error.code)
    context.set_details(str(error))
    context.set_trailing_metadata(error.trailing_metadata())


def _pack(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
