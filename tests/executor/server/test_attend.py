"""If an executor's beats do not come or say something wrong, its router loses a group that is well."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from executor.metrics import Measures
from executor.parallel.lease import Lease
from executor.server.beats import Beats
from executor.server.service import QUIET_MS
from protos.executor.beats import BEAT_S
from protos.executor.v1 import executor_pb2 as pb
from tests.executor.support.fake_worker import TIMEOUT_S, FakeWorker, HeldGroups, held_step
from tests.executor.support.ranks.ranks import SECRET
from tests.executor.support.servers import join_request, reason_of, serving
from tests.support.virtual_clock import on_virtual_clock


async def attended(client: Any) -> Any:
    """Returns an open Attend call; it beats until it is cancelled."""
    call = client.executor.Attend()
    await call.write(pb.AttendRequest(router_id=b"router"))
    return call


async def beat_with(call: Any, **said: Any) -> pb.AttendResponse:
    """Returns the next beat that says this."""
    while True:
        beat = await call.read()
        if all(getattr(beat, name) == value for name, value in said.items()):
            return beat


async def read_to_end(call: Any) -> None:
    """Reads the beats that are on their way, and what the call ends with."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_beats_say_which_process_epoch_and_step_it_is(fake: Any):
    worker, client = fake
    call = await attended(client)
    beat = await call.read()
    instance_id = (await client.executor.Describe(pb.DescribeRequest())).instance_id
    assert beat == pb.AttendResponse(instance_id=instance_id)

    await held_step(worker, client)
    beat = await beat_with(call, epoch=1, step_id=1)
    assert not beat.waits_for_peers
    worker.waits_for_peers = True
    await beat_with(call, waits_for_peers=True)
    worker.gate.set()
    await client.join(2)
    await beat_with(call, epoch=2, step_id=0)


@pytest.mark.parametrize(("step_id", "epoch"), [(7, 1), (7, 9)])
async def test_a_step_that_is_not_the_next_of_the_epoch_has_not_begun(
    fake: Any, step_id: int, epoch: int
):
    _, client = fake
    assert await client.joins_and_runs(1)
    assert await reason_of(client.steps(step_id, epoch=epoch)) in (
        "STEP_OUT_OF_ORDER",
        "STALE_EPOCH",
    )
    beat = await (await attended(client)).read()
    assert (beat.epoch, beat.step_id) == (1, 1)


async def test_a_pause_is_announced_at_once_for_as_long_as_a_join_takes(
    fake: Any, monkeypatch: pytest.MonkeyPatch
):
    worker, client = fake
    monkeypatch.setattr("executor.server.beats.BEAT_S", 3600.0)
    call = await attended(client)
    assert (await call.read()).quiet_ms == 0
    groups = HeldGroups()
    worker.form_group = groups.form
    joining = asyncio.ensure_future(client.join(1))
    async with asyncio.timeout(TIMEOUT_S):
        await beat_with(call, quiet_ms=QUIET_MS)
    groups.may_form.set()
    await joining
    worker.servicer._beats.beat_now()
    await beat_with(call, quiet_ms=0, epoch=1)


class Context:
    """Of a call: keeps when beats were sent, and how many standbys they told."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.standbys: list[int] = []

    async def write(self, beat: pb.AttendResponse) -> None:
        self.times.append(asyncio.get_running_loop().time())
        self.standbys.append(beat.num_standbys)

    def peer(self) -> str:
        return "router"


@on_virtual_clock
async def test_answers_stand_for_beats_to_the_router_that_drives_the_epoch_and_to_no_other():
    beats = Beats(pb.AttendResponse, Lease(), Measures().beat_late_s)
    beats.begin()
    driver, other = Context(), Context()

    async def told(epoch: int) -> AsyncIterator[pb.AttendRequest]:
        yield pb.AttendRequest(router_id=b"router", epoch=epoch, is_driver=True)
        await asyncio.Event().wait()

    calls = [
        asyncio.create_task(beats.attend(told(epoch), context))
        for epoch, context in ((7, driver), (0, other))
    ]
    for number in range(100):
        await asyncio.sleep(0.03 if number % 2 else BEAT_S - 0.01)
        beats.note_answer(7)
    answered = asyncio.get_running_loop().time()
    await asyncio.sleep(1.0)
    beats.end()
    await asyncio.gather(*calls)
    first, *later = driver.times[:-1]  # the last one ends the call
    assert first == 0.0
    assert later == pytest.approx([answered + BEAT_S * n for n in range(1, len(later) + 1)])
    assert len(later) >= 9
    assert other.times[:-1] == pytest.approx([BEAT_S * n for n in range(len(other.times) - 1)])


@on_virtual_clock
async def test_news_that_come_as_a_beat_falls_due_are_told_although_answers_stand_for_it() -> None:
    beats = Beats(pb.AttendResponse, Lease(), Measures().beat_late_s)
    beats.begin()
    driver = Context()

    async def requests() -> AsyncIterator[pb.AttendRequest]:
        yield pb.AttendRequest(router_id=b"router", epoch=7, is_driver=True)
        await asyncio.Event().wait()

    call = asyncio.create_task(beats.attend(requests(), driver))  # type: ignore[arg-type]
    await asyncio.sleep(BEAT_S / 2)
    beats.note_answer(7)
    asyncio.get_running_loop().call_at(BEAT_S, beats.beat_now)
    await asyncio.sleep(BEAT_S)
    assert driver.times == pytest.approx([0.0, BEAT_S])
    beats.end()
    await call


@on_virtual_clock
async def test_news_that_one_router_knows_are_told_to_the_others_alone() -> None:
    beats = Beats(pb.AttendResponse, Lease(), Measures().beat_late_s)
    beats.begin()
    driver, standby = Context(), Context()

    async def requests(router_id: bytes) -> AsyncIterator[pb.AttendRequest]:
        yield pb.AttendRequest(router_id=router_id)
        await asyncio.Event().wait()

    attending = [
        asyncio.create_task(beats.attend(requests(router_id), context))  # type: ignore[arg-type]
        for router_id, context in ((b"driver", driver), (b"standby", standby))
    ]
    await asyncio.sleep(BEAT_S / 2)
    beats.beat_now(but_to=b"driver")
    await asyncio.sleep(BEAT_S / 4)
    assert driver.times == [0.0]
    assert standby.times == pytest.approx([0.0, BEAT_S / 2])
    beats.end()
    await asyncio.gather(*attending)


async def test_each_beat_counts_how_late_it_was():
    measures = Measures()
    async with serving(lambda: (FakeWorker(), pb.DescribeResponse()), measures=measures) as (
        _,
        client,
    ):
        call = await attended(client)
        for count in range(1, 4):
            await call.read()
            assert sum(measures.beat_late_s.counts) >= count


async def test_a_router_that_ends_its_call_is_attended_no_more(fake: Any):
    worker, client = fake
    call = await attended(client)
    await call.read()
    await call.done_writing()
    while await call.read() is not None and not call.done():
        pass
    assert not worker.servicer._beats._routers
    other = await attended(client)
    await other.read()
    other.cancel()
    while worker.servicer._beats._routers:
        await asyncio.sleep(0)


async def test_the_first_beat_says_at_once_that_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("executor.server.beats.BEAT_S", 3600.0)
    async with serving(None) as (servicer, client):
        calls = [await attended(client) for _ in range(2)]
        while servicer._lease.num_standbys < 1:  # they have come, of one router
            await asyncio.sleep(0)
        reads = [asyncio.create_task(call.read()) for call in calls]
        done, _ = await asyncio.wait(reads, timeout=0.05)
        assert not done
        await servicer.load(lambda: (FakeWorker(), pb.DescribeResponse()))
        instance_id = (await client.executor.Describe(pb.DescribeRequest())).instance_id
        assert {beat.instance_id for beat in await asyncio.gather(*reads)} == {instance_id}


async def test_a_call_that_waits_for_the_first_beat_ends_with_its_router_or_with_the_process():
    async with serving(None) as (servicer, client):
        call, cancelled, closed = [await attended(client) for _ in range(3)]
        while len(servicer._beats._routers) < 3:
            await asyncio.sleep(0)
        cancelled.cancel()
        await closed.done_writing()
        assert await reason_of(read_to_end(closed)) == "NOT_LOADED"
        while len(servicer._beats._routers) > 1:
            await asyncio.sleep(0)
        await servicer.stop()
        assert await reason_of(read_to_end(call)) == "SHUTTING_DOWN"


async def test_beats_end_with_the_process(fake: Any):
    worker, client = fake
    call = await attended(client)
    await call.read()
    await call.read()  # a router came: this one
    await worker.servicer.stop()
    assert await reason_of(read_to_end(call)) == "SHUTTING_DOWN"


def join_of(router_id: bytes, epoch: int) -> pb.JoinRequest:
    request = join_request(epoch)
    request.router_id = router_id
    return request


async def test_an_executor_whose_driver_is_there_is_refused_to_other_routers(fake: Any):
    _, client = fake
    driver = client.executor.Attend()
    await driver.write(pb.AttendRequest(router_id=b"driver", is_driver=True))
    await driver.read()
    await client.executor.Join(join_of(b"driver", 1))
    for call in (
        client.executor.Join(join_of(b"other", 2)),
        client.executor.Prepare(pb.PrepareRequest(epoch=2, secret=SECRET, router_id=b"other")),
    ):
        assert await reason_of(call) == "HELD"
    told = (await client.executor.Describe(pb.DescribeRequest())).driver
    assert (told.router_id, told.has_stream) == (b"driver", True)
    await client.executor.Join(join_of(b"driver", 2))
    driver.cancel()
    while (await client.executor.Describe(pb.DescribeRequest())).driver.has_stream:
        await asyncio.sleep(0)
    await client.executor.Join(join_of(b"other", 3))


async def test_routers_that_observe_are_told_at_once_who_drives_and_when_it_is_gone(
    fake: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("executor.server.beats.BEAT_S", 3600.0)
    _, client = fake
    call = await attended(client)
    assert not (await call.read()).HasField("driver")
    async with asyncio.timeout(TIMEOUT_S):
        await client.executor.Join(join_of(b"driver", 1))
        while not (beat := await call.read()).HasField("driver"):
            pass
        assert (beat.driver.router_id, beat.driver.has_stream) == (b"driver", True)
        steps = await client.begin(1)
        await steps.read()
        steps.cancel()
        while (await call.read()).driver.has_stream:
            pass


async def test_the_driver_is_told_how_many_routers_stand_by(fake: Any):
    _, client = fake
    driver = client.executor.Attend()
    await driver.write(pb.AttendRequest(router_id=b"driver", is_driver=True))
    await client.executor.Join(join_of(b"driver", 1))
    other = await attended(client)
    beat = await beat_with(driver, num_standbys=1)
    assert not beat.HasField("driver")
    other.cancel()
    await beat_with(driver, num_standbys=0)


@on_virtual_clock
async def test_the_driver_is_told_of_a_standby_that_falls_silent_although_steps_are_answered() -> (
    None
):
    beats = Beats(pb.AttendResponse, Lease(asyncio.get_running_loop().time), Measures().beat_late_s)
    beats.begin()
    driver, standby = Context(), Context()
    goes_on = asyncio.Event()
    goes_on.set()

    async def drives() -> AsyncIterator[pb.AttendRequest]:
        yield pb.AttendRequest(router_id=b"driver", epoch=7, is_driver=True)
        await asyncio.Event().wait()

    async def stands_by() -> AsyncIterator[pb.AttendRequest]:
        while True:
            await goes_on.wait()
            yield pb.AttendRequest(router_id=b"standby")
            await asyncio.sleep(BEAT_S)

    async def run_steps(seconds: float) -> None:
        for _ in range(round(seconds / 0.05)):
            beats.note_answer(7)
            await asyncio.sleep(0.05)

    attending = [
        asyncio.create_task(beats.attend(drives(), driver)),  # type: ignore[arg-type]
        asyncio.create_task(beats.attend(stands_by(), standby)),  # type: ignore[arg-type]
    ]
    await run_steps(2.0)
    assert driver.standbys == [0, 1]
    goes_on.clear()
    await run_steps(2.0)
    assert driver.standbys == [0, 1, 0]
    goes_on.set()
    await run_steps(2.0)
    assert driver.standbys == [0, 1, 0, 1]
    beats.end()
    await asyncio.gather(*attending)
