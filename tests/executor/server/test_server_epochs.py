"""If this fails, an executor stays in a group that is over, or does not get into the next one."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from executor.errors import InvalidStep, JoinFailed, PeerLost
from executor.parallel.rendezvous import StorePort
from protos.executor.epochs import MAX_EPOCH_LEAP
from protos.executor.v1 import executor_pb2 as pb
from tests.executor.support.fake_worker import FakeWorker, held_step, read_ids, until
from tests.executor.support.ranks.ranks import HOST, SECRET
from tests.executor.support.servers import error_of, join_request, reason_of, serving
from tests.support.listening import listening_at


@pytest.mark.parametrize(
    ("step_id", "failure", "reason"),
    [
        (1, InvalidStep("rows: has 9"), "INVALID_STEP"),
        (1, PeerLost("another executor left the group"), "STEP_FAILED"),
        (1, RuntimeError("no memory"), "STEP_FAILED"),
        (2, None, "STEP_OUT_OF_ORDER"),
    ],
)
async def test_a_step_that_one_of_several_refuses_takes_it_out_of_the_group(
    member: Any, step_id: int, failure: Exception | None, reason: str
):
    """The others have begun the step and would wait for it."""
    worker, client = member
    worker.failure, may_begin = failure, threading.Event()
    worker.servicer._compute.submit(may_begin.wait)
    call = await client.begin(step_id, step_id + 1)
    await call.done_writing()  # else a failed write may take the place of what the executor says
    may_begin.set()
    told, message = await error_of(call)
    assert told == reason
    assert str(failure or "") in message
    await until(lambda: worker.num_leaves)
    assert await client.status("readiness") != health_pb2.HealthCheckResponse.SERVING
    worker.failure = None
    assert await reason_of(client.steps(step_id + 1)) == "NOT_JOINED"
    assert worker.begun == [1] * (step_id == 1)
    assert worker.num_leaves == 1
    assert await client.joins_and_runs(2)


@pytest.mark.parametrize("failure", [InvalidStep("rows: has 9"), RuntimeError("no memory")])
async def test_the_router_hears_why_a_step_ended_before_peers_can_fail_for_want_of_it(
    member: Any, failure: Exception
):
    worker, client = member
    worker.gate.clear()
    worker.failure, was_told = failure, []
    call = client.steps(1)
    await until(lambda: worker.begun == [1])
    stream = worker.servicer._stream
    worker.leave = lambda: was_told.append(stream.is_over.is_set())
    worker.gate.set()
    await reason_of(call)
    await until(lambda: was_told == [True])


@pytest.mark.parametrize("way", ["cancelled", "half-closed"])
async def test_an_executor_leaves_its_group_as_soon_as_its_stream_ends(fake: Any, way: str):
    """Also from within a step that waits for a peer: the others shall be free at once."""
    worker, client = fake
    worker.has_peers = True
    call = await held_step(worker, client)
    if way == "cancelled":
        call.cancel()
    else:
        await call.done_writing()
        worker.gate.set()
        assert await read_ids(call, 1) == [1]
    await until(lambda: worker.num_leaves == 1)
    worker.gate.set()
    assert await client.status("readiness") != health_pb2.HealthCheckResponse.SERVING
    assert await reason_of(client.steps(2)) == "NOT_JOINED"
    assert worker.num_leaves == 1
    assert await client.joins_and_runs(2)


async def test_a_join_ends_the_stream_of_an_older_epoch_whose_end_leaves_the_new_one(member: Any):
    """A router that restarts must not wait for its predecessor's connection to be noticed."""
    worker, client = member
    old = await client.begin(1)
    assert await read_ids(old, 1) == [1]
    await client.join(2)
    assert await reason_of(old) == "STALE_EPOCH"
    new = await client.begin(1, epoch=2)
    assert await read_ids(new, 1) == [1]
    assert worker.num_leaves == 0
    assert await client.status("readiness") == health_pb2.HealthCheckResponse.SERVING
    await new.done_writing()


async def test_a_step_of_another_epoch_leaves_the_group_alone(fake: Any):
    """It comes from a router that has been replaced."""
    worker, client = fake
    worker.has_peers = True
    await client.join(2)
    assert await reason_of(client.steps(1, epoch=1)) == "STALE_EPOCH"
    assert [r.step_id async for r in client.steps(1, epoch=2)] == [1]


async def test_epochs_only_rise(fake: Any):
    worker, client = fake
    assert (await client.prepare(3)).startswith(f"{HOST}:")
    assert await reason_of(client.prepare(3)) == "STALE_EPOCH"
    assert await reason_of(client.join(2)) == "STALE_EPOCH"
    await client.join(3)
    assert await reason_of(client.join(3)) == "STALE_EPOCH"
    assert await reason_of(client.prepare(3)) == "STALE_EPOCH"
    await client.prepare(4)
    description = await client.executor.Describe(pb.DescribeRequest())
    assert description.epoch == 4  # the next one must be above
    assert worker.num_joins == 1


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("secret", b""),
        ("secret", bytes(15)),
        ("store_address", "10.0.0.7:1"),
        ("store_address", "[::1]:1"),
        ("peer_hosts", ["executor-0.test", "executor-1.test"]),
        ("peer_hosts", []),
    ],
)
async def test_a_join_without_a_secret_or_to_a_store_of_no_member_changes_nothing(
    member: Any, field: str, wrong: Any
):
    """Who calls it could else have the executor connect to any address."""
    worker, client = member
    fields = {"secret": SECRET, "store_address": f"{HOST}:1", "peer_hosts": ["h", HOST]}
    request = pb.JoinRequest(epoch=2, **{**fields, field: wrong})
    reason, message = await error_of(client.executor.Join(request))
    assert reason == "INVALID_RENDEZVOUS"
    assert "can be guessed" in message if field == "secret" else "host of a member" in message
    assert [r.step_id async for r in client.steps(1)] == [1]
    assert worker.num_joins == 1
    await client.executor.Join(pb.JoinRequest(epoch=2, **fields))


async def test_an_executor_whose_settings_say_where_it_stands_takes_no_other_place(member: Any):
    worker, client = member
    placement = pb.Placement(coordinates=pb.Coordinates(dp_rank=0, dp_size=1))
    request = join_request(2)
    request.placement.CopyFrom(placement)
    assert await reason_of(client.executor.Join(request)) == "INVALID_PLACEMENT"
    staging = client.executor.Stage(pb.StageRequest(placement=placement))
    assert await reason_of(staging) == "INVALID_PLACEMENT"
    assert [r.step_id async for r in client.steps(1)] == [1]
    assert worker.num_joins == 1


async def test_a_prepare_without_a_secret_opens_nothing(fake: Any):
    worker, client = fake
    call = client.executor.Prepare(pb.PrepareRequest(epoch=1, secret=bytes(15)))
    assert await reason_of(call) == "INVALID_RENDEZVOUS"
    assert not worker.servicer._stores
    await client.prepare(1)


@pytest.mark.parametrize("way", ["joined", "failed", "stopped", "prepared again"])
async def test_a_store_closes_when_its_group_has_formed_or_never_will(fake: Any, way: str):
    worker, client = fake
    port = int((await client.prepare(1)).rpartition(":")[2])
    assert (HOST, port) in listening_at(os.getpid())
    if way == "joined":
        await client.join(1)
    elif way == "failed":
        worker.failure = JoinFailed("rank 1 did not come")
        assert await reason_of(client.join(1)) == "JOIN_FAILED"
    elif way == "stopped":
        await worker.servicer.stop()
    else:
        await client.prepare(2)
    assert (HOST, port) not in listening_at(os.getpid())


@pytest.fixture
def stores() -> Iterator[StorePort]:
    with closing(StorePort(HOST)) as port:
        yield port


@pytest.mark.parametrize("fails", [False, True])
async def test_without_a_prepare_join_opens_the_store_where_describe_said(
    stores: StorePort, fails: bool
):
    worker = FakeWorker()
    worker.has_peers = True
    seen: list[bool] = []

    def form(epoch: int, *place: Any) -> Any:
        seen.append((HOST, port) in listening_at(os.getpid()))
        if fails:
            raise RuntimeError("rank 1 did not come")

    worker.form_group = form
    served = serving(lambda: (worker, pb.DescribeResponse()), stores=stores)
    async with served as (_, client):
        address = (await client.executor.Describe(pb.DescribeRequest())).store_address
        port = int(address.rpartition(":")[2])
        others = f"{HOST}:{port + 1}"
        for epoch, store_address in enumerate((address, address, others), 1):
            joining = client.executor.Join(join_request(epoch, store_address))
            if fails:
                assert await reason_of(joining) == "JOIN_FAILED"
            else:
                await joining
            assert (HOST, port) not in listening_at(os.getpid())
        assert seen == [True, True, False]
        assert await client.prepare(4) == address
        assert (HOST, port) in listening_at(os.getpid())


async def test_a_store_that_cannot_be_opened_where_it_was_to_be_fails_the_join(
    member: Any, stores: StorePort
):
    """The executor has left the group that it was in, as the others have."""
    worker, client = member
    worker.servicer._open_store, worker.servicer._store_address = stores.open, stores.address
    port = int(stores.address.rpartition(":")[2])
    with socket.create_server((HOST, port), reuse_port=False):
        reason, problem = await error_of(client.executor.Join(join_request(2, stores.address)))
    assert reason == "JOIN_FAILED"
    assert f"cannot listen on {HOST}, port {port}" in problem
    assert worker.num_leaves == 1
    assert await client.status("readiness") != health_pb2.HealthCheckResponse.SERVING
    assert await reason_of(client.steps(1)) == "NOT_JOINED"
    await client.executor.Join(join_request(3, stores.address))


async def test_a_prepare_says_why_it_cannot_open_a_store(fake: Any, stores: StorePort):
    worker, client = fake
    worker.servicer._open_store = stores.open
    port = int(stores.address.rpartition(":")[2])
    with socket.create_server((HOST, port), reuse_port=False):
        call = client.executor.Prepare(pb.PrepareRequest(epoch=1, secret=SECRET))
        reason, problem = await error_of(call)
    assert reason == "JOIN_FAILED"
    assert f"cannot listen on {HOST}, port {port}" in problem
    assert await client.prepare(2) == stores.address


async def test_a_join_that_fails_leaves_the_executor_joinable(fake: Any):
    worker, client = fake
    worker.failure = JoinFailed("rank 1 did not come")
    assert await reason_of(client.join(1)) == "JOIN_FAILED"
    worker.failure = None
    assert await reason_of(client.steps(1)) == "NOT_JOINED"
    assert await client.joins_and_runs(2)


@pytest.mark.parametrize("dp_rank", [0, 1])
async def test_every_executor_is_taken_to_far_epochs_in_leaps_and_only_the_first_opens_stores(
    dp_rank: int,
):
    worker = FakeWorker()
    async with serving(lambda: (worker, pb.DescribeResponse()), dp_rank=dp_rank) as (_, client):
        prepare = client.executor.Prepare
        for leap in (1, 2, 3):
            too_far = leap * MAX_EPOCH_LEAP + 1
            assert await reason_of(prepare(pb.PrepareRequest(epoch=too_far))) == "INVALID_EPOCH"
            assert await reason_of(client.join(too_far)) == "INVALID_EPOCH"
            prepared = await prepare(pb.PrepareRequest(epoch=leap * MAX_EPOCH_LEAP))
            assert not prepared.store_address
        assert (await client.executor.Describe(pb.DescribeRequest())).epoch == 3 * MAX_EPOCH_LEAP
        assert bool(await client.prepare(3 * MAX_EPOCH_LEAP + 1)) == (dp_rank == 0)
        assert worker.num_joins == 0
        assert await client.joins_and_runs(3 * MAX_EPOCH_LEAP + 1)


async def test_kv_has_its_id_for_as_long_as_each_join_names_it(fake: Any):
    """Who joins without it writes where it likes, and who comes back then is told so."""
    _, client = fake

    async def described() -> str:
        answer = await client.executor.Describe(pb.DescribeRequest())
        return str(answer.kv_id)

    async def join(epoch: int, kv_id: str) -> str:
        request = join_request(epoch)
        request.kv_id = kv_id
        return str((await client.executor.Join(request)).kv_id)

    first = await join(1, "")
    assert first == await described()
    assert [await join(epoch, first) for epoch in (2, 3)] == [first, first]
    assert await described() == first
    other = await join(4, "")
    assert len({first, other, await join(5, first)}) == 3


async def test_the_longest_sequence_that_a_router_takes_is_told_to_the_next_one(fake: Any):
    worker, client = fake

    async def described() -> int:
        return (await client.executor.Describe(pb.DescribeRequest())).joined_max_model_len

    assert await described() == 0
    for epoch, max_model_len in ((1, 16), (2, 0)):
        request = join_request(epoch)
        request.max_model_len = max_model_len
        await client.executor.Join(request)
        assert await described() == max_model_len
    request = join_request(3)
    request.max_model_len = 48
    worker.failure = JoinFailed("rank 1 did not come")
    assert await reason_of(client.executor.Join(request)) == "JOIN_FAILED"
    assert await described() == 0, "no group took such sequences"
