"""If this fails, one member that does not come keeps the others from the next epoch, or from stopping.

Members never come here until a test is over: what goes on before went on without them.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from executor.batch.placement import Loaded
from executor.build.executor import build_worker
from executor.config import ExecutorConfig
from executor.errors import JoinFailed, PeerLost
from executor.parallel.communicators import DpCommunicator
from executor.parallel.epochs import JoinAttempt
from executor.parallel.process_groups import EpochGroups
from executor.parallel.rendezvous import open_store
from tests.executor.support.fake_worker import TIMEOUT_S, FakeWorker, HeldGroups, until
from tests.executor.support.ranks.ranks import SECRET
from tests.executor.support.servers import (
    HOST,
    Client,
    config_of,
    error_of,
    form_group,
    join_request,
    reason_of,
    serving,
)
from tests.executor.support.steps import prompt_part, step


@pytest.fixture
async def joining(fake: Any) -> AsyncIterator[tuple[FakeWorker, Client, Any]]:
    """An executor in the middle of joining epoch 1, and the call that asked for it."""
    worker, client = fake
    groups = HeldGroups()
    worker.has_peers, worker.form_group = True, groups.form
    call = client.executor.Join(join_request(1))
    waiting = asyncio.ensure_future(error_of(call))
    await until(groups.begun.is_set)
    worker.form_group = None  # the next one has all its members
    yield worker, client, (call, waiting)
    groups.may_form.set()
    waiting.cancel()


async def ended(waiting: asyncio.Future[tuple[str, str]]) -> tuple[str, str]:
    async with asyncio.timeout(TIMEOUT_S):
        return await waiting


@pytest.mark.parametrize("is_prepared", [True, False])
async def test_who_forms_an_epoch_is_freed_by_the_prepare_or_the_join_of_the_next(
    joining: Any, is_prepared: bool
):
    """Only a group's first executor is asked to prepare."""
    worker, client, (_, waiting) = joining
    if is_prepared:
        await client.prepare(2)
    else:
        await client.join(2)
    assert await ended(waiting) == ("JOIN_FAILED", "epoch 1: epoch 2 has begun")
    if is_prepared:
        assert worker.num_joins == 1
        await client.join(2)
    assert worker.num_joins == 2
    assert [r.step_id async for r in client.steps(1, epoch=2)] == [1]


async def test_who_forms_an_epoch_is_freed_when_its_router_gives_up(joining: Any):
    """As it does when another member fails, long before it has found one in its place."""
    worker, client, (call, _) = joining
    call.cancel()
    await until(lambda: worker.num_leaves)
    await until(lambda: worker.servicer._joining is None)
    assert worker.servicer._measures.joins["failed"] == 1
    assert await reason_of(client.steps(1)) == "NOT_JOINED"
    assert worker.num_leaves == 1
    assert await client.joins_and_runs(2)


async def test_who_forms_an_epoch_stops_when_it_is_told_to(joining: Any):
    worker, _, (_, waiting) = joining
    async with asyncio.timeout(TIMEOUT_S):
        await worker.servicer.stop()
    assert await ended(waiting) == ("JOIN_FAILED", "epoch 1: this executor was told to stop")


async def test_who_forms_an_epoch_is_not_ready_though_it_was_in_the_one_before(fake: Any):
    """No router may have driven it there: then no stream ends, either."""
    worker, client = fake
    await client.join(1)
    assert await client.status("readiness") == health_pb2.HealthCheckResponse.SERVING
    groups = HeldGroups()
    worker.has_peers, worker.form_group = True, groups.form
    waiting = asyncio.ensure_future(client.join(2))
    await until(groups.begun.is_set)
    assert await client.status("readiness") == health_pb2.HealthCheckResponse.NOT_SERVING
    groups.may_form.set()
    await waiting
    assert await client.status("readiness") == health_pb2.HealthCheckResponse.SERVING


async def test_a_stream_that_is_not_of_the_epoch_that_forms_does_not_end_it(joining: Any):
    worker, client, (_, waiting) = joining
    stray = client.executor.Step()
    await stray.done_writing()
    assert await stray.read() is grpc.aio.EOF
    await until(lambda: worker.servicer._stream is None)
    assert worker.num_leaves == 0
    assert not waiting.done()


@pytest.mark.parametrize("way", ["prepare", "stop"])
async def test_a_join_that_is_called_off_as_it_succeeds_has_failed(
    fake: Any, monkeypatch: pytest.MonkeyPatch, way: str
):
    """Its epoch is over: if the executor took itself for a member, it would wait for steps of it."""
    worker, client = fake
    has_joined, may_return = threading.Event(), threading.Event()

    def join(*of_epoch: Any) -> Loaded:
        has_joined.set()
        assert may_return.wait(TIMEOUT_S)
        return Loaded()

    monkeypatch.setattr(worker, "join", join)
    waiting = asyncio.ensure_future(error_of(client.executor.Join(join_request(1))))
    await asyncio.to_thread(has_joined.wait)
    num_leaves = worker.num_leaves
    if way == "prepare":
        ending = asyncio.ensure_future(client.prepare(2))
    else:
        ending = asyncio.ensure_future(worker.servicer.stop())
    await until(lambda: worker.num_leaves == num_leaves + 1)
    may_return.set()
    assert (await ended(waiting))[0] == "JOIN_FAILED"
    assert worker.servicer.epoch is None
    assert await client.status("readiness") != health_pb2.HealthCheckResponse.SERVING
    await ending


# Real workers


@pytest.fixture
def alone(tiny_checkpoint: Path) -> Any:
    worker, _ = build_worker(
        ExecutorConfig(model=tiny_checkpoint, block_size=4, max_num_seqs=4, num_kv_blocks=64)
    )
    return worker


OVER, LEFT = "epoch 4 has begun", "this executor has left the group"


@pytest.mark.parametrize(
    ("called_off", "fails", "problem"),
    [(True, False, OVER), (True, True, OVER), (False, True, f"graphs were not captured: {LEFT}")],
)
def test_a_worker_that_is_called_off_or_fails_while_it_captures_leaves_and_says_why(
    alone: Any, monkeypatch: pytest.MonkeyPatch, called_off: bool, fails: bool, problem: str
):
    """Else the others would wait for it in their next collective.

    The other thread leaves too, at any time: before the groups are known here, or after.
    """
    closed = []
    group: Any = SimpleNamespace(rank=0, world_size=1, close=lambda: closed.append(True))
    attempt = JoinAttempt(3)
    monkeypatch.setattr(
        alone, "_form_group", lambda epoch, *place: EpochGroups(epoch, group, None, group)
    )

    def capture() -> None:
        if called_off:
            attempt.call_off(OVER)
        if fails:
            raise RuntimeError(LEFT)

    monkeypatch.setattr(alone._runner, "capture", capture)
    with pytest.raises(JoinFailed, match=f"^epoch 3: {problem}$"):
        alone.join(3, f"{HOST}:1", attempt)
    assert closed == [True]
    assert alone._groups is None


def test_a_worker_that_is_called_off_before_its_groups_are_known_uses_none_of_them(
    alone: Any, monkeypatch: pytest.MonkeyPatch
):
    """The other thread had nothing to leave yet: a peer that stands still would be waited for."""
    happened: list[str] = []

    class CalledOffLate(JoinAttempt):
        def form(self, *place: Any) -> Any:
            groups = super().form(*place)
            self.call_off(OVER)
            alone.leave()
            return groups

    group: Any = SimpleNamespace(rank=0, world_size=1, close=lambda: happened.append("closed"))
    member = SimpleNamespace(join=lambda groups: happened.append("used"), leave=lambda: None)
    monkeypatch.setattr(alone, "_form_group", lambda *place: EpochGroups(3, group, None, group))
    monkeypatch.setattr(alone, "_members", [member])
    monkeypatch.setattr(alone._runner, "capture", lambda: happened.append("captured"))
    with pytest.raises(JoinFailed, match=f"^epoch 3: {OVER}$"):
        alone.join(3, f"{HOST}:1", CalledOffLate(3))
    assert happened == ["closed"]


def test_a_worker_that_is_called_off_while_its_members_join_needs_no_group_to_run_alone(
    alone: Any, monkeypatch: pytest.MonkeyPatch
):
    """Who joins after the other thread has left would use a group that is closed, in later epochs, too."""
    attempt, communicator = JoinAttempt(3), DpCommunicator.single()

    def call_off(_: EpochGroups) -> None:
        attempt.call_off(OVER)
        alone.leave()

    group: Any = SimpleNamespace(rank=0, world_size=1, close=lambda: None)
    first = SimpleNamespace(join=call_off, leave=lambda: None)
    monkeypatch.setattr(alone, "_form_group", lambda *place: EpochGroups(3, group, None, group))
    monkeypatch.setattr(alone, "_members", [first, communicator])
    with pytest.raises(JoinFailed, match=f"^epoch 3: {OVER}$"):
        alone.join(3, f"{HOST}:1", attempt)
    monkeypatch.setattr(alone, "_form_group", None)
    alone.join(4, "")
    assert communicator.is_alone


def test_a_worker_that_has_left_its_group_runs_no_step(alone: Any, monkeypatch: pytest.MonkeyPatch):
    """It was told to leave after the step had been found to be the next one."""
    groups = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(alone, "_form_group", lambda *place: groups)
    monkeypatch.setattr(alone, "_groups", groups)
    alone.leave()
    prompt = step(1, prompt_part(0, [5, 6], [1]), num_tokens=[2], num_logits=[1])
    with pytest.raises(PeerLost, match="has left its group"):
        alone.execute(prompt)
    assert not alone._rows.is_live.any()


@pytest.mark.parametrize("comes", [0, 1])
async def test_an_executor_whose_peer_never_comes_is_in_the_next_epoch(
    tiny_checkpoint: Path, comes: int
):
    """Also if nothing else would free it: the store of the epoch that is over stays open here."""

    def build(rank: int) -> Callable[[], Any]:
        return lambda: build_worker(config_of(tiny_checkpoint, rank, 2))

    async with (
        serving(build(0)) as (first, to_first),
        serving(build(1), dp_rank=1) as (second, to_second),
    ):
        clients, servicers = [to_first, to_second], [first, second]
        old_store = open_store(HOST, SECRET)
        to_join = join_request(1, f"{HOST}:{old_store.port}")
        waiting = asyncio.ensure_future(error_of(clients[comes].executor.Join(to_join)))
        await until(lambda: servicers[comes]._joining is not None)
        await form_group(clients, 2)
        assert await ended(waiting) == ("JOIN_FAILED", "epoch 1: epoch 2 has begun")
        for servicer in servicers:
            assert servicer.epoch == 2
        old_store.close()  # ends what was left behind
