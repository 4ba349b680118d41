"""If attention-TP peers get unlike steps, or a lost one goes unnoticed, a whole group hangs."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from structlog.testing import capture_logs

from protos.executor.v1 import executor_pb2 as pb
from router.discovery import find_addresses
from router.errors import ExecutorLost
from router.executor_client import ExecutorGroup
from router.step import StepPlan
from router.step_deadline import MIN_STEPS, StepDeadline
from tests.router.stepper import Stepper, make_shape

SERVICE = pb.DESCRIPTOR.services_by_name["ExecutorService"].full_name
FORM_TIMEOUT_S = 30.0
NEVER_LATE = StepDeadline(factor=20, min_s=30, max_s=30)


class Peer:
    """An executor behind a real port: keeps the bytes of its steps, and answers when it may.

    Attributes:
        steps: The StepRequests that came, as they came.
        prepared, joined: Epochs of these calls.
        may_answer: Holds its answers back while it is not set.
        on_describe: Awaited before Describe is answered.
        instance_id: Of its process.
        shift: What is added to the epoch and the step of its answers.
        num_streams: Step streams that are open.
        dies: Set by a test to end the Step stream with an error.
    """

    def __init__(self, dp_rank: int, attn_tp_rank: int, dp_size: int, attn_tp_size: int) -> None:
        self.place = (dp_rank, attn_tp_rank)
        self.steps: list[bytes] = []
        self.prepared: list[int] = []
        self.joined: list[int] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.dies = asyncio.Event()
        self.on_describe: Callable[[], Awaitable[object]] = _nothing
        self.instance_id = "first"
        self.shift = (0, 0)
        self.num_streams = 0
        self._sizes = (dp_size, attn_tp_size)

    async def describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        await self.on_describe()
        (dp_rank, attn_tp_rank), (dp_size, attn_tp_size) = self.place, self._sizes
        return pb.DescribeResponse(
            instance_id=self.instance_id,
            coordinates=pb.Coordinates(
                dp_rank=dp_rank,
                dp_size=dp_size,
                attn_tp_rank=attn_tp_rank,
                attn_tp_size=attn_tp_size,
            ),
            model=pb.ModelInfo(vocab_size=50, max_model_len=48, block_size=4),
            num_kv_blocks=40,
            num_rows=8,
            budget=pb.TokenBudget(max_num_batched_tokens=32, max_num_seqs=8, max_num_logits=16),
        )

    async def prepare(self, request: pb.PrepareRequest, context: Any) -> pb.PrepareResponse:
        self.prepared.append(request.epoch)
        return pb.PrepareResponse(store_address="127.0.0.1:1")

    async def join(self, request: pb.JoinRequest, context: Any) -> pb.JoinResponse:
        self.joined.append(request.epoch)
        return pb.JoinResponse()

    async def step(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Answers a token for each sequence: 10 * dp_rank + attn_tp_rank."""
        self.num_streams += 1
        answering = asyncio.create_task(self._answer(requests, context))
        dying = asyncio.create_task(self.dies.wait())
        try:
            await asyncio.wait({answering, dying}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.num_streams -= 1
            answering.cancel()
            dying.cancel()
        if self.dies.is_set():
            await context.abort(grpc.StatusCode.INTERNAL, "its attention failed")

    async def _answer(self, requests: AsyncIterator[bytes], context: Any) -> None:
        dp_rank, attn_tp_rank = self.place
        async for data in requests:
            self.steps.append(data)
            request = pb.StepRequest.FromString(data)
            num_sampled = sum(request.ranks[0].sequences.samples)
            tokens = np.full(num_sampled, 10 * dp_rank + attn_tp_rank, dtype="<i4").tobytes()
            await self.may_answer.wait()
            result = pb.RankResult(dp_rank=request.ranks[0].dp_rank, next_token_ids=tokens)
            await context.write(
                pb.StepResponse(
                    epoch=request.epoch + self.shift[0],
                    step_id=request.step_id + self.shift[1],
                    ranks=[result],
                )
            )

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service. Steps come as bytes, so that a test sees what travelled."""
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Describe": unary(
                    self.describe,
                    request_deserializer=pb.DescribeRequest.FromString,
                    response_serializer=pb.DescribeResponse.SerializeToString,
                ),
                "Prepare": unary(
                    self.prepare,
                    request_deserializer=pb.PrepareRequest.FromString,
                    response_serializer=pb.PrepareResponse.SerializeToString,
                ),
                "Join": unary(
                    self.join,
                    request_deserializer=pb.JoinRequest.FromString,
                    response_serializer=pb.JoinResponse.SerializeToString,
                ),
                "Step": grpc.stream_stream_rpc_method_handler(
                    self.step, response_serializer=pb.StepResponse.SerializeToString
                ),
            },
        )


async def _nothing() -> None:
    pass


Peers = dict[tuple[int, int], Peer]


@asynccontextmanager
async def run_group(
    dp_size: int, attn_tp_size: int, deadline: StepDeadline | None = None
) -> AsyncIterator[tuple[ExecutorGroup, Peers]]:
    """Peers of every place, by place, and a client that was given their addresses backwards."""
    peers, addresses = {}, []
    async with AsyncExitStack() as stack:
        for place in np.ndindex(dp_size, attn_tp_size):
            peers[place] = Peer(*place, dp_size, attn_tp_size)
            server = grpc.aio.server()
            server.add_generic_rpc_handlers((peers[place].handlers(),))
            addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            await server.start()
            stack.push_async_callback(server.stop, None)
        group = ExecutorGroup(
            find_addresses(addresses[::-1]),
            "moe",
            form_timeout_s=FORM_TIMEOUT_S,
            deadline=deadline or NEVER_LATE,
        )
        stack.push_async_callback(group.close)
        yield group, peers


def plan_step(dp_size: int) -> StepPlan:
    """A step in which every DP rank runs a prompt of its own."""
    world = Stepper(make_shape(dp_size=dp_size))
    for first in range(dp_size):
        world.submit([1 + first, 2, 3, 4, 5])
    plan = world.plan()
    assert plan is not None
    return plan


async def test_attention_tp_peers_get_the_same_bytes_and_the_first_ones_tokens_count() -> None:
    async with run_group(dp_size=2, attn_tp_size=3) as (group, peers):
        info = await group.form()
        assert (info.shape.dp_size, info.shape.attn_tp_size) == (2, 3)

        group.send(plan_step(dp_size=2))
        results = await group.receive()

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
        group.send(plan_step(dp_size=1))
        receiving = asyncio.ensure_future(group.receive())
        # Time for the other's answer to come; a group that did not wait would end here.
        await asyncio.wait({receiving}, timeout=0.2)
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
        group.send(plan_step(dp_size=2))
        peers[1, 1].dies.set()

        with pytest.raises(ExecutorLost, match=r"dp_rank 1, attn_tp_rank 1.*its attention failed"):
            await group.lost()
        with pytest.raises(ExecutorLost, match="dp_rank 1, attn_tp_rank 1"):
            await group.receive()

        for peer in peers.values():
            peer.dies.clear()
            peer.may_answer.set()
        await group.form()
        group.send(plan_step(dp_size=2))
        results = await group.receive()
        assert [result.next_token_ids.tolist() for result in results] == [[0], [10]]


def hurried() -> StepDeadline:
    return StepDeadline(factor=20, min_s=0.1, max_s=0.3)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
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
        group.send(plan_step(dp_size=2))
        with pytest.raises(ExecutorLost, match=r"did not answer step 1 within 0\.3 s"):
            await group.receive()
        await until(lambda: all(peer.num_streams == 0 for peer in peers.values()))
        with pytest.raises(ExecutorLost):
            await group.lost()


async def test_a_rank_that_is_silent_is_told_from_those_that_wait_for_it() -> None:
    async with run_group(dp_size=3, attn_tp_size=1, deadline=hurried()) as (group, peers):
        await group.form()
        for place in ((0, 0), (2, 0)):
            peers[place].may_answer.clear()
        peers[2, 0].on_describe = asyncio.Event().wait
        group.send(plan_step(dp_size=3))
        with pytest.raises(ExecutorLost) as caught:
            await group.receive()
    silent, _, waiting = str(caught.value).partition(", nor any other call; ")
    assert "(dp_rank 2, attn_tp_rank 0) did not answer step 1 within 0.3 s" in silent
    assert "dp_rank 0" not in silent
    assert "(dp_rank 0, attn_tp_rank 0) waited for it" in waiting
    assert "dp_rank 1" not in str(caught.value)


async def test_ranks_that_are_late_but_not_silent_are_all_named() -> None:
    async with run_group(dp_size=3, attn_tp_size=1, deadline=hurried()) as (group, peers):
        await group.form()
        for place in ((0, 0), (2, 0)):
            peers[place].may_answer.clear()
        group.send(plan_step(dp_size=3))
        with pytest.raises(ExecutorLost, match=r"dp_rank 0.*dp_rank 2.*they answer other calls"):
            await group.receive()


async def test_an_answer_that_comes_while_it_is_looked_for_is_not_too_late() -> None:
    """It was the router that stood still, not the executor."""
    async with run_group(dp_size=2, attn_tp_size=1, deadline=hurried()) as (group, peers):
        await group.form()
        peers[1, 0].may_answer.clear()

        async def answer() -> None:
            peers[1, 0].may_answer.set()
            await asyncio.sleep(0.2)

        peers[1, 0].on_describe = answer
        group.send(plan_step(dp_size=2))
        results = await group.receive()
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
        group.send(plan_step(dp_size=1))
        expected = f"attn_tp_rank 1.*answered {answered} where step 1 of epoch 1 was due"
        with pytest.raises(ExecutorLost, match=expected):
            await group.receive()


async def test_a_restarted_executor_is_recognised_and_what_was_learnt_of_steps_forgotten() -> None:
    deadline = StepDeadline(factor=20, min_s=5, max_s=30)
    async with run_group(dp_size=2, attn_tp_size=1, deadline=deadline) as (group, peers):
        plan = plan_step(dp_size=2)
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
        peers[1, 0].on_describe = _nothing
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
    port = await serve(old, 0)
    group = ExecutorGroup(
        find_addresses([f"127.0.0.1:{port}"]),
        "moe",
        form_timeout_s=FORM_TIMEOUT_S,
        deadline=NEVER_LATE,
    )
    try:
        await group.form()
        group.send(plan_step(dp_size=1))
        await group.receive()
        await servers.pop().stop(None)
        await serve(new, port)
        with pytest.raises(ExecutorLost):
            await group.lost()
        group.send(plan_step(dp_size=1))
        with pytest.raises(ExecutorLost):
            await group.receive()
        await group.form()
        assert new.steps == []
        assert (old.joined, new.joined) == ([1], [2])
    finally:
        await group.close()
        await servers.pop().stop(None)
