"""Executor service: one Step stream in, one compute thread, one stream out.

    Step stream ──▶ reader ──▶ [ step 8 launched | step 9 waiting ]    [ step 7 ] ──▶ answers, in order
                               └──────── compute thread ──────────┘    └ finish ┘

The reader hands a step over as soon as it arrives, so the next one is already there when a step
ends. One thread computes, because steps are ordered and share tensors; it is not the event
loop's, so that health checks are answered while a step runs or a model loads. A GPU only gets its
work from that thread; another waits for the tokens, so that the next step, whenever it arrives, is
launched while this one runs. Where the host computes, a step is done when it is launched, and no
other thread has a part. What a step defers until its answer is out, the compute thread runs before
the next one.

The Step stream is the executor's part in its epoch. However it ends, an executor with peers first says
why, so that the router hears the cause before its consequences, and then closes their group, which
frees its own thread and theirs from any collective. A step that goes on for long after that is
stuck, in a kernel or a driver, and nothing can free its thread: the process has to end, and to be
started again.
"""

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc
import numpy as np
import structlog
from grpc_health.v1 import health_pb2_grpc

from executor.batch.placement import Loaded, Placement, read_placement
from executor.errors import (
    InvalidPlacement,
    InvalidRendezvous,
    JoinFailed,
    NotJoined,
    NotLoaded,
    NotPlaced,
    ShuttingDown,
    StaleEpoch,
    StepFailed,
    StepOutOfOrder,
    StreamHeld,
)
from executor.metrics import Measures
from executor.parallel.epochs import (
    Epochs,
    JoinAttempt,
    check_secret,
    join_address,
    split_address,
)
from executor.parallel.layout import Capacity
from executor.parallel.lease import Lease
from executor.server.beats import Beats
from executor.server.step_stream import Answer, Reading, StepStream
from protos.executor.v1 import executor_pb2 as pb
from protos.executor.v1 import executor_pb2_grpc
from protos.transport.admission import Refusals
from protos.transport.errors import RpcError, abort_on_error
from protos.transport.health import SERVICE_NAME, HealthServicer
from protos.transport.interceptors import RequestReader
from protos.transport.port import ServiceConfig
from protos.transport.reflection import enable_reflection

log = structlog.stdlib.get_logger(__name__)

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

SERVICE = pb.DESCRIPTOR.services_by_name["ExecutorService"].full_name
LIVENESS, READINESS = "liveness", "readiness"

QUIET_MS = 10_000  # for which captures and libraries that are loaded may hold the event loop up
STUCK_CHECKS = 10  # so that a process that was stopped for a while is not taken for a stuck one

STAGE_PROGRESS_S = 0.25

# Before the port's, as gRPC goes by the first option of a name.
SERVER_OPTIONS = [
    ("grpc.max_send_message_length", 256 << 20),
    ("grpc.keepalive_time_ms", 30_000),
    # A router asks every 2 s whether this process is there, as the last line behind beats.
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
]
NOT_ELASTIC = InvalidPlacement(
    "this executor's place is set where it was started", field="placement"
)
STEP = f"/{SERVICE}/Step"  # its first message comes when there is something to do


class Pending(Protocol):
    """A step that was launched and not answered yet."""

    @property
    def is_done(self) -> bool: ...


class Staging(Protocol):
    """Experts that are loaded ahead of a Join."""

    bytes_done: int
    bytes_total: int

    def run(self) -> None: ...
    def cancel(self) -> None: ...


class Experts(Protocol):
    """``ElasticExperts``, as far as the service calls it."""

    capacity: Capacity

    @property
    def num_experts(self) -> int: ...
    @property
    def resident(self) -> list[int]: ...
    @property
    def places_crc32(self) -> int: ...
    def stage(
        self, slots: Sequence[int], used: Sequence[int] | None, max_bytes_per_s: int
    ) -> Staging: ...


class Worker(Protocol):
    """``executor.worker.Worker``, as far as the service calls it."""

    @property
    def has_peers(self) -> bool: ...
    @property
    def has_deferred(self) -> bool: ...
    @property
    def waits_for_peers(self) -> bool: ...
    @property
    def experts(self) -> Experts | None: ...
    def launch(self, request: pb.StepRequest) -> Pending: ...
    def finish(self, pending: Any) -> pb.StepResponse: ...
    def run_deferred(self) -> None: ...
    def join(
        self, epoch: int, store_address: str, attempt: JoinAttempt, placement: Placement | None
    ) -> Loaded: ...
    def leave(self) -> None: ...


class Store(Protocol):
    """A rendezvous store; it listens until it is closed."""

    @property
    def port(self) -> int: ...
    def close(self) -> None: ...


class ExecutorServicer(executor_pb2_grpc.ExecutorServiceServicer):
    """Serves one executor to one router.

    Args:
        is_first: Whether this is the group's first executor, which opens the stores.
        store_host: Host at which the group's members reach this one, and a store opened here.
        open_store: Opens an epoch's store, given its secret.
        store_address: Where all of them will listen, if that is known, so that no Prepare need tell.
        measures: Gets what becomes of steps and joins; None: nobody asks for it.
        stuck_after_s: A step that outlives its stream for longer will never end.

    Attributes:
        stuck: Set when there is such a step. This process can do no other.
        refusals: Calls that were not taken, of all ports.
    """

    def __init__(
        self,
        *,
        is_first: bool,
        store_host: str,
        open_store: Callable[[bytes], Store],
        store_address: str = "",
        measures: Measures | None = None,
        stuck_after_s: float = 60.0,
    ) -> None:
        self.health = HealthServicer()
        self.stuck = asyncio.Event()
        self._stuck_after_s = stuck_after_s
        self._is_first = is_first
        self._store_host = store_host
        self._open_store = open_store
        self._store_address = store_address
        self._measures = measures or Measures()
        self.refusals = Refusals(self._measures.add_refusal)
        self._stores: dict[int, Store] = {}  # by epoch: of the newest, and only while it forms
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._finishing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="finish")
        self._last_reading: Reading | None = None
        self._ended_ns = 0  # when the last step was finished
        self._worker: Worker | None = None
        self._description = pb.DescribeResponse()
        self._stream: StepStream | None = None
        self._is_stopping = False
        self._epochs = Epochs()
        self._joining: JoinAttempt | None = None  # the newest, while it is under way
        self._placement: Placement | None = None  # of the newest Join
        self._staging: Staging | None = None
        self._stager = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stage")
        self._begun_step_id = 0
        # At once, so that a router that stands by takes over then.
        self._lease = Lease(on_change=lambda knows: self._beats.beat_now(but_to=knows))
        self._beats = Beats(self._beat, self._lease, self._measures.beat_late_s)

        # Set where no step runs, as a join has just ended; but an epoch ends at once, also while
        # the compute thread waits.
        self._epoch: int | None = None  # None while in no group
        self._driven_epoch: int | None = None  # that a Step stream was opened in
        self._next_step_id = 1

    # Life of the process

    async def start(self, config: ServiceConfig) -> tuple[grpc.aio.Server, int]:
        """Starts listening, before any model is loaded. Returns the server and its port.

        Raises:
            OSError: The address cannot be bound.
        """
        refusals = self.refusals
        reader = RequestReader(config, refusals, patient=(STEP,))
        server = grpc.aio.server(
            interceptors=[*config.interceptors(refusals), reader],
            options=[*SERVER_OPTIONS, *config.server_options()],
        )
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(self, server)
        self.add_health_to(server)
        enable_reflection(server, (SERVICE, SERVICE_NAME))
        for name in ("", SERVICE, LIVENESS):
            self.health.set(name, True)
        self._publish_readiness()
        return server, await config.start(server)

    def add_health_to(self, server: grpc.aio.Server) -> None:
        """Adds the health service to a server that has not started."""
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)

    async def load(self, build: Callable[[], tuple[Worker, pb.DescribeResponse]]) -> None:
        """Builds the worker on the compute thread; from then on the RPCs are answered.

        Args:
            build: Returns the worker and what Describe says of it, but for the ids of instance and
                KV, the digest and the epoch.
        """
        self._worker, self._description = await self._on_compute_thread(build)
        self._description.instance_id = uuid.uuid4().hex
        self._description.kv_id = uuid.uuid4().hex
        self._description.peer_host = self._store_host
        self._description.store_address = self._store_address
        self._description.agreement_digest = agreement_digest(dict(self._description.agreement))
        self._publish_readiness()
        self._beats.begin()

    async def stop(self) -> None:
        """Finishes the step in flight, tells the router, and then leaves the group.

        In this order, the router hears SHUTTING_DOWN before any peer fails for want of this one:
        it knows that the leave is planned.
        """
        self._is_stopping = True
        self._cancel_staging()
        self._beats.end()
        self._publish_readiness()
        self._call_off_join("this executor was told to stop")
        self._close_stores(self._epochs.newest)
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.epoch = None
            stream.end(ShuttingDown("this executor was told to stop"))
            await stream.is_over.wait()
        if self._worker is not None:
            await self._on_compute_thread(self._leave)

    @property
    def is_driven(self) -> bool:
        """Whether a router holds a Step stream here, or is about to open one for an epoch that was joined."""
        is_awaited = self._epoch is not None and self._epoch != self._driven_epoch
        return self._stream is not None or is_awaited

    @property
    def epoch(self) -> int | None:
        """The epoch that it is joined to; None if to none."""
        return self._epoch

    @property
    def dp_rank(self) -> int:
        """Where it stands; 0 while it loads, and of an elastic one before its first Join."""
        return self._description.coordinates.dp_rank

    @property
    def resident_experts(self) -> list[int]:
        """The expert in each slot of an elastic executor, -1 for none."""
        experts = None if self._worker is None else self._worker.experts
        return [] if experts is None else experts.resident

    @property
    def num_kv_blocks(self) -> int:
        """Blocks of its pool; 0 while it loads."""
        return self._description.num_kv_blocks

    # RPCs

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        async with abort_on_error(context):
            self._loaded_worker()
            response = pb.DescribeResponse()
            response.CopyFrom(self._description)
            response.epoch = self._epochs.newest
            if (driver := self._lease.driver) is not None:
                response.driver.CopyFrom(pb.Driver(**driver._asdict()))
            response.resident_experts = np.array(self.resident_experts, "<i4").tobytes()
            return response

    async def Prepare(self, request: pb.PrepareRequest, context: Context) -> pb.PrepareResponse:
        async with abort_on_error(context):
            self._loaded_worker()
            if request.secret:
                check_secret(request.secret)
            self._lease.check(request.router_id)
            self._epochs.prepare(request.epoch)
            self._lease.take(request.router_id)
            self._call_off_join(f"epoch {request.epoch} has begun")
            if not self._is_first or not request.secret:
                return pb.PrepareResponse()
            store = self._open(request.epoch, request.secret)
            return pb.PrepareResponse(store_address=join_address(self._store_host, store.port))

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinResponse:
        async with abort_on_error(context):
            worker = self._loaded_worker()
            placement = _placement_of(worker.experts, request)
            has_peers = worker.has_peers
            if placement is not None:
                has_peers = placement.topology.world_size > 1
            if has_peers:
                _check_rendezvous(request)
            self._lease.check(request.router_id)
            self._epochs.join(request.epoch)
            if request.kv_id != self._description.kv_id:
                self._description.kv_id = uuid.uuid4().hex
            if self._stream is not None:
                self._stream.end(StaleEpoch(f"epoch {request.epoch} has begun"))
                self._stream = None
                self._lease.note_steps(is_open=False)
            self._lease.take(request.router_id)
            self._call_off_join(f"epoch {request.epoch} has begun")
            self._leave()  # from here, so that a step that waits for lost peers fails now
            self._cancel_staging()
            self._placement = placement
            self._publish_readiness()
            if has_peers and request.store_address == self._store_address:
                self._open(request.epoch, request.secret)
            attempt = self._joining = JoinAttempt(request.epoch, request.secret)
            self._beats.beat_now()  # announces a pause
            try:
                # A call that is cancelled does not stop the thread, whose outcome must be noted.
                joined = await asyncio.shield(self._join(worker, request, attempt, placement))
            except asyncio.CancelledError:
                if self._joining is attempt:  # as a router does when another member cannot join
                    self._call_off_join("the router gave up")
                raise
            if isinstance(joined, JoinFailed):
                raise joined
            joined.instance_id = self._description.instance_id
            joined.kv_id = self._description.kv_id
            return joined

    async def Attend(  # type: ignore[override]
        self, requests: AsyncIterator[pb.AttendRequest], context: Context
    ) -> None:
        async with abort_on_error(context):
            await self._beats.attend(requests, context)
            self._loaded_worker()  # says so if this process stops

    async def Stage(  # type: ignore[override]
        self, request: pb.StageRequest, context: Context
    ) -> None:
        async with abort_on_error(context):
            experts = self._loaded_worker().experts
            placement = _placement_of(experts, request)
            if experts is None or placement is None:
                raise NOT_ELASTIC
            used = None
            if self._placement is not None and (self._epoch is not None or self._joining):
                used = self._placement.slots
            staging = experts.stage(placement.slots, used, request.max_bytes_per_s)
            self._cancel_staging()
            self._staging = staging
            if self._joining is not None:  # which would wait for it
                staging.cancel()
            try:
                await self._stage(staging, context)
            finally:
                staging.cancel()
                self._measures.loaded_bytes += staging.bytes_done

    async def _stage(self, staging: Staging, context: Context) -> None:
        """Answers how far it is until it has ended, however it does."""
        loading = asyncio.get_running_loop().run_in_executor(self._stager, staging.run)
        is_over = False
        while not is_over:
            is_over = bool((await asyncio.wait([loading], timeout=STAGE_PROGRESS_S))[0])
            await context.write(
                pb.StageResponse(bytes_done=staging.bytes_done, bytes_total=staging.bytes_total)
            )
        loading.result()
        log.info("staged", bytes=staging.bytes_done, of=staging.bytes_total)

    def _cancel_staging(self) -> None:
        if self._staging is not None:
            self._staging.cancel()

    # A coroutine that writes to the context, not a generator: when its call is cancelled, a
    # generator would stay suspended at its yield and hold the stream until collected.
    async def Step(  # type: ignore[override]
        self, requests: AsyncIterator[pb.StepRequest], context: Context
    ) -> None:
        stream = StepStream()
        try:
            async with abort_on_error(context):
                worker = self._loaded_worker()
                if self._stream is not None and not self._stream.has_ended:
                    raise StreamHeld("another stream drives this executor")
                self._stream, self._driven_epoch = stream, self._epoch
                self._lease.note_steps(is_open=True)
                stream.epoch = self._epoch if _leaves(worker) else None
                await self._answer(stream, requests, worker, context)
        finally:
            stream.is_over.set()
            self._end(stream)

    async def _answer(
        self,
        stream: StepStream,
        requests: AsyncIterator[pb.StepRequest],
        worker: Worker,
        context: Context,
    ) -> None:
        reader = asyncio.create_task(self._read(stream, requests, worker))
        try:
            while (pending := await stream.answers.get()) is not None:
                answer = await pending
                if isinstance(answer, Future):  # whose thread goes on if this call is cancelled
                    answer = await asyncio.shield(asyncio.wrap_future(answer))
                stream.unanswered.release()
                if isinstance(answer, RpcError):
                    raise answer
                if answer is not None:
                    await context.write(answer)
                    self._beats.note_answer(answer.epoch)
        finally:
            stream.has_ended = True
            reader.cancel()

    def _end(self, stream: StepStream) -> None:
        """Leaves the group that the stream was of, unless a newer Join has."""
        if self._stream is stream:
            self._stream = None
            self._lease.note_steps(is_open=False)
        if stream.epoch is not None and stream.epoch == self._epochs.last_joined:
            self._leave()
        self._publish_readiness()
        self._check_stuck(stream, STUCK_CHECKS)

    async def _read(
        self, stream: StepStream, requests: AsyncIterator[pb.StepRequest], worker: Worker
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            async for request in requests:
                arrival_ns = time.perf_counter_ns()
                self._lease.note_step()
                await stream.unanswered.acquire()
                answer = loop.run_in_executor(
                    self._compute, self._step, stream, worker, request, arrival_ns
                )
                stream.answers.put_nowait(answer)
        except RpcError as error:  # of a message that cannot be read
            stream.refuse(error)
        finally:
            stream.answers.put_nowait(None)

    def _call_off_join(self, problem: str) -> None:
        """Ends a join that is under way: its call fails with ``problem``, at once."""
        if self._joining is not None:
            self._joining.call_off(problem)
            self._leave()

    def _check_stuck(self, stream: StepStream, num_left: int) -> None:
        """Looks at the last steps of a stream that has ended, now and a few times more."""
        if not stream.under_way:
            return
        if num_left:
            loop, wait_s = asyncio.get_running_loop(), self._stuck_after_s / STUCK_CHECKS
            loop.call_later(wait_s, self._check_stuck, stream, num_left - 1)
            return
        log.error("step_stuck", stuck_after_s=self._stuck_after_s)
        self.health.set(LIVENESS, False)
        self.stuck.set()

    async def _join(
        self,
        worker: Worker,
        request: pb.JoinRequest,
        attempt: JoinAttempt,
        placement: Placement | None,
    ) -> pb.JoinResponse | JoinFailed:
        """Returns how it failed, if it did: nobody awaits this once the call was cancelled."""
        started_s = time.perf_counter()
        join = partial(self._join_worker, worker, request, attempt, placement)
        try:
            joined = await self._on_compute_thread(join)
            attempt.check()  # it may have been called off since it joined
            self._begun_step_id = 0
            self._next_step_id, self._epoch = 1, request.epoch  # in this order: see _check_order
        except JoinFailed as error:
            self._measures.joins["failed"] += 1
            log.warning("join_failed", epoch=request.epoch, problem=str(error))
            return error
        finally:
            if self._joining is attempt:
                self._joining = None
            self._close_stores(request.epoch)  # all have what they need of it, or it failed
            self._publish_readiness()
        self._description.joined_max_model_len = request.max_model_len
        if placement is not None:
            self._description.coordinates.CopyFrom(request.placement.coordinates)
        self._measures.joins["joined"] += 1
        self._measures.loaded_bytes += joined.loaded_bytes
        log.info(
            "joined",
            epoch=request.epoch,
            dp_rank=self._description.coordinates.dp_rank,
            dp_size=self._description.coordinates.dp_size,
            seconds=round(time.perf_counter() - started_s, 3),
            loaded_bytes=joined.loaded_bytes,
        )
        return joined

    # On the compute thread, and that which finishes

    def _join_worker(
        self,
        worker: Worker,
        request: pb.JoinRequest,
        attempt: JoinAttempt,
        placement: Placement | None,
    ) -> pb.JoinResponse:
        """Joins once no step of an older epoch is under way."""
        if self._last_reading is not None:
            wait([self._last_reading])
        loaded = worker.join(request.epoch, request.store_address, attempt, placement)
        return pb.JoinResponse(
            loaded_bytes=loaded.num_bytes,
            load_ns=loaded.ns,
            places_crc32=0 if worker.experts is None else worker.experts.places_crc32,
        )

    def _step(
        self, stream: StepStream, worker: Worker, request: pb.StepRequest, arrival_ns: int
    ) -> Answer | Reading:
        """Launches a step unless its stream has ended. After an error the stream has.

        An executor without peers stays as it was before a step that it refused.
        """
        if stream.has_ended:
            return None
        stream.under_way.add(request.step_id)
        try:
            self._check_order(request)
            self._begun_step_id = request.step_id
            worker.run_deferred()
            begun_ns = time.perf_counter_ns()
            if _leaves(worker):
                stream.epoch = request.epoch
            pending = worker.launch(request)
        except Exception as error:
            return self._give_up(stream, worker, error, request)
        self._next_step_id += 1
        finish = partial(self._finish, stream, worker, request, pending, arrival_ns, begun_ns)
        if not pending.is_done:
            self._last_reading = self._finishing.submit(finish)
            return self._last_reading
        answer = finish()
        if worker.has_deferred and isinstance(
            answer, pb.StepResponse
        ):  # the answer goes out meanwhile
            self._compute.submit(self._run_deferred, stream, worker, request)
        return answer

    def _finish(
        self,
        stream: StepStream,
        worker: Worker,
        request: pb.StepRequest,
        pending: Pending,
        arrival_ns: int,
        begun_ns: int,
    ) -> Answer:
        """Returns the answer of a step that was launched; on a GPU, in a thread that only does this."""
        try:
            response = worker.finish(pending)
        except Exception as error:
            return self._give_up(stream, worker, error, request)
        stream.under_way.discard(request.step_id)
        response.queued_ns = max(begun_ns, self._ended_ns) - arrival_ns
        self._ended_ns = time.perf_counter_ns()
        self._measures.phase_ns["queue"] += response.queued_ns
        return response

    def _run_deferred(self, stream: StepStream, worker: Worker, request: pb.StepRequest) -> None:
        """Runs what a step has deferred, unless the next one came first and did.

        An error ends the stream as one of the step would.
        """
        if self._next_step_id != request.step_id + 1:
            return
        stream.under_way.add(request.step_id)
        try:
            worker.run_deferred()
        except Exception as error:
            stream.refuse_soon(self._fail(stream, error, request))
        finally:
            stream.under_way.discard(request.step_id)

    def _give_up(
        self, stream: StepStream, worker: Worker, error: Exception, request: pb.StepRequest
    ) -> RpcError:
        """Ends a stream for what went wrong with a step. Returns what to tell the router."""
        stream.under_way.discard(request.step_id)
        if not isinstance(error, RpcError):
            return self._fail(stream, error, request)
        stream.has_ended = True
        if isinstance(error, StaleEpoch):  # a stray stream, which takes no part in this epoch
            stream.epoch = None
        elif _leaves(worker):
            self._epoch = None
        self._measures.failures[error.reason] += 1
        log.warning("step_refused", **_ids(request), reason=error.reason, problem=str(error))
        return error

    def _fail(self, stream: StepStream, error: Exception, request: pb.StepRequest) -> StepFailed:
        """Ends the epoch here: rows are in no known state."""
        failure = StepFailed(f"step {request.step_id}: {type(error).__name__}: {error}")
        self._epoch = None
        if stream.has_ended:  # and so did the group, under the step
            log.info("step_cut_short", **_ids(request), problem=str(failure))
            return failure
        stream.has_ended = True
        self._measures.failures[failure.reason] += 1
        log.exception("step_failed", **_ids(request))
        return failure

    def _check_order(self, request: pb.StepRequest) -> None:
        if self._epoch is None:
            raise NotJoined("no group: call Join first")
        if request.epoch != self._epoch:
            raise StaleEpoch(
                f"the step is of epoch {request.epoch}, this executor in epoch {self._epoch}",
                field="epoch",
            )
        if request.step_id != self._next_step_id:
            raise StepOutOfOrder(
                f"got step {request.step_id}; the next one is {self._next_step_id}", field="step_id"
            )

    def _leave(self) -> None:
        self._epoch = None
        if self._worker is not None:
            self._worker.leave()

    # Helpers

    def _open(self, epoch: int, secret: bytes) -> Store:
        """Returns the store of an epoch, which is the only one open.

        Raises:
            JoinFailed: It cannot be opened where it is to be.
        """
        if epoch not in self._stores:
            self._close_stores(epoch)
            try:
                self._stores[epoch] = self._open_store(secret)
            except OSError as error:
                raise JoinFailed(f"epoch {epoch}: {error}") from error
        return self._stores[epoch]

    def _close_stores(self, epoch: int) -> None:
        """Closes the store of an epoch and of those before it."""
        for each in [each for each in self._stores if each <= epoch]:
            self._stores.pop(each).close()

    def _loaded_worker(self) -> Worker:
        if self._is_stopping:
            raise ShuttingDown("this executor was told to stop")
        if self._worker is None:
            raise NotLoaded("the model is still loading")
        return self._worker

    def _beat(self) -> pb.AttendResponse:
        return pb.AttendResponse(
            instance_id=self._description.instance_id,
            epoch=self._epoch or 0,
            step_id=self._begun_step_id,
            waits_for_peers=self._worker is not None and self._worker.waits_for_peers,
            quiet_ms=QUIET_MS if self._joining is not None else 0,
        )

    def _publish_readiness(self) -> None:
        is_spare = self._worker is not None and self._worker.experts is not None
        is_ready = is_spare or self._epoch is not None
        self.health.set(READINESS, is_ready and not self._is_stopping)

    async def _on_compute_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._compute, function)


def _ids(request: pb.StepRequest) -> dict[str, int]:
    """Returns what a log says of a step, under the names that the router's log uses."""
    return {"epoch": request.epoch, "step_id": request.step_id}


def _leaves(worker: Worker) -> bool:
    """Whether an epoch ends with its stream: others wait, or the executor is a spare again."""
    return worker.has_peers or worker.experts is not None


def _placement_of(
    experts: Experts | None, request: pb.JoinRequest | pb.StageRequest
) -> Placement | None:
    """Returns where a call places this executor; None if its settings do.

    Raises:
        NotPlaced: The executor is elastic, and the call says nothing of that.
        InvalidPlacement: It cannot stand there.
    """
    if request.HasField("placement"):
        if experts is None:
            raise NOT_ELASTIC
        return read_placement(request.placement, experts.capacity, experts.num_experts)
    if experts is not None:
        raise NotPlaced(
            "this executor is elastic (max_dp_size): need a placement, of a router that gives places",
            field="placement",
        )
    return None


def _check_rendezvous(request: pb.JoinRequest) -> None:
    check_secret(request.secret)
    host, _ = split_address(request.store_address)
    if host not in request.peer_hosts:
        raise InvalidRendezvous(
            f"store_address={request.store_address!r}: need the host of a member, one of "
            f"{list(request.peer_hosts)}",
            field="store_address",
        )


def agreement_digest(agreement: dict[str, str]) -> bytes:
    """Returns SHA-256 over the entries in order of name, each as ``name=value`` and a newline."""
    lines = "".join(f"{name}={value}\n" for name, value in sorted(agreement.items()))
    return hashlib.sha256(lines.encode()).digest()
