"""Real sockets on loopback: what a router meets at an executor's edge, in good order and bad."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from executor.errors import InvalidStep, JoinFailed, StepDisagreement
from executor.server import SERVICE, agreement_digest
from protos.errors import error_details
from protos.executor.v1 import executor_pb2 as pb
from tests.executor.servers import (
    HOST,
    Client,
    connected,
    form_group,
    group_of,
    reason_of,
    request,
    serving,
)
from tests.executor.steps import decode_part, idle_part, prompt_part, step, tokens_of

PROMPT = [5, 17, 33, 2, 90, 41, 8, 8, 60]


class FakeWorker:
    """Answers with the step's number as its token. Steps wait for ``gate``."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.begun: list[int] = []
        self.num_joins = self.num_leaves = 0
        self.has_peers = False
        self.failure: Exception | None = None
        self.servicer: Any = None  # who has it

    def execute(self, request: pb.StepRequest) -> pb.StepResponse:
        self.begun.append(request.step_id)
        assert self.gate.wait(60)
        if self.failure is not None:
            raise self.failure
        return pb.StepResponse(epoch=request.epoch, step_id=request.step_id)

    def join(self, epoch: int, store_address: str) -> None:
        self.num_joins += 1
        if self.failure is not None:
            raise self.failure

    def leave(self) -> None:
        self.num_leaves += 1


@pytest.fixture
async def fake() -> AsyncIterator[tuple[FakeWorker, Client]]:
    worker = FakeWorker()
    async with serving(lambda: (worker, pb.DescribeResponse())) as (worker.servicer, client):
        yield worker, client
        worker.gate.set()


async def read_ids(call: Any, count: int) -> list[int]:
    return [(await call.read()).step_id for _ in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


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
    await client.join(1)
    worker.gate.clear()
    call = client.executor.Step()
    await call.write(request(1))
    await until(lambda: worker.begun == [1])
    await call.write(request(2))
    worker.gate.set()
    assert await read_ids(call, 2) == [1, 2]
    await call.done_writing()


async def test_health_is_answered_while_a_step_runs(fake: Any):
    worker, client = fake
    await client.join(1)
    worker.gate.clear()
    call = client.steps(1)
    await until(lambda: worker.begun == [1])
    assert await client.status("liveness") == health_pb2.HealthCheckResponse.SERVING
    worker.gate.set()
    assert await read_ids(call, 1) == [1]


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
    call = client.executor.Step()
    await call.write(request(1))
    assert await read_ids(call, 1) == [1]
    assert await reason_of(client.steps(2)) == "STREAM_HELD"
    await call.write(request(2))
    assert await read_ids(call, 1) == [2]
    await call.done_writing()


async def test_a_cancelled_stream_lets_another_follow(fake: Any):
    worker, client = fake
    await client.join(1)
    worker.gate.clear()
    call = client.executor.Step()
    await call.write(request(1))
    await until(lambda: worker.begun == [1])
    call.cancel()
    worker.gate.set()
    await client.join(2)
    assert [r.step_id async for r in client.steps(1, epoch=2)] == [1]


async def test_a_step_that_has_not_begun_when_its_stream_is_cancelled_never_does():
    worker = FakeWorker()
    async with serving(lambda: (worker, pb.DescribeResponse())) as (servicer, client):
        await client.join(1)
        worker.gate.clear()
        call = client.executor.Step()
        for step_id in (1, 2):
            await call.write(request(step_id))
        await until(lambda: worker.begun == [1] and servicer._compute._work_queue.qsize() == 1)
        call.cancel()
        await until(lambda: servicer._stream is None)
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


@pytest.mark.parametrize(
    ("step_id", "failure", "reason"),
    [
        (1, InvalidStep("rows: has 9"), "INVALID_STEP"),
        (1, StepDisagreement("rank 1 was told"), "STEP_DISAGREEMENT"),
        (2, None, "STEP_OUT_OF_ORDER"),
    ],
)
async def test_a_step_that_one_of_several_refuses_takes_it_out_of_the_group(
    fake: Any, step_id: int, failure: Exception | None, reason: str
):
    """The others have begun the step and would wait for it."""
    worker, client = fake
    worker.has_peers = True
    await client.join(1)
    num_leaves, worker.failure = worker.num_leaves, failure
    assert await reason_of(client.steps(step_id)) == reason
    assert worker.num_leaves > num_leaves
    assert await client.status("readiness") != health_pb2.HealthCheckResponse.SERVING
    worker.failure = None
    assert await reason_of(client.steps(1)) == "NOT_JOINED"
    await client.join(2)
    assert [r.step_id async for r in client.steps(1, epoch=2)] == [1]


@pytest.mark.parametrize("way", ["cancelled", "half-closed"])
async def test_an_executor_leaves_its_group_as_soon_as_its_stream_ends(fake: Any, way: str):
    """Also from within a step that waits for a peer: the others shall be free at once."""
    worker, client = fake
    worker.has_peers = True
    await client.join(1)
    num_leaves = worker.num_leaves
    worker.gate.clear()
    call = client.executor.Step()
    await call.write(request(1))
    await until(lambda: worker.begun == [1])
    if way == "cancelled":
        call.cancel()
        await until(lambda: worker.num_leaves == num_leaves + 1)
        worker.gate.set()
    else:
        await call.done_writing()
        worker.gate.set()
        assert await read_ids(call, 1) == [1]
        await until(lambda: worker.num_leaves == num_leaves + 1)
    assert await client.status("readiness") != health_pb2.HealthCheckResponse.SERVING
    assert await reason_of(client.steps(2)) == "NOT_JOINED"
    await client.join(2)
    assert [r.step_id async for r in client.steps(1, epoch=2)] == [1]


async def test_the_end_of_an_old_stream_does_not_end_the_epoch_that_has_begun(fake: Any):
    worker, client = fake
    worker.has_peers = True
    await client.join(1)
    old = client.executor.Step()
    await old.write(request(1))
    assert await read_ids(old, 1) == [1]
    await client.join(2)
    num_leaves = worker.num_leaves
    assert await reason_of(old) == "STALE_EPOCH"
    new = client.executor.Step()
    await new.write(request(1, epoch=2))
    assert await read_ids(new, 1) == [1]
    assert worker.num_leaves == num_leaves
    assert await client.status("readiness") == health_pb2.HealthCheckResponse.SERVING
    await new.done_writing()


async def test_a_step_of_another_epoch_leaves_the_group_alone(fake: Any):
    """It comes from a router that has been replaced."""
    worker, client = fake
    worker.has_peers = True
    await client.join(2)
    assert await reason_of(client.steps(1, epoch=1)) == "STALE_EPOCH"
    assert [r.step_id async for r in client.steps(1, epoch=2)] == [1]


async def test_a_failed_step_needs_a_new_join(fake: Any, caplog: pytest.LogCaptureFixture):
    worker, client = fake
    await client.join(1)
    ready = health_pb2.HealthCheckResponse.SERVING
    assert await client.status("readiness") == ready
    worker.failure = RuntimeError("a peer is gone")
    call = client.steps(1, 2)
    with pytest.raises(grpc.aio.AioRpcError, match="a peer is gone") as caught:
        await call.read()
    assert error_details(caught.value).reason == "STEP_FAILED"
    assert worker.num_leaves == 2, "peers would wait for this executor"  # one was the join's
    worker.failure = None
    assert await client.status("readiness") != ready
    assert await reason_of(client.steps(2)) == "NOT_JOINED"
    await client.join(2)
    assert await client.status("readiness") == ready
    assert [r.step_id async for r in client.steps(1, epoch=2)] == [1]
    assert worker.begun == [1, 1]


async def test_a_join_ends_the_stream_of_an_older_epoch(fake: Any):
    """A router that restarts must not wait for its predecessor's connection to be noticed."""
    _, client = fake
    await client.join(1)
    call = client.executor.Step()
    await call.write(request(1))
    assert await read_ids(call, 1) == [1]
    await client.join(2)
    assert await reason_of(call) == "STALE_EPOCH"
    assert [r.step_id async for r in client.steps(1, epoch=2)] == [1]


async def test_epochs_only_rise(fake: Any):
    worker, client = fake
    prepare = client.executor.Prepare
    assert (await prepare(pb.PrepareRequest(epoch=3))).store_address.startswith(f"{HOST}:")
    assert await reason_of(prepare(pb.PrepareRequest(epoch=3))) == "STALE_EPOCH"
    assert await reason_of(client.join(2)) == "STALE_EPOCH"
    await client.join(3)
    assert await reason_of(client.join(3)) == "STALE_EPOCH"
    assert await reason_of(prepare(pb.PrepareRequest(epoch=3))) == "STALE_EPOCH"
    await prepare(pb.PrepareRequest(epoch=4))
    assert (
        await client.executor.Describe(pb.DescribeRequest())
    ).epoch == 4  # the next one must be above
    assert worker.num_joins == 1


async def test_a_join_that_fails_leaves_the_executor_joinable(fake: Any):
    worker, client = fake
    worker.failure = JoinFailed("rank 1 did not come")
    assert await reason_of(client.join(1)) == "JOIN_FAILED"
    worker.failure = None
    assert await reason_of(client.steps(1)) == "NOT_JOINED"
    await client.join(2)
    assert [r.step_id async for r in client.steps(1, epoch=2)] == [1]


async def test_only_the_first_executor_opens_a_store():
    worker = FakeWorker()
    async with serving(lambda: (worker, pb.DescribeResponse()), dp_rank=1) as (_, client):
        assert await reason_of(client.executor.Prepare(pb.PrepareRequest(epoch=1))) == "NOT_FIRST"


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
            client.executor.Prepare(pb.PrepareRequest(epoch=1)),
            client.join(1),
            client.steps(1),
        ):
            assert await reason_of(call) == "NOT_LOADED"
        gate.set()
        await loading
        description = await client.executor.Describe(pb.DescribeRequest())
        assert description.instance_id
        assert description.agreement_digest == agreement_digest({"dtype": "float32"})


async def test_stopping_answers_the_step_in_flight_and_leaves_the_group():
    worker = FakeWorker()
    async with serving(lambda: (worker, pb.DescribeResponse())) as (servicer, client):
        await client.join(1)
        worker.gate.clear()
        call = client.executor.Step()
        await call.write(request(1))
        await until(lambda: worker.begun == [1])
        num_leaves = worker.num_leaves
        stopping = asyncio.create_task(servicer.stop())
        await until(lambda: servicer._is_stopping)
        worker.gate.set()
        assert await read_ids(call, 1) == [1]
        assert await reason_of(call) == "SHUTTING_DOWN"
        await stopping
        assert worker.num_leaves == num_leaves + 1


async def test_a_router_hears_that_its_executor_stops_before_the_group_does():
    worker = FakeWorker()
    worker.has_peers = True
    async with serving(lambda: (worker, pb.DescribeResponse())) as (servicer, client):
        await client.join(1)
        call = client.executor.Step()
        await call.write(request(1))
        assert await read_ids(call, 1) == [1]
        stream, was_told = servicer._stream, []
        assert stream is not None
        worker.leave = lambda: was_told.append(stream.is_over.is_set())  # type: ignore[method-assign]
        await asyncio.gather(servicer.stop(), reason_of(call))
        assert was_told == [True]


async def test_an_executor_whose_step_outlives_its_stream_for_long_is_stuck(fake: Any):
    worker, client = fake
    servicer = worker.servicer
    servicer._stuck_after_s = 0.1
    await client.join(1)
    for epoch in (1, 2):
        worker.gate.clear()
        call = client.executor.Step()
        await call.write(request(1, epoch))
        await until(lambda epoch=epoch: len(worker.begun) == epoch)
        call.cancel()
        await until(lambda: servicer._stream is None)
        if epoch == 1:  # it ends in time
            worker.gate.set()
            await client.join(2)
            await asyncio.sleep(3 * servicer._stuck_after_s)
            assert not servicer.stuck.is_set()
    await asyncio.wait_for(servicer.stuck.wait(), 60)
    assert await client.status("liveness") != health_pb2.HealthCheckResponse.SERVING


async def test_a_step_may_take_as_long_as_its_stream_lasts(fake: Any):
    worker, client = fake
    worker.servicer._stuck_after_s = 0.01
    await client.join(1)
    worker.gate.clear()
    call = client.executor.Step()
    await call.write(request(1))
    await until(lambda: worker.begun == [1])
    await asyncio.sleep(0.1)
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


# Real models


async def generate(
    clients: list[Client], prompts: list[list[int]], count: int, epoch: int
) -> list[list[int]]:
    """Returns greedy tokens of one sequence per rank. Rank r begins r steps late."""
    calls = [client.executor.Step() for client in clients]
    tokens: list[list[int]] = [[] for _ in prompts]
    for step_id in range(1, count + len(prompts)):
        parts = [
            part_of(rank, prompt, step_id - 1 - rank, count) for rank, prompt in enumerate(prompts)
        ]
        num_tokens = [sum_of_tokens(part) for part in parts]
        is_extend = any(part.forward_mode == pb.FORWARD_MODE_EXTEND for part in parts)
        for call, part in zip(calls, parts, strict=True):
            await call.write(
                step(
                    step_id,
                    part,
                    num_tokens=num_tokens,
                    num_logits=[min(number, 1) for number in num_tokens],
                    epoch=epoch,
                    has_extend=is_extend,
                    padding_mode=(
                        pb.DP_PADDING_MODE_SUM_LEN if is_extend else pb.DP_PADDING_MODE_MAX_LEN
                    ),
                )
            )
        for call, own in zip(calls, tokens, strict=True):
            own += tokens_of(await call.read())
    for call in calls:
        await call.done_writing()
    return tokens


def part_of(rank: int, prompt: list[int], own_step: int, count: int) -> pb.RankStep:
    if not 0 <= own_step < count:
        return idle_part(rank)
    if own_step == 0:
        return prompt_part(0, prompt, list(range(1, -(-len(prompt) // 4) + 1)), dp_rank=rank)
    computed = len(prompt) + own_step - 1
    new = [computed // 4 + 1] if computed % 4 == 0 else []
    return decode_part(0, computed, -1, new, dp_rank=rank)


def sum_of_tokens(part: pb.RankStep) -> int:
    return len(part.sequences.token_ids) // 4


async def generate_alone(path: Path, prompts: Iterable[list[int]]) -> list[list[int]]:
    async with group_of(path, 1) as clients:
        tokens = []
        for epoch, prompt in enumerate(prompts, start=1):
            await form_group(clients, epoch)
            tokens += await generate(clients, [prompt], 8, epoch)
        return tokens


async def test_two_ranks_answer_as_one_does_and_form_again(tiny_checkpoint: Path):
    prompts = [PROMPT, [7, 3, 44]]
    alone = await generate_alone(tiny_checkpoint, prompts)
    async with group_of(tiny_checkpoint, 2) as clients:
        for epoch in (1, 2):
            await form_group(clients, epoch)
            assert await generate(clients, prompts, 8, epoch) == alone


async def test_a_member_that_does_not_come_fails_the_join_and_not_the_next(tiny_checkpoint: Path):
    async with group_of(tiny_checkpoint, 2, peer_timeout_s=1.0) as clients:
        prepared = await clients[0].executor.Prepare(pb.PrepareRequest(epoch=1))
        assert await reason_of(clients[0].join(1, prepared.store_address)) == "JOIN_FAILED"
        await form_group(clients, 2)
        assert len(await generate(clients, [PROMPT, [1]], 2, 2)) == 2


async def test_a_rank_that_waits_for_a_lost_peer_joins_the_next_epoch(tiny_checkpoint: Path):
    """Rank 0 runs a step that rank 1 never gets; the router then forms the group again."""
    async with group_of(tiny_checkpoint, 2) as clients:
        await form_group(clients, 1)
        call = clients[0].executor.Step()
        part = prompt_part(0, PROMPT, [1, 2, 3])
        await call.write(step(1, part, num_tokens=[9, 0], num_logits=[1, 0]))
        await form_group(clients, 2)
        assert await reason_of(call) in ("STEP_FAILED", "STALE_EPOCH")
        tokens = await generate(clients, [PROMPT, [7, 3, 44]], 8, 2)
    assert tokens == await generate_alone(tiny_checkpoint, [PROMPT, [7, 3, 44]])


async def test_the_process_listens_loads_and_stops_when_told(tiny_checkpoint: Path):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "executor",
        env=os.environ
        | {
            "LOCKSTEP_EXECUTOR_MODEL": str(tiny_checkpoint),
            "LOCKSTEP_EXECUTOR_LISTEN": f"{HOST}:0",
            "LOCKSTEP_EXECUTOR_NUM_THREADS": "1",
            "LOCKSTEP_EXECUTOR_KV_CACHE_BYTES": "1000000",
            "LOCKSTEP_EXECUTOR_BLOCK_SIZE": "4",
        },
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    lines = []
    try:
        async with asyncio.timeout(120):
            while not lines or '"event": "ready_to_join"' not in lines[-1]:
                line = (await process.stderr.readline()).decode()
                assert line, lines
                lines.append(line)
        [listening] = [line for line in lines if '"event": "listening"' in line]
        port = int(listening.partition(f'"address": "{HOST}:')[2].partition('"')[0])
        async with connected(port) as client:
            await form_group([client], 1)
            assert len((await generate([client], [PROMPT], 3, 1))[0]) == 3
    finally:
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            await process.communicate()
    assert process.returncode == 0
