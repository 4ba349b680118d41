"""Details of a failed call, as its caller reads them.

Read without the package googleapis-common-protos, which clients need not have: well-known types of
protobuf have the same fields on the wire.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

# Numbers of google.rpc's fields.
STATUS_DETAILS = 3
REASON, METADATA = 1, 3  # of ErrorInfo
FIELD_VIOLATIONS = FIELD = 1
RETRY_DELAY = REQUEST_ID = 1
KEY, VALUE = 1, 2  # of an entry of a map

_LENGTH_DELIMITED = 2


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """Details of an error. Empty where the status had none."""

    reason: str = ""
    field: str = ""
    retry_delay_s: float | None = None
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    request_id: str = ""


def error_details(error: grpc.aio.AioRpcError) -> ErrorDetails:
    """Reads the google.rpc details of a failed call."""
    found: dict[str, Any] = {}
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            for detail in _fields(value)[STATUS_DETAILS]:
                found |= _read(AnyMessage.FromString(detail))
    return ErrorDetails(**found)


def _read(detail: AnyMessage) -> dict[str, Any]:
    fields = _fields(detail.value)
    match detail.TypeName():
        case "google.rpc.ErrorInfo":
            entries = [_fields(entry) for entry in fields[METADATA]]
            metadata = {_text(entry[KEY]): _text(entry[VALUE]) for entry in entries}
            return {"reason": _text(fields[REASON]), "metadata": metadata}
        case "google.rpc.BadRequest" if fields[FIELD_VIOLATIONS]:
            return {"field": _text(_fields(fields[FIELD_VIOLATIONS][0])[FIELD])}
        case "google.rpc.RetryInfo" if fields[RETRY_DELAY]:
            delay = Duration.FromString(fields[RETRY_DELAY][0])
            return {"retry_delay_s": delay.ToNanoseconds() / 1e9}
        case "google.rpc.RequestInfo":
            return {"request_id": _text(fields[REQUEST_ID])}
    return {}


def _fields(data: bytes) -> defaultdict[int, list[bytes]]:
    """Returns the strings and messages of a message, by number."""
    found: defaultdict[int, list[bytes]] = defaultdict(list)
    unknown: Any = UnknownFieldSet(Empty.FromString(data))
    for field in unknown:
        if field.wire_type == _LENGTH_DELIMITED:
            found[field.field_number].append(field.data)
    return found


def _text(values: list[bytes]) -> str:
    return values[-1].decode() if values else ""
