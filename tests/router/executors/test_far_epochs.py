"""If these fail, one call by a stranger to one executor keeps its group from ever forming again."""

import pytest

from protos.executor.epochs import MAX_EPOCH_LEAP
from router.errors import ExecutorLied, ExecutorLost
from tests.router.support.peers import Peer, formed_group, run_group, run_step


def called_by_a_stranger(peer: Peer, num_calls: int = 1) -> None:
    """As Prepare and Join do, with the highest numbers that are taken."""
    for _ in range(num_calls):
        peer.advance(peer.newest + MAX_EPOCH_LEAP, least=peer.newest)


@pytest.mark.parametrize("place", [(0, 0), (1, 0), (1, 1)])
@pytest.mark.parametrize("num_calls", [1, 2, 20])
async def test_executors_that_a_stranger_led_far_ahead_form_at_the_next_attempt(
    place: tuple[int, int], num_calls: int
) -> None:
    async with formed_group(2, 2) as (group, peers):
        called_by_a_stranger(peers[place], num_calls)
        info = await group.form()
        assert info.epoch == 1 + 1 + num_calls * MAX_EPOCH_LEAP
        assert all(peer.joined == [1, info.epoch] for peer in peers.values())
        assert len(await run_step(group, 2)) == 2
        assert (await group.form()).epoch == info.epoch + 1


@pytest.mark.parametrize("place", [(0, 0), (1, 0)])
@pytest.mark.parametrize("num_calls", [1, 2])
async def test_a_stranger_s_call_while_the_group_forms_costs_that_forming_only(
    place: tuple[int, int], num_calls: int
) -> None:
    async with run_group(2) as (group, peers):
        peer = peers[place]

        def call_once_described(_: object) -> None:
            called_by_a_stranger(peer, num_calls)
            peer.describes = lambda description: None

        peer.describes = call_once_described
        with pytest.raises(ExecutorLost, match="STALE_EPOCH"):
            await group.form()
        await group.form()
        assert len(await run_step(group, 2)) == 2


async def test_strangers_who_lead_executors_apart_cost_no_more_than_one_does() -> None:
    async with run_group(3) as (group, peers):
        for num_calls, peer in enumerate(peers.values()):
            called_by_a_stranger(peer, num_calls)
        await group.form()
        assert {peer.newest for peer in peers.values()} == {2 * MAX_EPOCH_LEAP + 1}


async def test_an_executor_that_restarts_is_brought_up_to_the_others() -> None:
    async with formed_group(2) as (group, peers):
        called_by_a_stranger(peers[0, 0], 200)
        await group.form()
        called_by_a_stranger(peers[0, 0], 200)
        await group.form()
        peers[1, 0].newest, peers[1, 0].instance_id = 0, "second"
        info = await group.form()
        assert len(peers[1, 0].prepared) == 200 + 200 + 400
        assert peers[1, 0].joined[-1] == info.epoch


async def test_an_epoch_that_nobody_can_have_counted_to_is_a_lie_that_ends_with_a_restart() -> None:
    async with formed_group(2) as (group, peers):
        liar = peers[1, 0]
        liar.newest = 1 << 62
        with pytest.raises(ExecutorLied, match=r"dp_rank 1.*epoch=4611686018427387904, more than"):
            await group.form()
        liar.newest = 1  # it takes that back, and is the same process
        with pytest.raises(ExecutorLost, match=r"dp_rank 1.*epoch=46.* left out until it restarts"):
            await group.form()
        liar.instance_id = "second"
        assert (await group.form()).epoch == 2
        assert peers[0, 0].prepared == [1, 2]


async def test_the_only_executor_of_a_group_may_be_anywhere() -> None:
    async with run_group(1) as (group, peers):
        peers[0, 0].newest = 1 << 62
        assert (await group.form()).epoch == (1 << 62) + 1
