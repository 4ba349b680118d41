"""Executors behind real ports that answer as a test says, and the client that drives them."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Self

import grpc
import numpy as np

from protos.executor.epochs import MAX_EPOCH_LEAP
from protos.executor.lease import is_held
from protos.executor.placement import places_crc32, places_of
from protos.executor.step_checksums import agreement_crc32, part_crc32
from protos.executor.v1 import executor_pb2 as pb
from protos.transport.errors import RpcError, abort_on_error
from router.executors.discovery import find_addresses
from router.executors.elastic import Strength
from router.executors.group import ExecutorGroup, GroupSettings
from router.executors.suspicion import MIN_SILENT_AFTER_MS
from router.scheduling.step import InFlight
from tests.router.support.fake_engines import listening
from tests.router.support.stepper import Stepper, make_shape

SERVICE = pb.DESCRIPTOR.services_by_name["ExecutorService"].full_name
FORM_TIMEOUT_S = 120.0
NEVER_LATE = GroupSettings(step_timeout_s=120, min_step_deadline_s=120, silent_after_ms=0)
WATCHFUL = GroupSettings(
    step_timeout_s=120, min_step_deadline_s=120, silent_after_ms=MIN_SILENT_AFTER_MS
)
BEAT_S = 0.02  # of these executors: more often than any that a router would suspect


def error_of(code: grpc.StatusCode, reason: str) -> type[RpcError]:
    """Returns a kind of error that an executor may answer."""
    return type("Answered", (RpcError,), {"code": code, "reason": reason})


JoinFailed = error_of(grpc.StatusCode.UNAVAILABLE, "JOIN_FAILED")
StepFailed = error_of(grpc.StatusCode.INTERNAL, "STEP_FAILED")  # also for want of another
StaleEpoch = error_of(grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")
InvalidEpoch = error_of(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_EPOCH")
Held = error_of(grpc.StatusCode.FAILED_PRECONDITION, "HELD")
Stopping = error_of(grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
Gone = error_of(grpc.StatusCode.UNAVAILABLE, "")  # of a call that reaches nobody


def description(
    dp_rank: int, dp_size: int, attn_tp_rank: int = 0, attn_tp_size: int = 1, **fields: Any
) -> pb.DescribeResponse:
    """Returns what an executor of this place says of itself, unless told otherwise."""
    coordinates = pb.Coordinates(
        dp_rank=dp_rank, dp_size=dp_size, attn_tp_rank=attn_tp_rank, attn_tp_size=attn_tp_size
    )
    defaults = {
        "model": pb.ModelInfo(vocab_size=50, max_model_len=48, block_size=4),
        "num_kv_blocks": 40,
        "num_rows": 8,
        "budget": pb.TokenBudget(max_num_batched_tokens=32, max_num_seqs=8, max_num_logits=16),
    }
    return pb.DescribeResponse(coordinates=coordinates, **{**defaults, **fields})


class Peer:
    """An executor behind a real port: keeps the bytes of its steps, and answers when it may.

    Attributes:
        steps: The StepRequests that came, as they came.
        prepared, joined: Epochs of these calls.
        newest: Of them. As in an executor, none goes back, nor further on than a leap.
        may_answer: Holds its answers back while it is not set.
        on_describe, on_join, on_stage: Awaited before Describe, Join or Stage is answered.
        instance_id: Of its process.
        kv_id: Of its KV; "": it is of a release that has none.
        shift: What is added to the epoch and the step of its answers.
        num_streams: Step streams that are open.
        num_ended_streams: That have ended.
        spare_bytes: Stand behind the tokens of its answers.
        describes: Changes what it says of itself.
        answers: Returns what is sent in place of an answer.
        garbled: Calls whose answers are bytes that are no message.
        misreads: Changes each request before it is run.
        dies: Set to end the Step stream with an error.
        attended: Beats of routers.
        may_beat: Holds its own back while it is not set.
        waits: Whether it says that it waits for its peers.
        placements: What Joins said of its place.
        staged: What Stage was called with.
        places: Of experts, as it was told them last.
        resident: [num_slots] experts that it holds; -1: none.
        driver: The router that took it last; others may as soon as that has no stream.
        joined_max_model_len: What the last Join that succeeded said of the longest sequence.
        num_standbys: Told with its beats.

    Args:
        has_beats: Whether there is a method Attend.
        num_slots: For experts, of which there are so many; 0: it is not elastic.
    """

    def __init__(
        self,
        dp_rank: int,
        attn_tp_rank: int,
        dp_size: int,
        attn_tp_size: int,
        *,
        has_beats: bool = True,
        num_slots: int = 0,
    ) -> None:
        self.placements: list[pb.Placement] = []
        self.staged: list[pb.StageRequest] = []
        self.places: list[tuple[int, int]] = []
        self.resident = [-1] * num_slots
        self.attended: list[pb.AttendRequest] = []
        self.may_beat = asyncio.Event()
        self.may_beat.set()
        self.waits = False
        self.driver = pb.Driver()
        self.num_standbys = 0
        self._has_beats = has_beats
        self.place = (dp_rank, attn_tp_rank)
        self.steps: list[bytes] = []
        self.prepared: list[int] = []
        self.joined: list[int] = []
        self.store_address = ""
        self.joined_max_model_len = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.dies = asyncio.Event()
        self._last_word: RpcError | None = None
        self.on_describe: Callable[[], Awaitable[object]] = nothing
        self.on_join: Callable[[], Awaitable[object]] = nothing
        self.on_stage: Callable[[], Awaitable[object]] = nothing
        self.instance_id = "first"
        self._kv_ids = (f"kv {number} of {id(self)}" for number in itertools.count())
        self.kv_id = next(self._kv_ids)
        self.shift = (0, 0)
        self.num_streams = self.num_ended_streams = 0
        self.spare_bytes = b""
        self.garbled: Collection[str] = ()
        self.newest = 0
        self.describes: Callable[[pb.DescribeResponse], object] = lambda description: None
        self.answers: Callable[[pb.StepResponse], list[pb.StepResponse]] = lambda answer: [answer]
        self.misreads: Callable[[pb.StepRequest], object] = lambda request: None
        self._sizes = (dp_size, attn_tp_size)

    def die(self, last_word: RpcError | None = None) -> None:
        """Ends the Step stream, with an error or with one that says no reason."""
        self._last_word = last_word
        self.dies.set()

    async def describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        async with abort_on_error(context):
            await self.on_describe()
        (dp_rank, attn_tp_rank), (dp_size, attn_tp_size) = self.place, self._sizes
        described = description(
            dp_rank,
            dp_size,
            attn_tp_rank,
            attn_tp_size,
            instance_id=self.instance_id,
            kv_id=self.kv_id,
            epoch=self.newest,
            driver=self.driver,
            joined_max_model_len=self.joined_max_model_len,
        )
        if self.resident:
            described.capability.min_dp_size, described.capability.max_dp_size = 1, 8
            described.capability.max_expert_slots = len(self.resident)
            described.model.num_experts = len(self.resident)
            described.resident_experts = np.array(self.resident, "<i4").tobytes()
        self.describes(described)
        return described

    async def prepare(self, request: pb.PrepareRequest, context: Any) -> pb.PrepareResponse:
        async with abort_on_error(context):
            self._take(request.router_id)
            self.advance(request.epoch, least=self.newest + 1)
        self.prepared.append(request.epoch)
        return pb.PrepareResponse(store_address="127.0.0.1:1")

    async def join(self, request: pb.JoinRequest, context: Any) -> pb.JoinResponse:
        async with abort_on_error(context):
            self._take(request.router_id)
            self.advance(request.epoch, least=self.newest)
            self.joined.append(request.epoch)
            self.store_address = request.store_address
            if self.resident:
                self._take_place(request.placement)
            if self.kv_id and self.kv_id != request.kv_id:
                self.kv_id = next(self._kv_ids)
            await self.on_join()
        self.joined_max_model_len = request.max_model_len
        return pb.JoinResponse(
            instance_id=self.instance_id, kv_id=self.kv_id, places_crc32=self._places_crc32
        )

    @property
    def _places_crc32(self) -> int:
        return places_crc32(self.places)

    def _take_place(self, placement: pb.Placement) -> None:
        self.placements.append(placement)
        told = placement.coordinates
        self.place = told.dp_rank, told.attn_tp_rank
        self._sizes = told.dp_size, told.attn_tp_size
        self._load(placement)

    def _load(self, placement: pb.Placement) -> None:
        rank, num_slots = placement.coordinates.ep_rank, placement.expert_slots
        if not num_slots:
            return
        experts = np.frombuffer(placement.expert_of_slot, "<i4").reshape(-1, num_slots)
        self.resident[:num_slots] = experts[rank].tolist()
        self.places = places_of(experts.tolist())

    async def stage(self, request: pb.StageRequest, context: Any) -> AsyncIterator[Any]:
        self.staged.append(request)
        await self.on_stage()
        self._load(request.placement)
        yield pb.StageResponse(bytes_done=1, bytes_total=1)

    def _take(self, router_id: bytes) -> None:
        driver = self.driver
        is_here = is_held(driver.silent_ms, has_stream=driver.has_stream)
        if is_here and driver.router_id != router_id:
            raise Held("it has a driver", metadata={"router_id": self.driver.router_id.hex()})
        self.driver = pb.Driver(router_id=router_id, has_stream=True)

    def advance(self, epoch: int, *, least: int) -> None:
        """Takes note of an epoch, from wherever it comes."""
        if epoch < least:
            raise StaleEpoch(f"{epoch} is below {least}")
        if epoch > self.newest + MAX_EPOCH_LEAP:
            raise InvalidEpoch(f"{epoch} is more than a leap above {self.newest}")
        self.newest = epoch

    async def step(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Answers a token for each sequence: 10 * dp_rank + attn_tp_rank."""
        self.num_streams += 1
        answering = asyncio.create_task(self._answer(requests, context))
        dying = asyncio.create_task(self.dies.wait())
        try:
            await asyncio.wait({answering, dying}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.num_streams -= 1
            self.num_ended_streams += 1
            answering.cancel()
            dying.cancel()
        if self.dies.is_set():
            async with abort_on_error(context):
                if self._last_word is not None:
                    raise self._last_word
            await context.abort(grpc.StatusCode.INTERNAL, "its attention failed")

    async def _answer(self, requests: AsyncIterator[bytes], context: Any) -> None:
        dp_rank, attn_tp_rank = self.place
        async for data in requests:
            self.steps.append(data)
            request = pb.StepRequest.FromString(data)
            self.misreads(request)
            columns = request.ranks[0].sequences
            num_sampled = sum(columns.samples) if columns.samples else len(columns.rows) // 4
            tokens = np.full(num_sampled, 10 * dp_rank + attn_tp_rank, dtype="<i4").tobytes()
            tokens += self.spare_bytes
            await self.may_answer.wait()
            result = pb.RankResult(dp_rank=request.ranks[0].dp_rank, next_token_ids=tokens)
            answer = pb.StepResponse(
                epoch=request.epoch + self.shift[0],
                step_id=request.step_id + self.shift[1],
                ranks=[result],
                agreement_crc32=agreement_crc32(request),
                part_crc32=part_crc32(request),
            )
            for message in self.answers(answer):
                await context.write(message)

    async def attend(self, requests: AsyncIterator[pb.AttendRequest], context: Any) -> None:
        told: list[pb.AttendRequest] = []  # by this router
        reading = asyncio.create_task(self._read_beats(requests, told))
        try:
            while True:
                await self.may_beat.wait()
                epoch = self.joined[-1] if self.joined else 0
                is_driver = any(each.router_id == self.driver.router_id for each in told)
                beat = pb.AttendResponse(
                    instance_id=self.instance_id,
                    epoch=epoch,
                    waits_for_peers=self.waits,
                    driver=None if is_driver else self.driver,
                    num_standbys=self.num_standbys,
                )
                await context.write(beat)
                await asyncio.sleep(BEAT_S)
        finally:
            reading.cancel()

    async def _read_beats(
        self, requests: AsyncIterator[pb.AttendRequest], told: list[pb.AttendRequest]
    ) -> None:
        async for request in requests:
            self.attended.append(request)
            told.append(request)

    def _serialise(self, call: str, answer: Any) -> bytes:
        if call in self.garbled:
            return b"\xff\xff\xff"
        data: bytes = answer.SerializeToString()
        return data

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds the service. Steps come as bytes, so that a test sees what travelled."""
        unary = {"Describe": self.describe, "Prepare": self.prepare, "Join": self.join}
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                call,
                request_deserializer=getattr(pb, f"{name}Request").FromString,
                response_serializer=partial(self._serialise, name),
            )
            for name, call in unary.items()
        }
        handlers["Step"] = grpc.stream_stream_rpc_method_handler(
            self.step, response_serializer=partial(self._serialise, "Step")
        )
        if self.resident:
            handlers["Stage"] = grpc.unary_stream_rpc_method_handler(
                self.stage,
                request_deserializer=pb.StageRequest.FromString,
                response_serializer=partial(self._serialise, "Stage"),
            )
        if self._has_beats:
            handlers["Attend"] = grpc.stream_stream_rpc_method_handler(
                self.attend,
                request_deserializer=pb.AttendRequest.FromString,
                response_serializer=partial(self._serialise, "Attend"),
            )
        service = grpc.method_handlers_generic_handler(SERVICE, handlers)
        server.add_generic_rpc_handlers((service,))


async def nothing() -> None:
    pass


Peers = dict[tuple[int, int], Peer]


def group_of(addresses: Sequence[str], settings: GroupSettings = NEVER_LATE) -> ExecutorGroup:
    return ExecutorGroup(find_addresses(addresses), settings)


def leave(peers: Peers) -> None:
    """Lets other routers take them."""
    for peer in peers.values():
        peer.driver.has_stream = False


@asynccontextmanager
async def run_group(
    dp_size: int,
    attn_tp_size: int = 1,
    settings: GroupSettings = NEVER_LATE,
    *,
    has_beats: bool = True,
) -> AsyncIterator[tuple[ExecutorGroup, Peers]]:
    """Peers of every place, by place, and a client that was given their addresses backwards."""
    peers, addresses = {}, []
    async with AsyncExitStack() as stack:
        for place in np.ndindex(dp_size, attn_tp_size):
            peers[place] = Peer(*place, dp_size, attn_tp_size, has_beats=has_beats)
            addresses.append(await stack.enter_async_context(listening(peers[place].add_to)))
        group = group_of(addresses[::-1], settings)
        stack.push_async_callback(group.close)
        yield group, peers


NUM_EXPERTS = 8


class ElasticPeers:
    """Peers that take any place, behind real ports, and the group of them.

    Attributes:
        group: It.
        peers: By address.
        may_resolve: Holds back where they are while it is not set.
    """

    def __init__(self, strength: Strength, settings: GroupSettings) -> None:
        self._stack = AsyncExitStack()
        self._servers: dict[str, AsyncExitStack] = {}
        self.peers: dict[str, Peer] = {}
        self.may_resolve = asyncio.Event()
        self.may_resolve.set()
        self.group = ExecutorGroup(self.addresses, settings, strength=strength)

    async def addresses(self) -> list[str]:
        """Returns where they are, or were."""
        await self.may_resolve.wait()
        return list(self.peers)

    async def start(self) -> str:
        """Starts another one. Returns its address."""
        peer = Peer(0, 0, 0, 1, num_slots=NUM_EXPERTS)
        peer.instance_id = f"instance {len(self._servers)}"
        server = AsyncExitStack()
        address = await server.enter_async_context(listening(peer.add_to))
        self._stack.push_async_callback(server.aclose)
        self._servers[address], self.peers[address] = server, peer
        return address

    async def stop(self, address: str) -> None:
        """Ends one for good. Its address stays known."""
        await self._servers[address].aclose()

    def at(self, address: str) -> Peer:
        return self.peers[address]

    async def __aenter__(self) -> Self:
        self._stack.push_async_callback(self.group.close)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()


@asynccontextmanager
async def formed_group(
    dp_size: int, attn_tp_size: int = 1, settings: GroupSettings = NEVER_LATE
) -> AsyncIterator[tuple[ExecutorGroup, Peers]]:
    """The same, in its first epoch."""
    async with run_group(dp_size, attn_tp_size, settings) as (group, peers):
        await group.form()
        yield group, peers


async def run_step(group: ExecutorGroup, dp_size: int) -> list[list[int]]:
    """Runs a step of `plan_step`. Returns each rank's tokens."""
    group.send(step := plan_step(dp_size))
    tokens = (await group.receive(step)).token_ids
    return [part.tolist() for part in np.split(tokens, np.cumsum(step.plan.num_sampled)[:-1])]


def plan_step(dp_size: int) -> InFlight:
    """A step, not sent yet, in which every DP rank runs a prompt of its own."""
    world = Stepper(make_shape(dp_size=dp_size))
    for first in range(dp_size):
        world.submit([1 + first, 2, 3, 4, 5])
    plan = world.plan()
    assert plan is not None
    return InFlight(plan, 0.0, 0.0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(FORM_TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.001)
