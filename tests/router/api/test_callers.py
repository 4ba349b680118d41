"""Requests are their caller's: nobody else ends them, sees them or takes their names."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from protos.serving.v1 import serving_pb2 as pb
from protos.serving.v1 import serving_pb2_grpc
from protos.transport.admission import Refusals
from protos.transport.port import ServiceConfig
from router.api.generate import GenerationServicer
from router.api.vllm_engine import VllmEngineServicer, add_vllm_engine
from router.requests.callers import CallerSettings
from router.requests.request import Request
from tests.router.support.calls import failure, prompt
from tests.router.support.fake_engines import FakeEngines, front_of, generation, listening

TOKENS = {name: f"{name}-0123456789abcdef" for name in ("mine", "other", "ops")}
TOLD, HIDDEN = "10.0.0.7:50061 does not answer", "told to operators only"


@dataclass
class Front:
    """Both services behind a port that takes tokens.

    Attributes:
        engines: Behind them.
        own, vllm: Stubs.
    """

    engines: FakeEngines
    own: Any
    vllm: Any


@asynccontextmanager
async def front(folder: Path, **scope: str) -> AsyncIterator[Front]:
    """Callers `mine` and `ops` have names, `other` has none."""
    tokens = folder / "tokens"
    lines = [f"mine {TOKENS['mine']}", TOKENS["other"], f"ops {TOKENS['ops']}"]
    tokens.write_text("\n".join(lines))
    settings = CallerSettings(operators="ops", flow_metadata="x-user", **scope)
    engines = FakeEngines()
    servicer = GenerationServicer(engines, None, "1", settings)  # type: ignore[arg-type]
    gateways = VllmEngineServicer(
        servicer,
        engines,  # type: ignore[arg-type]
        None,
        "1",
        is_ready=lambda: False,
        settings=settings,
    )
    services = generation(servicer), partial(add_vllm_engine, servicer=gateways)
    options = front_of(servicer, engines)
    options["interceptors"] = [
        *ServiceConfig(auth_tokens=tokens).interceptors(Refusals()),
        *options["interceptors"],
    ]
    async with (
        listening(*services, **options) as target,
        grpc.aio.insecure_channel(target) as channel,
    ):
        own = serving_pb2_grpc.GenerationServiceStub(channel)
        yield Front(engines, own, vllm_engine_pb2_grpc.VllmEngineStub(channel))


def by(caller: str) -> dict[str, Any]:
    return {"metadata": [("authorization", f"Bearer {TOKENS[caller]}")]}


async def begin(front: Front, caller: str, request_id: str = "order-17") -> tuple[Any, Request]:
    """Starts a request. Returns its call, and the request as it arrived."""
    call = front.own.Generate(prompt(request_id=request_id), **by(caller))
    return call, await front.engines.arrivals.get()


async def test_a_foreign_request_is_answered_as_one_that_is_not_there(tmp_path: Path):
    async with front(tmp_path) as served:

        async def cancelled_by(caller: str) -> tuple[Any, ...]:
            named = pb.CancelRequest(request_id="order-17")
            error = await failure(served.own.Cancel(named, **by(caller)))
            return error.code(), error.details(), error.trailing_metadata()

        before = await cancelled_by("other")
        call, request = await begin(served, "mine")
        assert await cancelled_by("other") == await cancelled_by("ops") == before
        assert before[0] is grpc.StatusCode.NOT_FOUND
        assert request.is_live

        await served.own.Cancel(pb.CancelRequest(request_id="order-17"), **by("mine"))
        assert (await failure(call)).code() is grpc.StatusCode.CANCELLED


async def test_what_a_gateway_sends_for_one_user_is_not_anothers_to_cancel(tmp_path: Path):
    """And no user becomes an operator by its name."""
    async with front(tmp_path) as served:
        users = {
            name: {"metadata": [*by("mine")["metadata"], ("x-user", name)]} for name in ("ops", "b")
        }
        call = served.own.Generate(prompt(request_id="order-17"), **users["ops"])
        request = await served.engines.arrivals.get()
        assert request.caller == ("mine", "x-user=ops")
        named = pb.CancelRequest(request_id="order-17")
        for other in (users["b"], by("mine")):
            error = await failure(served.own.Cancel(named, **other))
            assert error.code() is grpc.StatusCode.NOT_FOUND
        assert request.is_live
        await served.own.Cancel(named, **users["ops"])
        assert (await failure(call)).code() is grpc.StatusCode.CANCELLED


async def test_a_gateways_abort_ends_no_foreign_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("router.api.vllm_engine.ABORT_GRACE_S", 0.0)
    message = vllm_engine_pb2.GenerateRequest(request_id="order-17")
    message.tokenized.input_ids.extend([5, 6])
    abort = vllm_engine_pb2.AbortRequest(request_ids=["order-17"])
    async with front(tmp_path) as served:
        call = served.vllm.Generate(message, **by("mine"))
        request = await served.engines.arrivals.get()
        for _ in range(10):  # lets the server get at what an abort would leave to it
            await served.vllm.Abort(abort, **by("other"))
        assert request.is_live
        monkeypatch.undo()  # the call has time to say how it ended
        await served.vllm.Abort(abort, **by("mine"))
        [answer] = [answer async for answer in call]
        assert answer.complete.finish_reason == "abort"


async def test_an_id_that_another_caller_uses_is_free(tmp_path: Path):
    async with front(tmp_path) as served:
        begun = [await begin(served, caller) for caller in ("mine", "other")]
        (call, mine), (others_call, others) = begun
        again = await failure(served.own.Generate(prompt(request_id="order-17"), **by("mine")))
        assert again.code() is grpc.StatusCode.ALREADY_EXISTS

        served.engines.cancel(mine)
        assert (await failure(call)).code() is grpc.StatusCode.CANCELLED
        assert others.is_live
        served.engines.cancel(others)
        await failure(others_call)


async def test_a_stream_is_its_callers_too(tmp_path: Path):
    async with front(tmp_path) as served:
        stream = served.own.GenerateMany(**by("mine"))
        await stream.write(pb.GenerateManyRequest(tag=1, start=prompt(request_id="order-17")))
        request = await served.engines.arrivals.get()
        assert request.caller == ("mine",)
        named = pb.CancelRequest(request_id="order-17")
        error = await failure(served.own.Cancel(named, **by("other")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        await served.own.Cancel(named, **by("mine"))
        [cancelled] = (await stream.read()).errors
        assert (cancelled.tag, cancelled.reason) == (1, "CANCELLED")
        stream.cancel()


async def test_executors_and_flows_are_shown_to_operators_only(tmp_path: Path):
    async with front(tmp_path) as served:
        for caller, address, problem in (("ops", "10.0.0.7:50061", TOLD), ("mine", "", HIDDEN)):
            ranks = [pb.RankStatus(dp_rank=0, address="10.0.0.7:50061", num_running=3)]
            flows = [pb.FlowStatus(flow="other")]
            served.engines.groups = [pb.GroupStatus(problem=TOLD, ranks=ranks, flows=flows)]
            served.engines.events = [pb.Event(name="group_lost", problem=TOLD)]
            status = await served.own.GetStatus(pb.GetStatusRequest(), **by(caller))
            [group], [event] = status.groups, status.events
            assert problem in group.problem
            assert (event.name, problem in event.problem) == ("group_lost", True)
            assert (group.ranks[0].address, group.ranks[0].num_running) == (address, 3)
            assert bool(group.flows) == (caller == "ops")
            served.engines.groups = [pb.GroupStatus(problem=TOLD)]
            health = vllm_engine_pb2.HealthCheckRequest()
            assert problem in (await served.vllm.HealthCheck(health, **by(caller))).message


async def test_the_cache_of_all_is_told_to_operators_and_flushed_by_them_only(tmp_path: Path):
    subscribe, flush = common_pb2.SubscribeKvEventsRequest(), common_pb2.FlushCacheRequest()
    async with front(tmp_path, prefix_cache_scope="shared") as served:
        for call in (
            served.vllm.SubscribeKvEvents(subscribe, **by("mine")),
            served.vllm.FlushCache(flush, **by("mine")),
        ):
            assert (await failure(call)).code() is grpc.StatusCode.PERMISSION_DENIED
        assert (await served.vllm.FlushCache(flush, **by("ops"))).success
        call = served.vllm.SubscribeKvEvents(subscribe, **by("ops"))
        assert (await call.read()).snapshot.count == 1
        call.cancel()
