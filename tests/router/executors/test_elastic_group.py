"""An elastic group must go on with whom it has: an executor that stays away must not stop it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from structlog.testing import capture_logs

from protos.executor.v1 import executor_pb2 as executor_pb
from protos.serving.v1 import serving_pb2 as pb
from protos.transport.channel import ChannelOpener
from protos.transport.errors import RpcError
from router.errors import (
    ExecutorLeft,
    ExecutorLied,
    ExecutorLost,
    GroupGrows,
    GroupHeld,
    GroupMismatch,
)
from router.executors import group
from router.executors.elastic import MAX_JOIN_BYTES, ElasticPolicy, Strength
from router.executors.formation import Member
from router.executors.group import ExecutorGroup, GroupSettings
from router.executors.places import candidate_of
from router.executors.spares import Spares, Stage
from tests.router.support.peers import (
    ElasticPeers,
    Gone,
    JoinFailed,
    Peer,
    error_of,
    nothing,
    run_step,
)
from tests.support.virtual_clock import on_virtual_clock

PATIENT = GroupSettings(step_timeout_s=120, min_step_deadline_s=120, silent_after_ms=0)
EAGER = GroupSettings(
    step_timeout_s=120,
    min_step_deadline_s=120,
    silent_after_ms=450,
    grow_after_s=0.05,
    stage_bytes_per_s=1000,
)


LoadFailed = error_of(grpc.StatusCode.UNAVAILABLE, "LOAD_FAILED")
NoRoom = error_of(grpc.StatusCode.FAILED_PRECONDITION, "NO_ROOM")
InvalidPlacement = error_of(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PLACEMENT")
Unexpected = error_of(grpc.StatusCode.UNKNOWN, "")  # of an exception that nobody foresaw
ShuttingDown = error_of(grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")


def as_received(error: RpcError) -> grpc.aio.AioRpcError:
    """Returns an executor's error as its router sees it."""
    trailing = grpc.aio.Metadata(*error.trailing_metadata())
    return grpc.aio.AioRpcError(error.code, grpc.aio.Metadata(), trailing, str(error))


def has_large_experts(description: executor_pb.DescribeResponse) -> None:
    """Has an executor say that no Join should load its experts."""
    description.model.bytes_per_expert = MAX_JOIN_BYTES + 1


async def fail_to_load() -> None:
    raise LoadFailed("the checkpoint is gone")


async def fail_to_join() -> None:
    raise JoinFailed("no peer came")


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def spares_of(world: ElasticPeers) -> dict[str, "pb.SpareState.ValueType"]:
    elastic = world.group.elastic()
    assert elastic is not None
    return {spare.address: spare.state for spare in elastic.spares}


def changes_of(world: ElasticPeers) -> dict[str, int]:
    elastic = world.group.elastic()
    assert elastic is not None
    return dict(elastic.changes)


def experts_of(peer: Peer) -> list[int]:
    placement = peer.placements[-1]
    rows = np.frombuffer(placement.expert_of_slot, "<i4").reshape(-1, placement.expert_slots)
    return rows[placement.coordinates.ep_rank].tolist()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors whose first beat has not come may take their time on a busy machine."""
    monkeypatch.setattr(group, "SILENT_TIMEOUT_S", group.DESCRIBE_TIMEOUT_S)


@asynccontextmanager
async def standing_by(world: ElasticPeers, *, size: int = 2) -> AsyncIterator[ExecutorGroup]:
    """Another router's side of the group, which has been refused it."""
    at_once, strength = replace(PATIENT, first_form_wait_s=0), Strength(size, 1)
    other = ExecutorGroup(world.addresses, at_once, strength=strength, router_id=b"other")
    try:
        with pytest.raises(GroupHeld):
            await other.form()
        yield other
    finally:
        await other.close()


async def shrink(world: ElasticPeers) -> str:
    """Forms a group of two, one of which stays away then. Returns where the other is, which goes on."""
    stays, leaves = [await world.start() for _ in range(2)]
    await world.group.form()
    await world.stop(leaves)
    with pytest.raises(ExecutorLost):
        await world.group.lost()
    assert (await world.group.form()).addresses == (stays,)
    return stays


async def test_members_are_told_their_places_and_the_rest_are_left_alone() -> None:
    async with ElasticPeers(Strength(2, 1), PATIENT) as world:
        first, second, third = [await world.start() for _ in range(3)]
        info = await world.group.form()
        assert (info.shape.dp_size, info.addresses) == (2, (first, second))
        assert await run_step(world.group, 2) == [[0], [10]]
        places = [world.at(address).placements[0].coordinates for address in (first, second)]
        assert [(p.dp_rank, p.dp_size, p.ep_rank, p.ep_size) for p in places] == [
            (0, 2, 0, 2),
            (1, 2, 1, 2),
        ]
        assert [experts_of(world.at(a)) for a in (first, second)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert world.at(third).joined == []


async def test_a_model_without_experts_has_places_all_the_same() -> None:
    def without_experts(description: executor_pb.DescribeResponse) -> None:
        description.model.num_experts = 0
        description.capability.max_expert_slots = 0
        description.resident_experts = b""

    async with ElasticPeers(Strength(2, 1), PATIENT) as world:
        first, second, third = [await world.start() for _ in range(3)]
        for address in (first, second, third):
            world.at(address).describes = without_experts
        assert (await world.group.form()).addresses == (first, second)
        await world.stop(first)
        assert (await world.group.form()).addresses == (second, third)


async def test_without_beats_executors_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "SILENT_TIMEOUT_S", 0.0)
    async with ElasticPeers(Strength(2, 1), PATIENT) as world:
        executors = [await world.start() for _ in range(2)]
        assert (await world.group.form()).addresses == tuple(executors)


async def test_a_spare_takes_the_place_of_a_lost_executor_and_who_stays_keeps_its_kv() -> None:
    async with ElasticPeers(Strength(2, 1), PATIENT) as world:
        first, second, third = [await world.start() for _ in range(3)]
        before = await world.group.form()
        await world.stop(first)
        after = await world.group.form()
        assert after.addresses == (second, third)
        assert after.kv_ids[0] == before.kv_ids[1]
        assert after.kv_ids[1] not in before.kv_ids
        assert experts_of(world.at(second)) == [4, 5, 6, 7]
        assert await run_step(world.group, 2) == [[0], [10]]
        assert changes_of(world) == {"first": 1, "replace": 1}


async def test_members_that_stay_and_beat_are_not_asked_what_they_have_loaded() -> None:
    async with ElasticPeers(Strength(2, 1), EAGER) as world:
        first, second, third = [await world.start() for _ in range(3)]
        await world.group.form()
        attentive = pb.MEMBER_STATE_ATTENTIVE
        await until(lambda: all(each.state == attentive for each in world.group.members()))

        async def fail() -> None:
            raise AssertionError("it was asked")

        world.at(second).on_describe = fail
        await world.stop(first)
        with pytest.raises(ExecutorLost):
            await world.group.lost()
        with capture_logs() as logs:
            assert (await world.group.form()).addresses == (second, third)
        [placed] = [record for record in logs if record["event"] == "group_placed"]
        assert placed["loads"][0] == 0
        assert sorted(experts_of(world.at(second)) + experts_of(world.at(third))) == [*range(8)]
        assert await run_step(world.group, 2) == [[0], [10]]


async def test_members_keep_their_places_as_their_connections_are_opened_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a change of TLS files: all of them shake hands at once, and nobody is heard of before."""
    async with ElasticPeers(Strength(2, 1), EAGER) as world:
        executors = [await world.start() for _ in range(2)]
        await world.group.form()
        attentive = pb.MEMBER_STATE_ATTENTIVE
        await until(lambda: all(each.state == attentive for each in world.group.members()))
        monkeypatch.setattr(group, "SILENT_TIMEOUT_S", 0.0)
        changes = iter([True])
        monkeypatch.setattr(ChannelOpener, "has_changed", lambda _: next(changes, False))
        for address in executors:
            world.at(address).may_beat.clear()
            world.at(address).on_describe = asyncio.Event().wait
        old = dict(world.group._connections.channels)
        assert (await world.group.form()).addresses == tuple(executors)
        assert not set(old.values()) & set(world.group._connections.channels.values())


async def test_without_a_spare_the_others_go_on_down_to_the_least() -> None:
    async with ElasticPeers(Strength(3, 2), PATIENT) as world:
        first, second, third = [await world.start() for _ in range(3)]
        before = await world.group.form()
        await world.stop(second)
        after = await world.group.form()
        assert after.addresses == (first, third)
        assert after.kv_ids == (before.kv_ids[0], before.kv_ids[2])
        assert sorted(experts_of(world.at(first)) + experts_of(world.at(third))) == [*range(8)]
        assert await run_step(world.group, 2) == [[0], [10]]
        await world.stop(third)
        with pytest.raises(
            ExecutorLost, match=r"1 of the group's executors answer, and it takes 2"
        ):
            await world.group.form()


async def test_a_lost_executor_is_replaced_while_names_take_long_to_resolve() -> None:
    async with ElasticPeers(Strength(2, 1), EAGER) as world:
        first, second, third = [await world.start() for _ in range(3)]
        await world.group.form()
        await until(lambda: spares_of(world) != {})
        world.may_resolve.clear()
        await world.stop(first)
        with pytest.raises(ExecutorLost):
            await world.group.lost()
        assert (await world.group.form()).addresses == (second, third)


async def test_the_first_forming_waits_for_names_however_long_they_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group, "LOOKUP_TIMEOUT_S", 0.0)
    async with ElasticPeers(Strength(1, 1), PATIENT) as world:
        only = await world.start()
        world.may_resolve.clear()
        forming = asyncio.ensure_future(world.group.form())
        await asyncio.wait((forming,), timeout=0.01)
        assert not forming.done()
        world.may_resolve.set()
        assert (await forming).addresses == (only,)


async def test_a_group_grows_at_a_border_by_who_has_been_there_and_has_loaded_its_experts() -> None:
    async with ElasticPeers(Strength(2, 1), EAGER) as world:
        first = await shrink(world)
        assert not world.group.wants_border
        third = await world.start()
        with pytest.raises(GroupGrows):
            await world.group.lost()
        assert world.group.wants_border
        assert [request.max_bytes_per_s for request in world.at(third).staged] == [1000]
        held = world.at(third).resident[:4]
        assert (await world.group.form()).addresses == (first, third)
        assert experts_of(world.at(third)) == held, "nothing was left to load"
        assert not world.group.wants_border


@pytest.mark.parametrize("fails", [False, True], ids=["loads", "cannot load"])
async def test_a_group_does_not_grow_by_who_is_loading_and_does_by_who_cannot_ahead(
    fails: bool,
) -> None:
    async with ElasticPeers(Strength(2, 1), EAGER) as world:
        first = await shrink(world)
        third, may_load, num_looks = await world.start(), asyncio.Event(), 0

        async def load() -> None:
            await may_load.wait()
            if fails:
                raise LoadFailed("not now")

        async def count() -> None:
            nonlocal num_looks
            num_looks += 1

        world.at(third).on_stage = load
        await until(lambda: len(world.at(third).staged) == 1)
        world.at(third).on_describe = count
        await until(lambda: num_looks == 10)  # for twice the time for which it has to be there
        assert not world.group.wants_border
        may_load.set()
        with pytest.raises(GroupGrows):
            await world.group.lost()
        assert (world.at(third).resident[0] == -1) == fails
        assert (await world.group.form()).addresses == (first, third)


async def test_spares_are_staged_while_the_group_serves_and_are_counted() -> None:
    async with ElasticPeers(Strength(1, 1), EAGER) as world:
        await world.start()
        spare = await world.start()
        await world.group.form()
        await until(lambda: spares_of(world) == {spare: pb.SPARE_STATE_STAGED})
        assert world.group.may_try_suspects()
        assert world.at(spare).resident == list(range(8))
        await world.stop(spare)
        await until(lambda: spares_of(world) == {})


async def test_a_spare_that_took_a_place_is_none_to_try_suspects_with_before_others_are_seen() -> (
    None
):
    """Else poison that has just killed it would be tried on the last executor."""
    async with ElasticPeers(Strength(2, 1), EAGER) as world:
        first, second, spare = [await world.start() for _ in range(3)]
        await world.group.form()
        await until(lambda: spare in spares_of(world))
        for lost, left in ((second, (first, spare)), (spare, (first,))):
            await world.stop(lost)
            with pytest.raises(ExecutorLost):
                await world.group.lost()
            assert (await world.group.form()).addresses == left
            assert spares_of(world) == {}
        assert not world.group.may_try_suspects()


async def test_a_spare_that_has_yet_to_load_is_none_to_try_suspects_with() -> None:
    """Else their epoch would begin with it, and all others wait until it has loaded."""
    async with ElasticPeers(Strength(2, 1), EAGER) as world:
        await shrink(world)
        third, may_load = await world.start(), asyncio.Event()

        async def load() -> None:
            await may_load.wait()

        world.at(third).on_stage = load
        await until(lambda: spares_of(world) == {third: pb.SPARE_STATE_COLD})
        assert not world.group.may_try_suspects()
        may_load.set()
        await until(lambda: spares_of(world) == {third: pb.SPARE_STATE_STAGED})
        assert world.group.may_try_suspects()


async def leave_alone(address: str) -> None:
    raise AssertionError(f"{address} is in no group")


async def watch_spares(
    peers: dict[str, Peer],
    strength: Strength,
    stage: Stage,
    stall_s: float = 100.0,
    release: Callable[[str], Awaitable[None]] = leave_alone,
) -> tuple[ElasticPolicy, Spares, asyncio.Event]:
    """Forms a group of the first peer, beside which the others are spares. The event: it should grow."""

    async def describe(address: str) -> Member:
        return Member(address, await peers[address].describe(executor_pb.DescribeRequest(), None))

    async def describe_spares() -> list[Member]:
        return [await describe(address) for address in others]

    first, *others = peers
    settings, now = replace(PATIENT, first_form_wait_s=0), asyncio.get_running_loop().time()
    policy, grows = ElasticPolicy(strength, settings, now), asyncio.Event()
    policy.note_formed(now, policy.choose(now, [candidate_of(await describe(first))]))
    spares = Spares(
        policy,
        settings,
        stall_s=stall_s,
        describe=describe_spares,
        stage=stage,
        release=release,
        on_grow=grows.set,
    )
    spares.watch({first})
    return policy, spares, grows


@pytest.mark.parametrize("stalls", [True, False])
@on_virtual_clock
async def test_a_group_waits_for_a_spare_that_loads_slowly_and_not_for_one_that_loads_nothing(
    stalls: bool,
) -> None:
    peers = {address: Peer(0, 0, 0, 1, num_slots=8) for address in "abc"}
    slow, stall_s = "b", 100.0

    async def stage(address: str, request: executor_pb.StageRequest) -> AsyncIterator[Any]:
        for num_bytes in range(1, 11 if address == slow else 1):
            await asyncio.sleep(0.6 * stall_s)
            yield executor_pb.StageResponse(bytes_done=0 if stalls else num_bytes, bytes_total=10)
        async for progress in peers[address].stage(request, None):
            yield progress

    policy, spares, grows = await watch_spares(peers, Strength(3, 1), stage, stall_s)
    async with asyncio.timeout(20 * stall_s):
        await grows.wait()
    assert spares.num_staged == (1 if stalls else 2), "one that is held off takes no place"
    spares.stop()
    now = asyncio.get_running_loop().time()
    assert (policy.held_off_until(slow, now) > 0) == stalls
    assert (peers[slow].resident[0] == -1) == stalls, "it had to load all before"
    assert peers["c"].resident[0] != -1


@pytest.mark.parametrize("failure", [LoadFailed, InvalidPlacement, Unexpected])
@on_virtual_clock
async def test_a_spare_that_cannot_load_is_held_off_and_its_group_grows_by_the_one_behind_it(
    failure: type[RpcError],
) -> None:
    peers = {address: Peer(0, 0, 0, 1, num_slots=8) for address in "abc"}
    for peer in peers.values():
        peer.describes = has_large_experts
    broken = "b"

    async def stage(address: str, request: executor_pb.StageRequest) -> AsyncIterator[Any]:
        if address == broken:
            peers[address].staged.append(request)
            raise as_received(failure("not here"))
        async for progress in peers[address].stage(request, None):
            yield progress

    begun = asyncio.get_running_loop().time()
    policy, spares, grows = await watch_spares(peers, Strength(2, 1), stage)
    async with asyncio.timeout(600):
        await grows.wait()
    now = asyncio.get_running_loop().time()
    held_off = {each.address: each.held_off_duration.ToSeconds() for each in spares.status()}
    spares.stop()
    assert peers["c"].resident[0] != -1
    assert len(peers[broken].staged) > 1
    assert policy.held_off_until(broken, now) == begun + 60, "it counts once while it is held off"
    assert held_off == {broken: int(begun + 60 - now), "c": 0}


@on_virtual_clock
async def test_a_group_does_not_wait_to_grow_for_a_spare_that_loads_to_replace_a_member() -> None:
    peers = {address: Peer(0, 0, 0, 1, num_slots=8) for address in "abc"}
    for peer in peers.values():
        peer.describes = has_large_experts
    loading = set[str]()

    async def stage(address: str, request: executor_pb.StageRequest) -> AsyncIterator[Any]:
        loading.add(address)
        if address == "c":
            await asyncio.Event().wait()
        async for progress in peers[address].stage(request, None):
            yield progress

    _, spares, grows = await watch_spares(peers, Strength(2, 1), stage, stall_s=1e9)
    async with asyncio.timeout(600):
        await grows.wait()
    assert loading == {"b", "c"}
    spares.stop()


@on_virtual_clock
async def test_an_epoch_that_was_ended_to_grow_in_vain_is_not_ended_again_soon() -> None:
    peers = {address: Peer(0, 0, 0, 1, num_slots=8) for address in "ab"}
    clock = asyncio.get_running_loop().time
    _, spares, grows = await watch_spares(
        peers, Strength(2, 1), lambda address, request: peers[address].stage(request, None)
    )
    await grows.wait()
    before = clock()
    grows.clear()
    await grows.wait()
    assert clock() - before == pytest.approx(60, abs=1)
    spares.stop()


@on_virtual_clock
async def test_a_spare_that_is_still_in_a_group_which_did_not_form_leaves_it_and_loads() -> None:
    """Its Join had ended well when another one failed: nobody has told it that there is no group."""
    peers = {address: Peer(0, 0, 0, 1, num_slots=8) for address in "ab"}
    peers["b"].describes = has_large_experts
    joined = {"b"}

    async def stage(address: str, request: executor_pb.StageRequest) -> AsyncIterator[Any]:
        if address in joined:
            raise as_received(NoRoom("slot 0 is in use"))
        async for progress in peers[address].stage(request, None):
            yield progress

    async def release(address: str) -> None:
        joined.remove(address)

    policy, spares, grows = await watch_spares(peers, Strength(2, 1), stage, release=release)
    async with asyncio.timeout(600):
        await grows.wait()
    spares.stop()
    assert policy.held_off_until("b", asyncio.get_running_loop().time()) == 0


async def test_a_spare_is_released_by_a_stream_that_ends() -> None:
    async with ElasticPeers(Strength(1, 1), PATIENT) as world:
        _, spare = [await world.start() for _ in range(2)]
        await world.group.form()
        await world.group._release(spare)
        assert world.at(spare).num_ended_streams == 1
        await world.stop(spare)
        await world.group._release(spare)


@on_virtual_clock
async def test_a_spare_that_ends_while_it_loads_is_not_held_off() -> None:
    peers = {address: Peer(0, 0, 0, 1, num_slots=8) for address in "ab"}
    ends, staged = [ShuttingDown("it was told to stop"), Gone("nobody listens")], asyncio.Event()

    async def stage(address: str, request: executor_pb.StageRequest) -> AsyncIterator[Any]:
        if ends:
            raise as_received(ends.pop())
        async for progress in peers[address].stage(request, None):
            yield progress
        staged.set()

    policy, spares, _ = await watch_spares(peers, Strength(2, 1), stage)
    async with asyncio.timeout(600):
        await staged.wait()
    spares.stop()
    assert policy.held_off_until("b", asyncio.get_running_loop().time()) == 0


async def test_an_executor_that_was_told_to_stop_is_taken_back_without_being_held_off() -> None:
    async with ElasticPeers(Strength(2, 1), EAGER) as world:
        first, second = [await world.start() for _ in range(2)]
        await world.group.form()
        world.at(second).die(ShuttingDown("it was told to stop"))
        with pytest.raises(ExecutorLeft):
            await world.group.lost()
        world.at(second).dies.clear()
        world.at(second).instance_id = "again"
        assert (await world.group.form()).addresses == (first, second)
        assert world.group._policy is not None
        assert world.group._policy.held_off_until(second, world.group._clock()) == 0


async def test_an_executor_that_another_router_drives_is_no_spare() -> None:
    """Else the group would end its epoch to grow by it, and not get it."""
    async with ElasticPeers(Strength(2, 1), EAGER) as world:
        member = await shrink(world)
        taken, spare = [await world.start() for _ in range(2)]
        world.at(taken).driver = executor_pb.Driver(router_id=b"another", has_stream=True)
        with pytest.raises(GroupGrows):
            await world.group.lost()
        assert spares_of(world) == {spare: pb.SPARE_STATE_STAGED}
        assert world.at(taken).staged == []
        world.at(taken).driver.has_stream = False
        assert (await world.group.form()).addresses == (member, spare)


async def test_a_silent_spare_does_not_end_the_epoch_and_a_silent_member_does() -> None:
    async with ElasticPeers(Strength(1, 1), EAGER) as world:
        member, spare = [await world.start() for _ in range(2)]
        await world.group.form()
        await until(lambda: spares_of(world) != {})
        world.at(spare).may_beat.clear()
        await until(lambda: world.group.suspicions["lost"] == 1)
        assert await run_step(world.group, 1) == [[0]]
        world.at(spare).may_beat.set()
        await until(lambda: world.group.suspicions["false"] == 1)
        world.at(member).may_beat.clear()
        with pytest.raises(ExecutorLost, match="is silent"):
            await world.group.lost()
        assert (await world.group.form()).addresses == (spare,)


async def test_an_executor_with_experts_in_other_places_than_its_group_is_left_out() -> None:
    """It would send rows to where another expert is, and nobody would see it but in the text."""
    async with ElasticPeers(Strength(2, 1), PATIENT) as world:
        first, second = [await world.start() for _ in range(2)]

        async def swap_two() -> None:
            places = world.at(second).places
            places[0], places[-1] = places[-1], places[0]

        world.at(second).on_join = swap_two
        with pytest.raises(ExecutorLied, match=rf"{second} .* experts in other places"):
            await world.group.form()
        await world.stop(first)
        with pytest.raises(ExecutorLost):
            await world.group.form()


async def test_an_executor_that_does_not_say_where_its_experts_are_is_told_from_a_wrong_one() -> (
    None
):
    async with ElasticPeers(Strength(2, 1), PATIENT) as world:
        _, second = [await world.start() for _ in range(2)]

        async def forget() -> None:
            world.at(second).places = []

        world.at(second).on_join = forget
        with (
            capture_logs() as logs,
            pytest.raises(ExecutorLied, match=rf"{second} .* joined with no places_crc32: it is"),
        ):
            await world.group.form()
        [told] = [record for record in logs if record["event"] == "executor_lied"]
        assert "no places_crc32" in told["problem"]


async def test_an_executor_that_cannot_load_its_experts_is_left_out_next_time() -> None:
    async with ElasticPeers(Strength(2, 1), PATIENT) as world:
        first, second, third = [await world.start() for _ in range(3)]
        await world.group.form()
        world.at(third).on_join = fail_to_load
        await world.stop(second)
        with pytest.raises(ExecutorLost, match="LOAD_FAILED"):
            await world.group.form()
        assert (await world.group.form()).addresses == (first,)


async def test_a_member_whose_joins_fail_gives_its_place_to_a_spare_and_is_told_to_be_held_off() -> (
    None
):
    async with ElasticPeers(Strength(2, 1), EAGER) as world:
        first, second, third = [await world.start() for _ in range(3)]
        await world.group.form()
        world.at(second).on_join = fail_to_join
        with capture_logs() as logs:
            for _ in range(2):
                with pytest.raises(ExecutorLost, match="JOIN_FAILED"):
                    await world.group.form()
            assert (await world.group.form()).addresses == (first, third)
        [told] = [record for record in logs if record["event"] == "executor_held_off"]
        assert (told["executor"], told["seconds"]) == (second, 2 * EAGER.grow_after_s)
        assert second in told["problem"]
        await until(lambda: second in spares_of(world))


async def refuse_to_join() -> None:
    raise ShuttingDown("this executor was told to stop")


async def test_only_who_could_not_take_its_place_is_held_off_for_it_and_once() -> None:
    async with ElasticPeers(Strength(3, 1), PATIENT) as world:
        first, second, third = [await world.start() for _ in range(3)]
        await world.group.form()
        await world.stop(second)
        await world.stop(third)
        assert (await world.group.form()).addresses == (first,)
        good, bad = [await world.start() for _ in range(2)]
        with capture_logs() as logs:
            for on_join in (fail_to_join, fail_to_load):
                world.at(bad).on_join = on_join
                with pytest.raises(ExecutorLost):
                    await world.group.form()
            assert (await world.group.form()).addresses == (first, good)
        told = [record for record in logs if record["event"] == "executor_held_off"]
        assert [(record["executor"], record["seconds"]) for record in told] == [(bad, 60)]


async def test_joins_of_an_executor_that_was_told_to_stop_are_no_reason_to_hold_any_off() -> None:
    async with ElasticPeers(Strength(3, 1), PATIENT) as world:
        first, second = [await world.start() for _ in range(2)]
        third = await world.start()
        await world.group.form()
        await world.stop(third)
        fourth = await world.start()
        world.at(second).on_join = refuse_to_join
        with capture_logs() as logs:
            for _ in range(3):
                with pytest.raises(ExecutorLeft, match=f"{second}.* told to stop"):
                    await world.group.form()
            world.at(second).on_join = nothing
            world.at(second).instance_id = "again"
            assert set((await world.group.form()).addresses) == {first, second, fourth}
        assert [each for each in logs if each["event"] == "executor_held_off"] == []
        assert world.group._policy is not None
        assert world.group._policy.held_off_until(second, world.group._clock()) == 0


def stand_still(peer: Peer) -> None:
    """Has a peer describe itself as one that stands where it was started."""
    peer.describes = lambda told: (
        told.ClearField("capability"),
        told.ClearField("resident_experts"),
        setattr(told.coordinates, "dp_size", 1),
    )


async def test_an_executor_with_a_place_of_its_own_is_refused_by_name() -> None:
    async with ElasticPeers(Strength(1, 1), PATIENT) as world:
        address = await world.start()
        stand_still(world.at(address))
        with pytest.raises(GroupMismatch, match=rf"{address}.*is not elastic"):
            await world.group.form()


async def test_an_executor_with_a_place_of_its_own_stops_no_others() -> None:
    async with ElasticPeers(Strength(2, 1), EAGER) as world:
        first, second, third = [await world.start() for _ in range(3)]
        stand_still(world.at(first))
        info = await world.group.form()
        assert info.addresses == (second, third)
        await until(lambda: spares_of(world) == {first: pb.SPARE_STATE_UNFIT})
        await world.stop(third)
        with pytest.raises(ExecutorLost):
            await world.group.lost()
        assert (await world.group.form()).addresses == (second,)
        assert not world.group.may_try_suspects(), "it has none to spare"


def has_blocks(count: int) -> Callable[[executor_pb.DescribeResponse], object]:
    return lambda told: setattr(told, "num_kv_blocks", count)


async def test_sequences_of_a_group_that_grows_by_larger_executors_are_no_longer_than_before() -> (
    None
):
    """Else it could not go on with the smaller ones."""

    async with ElasticPeers(Strength(2, 1), PATIENT) as world:
        small, large = [await world.start() for _ in range(2)]
        world.at(small).describes = has_blocks(5)
        before = await world.group.form()
        await world.stop(small)
        alone = await world.group.form()
        assert alone.addresses == (large,)
        assert alone.model.max_model_len == before.model.max_model_len == 16
        again, smaller = [await world.start() for _ in range(2)]
        world.at(again).describes, world.at(smaller).describes = has_blocks(5), has_blocks(4)
        assert (await world.group.form()).addresses == (large, again)


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_router_that_takes_a_group_takes_sequences_as_long_as_its_driver_did(
    is_told: bool,
) -> None:
    """Which its present members need not show: the group may have begun with smaller ones."""
    async with ElasticPeers(Strength(2, 1), PATIENT) as world:
        small, large = [await world.start() for _ in range(2)]
        world.at(small).describes = has_blocks(5)
        await world.group.form()
        await world.stop(small)
        assert (await world.group.form()).model.max_model_len == 16
        if not is_told:  # by a driver of an older release
            world.at(large).joined_max_model_len = 0
        async with standing_by(world) as other:
            assert other.held_model is not None
            assert other.held_model.max_model_len == (16 if is_told else 48)
            again = await world.start()
            world.at(again).describes = has_blocks(5)
            world.at(large).driver.has_stream = False
            info = await other.form()
        assert info.addresses == ((large, again) if is_told else (large,))
        assert info.model.max_model_len == (16 if is_told else 48)


async def test_a_router_that_takes_a_group_gives_no_place_to_who_is_too_small_for_it() -> None:
    async with ElasticPeers(Strength(2, 1), PATIENT) as world:
        member, lost, small = [await world.start() for _ in range(3)]
        world.at(small).describes = has_blocks(5)
        model = (await world.group.form()).model
        async with standing_by(world) as other:
            await world.stop(lost)
            world.at(member).driver.has_stream = False
            info = await other.form()
        assert info.addresses == (member,)
        assert info.model.max_model_len == model.max_model_len > 16


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1)])
async def test_a_router_that_takes_a_group_gives_it_the_size_that_it_was_told(
    before: int, after: int
) -> None:
    async with ElasticPeers(Strength(before, 1), PATIENT) as world:
        executors = [await world.start() for _ in range(3)]
        assert (await world.group.form()).addresses == tuple(executors[:before])
        async with standing_by(world, size=after) as other:
            for peer in world.peers.values():
                peer.driver.has_stream = False
            info = await other.form()
        assert info.addresses == tuple(executors[:after])


async def test_a_router_that_takes_a_group_has_none_of_its_members_load_experts() -> None:
    async with ElasticPeers(Strength(2, 1), PATIENT) as world:
        members = [await world.start() for _ in range(2)]
        await world.group.form()
        spare = await world.start()
        world.peers = {spare: world.at(spare), **world.peers}  # a router finds it first
        async with standing_by(world) as other:
            for peer in world.peers.values():
                peer.driver.has_stream = False
            with capture_logs() as logs:
                await other.form()
        [placed] = [record for record in logs if record["event"] == "group_placed"]
        assert (placed["executors"], placed["loads"]) == (members, [0, 0])


async def test_a_router_that_takes_a_group_goes_by_what_its_newest_epoch_was_told() -> None:
    """Executors of an epoch that did not form may have been told of longer sequences."""
    async with ElasticPeers(Strength(2, 1), PATIENT) as world:
        small, large, spare = [await world.start() for _ in range(3)]
        world.at(small).describes = has_blocks(5)
        await world.group.form()
        world.at(spare).joined_max_model_len = 48
        world.at(spare).driver.CopyFrom(world.at(large).driver)
        async with standing_by(world) as other:
            for peer in world.peers.values():
                peer.driver.has_stream = False
            info = await other.form()
        assert (info.addresses, info.model.max_model_len) == ((small, large), 16)
