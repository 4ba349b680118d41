"""Endpoint picker: it reads what endpoints say of their load, and tells Envoy where a call goes.

It does what the Gateway API's inference extension asks of one (endpoint picker protocol 1.0): Envoy
streams each call to it, it answers with the header `x-gateway-destination-endpoint` and the same as
metadata, or 503. It goes by the metrics of that extension's model server protocol.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.struct_pb2 import Struct
from smg_grpc_proto.generated import vllm_engine_pb2

from tests.support.scraping import scrape

pb, pb_grpc = grpc.protos_and_services("tests/e2e/support/ext_proc.proto")

DESTINATION, NAMESPACE = "x-gateway-destination-endpoint", "envoy.lb"
GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
FRAME_BYTES = 5  # before a message of a gRPC call


class Picker(pb_grpc.ExternalProcessorServicer):  # type: ignore[misc]
    """Picks the endpoint with the fewest requests.

    Args:
        endpoints: Each one, and the address of its metrics.

    Attributes:
        picks: Prompt of each Generate call, and where it was sent.
    """

    def __init__(self, endpoints: Mapping[str, str]) -> None:
        self.endpoints = dict(endpoints)
        self.picks: list[tuple[list[int], str]] = []

    async def Process(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        path, body = "", b""
        async for request in requests:
            kind = request.WhichOneof("request")
            if kind == "request_headers":
                path = value_of(":path", request.request_headers.headers)
            elif kind == "request_trailers":
                yield pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
            elif kind == "request_body":
                body += request.request_body.body
                if request.request_body.end_of_stream:
                    for response in await self._answers(path, body):
                        yield response

    async def _answers(self, path: str, body: bytes) -> list[Any]:
        endpoint = await self._least_loaded()
        if endpoint is None:
            refusal = pb.ImmediateResponse(status=pb.HttpStatus(code=503))
            return [pb.ProcessingResponse(immediate_response=refusal)]
        if path == GENERATE:
            message = vllm_engine_pb2.GenerateRequest.FromString(body[FRAME_BYTES:])
            self.picks.append(([*message.tokenized.input_ids], endpoint))
        value = pb.HeaderValue(key=DESTINATION, raw_value=endpoint.encode())
        headers = pb.HeadersResponse()
        headers.response.header_mutation.set_headers.add(header=value)
        metadata = Struct()
        metadata.update({NAMESPACE: {DESTINATION: endpoint}})
        whole = pb.BodyResponse()
        streamed = whole.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = body, True
        return [
            pb.ProcessingResponse(request_headers=headers, dynamic_metadata=metadata),
            pb.ProcessingResponse(request_body=whole),
        ]

    async def _least_loaded(self) -> str | None:
        loads = {endpoint: await load_at(address) for endpoint, address in self.endpoints.items()}
        return min(loads, key=loads.__getitem__, default=None)


async def load_at(address: str) -> tuple[float, float, float]:
    """Returns what a model server says of itself: queued, running, and the use of its KV cache."""
    samples = await scrape(address)
    queued, running, usage = (
        samples[f"vllm:{name}"][()]
        for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
    )
    return queued, running, usage


def value_of(key: str, headers: Any) -> str:
    [value] = [h.raw_value.decode() or h.value for h in headers.headers if h.key == key]
    return value


@asynccontextmanager
async def picking(picker: Picker) -> AsyncIterator[str]:
    """Yields the address of a picker."""
    server = grpc.aio.server()
    pb_grpc.add_ExternalProcessorServicer_to_server(picker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
