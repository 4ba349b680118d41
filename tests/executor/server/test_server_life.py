"""An executor from its start on: while it loads, when it is told to stop, and when it is stuck."""

import asyncio
import threading
from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from executor.server.service import SERVICE, STUCK_CHECKS, agreement_digest
from protos.executor.v1 import executor_pb2 as pb
from tests.executor.support.fake_worker import FakeWorker, held_step, read_ids, until
from tests.executor.support.servers import join_request, reason_of, request, serving


async def test_an_executor_that_loads_is_alive_and_says_that_it_is_not_loaded():
    gate = threading.Event()

    def build() -> tuple[FakeWorker, pb.DescribeResponse]:
        assert gate.wait(60)
        return FakeWorker(), pb.DescribeResponse(agreement={"dtype": "float32"})

    async with serving(None) as (servicer, client):
        loading = asyncio.create_task(servicer.load(build))
        serving_status = health_pb2.HealthCheckResponse.SERVING
        for name in ("", SERVICE, "liveness"):
            assert await client.status(name) == serving_status
        assert await client.status("readiness") != serving_status
        for call in (
            client.executor.Describe(pb.DescribeRequest()),
            client.prepare(1),
            client.join(1),
            client.steps(1),
        ):
            assert await reason_of(call) == "NOT_LOADED"
        gate.set()
        await loading
        description = await client.executor.Describe(pb.DescribeRequest())
        assert description.instance_id
        assert description.agreement_digest == agreement_digest({"dtype": "float32"})


async def test_join_and_describe_name_the_same_process(fake: Any):
    _, client = fake
    description = await client.executor.Describe(pb.DescribeRequest())
    joined = await client.executor.Join(join_request(1))
    assert joined.instance_id == description.instance_id


async def test_stopping_answers_the_step_in_flight_and_leaves_the_group(fake: Any):
    worker, client = fake
    call = await held_step(worker, client)
    stopping = asyncio.create_task(worker.servicer.stop())
    await until(lambda: worker.servicer._is_stopping)
    worker.gate.set()
    assert await read_ids(call, 1) == [1]
    assert await reason_of(call) == "SHUTTING_DOWN"
    await stopping
    assert worker.num_leaves == 1


async def test_a_router_hears_that_its_executor_stops_before_the_group_does(member: Any):
    worker, client = member
    call = await client.begin(1)
    assert await read_ids(call, 1) == [1]
    stream, was_told = worker.servicer._stream, []
    worker.leave = lambda: was_told.append(stream.is_over.is_set())
    await asyncio.gather(worker.servicer.stop(), reason_of(call))
    assert was_told == [True]


async def test_an_executor_that_has_just_joined_counts_as_driven_until_its_router_has_come_and_gone(
    fake: Any,
):
    """One that is told to stop then answers the stream that comes, which would end without a reason."""
    worker, client = fake
    assert not worker.servicer.is_driven
    await client.join(1)
    assert worker.servicer.is_driven
    call = client.executor.Step()
    await call.write(request(1, 1))
    await until(lambda: len(worker.begun) == 1)
    call.cancel()
    await until(lambda: not worker.servicer.is_driven)
    await client.join(2)
    await worker.servicer.stop()
    assert await reason_of(client.executor.Step()) == "SHUTTING_DOWN"


async def test_an_executor_whose_step_outlives_its_stream_for_long_is_stuck(
    fake: Any, monkeypatch: pytest.MonkeyPatch
):
    """One that ends between two looks at it is not, and then nobody looks again."""
    worker, client = fake
    servicer = worker.servicer
    servicer._stuck_after_s = 0.1
    check, looks = servicer._check_stuck, []

    def check_and_note(stream: Any, num_left: int) -> None:
        if epoch == 1 and num_left == 5:
            worker.gate.set()
            servicer._compute.submit(int).result(60)  # the step has ended
        looks.append(num_left)
        check(stream, num_left)

    monkeypatch.setattr(servicer, "_check_stuck", check_and_note)
    await client.join(1)
    for epoch in (1, 2):
        worker.gate.clear()
        call = client.executor.Step()
        await call.write(request(1, epoch))
        await until(lambda epoch=epoch: len(worker.begun) == epoch)
        call.cancel()
        if epoch == 1:
            await until(lambda: 5 in looks)
            assert not servicer.stuck.is_set()
            await client.join(2)
    await asyncio.wait_for(servicer.stuck.wait(), 60)
    assert looks == [*range(STUCK_CHECKS, 4, -1), *range(STUCK_CHECKS, -1, -1)]
    assert await client.status("liveness") != health_pb2.HealthCheckResponse.SERVING


async def test_a_step_may_take_as_long_as_its_stream_lasts(fake: Any):
    worker, client = fake
    worker.servicer._stuck_after_s = 0.0
    call = await held_step(worker, client)
    for _ in range(STUCK_CHECKS):  # the loop looks at its timers each time
        await client.status("liveness")
    assert not worker.servicer.stuck.is_set()
    worker.gate.set()
    assert await read_ids(call, 1) == [1]


async def test_reflection_lists_the_service(fake: Any):
    _, client = fake
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in client.reflection.ServerReflectionInfo(iter([ask])):
        names = [service.name for service in answer.list_services_response.service]
    assert set(names) >= {SERVICE, "grpc.health.v1.Health"}


def test_equal_agreements_have_equal_digests_in_any_order():
    first = agreement_digest({"a": "1", "b": "2"})
    assert first == agreement_digest({"b": "2", "a": "1"})
    assert first != agreement_digest({"a": "1", "b": "3"})
