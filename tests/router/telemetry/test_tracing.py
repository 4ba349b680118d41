"""A trace that ends at the router's door, or a router that is slow because it traces, is of no use."""

import asyncio
import sys
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from protos.serving.v1 import serving_pb2, serving_pb2_grpc
from router.api.generate import GenerationServicer
from router.engine.engines import Engines
from router.telemetry.tracing import CarrierInterceptor, Tracing, _carrier, start_tracing
from tests.router.support.calls import failure
from tests.router.support.fake_engines import generation, listening
from tests.router.support.running_engines import complete, running

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = ("traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01")


class Traced:
    """A router that traces into memory, and a stub to call it with."""

    def __init__(self, stub: serving_pb2_grpc.GenerationServiceStub, spans: InMemorySpanExporter):
        self.stub = stub
        self._spans = spans

    def take_spans(self) -> dict[str, ReadableSpan]:
        """Returns the spans that have ended, by request id."""
        spans = {s.attributes["lockstep.request_id"]: s for s in self._spans.get_finished_spans()}
        self._spans.clear()
        return spans

    async def complete(self, request_id: str, *metadata: tuple[str, str], **fields: Any) -> None:
        call = self.stub.Generate(message(request_id, **fields), metadata=metadata)
        async for _ in call:
            pass


def message(request_id: str, max_tokens: int = 5, **fields: Any) -> serving_pb2.GenerateRequest:
    return serving_pb2.GenerateRequest(
        request_id=request_id,
        token_ids=serving_pb2.TokenIds(ids=[1, 2, 3]),
        stop=serving_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        **fields,
    )


@pytest.fixture
async def traced() -> AsyncIterator[Traced]:
    spans, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    async with running(dp_size=1, observers=[Tracing(provider)]) as engines:
        service = generation(GenerationServicer(engines, None, "1"))
        async with (
            listening(service, interceptors=[CarrierInterceptor()]) as target,
            grpc.aio.insecure_channel(target) as channel,
        ):
            yield Traced(serving_pb2_grpc.GenerationServiceStub(channel), spans)


async def test_a_request_has_one_span_with_its_times_in_order(traced: Traced):
    await traced.complete("one")
    [span] = traced.take_spans().values()

    assert [event.name for event in span.events] == ["queue", "prefill", "decode"]
    times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
    assert times == sorted(times)
    assert times[-1] > times[0]
    assert span.parent is None
    assert span.kind.name == "SERVER"
    attributes = dict(span.attributes)
    assert attributes["gen_ai.usage.input_tokens"] == 3
    assert attributes["gen_ai.usage.output_tokens"] == 5
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)


async def test_the_callers_trace_is_continued(traced: Traced):
    await traced.complete("one", TRACEPARENT, ("tracestate", "vendor=1"))
    await traced.complete("other")
    spans = traced.take_spans()

    context = spans["one"].context
    assert f"{context.trace_id:032x}" == TRACE_ID
    assert f"{spans['one'].parent.span_id:016x}" == SPAN_ID
    assert context.trace_state["vendor"] == "1"
    assert f"{spans['other'].context.trace_id:032x}" != TRACE_ID  # a call of its own


async def test_all_requests_of_a_stream_belong_to_its_trace(traced: Traced):
    call = traced.stub.GenerateMany(metadata=[TRACEPARENT])
    for tag in (1, 2):
        start = message(f"many-{tag}")
        await call.write(serving_pb2.GenerateManyRequest(tag=tag, start=start))
    await call.done_writing()
    async for _ in call:
        pass
    spans = traced.take_spans()

    assert set(spans) == {"many-1", "many-2"}
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE_ID}


async def test_requests_of_two_callers_with_one_id_belong_each_to_its_own_trace():
    spans, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))

    async def ask(engines: Engines, caller: str, trace_id: str) -> None:
        _carrier.set({"traceparent": f"00-{trace_id}-{SPAN_ID}-01"})
        await complete(engines, "one", [1, 2, 3], 5, caller=(caller,))

    traces = {"a": TRACE_ID, "b": TRACE_ID[::-1]}
    async with running(dp_size=1, observers=[Tracing(provider)]) as engines:
        await asyncio.gather(*[ask(engines, *each) for each in traces.items()])
    found = {
        s.attributes["lockstep.caller"][0]: f"{s.context.trace_id:032x}"
        for s in spans.get_finished_spans()
    }
    assert found == traces


async def test_a_malformed_traceparent_begins_a_new_trace(traced: Traced):
    await traced.complete("one", ("traceparent", "00-nonsense"))
    assert traced.take_spans()["one"].parent is None


async def test_a_request_that_fails_says_how(traced: Traced):
    call = traced.stub.Generate(message("one", max_tokens=40))
    await call.read()
    await traced.stub.Cancel(serving_pb2.CancelRequest(request_id="one"))
    await failure(call)
    [span] = traced.take_spans().values()

    assert span.status.status_code.name == "ERROR"
    assert span.attributes["error.type"] == "CANCELLED"
    assert span.attributes["gen_ai.response.finish_reasons"] == ("error",)


async def test_continuations_share_a_span_and_have_their_own_events(traced: Traced):
    await traced.complete("one", n=3)
    [span] = traced.take_spans().values()

    indices = [event.attributes["lockstep.index"] for event in span.events]
    assert sorted(indices) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert span.attributes["gen_ai.usage.output_tokens"] == 15


class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """What an OpenTelemetry collector is to the router."""

    def __init__(self) -> None:
        self.received: list[trace_pb2.ResourceSpans] = []

    async def Export(self, request: Any, context: Any) -> Any:
        self.received += request.resource_spans
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_spans_arrive_at_a_collector():
    collector = Collector()
    service = partial(trace_service_pb2_grpc.add_TraceServiceServicer_to_server, collector)
    async with listening(service) as target:
        tracing = start_tracing(f"http://{target}")
        async with running(dp_size=1, observers=[tracing]) as engines:
            await complete(engines, "to-the-collector", [1, 2, 3], max_tokens=4)
        await asyncio.to_thread(tracing.close)

    [resource_spans] = collector.received
    resource = {a.key: a.value.string_value for a in resource_spans.resource.attributes}
    assert resource["service.name"] == "lockstep-router"
    [span] = resource_spans.scope_spans[0].spans
    ids = [a.value.string_value for a in span.attributes if a.key == "lockstep.request_id"]
    assert ids == ["to-the-collector"]


async def test_a_collector_that_is_gone_holds_up_neither_requests_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("router.telemetry.tracing.CLOSE_S", 0.01)
    tracing = start_tracing("http://127.0.0.1:1")
    async with running(dp_size=1, observers=[tracing]) as engines:
        request = await complete(engines, "to-nobody", [1, 2, 3], max_tokens=4)
    tracing.close()
    assert request.sequences[0].error is None


async def test_without_tracing_its_packages_are_not_even_imported():
    """They take a quarter of a second to import, and not everybody installs them."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys, router.app; sys.exit(any(m.startswith('opentelemetry') for m in sys.modules))",
    )
    assert await process.wait() == 0
