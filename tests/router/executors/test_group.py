"""If attention-TP peers get unlike steps, or a lost one goes unnoticed, a whole group hangs."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest
from structlog.testing import capture_logs

from deploy.local.ports import held_port
from protos.executor.v1 import executor_pb2 as pb
from protos.transport.errors import RpcError
from router.errors import ExecutorLeft, ExecutorLost, ReasonUnknown
from router.executors import group as executor_client
from router.executors.discovery import find_addresses
from router.executors.group import ExecutorGroup
from router.executors.step_deadline import MIN_STEPS, StepDeadline
from tests.router.conftest import LONG_S
from tests.router.support.peers import (
    FORM_TIMEOUT_S,
    NEVER_LATE,
    Peer,
    nothing,
    plan_step,
    run_group,
)


async def test_attention_tp_peers_get_the_same_bytes_and_the_first_ones_tokens_count() -> None:
    async with run_group(dp_size=2, attn_tp_size=3) as (group, peers):
        info = await group.form()
        assert (info.shape.dp_size, info.shape.attn_tp_size) == (2, 3)

        group.send(step := plan_step(dp_size=2))
        results = await group.receive(step)

        assert [result.next_token_ids.tolist() for result in results] == [[0], [10]]
        for dp_rank in range(2):
            [sent] = peers[dp_rank, 0].steps
            assert pb.StepRequest.FromString(sent).ranks[0].dp_rank == dp_rank
            assert [peers[dp_rank, peer].steps for peer in (1, 2)] == [[sent], [sent]]
        assert peers[0, 0].steps != peers[1, 0].steps


async def test_every_executor_joins_the_store_that_the_first_one_prepared() -> None:
    async with run_group(dp_size=2, attn_tp_size=2) as (group, peers):
        first = await group.form()
        second = await group.form()

        assert first.epoch < second.epoch
        epochs = [first.epoch, second.epoch]
        for place, peer in peers.items():
            assert peer.prepared == (epochs if place == (0, 0) else [])
        assert all(peer.joined == epochs for peer in peers.values())


async def test_a_step_is_over_only_when_every_peer_has_ended_it() -> None:
    async with run_group(dp_size=1, attn_tp_size=2) as (group, peers):
        await group.form()
        peers[0, 1].may_answer.clear()
        group.send(step := plan_step(dp_size=1))
        await until(lambda: group._streams[0].has_answer and len(peers[0, 1].steps) == 1)
        receiving = asyncio.ensure_future(group.receive(step))
        await until(lambda: not group._streams[0].has_answer)
        for _ in range(10):  # a group that did not wait for the other one would end here
            await asyncio.sleep(0)
        assert len(peers[0, 0].steps) == len(peers[0, 1].steps) == 1
        assert not receiving.done()

        peers[0, 1].may_answer.set()
        [result] = await receiving
        assert result.next_token_ids.tolist() == [0]


async def test_the_loss_of_a_peer_that_answers_no_tokens_ends_the_epoch_for_all() -> None:
    async with run_group(dp_size=2, attn_tp_size=2) as (group, peers):
        await group.form()
        for peer in peers.values():
            peer.may_answer.clear()
        group.send(step := plan_step(dp_size=2))
        peers[1, 1].dies.set()

        with pytest.raises(ExecutorLost, match=r"dp_rank 1, attn_tp_rank 1.*its attention failed"):
            await group.lost()
        with pytest.raises(ExecutorLost, match="dp_rank 1, attn_tp_rank 1"):
            await group.receive(step)

        for peer in peers.values():
            peer.dies.clear()
            peer.may_answer.set()
        await group.form()
        group.send(step := plan_step(dp_size=2))
        results = await group.receive(step)
        assert [result.next_token_ids.tolist() for result in results] == [[0], [10]]


class StepFailed(RpcError):
    """What an executor says whose step fails, also if it does for want of another."""

    code = grpc.StatusCode.INTERNAL
    reason = "STEP_FAILED"


class Stopping(RpcError):
    code = grpc.StatusCode.UNAVAILABLE
    reason = "SHUTTING_DOWN"


class Gone(RpcError):
    """What a call ends with that reaches nobody."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = ""


def says(error: RpcError) -> Callable[[], Awaitable[None]]:
    """Returns what has Describe answered with an error."""

    async def raise_it() -> None:
        raise error

    return raise_it


STEP_FAILED, REASON_LOST = StepFailed("another executor left the group"), None


@pytest.mark.parametrize("heard_first", [0, 1])
@pytest.mark.parametrize("last_word", [STEP_FAILED, REASON_LOST], ids=["failed", "lost"])
async def test_who_left_is_asked_when_the_first_stream_to_end_does_not_say(
    last_word: RpcError | None, heard_first: int
) -> None:
    """A step fails on those who stay, too; and gRPC loses what is said while a step is sent."""
    async with run_group(dp_size=3, attn_tp_size=1) as (group, peers):
        await group.form()
        peers[1, 0].on_describe = says(Stopping("it was told to stop"))
        peers[heard_first, 0].last_word = last_word
        peers[heard_first, 0].dies.set()
        with pytest.raises(ExecutorLeft, match=r"dp_rank 1.*told to stop"):
            await asyncio.wait_for(group.lost(), LONG_S)


async def test_who_does_not_answer_is_named_though_another_one_says_that_its_step_failed() -> None:
    async with run_group(dp_size=2, attn_tp_size=1) as (group, peers):
        await group.form()
        peers[1, 0].on_describe = says(Gone("nobody is there any more"))
        peers[0, 0].last_word = STEP_FAILED
        peers[0, 0].dies.set()
        expected = r"dp_rank 1, attn_tp_rank 0\): UNAVAILABLE; .*dp_rank 0.*left the group"
        with pytest.raises(ExecutorLost, match=expected):
            await asyncio.wait_for(group.lost(), LONG_S)


async def test_a_step_that_failed_on_one_executor_ends_the_epoch_for_all() -> None:
    async with run_group(dp_size=2, attn_tp_size=1) as (group, peers):
        await group.form()
        await until(lambda: all(peer.num_streams == 1 for peer in peers.values()))
        peers[1, 0].last_word = StepFailed("out of memory")
        peers[1, 0].dies.set()
        with pytest.raises(ReasonUnknown, match=r"dp_rank 1.*out of memory"):
            await asyncio.wait_for(group.lost(), LONG_S)
        await until(lambda: all(peer.num_streams == 0 for peer in peers.values()))


async def test_the_others_streams_end_before_anybody_is_asked_why_the_first_did() -> None:
    """They wait in a collective for who has left."""
    async with run_group(dp_size=2, attn_tp_size=1) as (group, peers):
        await group.form()
        await until(lambda: all(peer.num_streams == 1 for peer in peers.values()))

        async def answer_once_free() -> None:
            await until(lambda: peers[0, 0].num_streams == 0)

        peers[1, 0].on_describe = answer_once_free
        peers[1, 0].last_word = STEP_FAILED
        peers[1, 0].dies.set()
        with pytest.raises(ReasonUnknown):
            await asyncio.wait_for(group.lost(), LONG_S)


async def test_an_answer_that_is_overdue_while_the_reason_is_asked_for_is_not_the_reason() -> None:
    async with run_group(dp_size=2, attn_tp_size=1, deadline=hurried()) as (group, peers):
        await group.form()
        for peer in peers.values():
            peer.may_answer.clear()
        group.send(step := plan_step(dp_size=2))
        receiving = asyncio.ensure_future(group.receive(step))
        await until(lambda: len(peers[1, 0].steps) == 1)

        async def answer_late() -> None:
            await asyncio.sleep(0.4)  # the step's deadline is 0.3 s
            raise Stopping("it was told to stop")

        peers[1, 0].on_describe = answer_late
        peers[1, 0].last_word = STEP_FAILED
        peers[1, 0].dies.set()
        with pytest.raises(ExecutorLeft, match=r"dp_rank 1.*told to stop"):
            await receiving


def other_agreement(request: pb.StepRequest) -> None:
    request.agreement.global_num_tokens[0] += 1


def other_part(request: pb.StepRequest) -> None:
    request.ranks[0].sequences.rows = b"\7\0\0\0"


def both(request: pb.StepRequest) -> None:
    other_agreement(request)
    other_part(request)


@pytest.mark.parametrize(
    ("misreads", "what"),
    [
        (other_agreement, "another agreement"),
        (other_part, "another part"),
        (both, "another agreement and another part"),
    ],
)
async def test_executors_that_ran_another_step_than_they_were_sent_are_named(
    misreads: Callable[[pb.StepRequest], None], what: str
) -> None:
    async with run_group(dp_size=2, attn_tp_size=2) as (group, peers):
        await group.form()
        for place in ((0, 1), (1, 0)):
            peers[place].misreads = misreads
        group.send(step := plan_step(dp_size=2))
        with pytest.raises(ExecutorLost) as caught:
            await group.receive(step)
        problem = str(caught.value)
        assert problem.startswith("step 1 was not run as it was sent: ")
        for dp_rank, attn_tp_rank in peers:
            named = f"(dp_rank {dp_rank}, attn_tp_rank {attn_tp_rank}) ran {what}"
            assert (named in problem) == ((dp_rank, attn_tp_rank) in ((0, 1), (1, 0)))
        await until(lambda: all(peer.num_streams == 0 for peer in peers.values()))


def hurried() -> StepDeadline:
    return StepDeadline(factor=20, min_s=0.1, max_s=0.3)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_all_streams_end_at_the_first_loss_so_that_every_peer_is_free() -> None:
    async with run_group(dp_size=2, attn_tp_size=2) as (group, peers):
        await group.form()
        await until(lambda: all(peer.num_streams == 1 for peer in peers.values()))
        peers[1, 0].dies.set()
        await until(lambda: all(peer.num_streams == 0 for peer in peers.values()))
        with pytest.raises(ExecutorLost, match="its attention failed"):
            await group.lost()


async def test_all_streams_end_when_an_answer_is_overdue() -> None:
    async with run_group(dp_size=2, attn_tp_size=1, deadline=hurried()) as (group, peers):
        await group.form()
        peers[1, 0].may_answer.clear()
        group.send(step := plan_step(dp_size=2))
        with pytest.raises(ExecutorLost, match=r"did not answer step 1 within 0\.3 s"):
            await group.receive(step)
        await until(lambda: all(peer.num_streams == 0 for peer in peers.values()))
        with pytest.raises(ExecutorLost):
            await group.lost()


async def test_a_rank_that_is_silent_is_told_from_those_that_wait_for_it() -> None:
    async with run_group(dp_size=3, attn_tp_size=1, deadline=hurried()) as (group, peers):
        await group.form()
        for place in ((0, 0), (2, 0)):
            peers[place].may_answer.clear()

        async def vanish() -> None:
            await until(lambda: group._streams[1].has_answer)
            raise Gone("nobody is there any more")

        peers[2, 0].on_describe = vanish
        group.send(step := plan_step(dp_size=3))
        with pytest.raises(ExecutorLost) as caught:
            await group.receive(step)
    silent, _, waiting = str(caught.value).partition(", nor any other call; ")
    assert "(dp_rank 2, attn_tp_rank 0) did not answer step 1 within 0.3 s" in silent
    assert "dp_rank 0" not in silent
    assert "(dp_rank 0, attn_tp_rank 0) waited for it" in waiting
    assert "dp_rank 1" not in str(caught.value)


async def test_who_does_not_answer_any_call_in_time_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with run_group(dp_size=1, attn_tp_size=1, deadline=hurried()) as (group, peers):
        await group.form()
        monkeypatch.setattr(executor_client, "PROBE_TIMEOUT_S", 0.1)
        peers[0, 0].may_answer.clear()
        peers[0, 0].on_describe = asyncio.Event().wait
        group.send(step := plan_step(dp_size=1))
        with pytest.raises(ExecutorLost, match=r"within 0\.3 s, nor any other call$"):
            await group.receive(step)


async def test_ranks_that_are_late_but_not_silent_are_all_named() -> None:
    async with run_group(dp_size=3, attn_tp_size=1, deadline=hurried()) as (group, peers):
        await group.form()
        for place in ((0, 0), (2, 0)):
            peers[place].may_answer.clear()
        group.send(step := plan_step(dp_size=3))
        with pytest.raises(ExecutorLost, match=r"dp_rank 0.*dp_rank 2.*they answer other calls"):
            await group.receive(step)


async def test_an_answer_that_comes_while_it_is_looked_for_is_not_too_late() -> None:
    """It was the router that stood still, not the executor."""
    async with run_group(dp_size=2, attn_tp_size=1, deadline=hurried()) as (group, peers):
        await group.form()
        peers[1, 0].may_answer.clear()

        async def answer() -> None:
            peers[1, 0].may_answer.set()
            await until(lambda: group._streams[1].has_answer)

        peers[1, 0].on_describe = answer
        group.send(step := plan_step(dp_size=2))
        results = await group.receive(step)
        assert [result.next_token_ids.tolist() for result in results] == [[0], [10]]


@pytest.mark.parametrize(
    ("shift", "answered"),
    [
        ((-1, 0), "step 1 of epoch 0"),
        ((1, 0), "step 1 of epoch 2"),
        ((0, -1), "step 0 of epoch 1"),
        ((0, 1), "step 2 of epoch 1"),
    ],
)
async def test_an_answer_to_another_step_or_epoch_is_refused(
    shift: tuple[int, int], answered: str
) -> None:
    async with run_group(dp_size=1, attn_tp_size=2) as (group, peers):
        await group.form()
        peers[0, 1].shift = shift
        group.send(step := plan_step(dp_size=1))
        expected = f"attn_tp_rank 1.*answered {answered} where step 1 of epoch 1 was due"
        with pytest.raises(ExecutorLost, match=expected):
            await group.receive(step)


@pytest.mark.parametrize(
    ("spare_bytes", "problem"),
    [(b"xy", "a column that cannot be read"), (b"four", "answered 2 tokens for 1")],
)
async def test_an_answer_that_cannot_be_read_costs_the_group_and_not_the_router(
    spare_bytes: bytes, problem: str
) -> None:
    async with run_group(dp_size=2, attn_tp_size=1) as (group, peers):
        await group.form()
        peers[1, 0].spare_bytes = spare_bytes
        group.send(step := plan_step(dp_size=2))
        with pytest.raises(ExecutorLost, match=problem):
            await group.receive(step)


async def test_a_restarted_executor_is_recognised_and_what_was_learnt_of_steps_forgotten() -> None:
    deadline = StepDeadline(factor=20, min_s=5, max_s=30)
    async with run_group(dp_size=2, attn_tp_size=1, deadline=deadline) as (group, peers):
        plan = plan_step(dp_size=2).plan
        for _ in range(MIN_STEPS):
            deadline.add(plan.agreement, 0.01)
        with capture_logs() as logs:
            await group.form()
            await group.form()
        assert logs == []
        assert deadline.limit_s(plan.agreement) == 5

        peers[1, 0].instance_id = "second"
        with capture_logs() as logs:
            await group.form()
        [record] = logs
        assert record["event"] == "executor_restarted"
        assert "dp_rank 1" in record["executor"]
        assert (record["old_instance"], record["new_instance"]) == ("first", "second")
        assert deadline.limit_s(plan.agreement) == 30


async def test_an_executor_that_restarts_while_the_group_forms_is_not_taken_for_its_predecessor():
    async with run_group(dp_size=2, attn_tp_size=1) as (group, peers):
        calls: list[str] = []

        async def restart() -> None:
            calls.append("describe")
            peers[1, 0].instance_id = f"after {len(calls)}"

        peers[1, 0].on_describe = restart
        with pytest.raises(ExecutorLost, match=r"dp_rank 1.*was restarted while the group formed"):
            await group.form()
        peers[1, 0].on_describe = nothing
        await group.form()


async def test_another_process_at_the_same_address_gets_no_step_of_the_epoch() -> None:
    """The stream ends with its process, and no step travels outside of it."""
    servers = []

    async def serve(peer: Peer, port: int) -> int:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((peer.handlers(),))
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        servers.append(server)
        return port

    old, new = (Peer(0, 0, 1, 1) for _ in range(2))
    with held_port() as port:
        port = await serve(old, port)
        group = ExecutorGroup(
            find_addresses([f"127.0.0.1:{port}"]),
            "moe",
            form_timeout_s=FORM_TIMEOUT_S,
            deadline=NEVER_LATE,
        )
        try:
            await group.form()
            group.send(step := plan_step(dp_size=1))
            await group.receive(step)
            await servers.pop().stop(None)
            await serve(new, port)
            with pytest.raises(ExecutorLost):
                await group.lost()
            group.send(step := plan_step(dp_size=1))
            with pytest.raises(ExecutorLost):
                await group.receive(step)
            await group.form()
            assert new.steps == []
            assert (old.joined, new.joined) == ([1], [2])
        finally:
            await group.close()
            await servers.pop().stop(None)
