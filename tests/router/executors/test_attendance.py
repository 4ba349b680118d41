"""If these fail, an executor that stands still stops its group for seconds, or a well one is lost."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest
import uvloop
from structlog.testing import capture_logs

from protos.executor.beats import BEAT_S
from protos.executor.v1 import executor_pb2
from protos.serving.v1 import serving_pb2 as pb
from protos.settings import check_settings
from router.errors import ExecutorLost
from router.executors import attendance, group
from router.executors.attendance import TICK_S, Attendance
from router.executors.group import ExecutorGroup, GroupSettings
from router.executors.suspicion import MIN_SILENT_AFTER_MS, MemberState, Suspicion
from tests.router.support.peers import (
    FORM_TIMEOUT_S,
    WATCHFUL,
    Peer,
    Peers,
    plan_step,
    run_group,
    run_step,
    until,
)
from tests.support.virtual_clock import on_virtual_clock

TIMEOUT_S = 60.0
NO_ANSWERS: Mapping[str, float] = {}


def state(executors: ExecutorGroup, number: int) -> MemberState:
    return executors._suspicion.state(executors._members[number].address)


@asynccontextmanager
async def attended_group(dp_size: int) -> AsyncIterator[tuple[ExecutorGroup, Peers]]:
    """A group in its first epoch, whose executors all beat."""
    async with run_group(dp_size, settings=WATCHFUL) as (executors, peers):
        await executors.form()
        attentive = [MemberState.ATTENTIVE] * dp_size
        await until(lambda: [state(executors, rank) for rank in range(dp_size)] == attentive)
        yield executors, peers


def stop(peer: Peer) -> None:
    """Stops an executor: it neither beats nor answers."""
    peer.may_beat.clear()
    peer.may_answer.clear()
    peer.on_describe = asyncio.Event().wait


class Fake:
    """A channel to an executor that sends its beats as fast as they are read.

    Attributes:
        num_read: Of these.
        told: Epochs of the router's beats.
    """

    def __init__(self, num_beats: int = 1) -> None:
        self.num_read = 0
        self.told: list[int] = []
        self._num_beats = num_beats

    def stream_stream(self, *args: Any, **options: Any) -> Callable[[AsyncIterator[bytes]], "Fake"]:
        def call(requests: AsyncIterator[bytes]) -> Fake:
            self._reading = asyncio.create_task(self._read(requests))
            return self

        return call

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        async for data in requests:
            self.told.append(executor_pb2.AttendRequest.FromString(data).epoch)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self.num_read < self._num_beats:
            self.num_read += 1
            yield executor_pb2.AttendResponse(instance_id="first").SerializeToString()
        await asyncio.Event().wait()

    def cancel(self) -> None:
        self._reading.cancel()


def attendance_of(
    epoch: Callable[[str], int], answers: Mapping[str, float] = NO_ANSWERS
) -> Attendance:
    return Attendance(
        Suspicion(0.45),
        router_id=b"router",
        epoch=epoch,
        is_driver=lambda: True,
        answers=answers.items,
        on_tick=lambda now: None,
        on_news=lambda: None,
    )


def go_on(peer: Peer) -> None:
    async def at_once() -> None:
        pass

    peer.may_beat.set()
    peer.may_answer.set()
    peer.on_describe = at_once


@pytest.mark.parametrize("by_answer", [False, True])
async def test_what_waited_to_be_read_while_the_router_stood_still_was_not_late(
    by_answer: bool,
) -> None:
    """Or the router would wait longer for silent executors, for a minute after each such stop."""
    attended = attendance_of(lambda _: 0)
    suspicion, told = attended._suspicion, executor_pb2.AttendResponse().SerializeToString()
    attended.attend("x", Fake())  # type: ignore[arg-type]
    assert attended._timer is not None
    due = attended._timer.when()
    attended._note("x", due - TICK_S, told)
    now = due + 1.0  # all of it came meanwhile, and is read before the tick has its turn
    if by_answer:
        attended.note_late_answer("x", now)
    attended._note("x", now, told)
    attended._clock = lambda: now
    attended._tick()
    assert suspicion.limit_s("x", now, is_idle=False) == 0.45
    assert suspicion._members["x"].silence_s(now) == 0.0  # and nothing that follows is excused
    attended.close()


@pytest.mark.parametrize("reads_beat", [False, True])
async def test_answers_that_came_before_the_router_stood_still_are_excused_for_it_too(
    reads_beat: bool,
) -> None:
    """Else every executor that had just answered would be lost with each such stop."""
    answers = {"x": float("-inf")}
    attended = attendance_of(lambda _: 0, answers)
    suspicion, told = attended._suspicion, executor_pb2.AttendResponse().SerializeToString()
    attended.attend("x", Fake())  # type: ignore[arg-type]
    assert attended._timer is not None
    due = attended._timer.when()
    attended._note("x", due - TICK_S, told)
    answers["x"] = due - 0.01
    now = due + 2.0
    if reads_beat:
        attended._note("y", now, told)
    attended._clock = lambda: now
    attended._tick()
    assert suspicion._members["x"].silence_s(now) == pytest.approx(0.01, abs=1e-3)
    assert suspicion.judge(now, 0, is_idle=False) == []
    attended.close()


async def test_answers_of_steps_are_signs_of_life_with_no_beat_between() -> None:
    async with attended_group(2) as (executors, peers):
        for peer in peers.values():
            peer.may_beat.clear()
        clock = asyncio.get_running_loop().time
        end = clock() + 4 * MIN_SILENT_AFTER_MS / 1000
        while clock() < end:
            assert await run_step(executors, 2) == [[0], [10]]
            await asyncio.sleep(0.01)
        assert [state(executors, rank) for rank in range(2)] == [MemberState.ATTENTIVE] * 2
        assert executors.suspicions == {"cleared": 0, "lost": 0, "false": 0}


@pytest.mark.parametrize("waits", [False, True])
async def test_an_executor_that_stands_still_in_a_step_is_lost_and_the_others_are_freed(
    waits: bool,
) -> None:
    async with attended_group(2) as (executors, peers):
        stop(peers[1, 0])
        peers[0, 0].waits = waits
        peers[0, 0].may_answer.clear()
        executors.send(step := plan_step(2))
        second_sign = r", and .*dp_rank 0.* waits for it" if waits else r" s$"
        with pytest.raises(ExecutorLost, match=rf"dp_rank 1.* is silent: .*{second_sign}"):
            await executors.receive(step)
        await until(lambda: peers[0, 0].num_streams == 0)
        assert executors.suspicions["lost"] == 1


async def test_what_beats_tell_of_each_executor_is_told() -> None:
    async with attended_group(2) as (executors, peers):
        first, second = executors.members()
        assert (first.dp_rank, second.dp_rank) == (0, 1)
        assert first.address == executors._members[0].address
        assert first.state == second.state == pb.MEMBER_STATE_ATTENTIVE
        assert first.HasField("last_beat_age")
        stop(peers[1, 0])
        executors.send(plan_step(2))
        with pytest.raises(ExecutorLost):
            await executors.lost()
        first, second = executors.members()
        assert (first.state, second.state) == (
            pb.MEMBER_STATE_ATTENTIVE,
            pb.MEMBER_STATE_SILENT,
        )
    async with run_group(1) as (executors, peers):
        assert executors.members() == []
        await executors.form()
        [only] = executors.members()
        assert only.state == pb.MEMBER_STATE_UNATTENDED
        assert not only.HasField("last_beat_age")


async def test_one_that_comes_back_is_news_and_joins_the_next_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group, "DESCRIBE_TIMEOUT_S", FORM_TIMEOUT_S)
    async with attended_group(2) as (executors, peers):
        stop(peers[1, 0])
        executors.send(plan_step(2))
        with pytest.raises(ExecutorLost, match="silent"):
            await executors.lost()
        async with asyncio.timeout(FORM_TIMEOUT_S / 2):  # who is silent is not waited for
            with pytest.raises(ExecutorLost, match=r"Describe of .*dp_rank 1.* failed: DEADLINE"):
                await executors.form()

        news = asyncio.ensure_future(executors.news())
        go_on(peers[1, 0])
        await news
        await executors.form()
        assert await run_step(executors, 2) == [[0], [10]]
        assert executors.suspicions == {"cleared": 0, "lost": 1, "false": 1}


async def test_one_that_falls_silent_while_the_group_forms_ends_the_forming() -> None:
    async with attended_group(2) as (executors, peers):
        is_joining = asyncio.Event()

        async def stand_still() -> None:
            is_joining.set()
            peers[1, 0].may_beat.clear()
            await asyncio.Event().wait()

        peers[1, 0].on_join = stand_still
        async with asyncio.timeout(FORM_TIMEOUT_S / 2):
            with pytest.raises(ExecutorLost, match=r"dp_rank 1.* is silent"):
                await executors.form()
        assert is_joining.is_set()


async def test_a_forming_that_is_cancelled_is_over() -> None:
    async with attended_group(2) as (executors, peers):
        is_freed = asyncio.Event()

        async def wait() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                is_freed.set()

        peers[1, 0].on_join = wait
        forming = asyncio.ensure_future(executors.form())
        await until(lambda: len(peers[1, 0].joined) == 2)
        forming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forming
        async with asyncio.timeout(FORM_TIMEOUT_S):
            await is_freed.wait()


async def test_executors_hear_from_their_router_which_epoch_it_drives() -> None:
    async with attended_group(1) as (executors, peers):
        peer = peers[0, 0]
        await until(lambda: any(beat.epoch for beat in peer.attended))
        assert {beat.router_id for beat in peer.attended} == {executors._router_id}
        assert peer.attended[-1].epoch == executors._epoch


@on_virtual_clock
async def test_a_router_whose_steps_go_out_beats_only_to_tell_its_epoch() -> None:
    epochs, executor = [0], Fake()
    router = attendance_of(lambda address: epochs[-1])
    router.attend("executor", executor)
    await asyncio.sleep(0.55)
    assert len(executor.told) == 6  # each epoch, 0: it forms
    for epoch in (7, 8):
        epochs.append(epoch)
        for _ in range(50):
            router.note_step()
            await asyncio.sleep(0.02)
    assert executor.told == [0] * 6 + [7, 8]
    await asyncio.sleep(1.0)
    assert executor.told[8:] == [8] * 9 or executor.told[8:] == [8] * 10
    router.close()


def test_a_router_that_was_held_up_while_it_judged_silences_goes_on() -> None:
    """It serves on uvloop, whose handle of what is due at once does not say when that was."""

    async def judge(num_ticks: int) -> None:
        ticks: asyncio.Queue[float] = asyncio.Queue()

        def hold_up(now: float) -> None:
            end = time.monotonic() + 2 * attendance.TICK_S
            while time.monotonic() < end:
                pass
            ticks.put_nowait(now)

        attended = attendance_of(lambda address: 0)
        attended._on_tick = hold_up
        attended.attend("held.test", cast(grpc.aio.Channel, Fake()))
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(num_ticks):
                await ticks.get()
        attended.close()

    uvloop.run(judge(3))


@on_virtual_clock
async def test_an_executor_that_floods_its_router_with_beats_has_few_of_them_read() -> None:
    router, executor = attendance_of(lambda address: 0), Fake(num_beats=10_000)
    router.attend("executor", executor)
    await asyncio.sleep(10.0)
    assert 100 < executor.num_read <= 5 * 10.0 / BEAT_S  # of 10,000 that were there
    router.close()


async def test_executors_of_an_older_release_are_left_to_deadlines_and_pinged_rarely() -> None:
    opened: dict[str, list[tuple[str, int]]] = {}
    async with run_group(2, settings=WATCHFUL, has_beats=False) as (executors, _):
        opener = executors._connections._opener.open

        def note(target: str, options: list[tuple[str, int]]) -> object:
            opened.setdefault(target, []).append(dict(options)["grpc.keepalive_time_ms"])
            return opener(target, options)

        executors._connections._opener.open = note
        with capture_logs() as logs:
            await executors.form()
            await until(lambda: len(executors._attendance.without_beats) == 2)
            assert await run_step(executors, 2) == [[0], [10]]
            await executors.form()
            await executors.form()
            assert await run_step(executors, 2) == [[0], [10]]
        assert [record["event"] for record in logs] == ["executor_without_beats"] * 2
        assert all(times == [2000, 10_000] for times in opened.values())
        assert set(map(state, [executors] * 2, range(2))) == {MemberState.UNATTENDED}


async def test_what_is_no_beat_costs_nobody_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendance, "REFUSED_RETRY_S", 0.01)
    async with attended_group(2) as (executors, peers):
        peers[1, 0].garbled = {"Attend"}
        await until(lambda: state(executors, 1) is MemberState.UNATTENDED)
        assert await run_step(executors, 2) == [[0], [10]]
        peers[1, 0].garbled = ()
        await until(lambda: state(executors, 1) is MemberState.ATTENTIVE)


async def test_executors_are_attended_only_while_they_are_of_the_group_and_only_if_asked() -> None:
    async with run_group(2) as (executors, peers):
        await executors.form()
        assert not executors._attendance._attended
    async with attended_group(2) as (executors, peers):
        address = executors._members[1].address
        await executors._connections.renew([executors._members[0].address])
        assert executors._suspicion.last_beat(address) is None
        num_beats = len(peers[0, 0].attended)
        await until(lambda: len(peers[0, 0].attended) > num_beats)


@pytest.mark.parametrize("ms", [-1, 1, MIN_SILENT_AFTER_MS - 1])
def test_a_limit_below_two_beats_is_refused(ms: int) -> None:
    with pytest.raises(ValueError, match=f"silent_after_ms={ms}: need 0, or at least 200"):
        check_settings(GroupSettings(silent_after_ms=ms))
