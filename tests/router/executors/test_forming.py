"""If this fails, a router waits for executors that wait for one that is lost: so does everybody."""

import asyncio

import grpc
import pytest

from protos.transport.errors import RpcError
from router.errors import ExecutorLost
from tests.router.support.peers import FORM_TIMEOUT_S, Peer, nothing, plan_step, run_group


class JoinFailed(RpcError):
    """What an executor says that does not get into an epoch."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "JOIN_FAILED"


class Gone(RpcError):
    """What gRPC says of an executor that is not there any more."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = ""


class Waiting:
    """A Join that waits for a member for as long as the router does."""

    def __init__(self, peer: Peer) -> None:
        self.has_begun = asyncio.Event()
        self.was_given_up = asyncio.Event()
        peer.on_join = self._wait

    async def _wait(self) -> None:
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.was_given_up.set()


@pytest.mark.parametrize("failure", [JoinFailed("graphs were not captured"), Gone("no connection")])
async def test_when_one_executor_cannot_join_the_others_are_freed_and_the_next_epoch_begins(
    failure: RpcError,
) -> None:
    """The router does not wait until they have waited for it: their time to form is long."""
    async with run_group(dp_size=3, attn_tp_size=1) as (group, peers):
        others = [Waiting(peers[rank, 0]) for rank in (0, 1)]

        async def fail() -> None:
            for other in others:
                await other.has_begun.wait()
            raise failure

        peers[2, 0].on_join = fail
        async with asyncio.timeout(FORM_TIMEOUT_S):
            with pytest.raises(ExecutorLost, match=r"Join of .*dp_rank 2.* failed: "):
                await group.form()
            for other in others:
                await other.was_given_up.wait()

        for peer in peers.values():
            peer.on_join = nothing
        info = await group.form()
        assert peers[0, 0].prepared == [info.epoch - 1, info.epoch]
        assert all(peer.joined == [info.epoch - 1, info.epoch] for peer in peers.values())
        group.send(step := plan_step(dp_size=3))
        assert len(await group.receive(step)) == 3
