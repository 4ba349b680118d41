"""If these fail, a GPU waits for the host between steps, or an answer is lost that it had computed.

The worker is ahead, as a GPU's: steps wait for its gate after they were launched.
"""

import asyncio
import time
from concurrent import futures
from types import SimpleNamespace
from typing import Any

import pytest

from executor.errors import InvalidStep
from tests.executor.support.fake_worker import FakeWorker, read_ids, until
from tests.executor.support.servers import Client, error_of, reason_of, request


@pytest.fixture
def ahead(fake: Any) -> tuple[FakeWorker, Client]:
    worker, client = fake
    worker.has_peers = worker.is_ahead = True
    worker.gate.clear()
    return worker, client


async def launched(worker: FakeWorker, client: Client, *step_ids: int) -> Any:
    """Returns a stream of epoch 1 whose steps were launched; the gate must open to end them."""
    await client.join(1)
    call = await client.begin(*step_ids)
    await until(lambda: worker.begun == [*step_ids])
    return call


async def test_the_next_step_is_launched_while_one_runs_whenever_it_comes(ahead: Any):
    worker, client = ahead
    call = await launched(worker, client, 1, 2)
    await call.write(request(3))
    await until(lambda: worker.begun == [1, 2, 3])
    worker.gate.set()
    assert await read_ids(call, 3) == [1, 2, 3]
    await call.done_writing()


async def test_a_step_is_in_the_queue_until_the_one_before_has_ended(
    ahead: Any, monkeypatch: pytest.MonkeyPatch
):
    now_ns = [5000]
    clock = SimpleNamespace(perf_counter_ns=lambda: now_ns[0], perf_counter=time.perf_counter)
    monkeypatch.setattr("executor.server.service.time", clock)
    worker, client = ahead
    call = await launched(worker, client, 1, 2)
    now_ns[0] = 8000
    worker.gate.set()
    assert [(await call.read()).queued_ns for _ in range(2)] == [0, 3000]
    await call.done_writing()


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (InvalidStep("rows: has 9"), ("INVALID_STEP", "rows: has 9")),
        (RuntimeError("no memory"), ("STEP_FAILED", "step 2: RuntimeError: no memory")),
    ],
)
async def test_a_step_that_is_not_launched_ends_the_stream_behind_the_answer_before_it(
    ahead: Any, failure: Exception, told: tuple[str, str]
):
    worker, client = ahead
    call = await launched(worker, client, 1)
    worker.failure = failure
    await call.write(request(2))
    await until(lambda: worker.servicer._stream.has_ended)
    assert worker.num_leaves == 0
    worker.gate.set()
    assert await read_ids(call, 1) == [1]
    assert await error_of(call) == told
    await until(lambda: worker.num_leaves)


async def test_a_failure_of_a_step_that_ran_is_told_as_its_own(ahead: Any):
    worker, client = ahead
    call = await launched(worker, client, 1, 2)
    worker.unread_failure = RuntimeError("an illegal address")
    worker.gate.set()
    assert await error_of(call) == ("STEP_FAILED", "step 1: RuntimeError: an illegal address")
    await until(lambda: worker.num_leaves)
    assert worker.servicer._measures.failures["STEP_FAILED"] == 1
    assert await reason_of(client.steps(3)) == "NOT_JOINED"


async def test_a_join_waits_for_the_steps_of_the_epoch_before(
    ahead: Any, monkeypatch: pytest.MonkeyPatch
):
    """Which fail, as collectives do of a group that is left: the new epoch would end with them."""
    worker, client = ahead
    call = await launched(worker, client, 1, 2)
    call.cancel()
    await until(lambda: worker.num_leaves)
    worker.unread_failure = RuntimeError("aborted")

    def end_steps_and_wait(readings: Any) -> None:
        worker.gate.set()
        futures.wait(readings)

    monkeypatch.setattr("executor.server.service.wait", end_steps_and_wait)
    await client.join(2)
    assert worker.num_unread_at_join == 0
    worker.unread_failure = None
    assert [response.step_id async for response in client.steps(1, epoch=2)] == [1]


async def test_a_step_whose_stream_is_cancelled_ends_all_the_same(ahead: Any):
    """Also if the thread that finishes has not come to it: else it would be taken for stuck."""
    worker, client = ahead
    worker.has_peers = False
    first = await launched(worker, client, 1)
    first.cancel()
    await until(lambda: not worker.servicer.is_driven)
    second = await client.begin(2)
    await until(lambda: worker.begun == [1, 2])
    stream = worker.servicer._stream
    second.cancel()
    await until(lambda: not worker.servicer.is_driven)
    worker.gate.set()
    await until(lambda: not stream.under_way)


async def test_stopping_answers_all_steps_that_were_launched(ahead: Any):
    worker, client = ahead
    call = await launched(worker, client, 1, 2)
    stopping = asyncio.create_task(worker.servicer.stop())
    await until(lambda: worker.servicer._is_stopping)
    worker.gate.set()
    assert await read_ids(call, 2) == [1, 2]
    assert await reason_of(call) == "SHUTTING_DOWN"
    await stopping


async def test_a_device_that_never_ends_a_step_is_stuck(ahead: Any):
    worker, client = ahead
    worker.servicer._stuck_after_s = 0.01
    call = await launched(worker, client, 1)
    call.cancel()
    await asyncio.wait_for(worker.servicer.stuck.wait(), 60)
