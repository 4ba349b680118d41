"""If attention-TP peers get unlike steps, or a lost one goes unnoticed, a whole group hangs."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from unittest.mock import AsyncMock

import pytest
from structlog.testing import capture_logs

from deploy.local.ports import held_port
from protos.executor.v1 import executor_pb2 as pb
from protos.serving.v1 import serving_pb2 as serving_pb
from protos.transport.errors import RpcError
from router.errors import ExecutorLeft, ExecutorLied, ExecutorLost, ReasonUnknown, ResolverFailed
from router.executors import group as executor_client
from router.executors.discovery import Lookup
from router.executors.group import ExecutorGroup, GroupSettings
from router.executors.step_stream import MIN_STEPS
from tests.router.support.fake_engines import listening
from tests.router.support.peers import (
    FORM_TIMEOUT_S,
    WATCHFUL,
    Gone,
    JoinFailed,
    Peer,
    Peers,
    StepFailed,
    Stopping,
    formed_group,
    group_of,
    leave,
    nothing,
    plan_step,
    run_group,
    run_step,
)


async def test_attention_tp_peers_get_the_same_bytes_and_the_first_ones_tokens_count() -> None:
    async with run_group(2, 3) as (group, peers):
        info = await group.form()
        assert (info.shape.dp_size, info.shape.attn_tp_size) == (2, 3)

        assert await run_step(group, 2) == [[0], [10]]
        for dp_rank in range(2):
            [sent] = peers[dp_rank, 0].steps
            assert pb.StepRequest.FromString(sent).ranks[0].dp_rank == dp_rank
            assert [peers[dp_rank, peer].steps for peer in (1, 2)] == [[sent], [sent]]
        assert peers[0, 0].steps != peers[1, 0].steps


async def test_every_executor_joins_the_store_that_the_first_one_prepared() -> None:
    async with run_group(2, 2) as (group, peers):
        epochs = [(await group.form()).epoch for _ in range(2)]

        assert epochs[0] < epochs[1]
        for place, peer in peers.items():
            assert peer.prepared == (epochs if place == (0, 0) else [])
        assert all(peer.joined == epochs for peer in peers.values())


async def test_a_rank_has_its_kv_while_each_of_its_executors_has_and_nobody_else_drives_them() -> (
    None
):
    async with run_group(2, 2) as (group, peers):
        first = (await group.form()).kv_ids
        assert (await group.form()).kv_ids == first
        peers[0, 1].kv_id = "of a new process"
        one, other = (await group.form()).kv_ids
        assert (one != first[0], other) == (True, first[1])

        peers[1, 0].on_join = says(JoinFailed("its peer is gone"))
        with pytest.raises(ExecutorLost):
            await group.form()
        peers[1, 0].on_join = nothing
        assert (await group.form()).kv_ids == (one, other)

        stranger = group_of(list(group._connections.channels))
        leave(peers)
        await stranger.form()
        await stranger.close()
        leave(peers)
        third = (await group.form()).kv_ids
        assert len({*first, one, other, *third}) == 5
        peers[0, 0].kv_id = ""
        assert (await group.form()).kv_ids == ("", third[1])


async def test_a_process_that_names_its_kv_as_the_one_before_it_did_is_not_believed() -> None:
    async with run_group(1) as (group, peers):
        [first] = (await group.form()).kv_ids
        peer, asked = peers[0, 0], []
        kv_id, peer.instance_id = peer.kv_id, "second"

        async def name_it_again() -> None:
            asked.append(peer.kv_id != kv_id)
            peer.kv_id = kv_id

        peer.on_join = name_it_again
        assert (await group.form()).kv_ids != (first,)
        assert asked == [True], "it was told that nothing is kept"


async def test_a_step_is_over_only_when_every_peer_has_ended_it() -> None:
    async with formed_group(1, 2) as (group, peers):
        peers[0, 1].may_answer.clear()
        group.send(step := plan_step(1))
        await until(lambda: group._streams[0].has_answer and len(peers[0, 1].steps) == 1)
        receiving = asyncio.ensure_future(group.receive(step))
        await until(lambda: not group._streams[0].has_answer)
        for _ in range(10):  # a group that did not wait for the other one would end here
            await asyncio.sleep(0)
        assert len(peers[0, 0].steps) == len(peers[0, 1].steps) == 1
        assert not receiving.done()

        peers[0, 1].may_answer.set()
        assert (await receiving).token_ids.tolist() == [0]


async def test_the_loss_of_a_peer_that_answers_no_tokens_ends_the_epoch_for_all() -> None:
    async with formed_group(2, 2) as (group, peers):
        for peer in peers.values():
            peer.may_answer.clear()
        group.send(step := plan_step(2))
        peers[1, 1].die()

        with pytest.raises(ExecutorLost, match=r"dp_rank 1, attn_tp_rank 1.*its attention failed"):
            await group.lost()
        with pytest.raises(ExecutorLost, match="dp_rank 1, attn_tp_rank 1"):
            await group.receive(step)

        for peer in peers.values():
            peer.dies.clear()
            peer.may_answer.set()
        await group.form()
        assert await run_step(group, 2) == [[0], [10]]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def until_streams_are(peers: Peers, count: int) -> None:
    """Waits until every executor has as many step streams open."""
    await until(lambda: all(peer.num_streams == count for peer in peers.values()))


def says(error: RpcError) -> Callable[[], Awaitable[None]]:
    """Returns what has Describe answered with an error."""

    async def raise_it() -> None:
        raise error

    return raise_it


STEP_FAILED, REASON_LOST = StepFailed("another executor left the group"), None
HURRIED = GroupSettings(step_timeout_s=0.3, min_step_deadline_s=0.3, silent_after_ms=0)


@pytest.mark.parametrize("heard_first", [0, 1])
@pytest.mark.parametrize("last_word", [STEP_FAILED, REASON_LOST], ids=["failed", "lost"])
async def test_who_left_is_asked_when_the_first_stream_to_end_does_not_say(
    last_word: RpcError | None, heard_first: int
) -> None:
    """A step fails on those who stay, too; and gRPC loses what is said while a step is sent."""
    async with formed_group(3) as (group, peers):
        peers[1, 0].on_describe = says(Stopping("it was told to stop"))
        peers[heard_first, 0].die(last_word)
        with pytest.raises(ExecutorLeft, match=r"dp_rank 1.*told to stop"):
            await group.lost()


async def test_who_does_not_answer_is_named_though_another_one_says_that_its_step_failed() -> None:
    async with formed_group(2) as (group, peers):
        peers[1, 0].on_describe = says(Gone("nobody is there any more"))
        peers[0, 0].die(STEP_FAILED)
        expected = r"dp_rank 1, attn_tp_rank 0\): UNAVAILABLE; .*dp_rank 0.*left the group"
        with pytest.raises(ExecutorLost, match=expected):
            await group.lost()


async def test_a_step_that_failed_on_one_executor_ends_the_epoch_for_all() -> None:
    async with formed_group(2) as (group, peers):
        await until_streams_are(peers, 1)
        peers[1, 0].die(StepFailed("out of memory"))
        with pytest.raises(ReasonUnknown, match=r"dp_rank 1.*out of memory"):
            await group.lost()
        await until_streams_are(peers, 0)


async def test_the_others_streams_end_before_anybody_is_asked_why_the_first_did() -> None:
    """They wait in a collective for who has left."""
    async with formed_group(2) as (group, peers):
        await until_streams_are(peers, 1)

        async def answer_once_free() -> None:
            await until(lambda: peers[0, 0].num_streams == 0)

        peers[1, 0].on_describe = answer_once_free
        peers[1, 0].die(STEP_FAILED)
        with pytest.raises(ReasonUnknown):
            await group.lost()


async def test_an_answer_that_is_overdue_while_the_reason_is_asked_for_is_not_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with formed_group(2, settings=HURRIED) as (group, peers):
        for peer in peers.values():
            peer.may_answer.clear()
        group.send(step := plan_step(2))
        receiving = asyncio.ensure_future(group.receive(step))
        await until(lambda: len(peers[1, 0].steps) == 1)

        is_overdue, lost = asyncio.Event(), group.lost

        async def wait_for_the_reason() -> None:
            is_overdue.set()
            await lost()

        async def answer_late() -> None:
            await is_overdue.wait()
            raise Stopping("it was told to stop")

        monkeypatch.setattr(group, "lost", wait_for_the_reason)
        peers[1, 0].on_describe = answer_late
        peers[1, 0].die(STEP_FAILED)
        with pytest.raises(ExecutorLeft, match=r"dp_rank 1.*told to stop"):
            await receiving


@pytest.mark.parametrize(
    "what", ["another agreement", "another part", "another agreement and another part"]
)
async def test_executors_that_ran_another_step_than_they_were_sent_are_named(what: str) -> None:
    def misread(request: pb.StepRequest) -> None:
        if "agreement" in what:
            request.agreement.global_num_tokens[0] += 1
        if "part" in what:
            request.ranks[0].sequences.rows = b"\7\0\0\0"

    async with formed_group(2, 2) as (group, peers):
        for place in ((0, 1), (1, 0)):
            peers[place].misreads = misread
        with pytest.raises(ExecutorLost) as caught:
            await run_step(group, 2)
        problem = str(caught.value)
        assert problem.startswith("step 1 was not run as it was sent: ")
        for dp_rank, attn_tp_rank in peers:
            named = f"(dp_rank {dp_rank}, attn_tp_rank {attn_tp_rank}) ran {what}"
            assert (named in problem) == ((dp_rank, attn_tp_rank) in ((0, 1), (1, 0)))
        await until_streams_are(peers, 0)


async def test_all_streams_end_when_an_answer_is_overdue() -> None:
    async with formed_group(2, settings=HURRIED) as (group, peers):
        peers[1, 0].may_answer.clear()
        with pytest.raises(ExecutorLost, match=r"did not answer step 1 within 0\.3 s"):
            await run_step(group, 2)
        await until_streams_are(peers, 0)
        with pytest.raises(ExecutorLost):
            await group.lost()


async def test_a_rank_that_is_silent_is_told_from_those_that_wait_for_it() -> None:
    async with formed_group(3, settings=HURRIED) as (group, peers):
        for place in ((0, 0), (2, 0)):
            peers[place].may_answer.clear()

        async def vanish() -> None:
            await until(lambda: group._streams[1].has_answer)
            raise Gone("nobody is there any more")

        peers[2, 0].on_describe = vanish
        with pytest.raises(ExecutorLost) as caught:
            await run_step(group, 3)
    silent, _, waiting = str(caught.value).partition(", nor any other call; ")
    assert "(dp_rank 2, attn_tp_rank 0) did not answer step 1 within 0.3 s" in silent
    assert "dp_rank 0" not in silent
    assert "(dp_rank 0, attn_tp_rank 0) waited for it" in waiting
    assert "dp_rank 1" not in str(caught.value)


async def test_who_does_not_answer_any_call_in_time_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with formed_group(1, settings=HURRIED) as (group, peers):
        monkeypatch.setattr(executor_client, "PROBE_TIMEOUT_S", 0.1)
        peers[0, 0].may_answer.clear()
        peers[0, 0].on_describe = asyncio.Event().wait
        with pytest.raises(ExecutorLost, match=r"within 0\.3 s, nor any other call$"):
            await run_step(group, 1)


async def test_ranks_that_are_late_but_not_silent_are_all_named() -> None:
    async with formed_group(3, settings=HURRIED) as (group, peers):
        for place in ((0, 0), (2, 0)):
            peers[place].may_answer.clear()
        with pytest.raises(ExecutorLost, match=r"dp_rank 0.*dp_rank 2.*they answer other calls"):
            await run_step(group, 3)


async def test_an_answer_that_comes_while_it_is_looked_for_is_not_too_late() -> None:
    """It was the router that stood still, not the executor."""
    async with formed_group(2, settings=HURRIED) as (group, peers):
        peers[1, 0].may_answer.clear()

        async def answer() -> None:
            peers[1, 0].may_answer.set()
            await until(lambda: group._streams[1].has_answer)

        peers[1, 0].on_describe = answer
        assert await run_step(group, 2) == [[0], [10]]


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
    async with formed_group(1, 2) as (group, peers):
        peers[0, 1].shift = shift
        expected = f"attn_tp_rank 1.*answered {answered} where step 1 of epoch 1 was due"
        with pytest.raises(ExecutorLost, match=expected):
            await run_step(group, 1)


@pytest.mark.parametrize(
    ("spare_bytes", "problem"),
    [(b"xy", "6 bytes of next_token_ids for 1"), (b"four", "8 bytes of next_token_ids for 1")],
)
async def test_an_answer_that_cannot_be_read_costs_the_group_and_not_the_router(
    spare_bytes: bytes, problem: str
) -> None:
    async with formed_group(2) as (group, peers):
        peers[1, 0].spare_bytes = spare_bytes
        with pytest.raises(ExecutorLost, match=problem):
            await run_step(group, 2)


async def test_answers_to_nothing_are_not_kept() -> None:
    """An executor that sent them without end would fill the router's memory."""
    async with formed_group(2) as (group, peers):
        peers[1, 0].answers = lambda answer: [answer, answer]
        peers[1, 0].may_answer.clear()
        group.send(step := plan_step(2))
        await until(lambda: group._streams[0].has_answer)
        peers[1, 0].may_answer.set()
        assert (await group.receive(step)).token_ids.tolist() == [0, 10]
        with pytest.raises(ExecutorLied, match=r"dp_rank 1.*answered a step that it was not"):
            await group.lost()
        await until_streams_are(peers, 0)


@pytest.mark.parametrize("calls", [{"Describe"}, {"Prepare"}, {"Join"}])
async def test_an_executor_whose_answers_are_no_messages_is_named(calls: set[str]) -> None:
    async with run_group(2) as (group, peers):
        peers[0, 0].garbled = calls
        with pytest.raises(ExecutorLost, match=r"of executor .* the answer is no such message"):
            await group.form()
        peers[0, 0].garbled = set()
        await group.form()


async def test_a_first_member_that_says_where_its_store_will_be_is_not_called_to_prepare() -> None:
    async with run_group(2) as (group, peers):
        await group.form()
        assert [peer.store_address for peer in peers.values()] == ["127.0.0.1:1"] * 2
        for (dp_rank, _), peer in peers.items():
            address = f"127.0.0.1:{dp_rank + 7}"
            peer.describes = lambda told, address=address: setattr(told, "store_address", address)
        await group.form()
        assert [peer.store_address for peer in peers.values()] == ["127.0.0.1:7"] * 2
        assert [peer.prepared for peer in peers.values()] == [[1], []]


async def test_a_description_that_is_far_too_long_is_not_received() -> None:
    async with run_group(2) as (group, peers):
        peers[1, 0].describes = lambda told: told.agreement.update(name="x" * (1 << 20))
        with pytest.raises(ExecutorLost, match=r"Describe of executor .* than max \(1048\d+ vs"):
            await group.form()


async def test_a_group_forms_again_of_the_executors_it_knows_while_names_take_long_to_resolve() -> (
    None
):
    async with formed_group(2) as (group, _):
        group._lookup = Lookup(asyncio.Event().wait)
        assert (await group.form()).epoch == 2


async def test_a_group_forms_again_of_the_executors_it_knows_while_names_cannot_be_looked_up() -> (
    None
):
    async with formed_group(2) as (group, _):
        group._lookup = Lookup(AsyncMock(side_effect=ResolverFailed("its server is down")))
        assert (await group.form()).epoch == 2
        group._lookup = Lookup(AsyncMock(side_effect=ExecutorLost("it resolves to 1 of 2 hosts")))
        with pytest.raises(ExecutorLost, match="1 of 2 hosts"):
            await group.form()


async def test_a_restarted_executor_is_recognised_and_what_was_learnt_of_steps_forgotten() -> None:
    settings = GroupSettings(step_timeout_s=30, min_step_deadline_s=5, silent_after_ms=0)
    async with run_group(2, settings=settings) as (group, peers):
        deadline = group.deadline
        plan = plan_step(2).plan
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
    async with run_group(2) as (group, peers):

        async def restart() -> None:
            peers[1, 0].instance_id = "second"

        peers[1, 0].on_join = restart
        with pytest.raises(ExecutorLost, match=r"dp_rank 1.*was restarted while the group formed"):
            await group.form()
        await group.form()


def count_described(peers: Peers) -> Counter[tuple[int, int]]:
    """Counts, from now on, how often each peer is asked to describe itself."""
    counts = Counter[tuple[int, int]]()
    for place, peer in peers.items():

        async def count(place: tuple[int, int] = place) -> None:
            counts[place] += 1

        peer.on_describe = count
    return counts


async def formed_twice(group: ExecutorGroup, peers: Peers) -> Counter[tuple[int, int]]:
    """Forms a group twice, with beats between. Returns who had to describe itself the second time."""
    await group.form()
    attentive = serving_pb.MEMBER_STATE_ATTENTIVE
    await until(lambda: all(member.state == attentive for member in group.members()))
    counts = count_described(peers)
    await group.form()
    return counts


def beating(group: ExecutorGroup, number: int) -> str:
    """Returns which process a member's beats are of."""
    last = group._suspicion.last_beat(group.members()[number].address)
    return last[1].instance_id if last else ""


async def test_members_that_beat_need_not_describe_themselves_for_the_next_epoch() -> None:
    async with run_group(2, settings=WATCHFUL) as (group, peers):
        assert await formed_twice(group, peers) == {}
        assert [peer.joined for peer in peers.values()] == [[1, 2]] * 2
        assert await run_step(group, 2) == [[0], [10]]


async def test_a_member_that_was_started_again_is_asked_as_soon_as_it_beats_or_joins() -> None:
    async with run_group(2, settings=WATCHFUL) as (group, peers):
        await formed_twice(group, peers)
        peers[1, 0].may_beat.clear()
        peers[1, 0].instance_id = "second"
        with pytest.raises(ExecutorLost, match="was restarted while the group formed"):
            await group.form()
        counts = count_described(peers)
        await group.form()
        assert counts == {(0, 0): 1, (1, 0): 1}
        peers[1, 0].may_beat.set()
        peers[1, 0].instance_id = "third"
        await until(lambda: beating(group, 1) == "third")
        counts.clear()
        await group.form()
        assert counts == {(1, 0): 1}


async def test_members_that_another_router_took_meanwhile_are_asked_after_one_attempt() -> None:
    async with run_group(2, settings=WATCHFUL) as (group, peers):
        await formed_twice(group, peers)
        for peer in peers.values():
            peer.newest = 9
        with pytest.raises(ExecutorLost, match="STALE_EPOCH"):
            await group.form()
        await group.form()
        assert [peer.joined[-1] for peer in peers.values()] == [10, 10]


@pytest.mark.parametrize("failure", [JoinFailed("graphs were not captured"), Gone("no connection")])
async def test_when_one_executor_cannot_join_the_others_are_freed_and_the_next_epoch_begins(
    failure: RpcError,
) -> None:
    """The router does not wait until they have waited for it: their time to form is long."""
    begun, freed = list[int](), list[int]()

    async def wait(rank: int) -> None:
        begun.append(rank)
        try:
            await asyncio.Event().wait()
        finally:
            freed.append(rank)

    async def fail() -> None:
        await until(lambda: sorted(begun) == [0, 1])
        raise failure

    async with run_group(3) as (group, peers):
        peers[0, 0].on_join, peers[1, 0].on_join = partial(wait, 0), partial(wait, 1)
        peers[2, 0].on_join = fail
        async with asyncio.timeout(FORM_TIMEOUT_S):
            with pytest.raises(ExecutorLost, match=r"Join of .*dp_rank 2.* failed: "):
                await group.form()
            await until(lambda: sorted(freed) == [0, 1])

        for peer in peers.values():
            peer.on_join = nothing
        info = await group.form()
        assert peers[0, 0].prepared == [info.epoch - 1, info.epoch]
        assert all(peer.joined == [info.epoch - 1, info.epoch] for peer in peers.values())
        assert len(await run_step(group, 3)) == 3


async def test_another_process_at_the_same_address_gets_no_step_of_the_epoch() -> None:
    """The stream ends with its process, and no step travels outside of it."""
    old, new = (Peer(0, 0, 1, 1) for _ in range(2))
    with held_port() as port:
        group = group_of([f"127.0.0.1:{port}"])
        async with listening(old.add_to, port=port):
            await group.form()
            await run_step(group, 1)
        async with listening(new.add_to, port=port):
            with pytest.raises(ExecutorLost):
                await group.lost()
            with pytest.raises(ExecutorLost):
                await run_step(group, 1)
            await group.form()
            assert new.steps == []
            assert (old.joined, new.joined) == ([1], [2])
            await group.close()
