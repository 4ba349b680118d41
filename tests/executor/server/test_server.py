"""Real sockets on loopback: what a router meets on an executor's stream, in good order and bad."""

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from executor.errors import InvalidStep
from protos.transport.error_details import error_details
from tests.executor.support.fake_worker import held_step, read_ids, until
from tests.executor.support.servers import error_of, reason_of, request


async def test_steps_are_answered_in_order_and_the_stream_ends_cleanly(fake: Any):
    _, client = fake
    await client.join(1)
    responses = [response async for response in client.steps(*range(1, 21))]
    assert [response.step_id for response in responses] == list(range(1, 21))
    assert all(response.queued_ns > 0 for response in responses)


async def test_the_next_stream_of_an_epoch_goes_on_with_the_next_step(fake: Any):
    _, client = fake
    await client.join(1)
    assert [r.step_id async for r in client.steps(1, 2)] == [1, 2]
    assert [r.step_id async for r in client.steps(3)] == [3]
    assert await reason_of(client.steps(3)) == "STEP_OUT_OF_ORDER"


async def test_a_step_sent_early_starts_without_its_predecessors_answer(fake: Any):
    worker, client = fake
    call = await held_step(worker, client)
    await call.write(request(2))
    worker.gate.set()
    assert await read_ids(call, 2) == [1, 2]
    await call.done_writing()


async def test_health_is_answered_while_a_step_runs(fake: Any):
    worker, client = fake
    call = await held_step(worker, client)
    assert await client.status("liveness") == health_pb2.HealthCheckResponse.SERVING
    worker.gate.set()
    assert await read_ids(call, 1) == [1]
    await call.done_writing()


@pytest.mark.parametrize(
    ("step_ids", "epoch", "answered", "reason"),
    [
        ([2], 1, 0, "STEP_OUT_OF_ORDER"),
        ([1, 2, 4], 1, 2, "STEP_OUT_OF_ORDER"),
        ([1, 1], 1, 1, "STEP_OUT_OF_ORDER"),
        ([1], 2, 0, "STALE_EPOCH"),
        ([1], 0, 0, "STALE_EPOCH"),
    ],
)
async def test_a_step_out_of_order_ends_the_stream_after_those_before_it(
    fake: Any, step_ids: list[int], epoch: int, answered: int, reason: str
):
    worker, client = fake
    await client.join(1)
    call = client.steps(*step_ids, epoch=epoch)
    assert await read_ids(call, answered) == step_ids[:answered]
    assert await reason_of(call) == reason
    assert worker.begun == step_ids[:answered]


async def test_a_step_before_any_join_is_refused(fake: Any):
    worker, client = fake
    assert await reason_of(client.steps(1)) == "NOT_JOINED"
    assert worker.begun == []


async def test_a_second_stream_is_refused_and_the_first_goes_on(fake: Any):
    _, client = fake
    await client.join(1)
    call = await client.begin(1)
    assert await read_ids(call, 1) == [1]
    assert await reason_of(client.steps(2)) == "STREAM_HELD"
    await call.write(request(2))
    assert await read_ids(call, 1) == [2]
    await call.done_writing()


async def test_a_cancelled_stream_lets_another_follow(fake: Any):
    worker, client = fake
    call = await held_step(worker, client)
    call.cancel()
    worker.gate.set()
    assert await client.joins_and_runs(2)


async def test_a_step_that_has_not_begun_when_its_stream_is_cancelled_never_does(fake: Any):
    worker, client = fake
    call = await held_step(worker, client)
    await call.write(request(2))
    await until(lambda: worker.servicer._compute._work_queue.qsize() == 1)
    call.cancel()
    await until(lambda: worker.servicer._stream is None)
    worker.gate.set()
    await client.join(2)
    assert worker.begun == [1]


async def test_a_refused_step_ends_the_stream_and_the_epoch_goes_on(fake: Any):
    worker, client = fake
    await client.join(1)
    worker.failure = InvalidStep("rows: has 9", field="ranks[0].sequences.rows")
    call = client.steps(1, 2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_details(caught.value).field == "ranks[0].sequences.rows"
    assert worker.begun == [1]
    worker.failure = None
    assert [r.step_id async for r in client.steps(1)] == [1]


# What a step leaves to be run behind its answer


async def test_an_answer_goes_out_before_what_its_step_leaves_is_run(fake: Any):
    worker, client = fake
    worker.trails = True
    await client.join(1)
    worker.deferred_gate.clear()
    call = await client.begin(1)
    assert await read_ids(call, 1) == [1]
    await call.write(request(2))
    assert (worker.begun, worker.num_deferred_run) == ([1], 0)  # the next step comes after it
    worker.deferred_gate.set()
    assert await read_ids(call, 1) == [2]
    assert worker.num_deferred_run >= 1
    await call.done_writing()


async def test_what_a_step_leaves_is_run_without_another_step(fake: Any):
    """Its peers run it too, and would wait."""
    worker, client = fake
    worker.trails = True
    await client.join(1)
    assert [r.step_id async for r in client.steps(1)] == [1]
    await until(lambda: worker.num_deferred_run == 1)
    assert not worker.has_deferred


async def test_a_failure_behind_an_answer_ends_the_stream_and_leaves_the_group(member: Any):
    worker, client = member
    worker.trails, worker.deferred_failure = True, RuntimeError("no more memory")
    call = await client.begin(1)
    assert await read_ids(call, 1) == [1]
    reason, message = await error_of(call)
    assert reason == "STEP_FAILED"
    assert "step 1: RuntimeError: no more memory" in message
    await until(lambda: worker.num_leaves)
    assert worker.servicer._measures.failures["STEP_FAILED"] == 1
    assert await reason_of(client.steps(2)) == "NOT_JOINED"
    assert worker.num_leaves == 1


async def test_a_failure_behind_the_last_answer_of_a_stream_is_no_steps_but_ends_the_epoch(
    fake: Any,
):
    """A stream that ends takes the executor out of its group, and peers that catch up fail."""
    worker, client = fake
    worker.trails, worker.deferred_failure = True, RuntimeError("a peer left")
    await client.join(1)
    worker.deferred_gate.clear()
    assert [r.step_id async for r in client.steps(1)] == [1]
    worker.deferred_gate.set()
    assert await reason_of(client.steps(2)) == "NOT_JOINED"
    assert worker.servicer._measures.failures["STEP_FAILED"] == 0


async def test_a_failure_behind_a_step_is_that_of_its_own_stream(fake: Any):
    """One without peers goes on in another stream, whose step may come before the first one's rest."""
    worker, client = fake
    worker.trails = True
    run_deferred = worker.run_deferred

    def fail_behind_the_second() -> None:
        worker.deferred_failure = RuntimeError("no memory") if worker.begun == [1, 2] else None
        run_deferred()

    worker.run_deferred = fail_behind_the_second
    first = await held_step(worker, client)
    first.cancel()
    await until(lambda: not worker.servicer.is_driven)
    second = await client.begin(2)
    await until(lambda: worker.servicer._compute._work_queue.qsize() == 1)  # it is in the line
    worker.gate.set()
    assert await read_ids(second, 1) == [2]
    assert "step 2: RuntimeError: no memory" in (await error_of(second))[1]
