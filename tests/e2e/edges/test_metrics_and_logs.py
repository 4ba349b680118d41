"""Observation of real processes: metrics of both services, a trace, and the live picture."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import grpc
import pytest
import pytest_asyncio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from deploy.local.demo import idle_group
from deploy.local.launch import LocalStack
from deploy.local.processes import ROOT
from protos.serving.v1 import serving_pb2, serving_pb2_grpc
from tests.deploy.metrics import EXPOSED, picker_families
from tests.e2e.conftest import EXECUTOR_ARGS, PATIENT
from tests.e2e.support.logs import logged, scraped

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
pytestmark = pytest.mark.asyncio(loop_scope="module")
ANY_PORT = ("--metrics-listen", "127.0.0.1:0")


class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """What an OpenTelemetry collector is to the router."""

    def __init__(self) -> None:
        self.spans: asyncio.Queue[Any] = asyncio.Queue()

    async def Export(self, request: Any, context: Any) -> Any:
        for resource_spans in request.resource_spans:
            for scope_spans in resource_spans.scope_spans:
                for span in scope_spans.spans:
                    self.spans.put_nowait(span)
        return trace_service_pb2.ExportTraceServiceResponse()


class Watched(NamedTuple):
    """A stack whose numbers are read from outside."""

    stack: LocalStack
    collector: Collector


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Watched]:
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with LocalStack(
        executor_args=[*EXECUTOR_ARGS, *ANY_PORT],
        router_args=[*ANY_PORT, "--otlp-endpoint", f"http://127.0.0.1:{port}", *PATIENT],
        log_dir=tmp_path_factory.mktemp("eyes"),
    ) as stack:
        yield Watched(stack, collector)
    await server.stop(None)


async def test_both_services_tell_the_same_story(watched: Watched):
    stack = watched.stack
    async with stack.client() as client:
        answers = [client.complete(f"\n{n}+25=", max_tokens=16) for n in range(17, 25)]
        finishes = [answer.finish for answer in await asyncio.gather(*answers)]
        await idle_group(client)  # the last step's blocks are held until it is back
    router = await scraped(stack.router)
    executors = [await scraped(executor) for executor in stack.executors]

    num_output = sum(finish.num_completion_tokens for finish in finishes)
    assert router["lockstep_router_ended_sequences_total"]["STOP",] == 8
    assert router["lockstep_router_time_to_first_token_seconds_count"]["0",] == 8
    assert router["lockstep_router_inter_token_seconds_count"]["0",] == num_output - 8
    num_steps = sum(router["lockstep_router_steps_total"].values())
    for rank, executor in enumerate(executors):
        assert sum(executor["lockstep_executor_steps_total"].values()) == num_steps
        ran = router["lockstep_router_scheduled_tokens_total"]["0", str(rank)]
        assert executor["lockstep_executor_tokens_total"]["scheduled",] == ran
        assert executor["lockstep_executor_epoch"][()] == router["lockstep_router_epoch"]["0",]
        phases = executor["lockstep_executor_step_seconds_total"]
        assert min(phases[phase,] for phase in ("fill", "forward", "sample")) > 0
    phases = router["lockstep_router_step_seconds_total"]
    assert min(phases["0", phase] for phase in ("plan", "encode", "execute", "commit")) > 0


async def test_nothing_is_exposed_that_the_documents_do_not_name(watched: Watched):
    named = {*EXPOSED, *(family.name for family in picker_families())}
    for process in [watched.stack.router, *watched.stack.executors]:
        for name in await scraped(process):
            assert name in named or name.endswith("_created"), name


async def test_the_trace_of_a_caller_reaches_the_collector(watched: Watched):
    async with grpc.aio.insecure_channel(watched.stack.address) as channel:
        stub = serving_pb2_grpc.GenerationServiceStub(channel)
        call = stub.Generate(
            serving_pb2.GenerateRequest(text="\n17+25=", request_id="traced"),
            metadata=[("traceparent", f"00-{TRACE_ID}-00f067aa0ba902b7-01")],
        )
        async for _ in call:
            pass
    while True:
        span = await watched.collector.spans.get()
        if span.trace_id.hex() == TRACE_ID:
            break
    assert [event.name for event in span.events] == ["queue", "prefill", "decode"]


async def test_top_prints_what_the_ranks_are_doing(watched: Watched):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router.top", watched.stack.address),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    lines = output.decode().splitlines()

    assert process.returncode == 0
    assert lines[0].startswith("router READY")
    assert lines[2].startswith("group 0 READY")
    assert [line.split()[0] for line in lines if re.match(r" +\d ", line)] == ["0", "1"]
    assert "group ready" in lines[-1]


async def test_counters_go_on_over_a_recovery_and_the_log_has_its_ids(watched: Watched):
    stack = watched.stack
    before = await scraped(stack.router)
    await stack.restart_executor(1)
    async with stack.client() as client:
        answer = await client.complete("\n17+25=", max_tokens=16)
        events = (await client.get_router_status()).events
    after = await scraped(stack.router)
    [lost] = await logged(stack.router, "group_lost")

    assert answer.text.startswith("42")
    [told] = [event for event in events if event.name == "group_lost"]
    assert (told.level, told.epoch, told.problem) == ("warning", 1, lost["problem"])
    assert (events[0].name, events[0].epoch) == ("group_ready", 2)
    assert after["lockstep_router_epochs_total"]["0",] == 2
    assert after["lockstep_router_ended_epochs_total"]["0", "lost"] == 1
    assert after["lockstep_router_recovery_seconds_count"]["0",] == 1
    for name in ("scheduled_tokens", "idle_steps", "prompt_tokens", "steps", "output_tokens"):
        old = before[f"lockstep_router_{name}_total"]
        new = after[f"lockstep_router_{name}_total"]
        assert all(new[labels] >= value for labels, value in old.items()), name
        assert sum(new.values()) > sum(old.values())
    assert (lost["group"], lost["epoch"]) == (0, 1)
    assert lost["step_id"] > 0
