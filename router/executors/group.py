"""The executors of one group: how they come into an epoch, and how a step goes to all of them."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import grpc
import structlog

from protos.executor.v1 import executor_pb2 as pb
from protos.executor.v1.executor_pb2_grpc import ExecutorServiceStub
from protos.transport.channel import ChannelOpener
from protos.transport.errors import error_details
from router.errors import ExecutorLost, StepLost, WordLost
from router.executors.discovery import FindAddresses
from router.executors.formation import Member, check_group, describe_group
from router.executors.step_codec import decode_result, encode_step
from router.executors.step_deadline import StepDeadline
from router.executors.step_stream import KINDS, StepStream
from router.scheduling.step import GroupInfo, RankResult, StepPlan, StepResult

if TYPE_CHECKING:  # the type of the stub on an aio channel, only in the stub file
    from protos.executor.v1.executor_pb2_grpc import ExecutorServiceAsyncStub

log = structlog.stdlib.get_logger(__name__)

T = TypeVar("T")

# Describe is answered at once, also while a model loads or a step runs.
DESCRIBE_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 1.0  # for the same, of executors that owe an answer to a step
CAUSE_TIMEOUT_S = 0.5  # between a step that fails on one executor, and what another says of itself

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


SILENT_CODES = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)

Place = tuple[int, int]  # dp_rank, attn_tp_rank


class _Sent(NamedTuple):
    plan: StepPlan
    time: float


class ExecutorGroup:
    """Drives the executors of one group. Implements engine.Executors.

    Args:
        find_addresses: Returns "host:port" of every executor of the group, in any order; asked at
            each forming.
        model_name: What clients may call the model; the router names it, not the executor.
        form_timeout_s: For each of Prepare and Join.
        deadline: Says how long a step may take, from its sending or the answer before it.
        opener: Opens channels; None is plain text, and no token.
    """

    def __init__(
        self,
        find_addresses: FindAddresses,
        model_name: str,
        *,
        form_timeout_s: float,
        deadline: StepDeadline,
        opener: ChannelOpener | None = None,
    ) -> None:
        self._opener = opener or ChannelOpener()
        self._model_name = model_name
        self._form_timeout_s = form_timeout_s
        self._deadline = deadline
        self._find_addresses = find_addresses
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[str, ExecutorServiceAsyncStub] = {}
        self._epoch = 0
        self._last_step_id = 0
        self._unanswered: deque[_Sent] = deque()
        self._last_answer_time = 0.0
        self._members: list[Member] = []
        self._instances: dict[Place, str] = {}
        self._streams: list[StepStream] = []
        self._step_loss: StepLost | None = None  # of this epoch, the first
        self._asking: set[asyncio.Task[None]] = set()
        self._clock = asyncio.get_running_loop().time
        self._loss: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def form(self) -> GroupInfo:
        """Brings all executors into a new epoch. See engine.Executors."""
        self._leave_epoch()
        await self._connect(await self._find_addresses())
        members = await self._describe_all()
        check_group(members)
        self._recognise(members)
        self._epoch = 1 + max(self._epoch, *(member.description.epoch for member in members))
        info = describe_group(members, self._epoch, self._model_name)
        await self._join(members)
        for before, now in zip(members, await self._describe_all(), strict=True):
            if before.description.instance_id != now.description.instance_id:
                raise ExecutorLost(f"{now} was restarted while the group formed")
        self._members = members
        self._streams = [
            StepStream(
                str(member),
                self._channels[member.address],
                self._loss,
                partial(self._on_stream_end, self._loss, member),
            )
            for member in members
        ]
        self._loss.add_done_callback(self._end_streams)
        return info

    def send(self, plan: StepPlan) -> None:
        """Sends each DP rank its part; attention-TP peers get the same."""
        self._last_step_id += 1
        self._unanswered.append(_Sent(plan, self._clock()))
        requests = encode_step(plan, self._epoch, self._last_step_id)
        for member, stream in zip(self._members, self._streams, strict=True):
            stream.send(requests[member.dp_rank])

    async def receive(self) -> StepResult:
        """Returns the result of the earliest step that has not come back."""
        try:
            return await self._receive()
        except ExecutorLost as error:
            _lose(self._loss, error)
            self._end_streams()
            raise

    async def _receive(self) -> StepResult:
        step_id = self._last_step_id - len(self._unanswered) + 1
        plan, sent_time = self._unanswered.popleft()
        begin_time = max(sent_time, self._last_answer_time)
        responses = await self._responses(
            step_id, begin_time, self._deadline.limit_s(plan.agreement)
        )
        self._last_answer_time = self._clock()
        self._deadline.add(plan.agreement, self._last_answer_time - begin_time)
        results = []
        for member, response in zip(self._members, responses, strict=True):
            if (response.epoch, response.step_id) != (self._epoch, step_id):
                raise ExecutorLost(
                    f"{member} answered step {response.step_id} of epoch {response.epoch} where "
                    f"step {step_id} of epoch {self._epoch} was due"
                )
            if member.attn_tp_rank == 0:
                results.append(_decode(member, response, plan))
        return tuple(results)

    async def _responses(
        self, step_id: int, begin_time: float, limit_s: float
    ) -> list[pb.StepResponse]:
        """Returns every member's next answer.

        Raises:
            ExecutorLost: A stream ended, or an answer is overdue; says whose.
        """
        responses: list[pb.StepResponse] = []
        try:
            async with asyncio.timeout_at(begin_time + limit_s):
                for stream in self._streams:
                    responses.append(await stream.receive())
        except TimeoutError:
            late = self._members[len(responses) :]
            silent = await self._silent(late)
            # Whose answer came meanwhile was not the one: it was this process that stood still.
            rest = list(zip(late, self._streams[len(responses) :], strict=True))
            late = [member for member, stream in rest if not stream.has_answer]
            if late:
                raise ExecutorLost(_describe_late(late, silent, step_id, limit_s)) from None
            responses += [await stream.receive() for _, stream in rest]
        return responses

    async def _silent(self, members: Sequence[Member]) -> list[Member]:
        """Returns those that do not answer any call. The others may only wait for them."""

        async def is_silent(member: Member) -> bool:
            stub = self._stubs[member.address]
            try:
                await stub.Describe(pb.DescribeRequest(), timeout=PROBE_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                return error.code() in SILENT_CODES
            return False

        are_silent = await asyncio.gather(*map(is_silent, members))
        return [member for member, is_one in zip(members, are_silent, strict=True) if is_one]

    async def lost(self) -> None:
        """Returns never; raises ExecutorLost as soon as a stream ends."""
        await asyncio.shield(self._loss)

    async def close(self) -> None:
        """Ends every stream and connection."""
        self._leave_epoch()
        for channel in self._channels.values():
            await channel.close()

    def _on_stream_end(
        self, loss: asyncio.Future[None], member: Member, error: ExecutorLost
    ) -> None:
        """Takes the end of a stream for the group's, once it is known whose fault it is.

        When an executor leaves or dies, the step that the others run with it fails on them, and one
        of them may be heard first. Another's own word is waited for, but not for long.

        Args:
            loss: Of the epoch that the stream was of.
            member: Whose stream it was.
            error: Why it ended, as far as that is known.
        """
        if isinstance(error, WordLost):
            self._asking.add(asking := asyncio.create_task(self._ask_why(loss, member, error)))
            asking.add_done_callback(self._asking.discard)
            return
        if isinstance(error, StepLost):
            error = self._step_loss = self._step_loss or error
            if self._asking or not all(stream.has_ended for stream in self._streams):
                asyncio.get_running_loop().call_later(CAUSE_TIMEOUT_S, _lose, loss, error)
                return
        _lose(loss, error)

    async def _ask_why(
        self, loss: asyncio.Future[None], member: Member, error: ExecutorLost
    ) -> None:
        """Ends the epoch with what an executor says of itself, or with ``error``."""
        try:
            stub = self._stubs[member.address]
            await stub.Describe(pb.DescribeRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as answer:
            reason = error_details(answer).reason
            if reason in KINDS:
                error = KINDS[reason](f"{member}: {reason}: {answer.details()}")
        _lose(loss, error)

    def _end_streams(self, _: object = None) -> None:
        """Ends every executor's part in the epoch; each then leaves its process groups."""
        for stream in self._streams:
            stream.close()

    def _leave_epoch(self) -> None:
        self._end_streams()
        self._streams, self._step_loss, self._last_step_id = [], None, 0
        self._unanswered.clear()
        self._loss = asyncio.get_running_loop().create_future()

    async def _connect(self, addresses: Sequence[str]) -> None:
        """Keeps one channel to each address, and closes those to others or with old files."""
        kept = set() if self._opener.has_changed() else set(addresses)
        for address in self._channels.keys() - kept:
            del self._stubs[address]
            await self._channels.pop(address).close()
        for address in addresses:
            if address not in self._channels:
                channel = self._opener.open(address, CHANNEL_OPTIONS)
                self._channels[address] = channel
                self._stubs[address] = ExecutorServiceStub(channel)

    async def _describe_all(self) -> list[Member]:
        """Returns all executors, by DP rank and attention-TP rank."""
        members = await _all([self._describe(address) for address in self._stubs])
        return sorted(members, key=_place_of)

    async def _describe(self, address: str) -> Member:
        timeout_s = min(DESCRIBE_TIMEOUT_S, self._form_timeout_s)
        call = self._stubs[address].Describe(pb.DescribeRequest(), timeout=timeout_s)
        known = [str(member) for member in self._members if member.address == address]
        name = known[0] if known else f"executor {address}"
        return Member(address, await _answer(call, f"Describe of {name}"))

    def _recognise(self, members: Sequence[Member]) -> None:
        """Notes who is here, and says which of them is not who was there before."""
        for member in members:
            instance_id = member.description.instance_id
            known = self._instances.get(_place_of(member))
            if known is not None and known != instance_id:
                log.warning(
                    "executor_restarted",
                    executor=str(member),
                    old_instance=known,
                    new_instance=instance_id,
                )
                self._deadline.forget()
            self._instances[_place_of(member)] = instance_id

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


def _place_of(member: Member) -> Place:
    return member.dp_rank, member.attn_tp_rank


def _lose(loss: asyncio.Future[None], error: ExecutorLost) -> None:
    """Notes why an epoch is over; the first reason counts."""
    if not loss.done():
        loss.set_exception(error)
        loss.exception()  # seen: a loss that nobody waits for is found at the next receive


def _describe_late(
    late: Sequence[Member], silent: Sequence[Member], step_id: int, limit_s: float
) -> str:
    """Says whose answer to a step is missing, and who of them seems to be why."""
    missing = f"did not answer step {step_id} within {limit_s:.3g} s"
    if not silent:
        return f"{_names(late)} {missing}, and they answer other calls"
    others = [member for member in late if member not in silent]
    waiting = f"; {_names(others)} waited for it" if others else ""
    return f"{_names(silent)} {missing}, nor any other call{waiting}"


def _decode(member: Member, response: pb.StepResponse, plan: StepPlan) -> RankResult:
    try:
        return decode_result(response, plan.batches[member.dp_rank], member.dp_rank)
    except ValueError as error:  # of bytes that are no whole number of entries
        raise ExecutorLost(
            f"{member} answered step {response.step_id} with a column that cannot be read: {error}"
        ) from error


def _names(members: Sequence[Member]) -> str:
    return ", ".join(map(str, members))


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
