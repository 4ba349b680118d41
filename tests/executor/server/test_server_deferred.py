"""If these fail, answers wait for what no answer needs, or a failure behind one is nobody's."""

from typing import Any

import grpc
import pytest

from protos.transport.errors import error_details
from tests.executor.support.fake_worker import read_ids, until
from tests.executor.support.servers import reason_of, request


async def test_an_answer_goes_out_before_what_its_step_leaves_is_run(fake: Any):
    worker, client = fake
    worker.trails = True
    await client.join(1)
    worker.deferred_gate.clear()
    call = client.executor.Step()
    await call.write(request(1))
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


async def test_a_failure_behind_an_answer_ends_the_stream_and_leaves_the_group(fake: Any):
    worker, client = fake
    worker.trails, worker.deferred_failure = True, RuntimeError("no more memory")
    worker.has_peers = True
    await client.join(1)
    num_leaves = worker.num_leaves
    call = client.executor.Step()
    await call.write(request(1))
    assert await read_ids(call, 1) == [1]
    with pytest.raises(
        grpc.aio.AioRpcError, match="step 1: RuntimeError: no more memory"
    ) as caught:
        await call.read()
    assert error_details(caught.value).reason == "STEP_FAILED"
    await until(lambda: worker.num_leaves > num_leaves)
    assert worker.servicer._measures.failures["STEP_FAILED"] == 1
    assert await reason_of(client.steps(2)) == "NOT_JOINED"


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
    await client.join(1)
    worker.gate.clear()
    first = client.executor.Step()
    await first.write(request(1))
    await until(lambda: worker.begun == [1])
    first.cancel()
    await until(lambda: not worker.servicer.is_driven)
    second = client.executor.Step()
    await second.write(request(2))
    await until(lambda: worker.servicer._compute._work_queue.qsize() == 1)  # it is in the line
    worker.gate.set()
    assert await read_ids(second, 1) == [2]
    with pytest.raises(grpc.aio.AioRpcError, match="step 2: RuntimeError: no memory"):
        await second.read()
