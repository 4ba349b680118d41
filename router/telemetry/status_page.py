"""Status page of a router, for browsers: GetStatus' answer as JSON, and a page that draws it."""

from importlib.resources import files

from google.protobuf.json_format import MessageToJson

from protos.serving.v1 import serving_pb2 as pb
from protos.telemetry.scrapes import Page
from router.engine.engines import Engines
from router.engine.status import hide_from_callers
from router.telemetry.prometheus import on_loop

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


def status_pages(engines: Engines, version: str, *, tells_operators: bool) -> dict[str, Page]:
    """Returns the pages of a router on the running loop, by path.

    Args:
        engines: The router's.
        version: Of the router.
        tells_operators: Whether they have what concerns operators only.
    """

    def overview() -> pb.GetStatusResponse:
        status = engines.overview(version)
        if not tells_operators:
            hide_from_callers(status)
        return status

    ask = on_loop(overview)

    def status_json() -> bytes:
        return MessageToJson(
            ask(),
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
            indent=None,
        ).encode()

    return {
        "/": _file("index.html"),
        "/status.css": _file("status.css"),
        "/status.js": _file("status.js"),
        "/status.json": Page("application/json", status_json),
    }


def _file(name: str) -> Page:
    text = files("router.telemetry").joinpath("page", name).read_bytes()
    return Page(f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8", lambda: text)
