"""OpenTelemetry traces: one span for each request that was taken, made when it has ended.

What a span tells (when the request waited, was prefilled and decoded) is noted anyway, so a running
request costs nothing here. The trace that a caller began is continued: its `traceparent` comes
with the call's metadata, and holds for every request of a GenerateMany stream.

Needs the packages of `pip install '.[tracing]'`: import this file only where traces are
wanted.
"""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.requests.request import Request, Sequence

CLOSE_S = 2.0  # for the last spans, when the router stops

_CARRIED = ("traceparent", "tracestate")
_carrier: ContextVar[dict[str, str] | None] = ContextVar("carrier", default=None)
_propagator = TraceContextTextMapPropagator()


class CarrierInterceptor(grpc.aio.ServerInterceptor):
    """Keeps what a call's metadata says of its trace, for the requests of the call."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        metadata = handler_call_details.invocation_metadata or ()
        carrier = {key: str(value) for key, value in metadata if key in _CARRIED}
        _carrier.set(carrier or None)  # a call is a task of its own, handler included
        return await continuation(handler_call_details)


class Tracing:
    """Makes spans of requests. Implements engines.Observer.

    Args:
        provider: Where spans go.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("lockstep.router")
        self._parents: dict[Request, Context | None] = {}

    def on_submit(self, request: Request) -> None:
        """A request was taken, by the call whose task this runs in."""
        carrier = _carrier.get()
        self._parents[request] = _propagator.extract(carrier) if carrier else None

    def on_end(self, request: Request) -> None:
        """Its last sequence has ended."""
        loop_time = asyncio.get_running_loop().time()
        epoch_ns = time.time_ns() - round(loop_time * 1e9)  # where the loop's clock began

        def wall_ns(seconds: float) -> int:
            return epoch_ns + round(seconds * 1e9)

        span = self._tracer.start_span(
            "lockstep.generate",
            context=self._parents.pop(request, None) or Context(),
            kind=SpanKind.SERVER,
            attributes=_attributes(request),
            start_time=wall_ns(request.arrival_time),
        )
        for sequence in request.sequences:
            _add_events(span, sequence, wall_ns)
        if request.attempt:
            resumed = {
                "lockstep.attempt": request.attempt,
                "lockstep.resumed_tokens": _resumed(request),
            }
            span.add_event("resume", resumed, wall_ns(request.arrival_time))
        errors = [sequence.error for sequence in request.sequences if sequence.error is not None]
        if errors:
            span.set_status(Status(StatusCode.ERROR, str(errors[0])))
            span.set_attribute("error.type", errors[0].reason)
        ends = [s.progress.end_time for s in request.sequences if s.progress.end_time is not None]
        span.end(wall_ns(max(ends)))

    def close(self) -> None:
        """Sends what has not been sent, but does not wait long for a collector that is gone."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)


def start_tracing(endpoint: str) -> Tracing:
    """Returns tracing that sends to an OTLP collector over gRPC.

    The SDK reads the other OTEL_* variables: headers, certificates, resource, sampler, batches.

    Args:
        endpoint: "http://host:4317", or https for TLS.
    """
    attributes = {} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: "lockstep-router"}
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider)


def _attributes(request: Request) -> dict[str, Any]:
    """Returns what is known of a request, by OpenTelemetry's names where it has some."""
    sequences = request.sequences
    return {
        "lockstep.request_id": request.request_id,
        "lockstep.caller": request.caller,
        "lockstep.priority": request.priority,
        "lockstep.group": sequences[0].group,
        "lockstep.dp_rank": sequences[0].dp_rank,
        "lockstep.cached_tokens": sum(s.progress.num_cached_tokens for s in sequences),
        "lockstep.preemptions": sum(s.progress.num_preemptions for s in sequences),
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.max_tokens": request.stop.max_tokens,
        "gen_ai.request.choice.count": len(sequences),
        "gen_ai.usage.input_tokens": len(request.prompt),
        "gen_ai.usage.output_tokens": sum(s.num_output_tokens for s in sequences),
        "gen_ai.response.finish_reasons": [
            s.finish_reason.name.lower() if s.finish_reason is not None else "error"
            for s in sequences
        ],
    }


def _resumed(request: Request) -> int:
    """Returns the output tokens that it came with."""
    return sum(sequence.num_resumed for sequence in request.sequences)


def _add_events(span: Span, sequence: Sequence, wall_ns: Callable[[float], int]) -> None:
    """Says when a continuation began to wait, to be prefilled, and to be decoded."""
    progress = sequence.progress
    times = {
        "queue": sequence.request.arrival_time,
        "prefill": progress.start_time,
        "decode": progress.first_token_time,
    }
    for name, seconds in times.items():
        if seconds is not None:
            span.add_event(name, {"lockstep.index": sequence.index}, wall_ns(seconds))
