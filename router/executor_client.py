"""The executors of one group: how they come into an epoch, and how a step goes to all of them."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, TypeVar

import grpc

from protos.errors import error_details
from protos.executor.v1 import executor_pb2 as pb
from protos.executor.v1.executor_pb2_grpc import ExecutorServiceStub
from router.discovery import FindAddresses
from router.errors import ExecutorLost
from router.formation import Member, check_group, describe_group
from router.group import GroupInfo
from router.step import StepPlan, StepResult
from router.step_codec import decode_result, encode_step
from router.step_stream import StepStream

if TYPE_CHECKING:  # the type of the stub on an aio channel, only in the stub file
    from protos.executor.v1.executor_pb2_grpc import ExecutorServiceAsyncStub

T = TypeVar("T")

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", 256 << 20),
    ("grpc.max_receive_message_length", 256 << 20),
    # A peer that vanishes without a word is noticed within 20 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Everybody waits for an executor that restarts: look for it often.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class ExecutorGroup:
    """Drives the executors of one group. Implements engine.Executors.

    Args:
        find_addresses: Returns "host:port" of every executor of the group, in any order; asked at
            each forming.
        model_name: What clients may call the model; the router names it, not the executor.
        form_timeout_s: For each of Describe, Prepare and Join.
        step_timeout_s: From a step's sending, or the answer before it, to its answer.
    """

    def __init__(
        self,
        find_addresses: FindAddresses,
        model_name: str,
        *,
        form_timeout_s: float,
        step_timeout_s: float,
    ) -> None:
        self._model_name = model_name
        self._form_timeout_s = form_timeout_s
        self._step_timeout_s = step_timeout_s
        self._find_addresses = find_addresses
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[str, ExecutorServiceAsyncStub] = {}
        self._epoch = 0
        self._last_step_id = 0
        self._unanswered: deque[StepPlan] = deque()
        self._members: list[Member] = []
        self._streams: list[StepStream] = []
        self._loss: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def form(self) -> GroupInfo:
        """Brings all executors into a new epoch. See engine.Executors."""
        self._leave_epoch()
        await self._connect(await self._find_addresses())
        members = await _all([self._describe(address) for address in self._stubs])
        members.sort(key=lambda member: (member.dp_rank, member.attn_tp_rank))
        check_group(members)
        self._epoch = 1 + max(self._epoch, *(member.description.epoch for member in members))
        info = describe_group(members, self._epoch, self._model_name)
        await self._join(members)
        self._members = members
        self._streams = [
            StepStream(str(member), self._channels[member.address], self._loss)
            for member in members
        ]
        return info

    def send(self, plan: StepPlan) -> None:
        """Sends each DP rank its part; attention-TP peers get the same."""
        self._last_step_id += 1
        self._unanswered.append(plan)
        requests = encode_step(plan, self._epoch, self._last_step_id)
        for member, stream in zip(self._members, self._streams, strict=True):
            stream.send(requests[member.dp_rank])

    async def receive(self) -> StepResult:
        """Returns the result of the earliest step that has not come back."""
        step_id = self._last_step_id - len(self._unanswered) + 1
        plan = self._unanswered.popleft()
        results = []
        for member, stream in zip(self._members, self._streams, strict=True):
            try:
                async with asyncio.timeout(self._step_timeout_s):
                    response = await stream.receive()
            except TimeoutError:
                raise ExecutorLost(
                    f"{member} did not answer step {step_id} within {self._step_timeout_s:g} s"
                ) from None
            if (response.epoch, response.step_id) != (self._epoch, step_id):
                raise ExecutorLost(
                    f"{member} answered step {response.step_id} of epoch {response.epoch} where "
                    f"step {step_id} of epoch {self._epoch} was due"
                )
            if member.attn_tp_rank == 0:
                rank = member.dp_rank
                results.append(decode_result(response, plan.batches[rank], rank))
        return tuple(results)

    async def lost(self) -> None:
        """Returns never; raises ExecutorLost as soon as a stream ends."""
        await asyncio.shield(self._loss)

    async def close(self) -> None:
        """Ends every stream and connection."""
        self._leave_epoch()
        for channel in self._channels.values():
            await channel.close()

    def _leave_epoch(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams, self._last_step_id = [], 0
        self._unanswered.clear()
        self._loss = asyncio.get_running_loop().create_future()

    async def _connect(self, addresses: Sequence[str]) -> None:
        """Keeps one channel to each address, and closes those to others."""
        for address in self._channels.keys() - set(addresses):
            del self._stubs[address]
            await self._channels.pop(address).close()
        for address in addresses:
            if address not in self._channels:
                channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
                self._channels[address] = channel
                self._stubs[address] = ExecutorServiceStub(channel)

    async def _describe(self, address: str) -> Member:
        call = self._stubs[address].Describe(pb.DescribeRequest(), timeout=self._form_timeout_s)
        return Member(address, await _answer(call, f"Describe of executor {address}"))

    async def _join(self, members: Sequence[Member]) -> None:
        stub = self._stubs[members[0].address]
        prepare = pb.PrepareRequest(epoch=self._epoch)
        prepared = await _answer(
            stub.Prepare(prepare, timeout=self._form_timeout_s), f"Prepare of {members[0]}"
        )
        join = pb.JoinRequest(epoch=self._epoch, store_address=prepared.store_address)
        await _all(
            [
                _answer(
                    self._stubs[member.address].Join(join, timeout=self._form_timeout_s),
                    f"Join of {member}",
                )
                for member in members
            ]
        )


async def _answer(call: Awaitable[T], name: str) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        reason = error_details(error).reason or error.code().name
        raise ExecutorLost(f"{name} failed: {reason}: {error.details()}") from error


async def _all(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """Awaits all; at the first failure, cancels the rest and raises it."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
