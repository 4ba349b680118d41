"""If these fail, routers take a group from each other in turns, or nobody takes one that is left."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from protos.executor.lease import LEASE_MS
from protos.executor.v1 import executor_pb2 as pb
from router.errors import ExecutorLost, GroupHeld
from router.executors.discovery import find_addresses
from router.executors.group import ExecutorGroup
from tests.router.support.peers import (
    FORM_TIMEOUT_S,
    WATCHFUL,
    Peers,
    StaleEpoch,
    leave,
    run_group,
    run_step,
    until,
)

OTHER = b"another router"


@asynccontextmanager
async def two_routers() -> AsyncIterator[tuple[ExecutorGroup, ExecutorGroup, Peers]]:
    """A router that drives two executors, one that was refused, and these."""
    async with run_group(2, settings=WATCHFUL) as (driver, peers):
        await driver.form()
        addresses = [member.address for member in driver._members]
        other = ExecutorGroup(find_addresses(addresses), WATCHFUL, router_id=OTHER)
        try:
            with pytest.raises(GroupHeld, match=driver._router_id.hex()[:8]):
                await other.form()
            yield driver, other, peers
        finally:
            await other.close()


async def test_a_router_that_is_refused_disturbs_nobody_and_says_that_it_stands_by() -> None:
    async with two_routers() as (driver, _, peers):
        assert await run_step(driver, 2) == [[0], [10]]
        for peer in peers.values():
            assert peer.joined == [1]
            await until(lambda peer=peer: OTHER in {beat.router_id for beat in peer.attended})
            beats = [beat for beat in peer.attended if beat.router_id == OTHER]
            assert not any(beat.is_driver for beat in beats)
            await until(lambda peer=peer: any(beat.is_driver for beat in peer.attended))


async def test_it_knows_what_the_other_one_serves_and_says_when_it_takes_over() -> None:
    async with two_routers() as (_, other, peers):
        assert other.held_model is not None
        assert not other.is_driver
        leave(peers)
        assert (await other.form()).model == other.held_model
        assert other.is_driver
        await other.close()
        assert not other.is_driver


async def test_it_believes_nothing_of_a_group_of_which_it_saw_a_part() -> None:
    async with run_group(2, settings=WATCHFUL) as (driver, peers):
        await driver.form()
        addresses = [member.address for member in driver._members]
        free, *_ = peers.values()
        free.driver.has_stream, free.driver.silent_ms = False, LEASE_MS
        other = ExecutorGroup(find_addresses(addresses), WATCHFUL, router_id=OTHER)
        try:
            with pytest.raises(GroupHeld):
                await other.form()
            assert other.held_model is None
        finally:
            await other.close()


async def test_it_hears_at_once_that_the_group_is_left_and_takes_it() -> None:
    async with two_routers() as (_, other, peers):
        await until(lambda: len(other._attendance.held) == 2)
        other._is_news.clear()
        news = asyncio.ensure_future(other.news())
        await asyncio.sleep(0)
        assert not news.done()
        leave(peers)
        async with asyncio.timeout(FORM_TIMEOUT_S):
            await news
        assert (await other.form()).epoch == 2
        for peer in peers.values():
            assert peer.driver.router_id == OTHER
        assert await run_step(other, 2) == [[0], [10]]


async def test_a_driver_that_is_silent_keeps_nobody_out_although_its_streams_are_open() -> None:
    async with two_routers() as (_, other, peers):
        for peer in peers.values():
            peer.driver.silent_ms = LEASE_MS
        assert (await other.form()).epoch == 2


async def test_of_two_that_take_a_group_one_gets_its_first_member_and_the_other_none() -> None:
    async with two_routers() as (_, other, peers):
        leave(peers)
        [first, second] = peers.values()

        async def third_comes() -> None:  # once the first has been asked
            await until(lambda: is_described)
            first.driver = pb.Driver(router_id=b"third", has_stream=True)

        is_described: list[bool] = []
        first.describes = lambda told: is_described.append(True)
        second.on_describe = third_comes
        with pytest.raises(GroupHeld, match=b"third".hex()[:8]):
            await other.form()
        assert (first.joined, second.joined) == ([1], [1])
        assert not other.is_driver


async def test_a_router_whose_group_was_taken_stands_by_and_does_not_take_it_back() -> None:
    async with two_routers() as (driver, other, peers):
        leave(peers)
        await other.form()
        peers[0, 0].die(StaleEpoch("epoch 2 has begun"))
        with pytest.raises(GroupHeld):
            await driver.lost()
        assert not driver.is_driver
        with pytest.raises(GroupHeld, match=OTHER.hex()[:8]):
            await driver.form()


async def test_a_driver_keeps_its_executors_while_it_forms_again() -> None:
    async with two_routers() as (driver, other, peers):
        peers[1, 0].die()
        with pytest.raises(ExecutorLost):
            await driver.lost()
        with pytest.raises(GroupHeld):
            await other.form()
        peers[1, 0].dies.clear()
        assert (await driver.form()).epoch == 2


async def test_as_many_routers_stand_by_as_every_member_sees() -> None:
    async with two_routers() as (driver, _, peers):
        assert driver.num_standbys == 0
        peers[0, 0].num_standbys, peers[1, 0].num_standbys = 2, 1
        await until(lambda: driver.num_standbys == 1)
        peers[1, 0].may_beat.clear()
        peers[1, 0].num_standbys = 0
        peers[1, 0].may_beat.set()
        await until(lambda: driver.num_standbys == 0)
