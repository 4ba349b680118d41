"""Step stream to one executor, and the deadline after which executors count as hung.

A stream is held open for an epoch, written ahead, and always being read.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from protos.executor.v1 import executor_pb2 as pb
from protos.settings import above, setting
from protos.transport.error_details import error_details
from router.errors import (
    ExecutorGone,
    ExecutorLeft,
    ExecutorLied,
    ExecutorLost,
    GroupHeld,
    ReasonUnknown,
)
from router.executors.suspicion import MIN_GAP_S
from router.scheduling.step import Agreement, StepSettings

# Errors by the reason of a stream's end; any other is ExecutorLost. A step also fails when another
# executor leaves; an epoch that this router has not begun is another's.
KINDS = {
    "SHUTTING_DOWN": ExecutorLeft,
    "STEP_FAILED": ReasonUnknown,
    "STALE_EPOCH": GroupHeld,
}
UNREASONED = {  # ends by gRPC's own codes, without a word of the executor's
    grpc.StatusCode.INTERNAL: ReasonUnknown,
    grpc.StatusCode.UNAVAILABLE: ExecutorGone,
}
STEP = f"/{pb.DESCRIPTOR.services_by_name['ExecutorService'].full_name}/Step"

RISE, FALL = 0.2, 0.01
MIN_STEPS = 16  # of a kind, before its estimate counts

Kind = tuple[bool, int, bool, int]


class StepStream:
    """Sends steps to one executor and keeps its answers until they are asked for.

    Args:
        name: Who it is, for errors.
        channel: To the executor.
        loss: Has an ExecutorLost when the group is lost; a `receive` that waits raises it.
        on_late_answer: Told when an answer has come, on the event loop's clock, if the one before it did more
            than MIN_GAP_S ago.
        on_end: Told why the stream ended before `close`.
        max_answer_bytes: See below.

    Attributes:
        max_answer_bytes: A longer answer is not read.
        answer_time: When the last answer came, on the event loop's clock.
    """

    def __init__(
        self,
        name: str,
        channel: grpc.aio.Channel,
        loss: asyncio.Future[None],
        on_late_answer: Callable[[float], None],
        on_end: Callable[[ExecutorLost], None],
        max_answer_bytes: int,
    ) -> None:
        self.name = name
        self.max_answer_bytes = max_answer_bytes
        self._loss = loss
        self._on_late_answer = on_late_answer
        self.answer_time = -math.inf
        self._on_end = on_end
        self._requests: asyncio.Queue[bytes] = asyncio.Queue()
        self._responses: deque[pb.StepResponse] = deque()
        self._num_due = 0  # answers to what was sent that have not come
        self._clock = asyncio.get_running_loop().time
        self._news = asyncio.Event()  # an answer, or the loss
        loss.add_done_callback(lambda _: self._news.set())
        # Not through the generated stub: it would serialise, and requests come serialised.
        # And not read by gRPC: a few bytes may stand for a message that takes many.
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            STEP, request_serializer=None, response_deserializer=None
        )
        # Written by a task of its own: gRPC's formats a traceback, unasked, of each call that is cancelled.
        self._call = method()
        self._writing = asyncio.create_task(self._write(), name=f"write {name}")
        self._reading = asyncio.create_task(self._read(), name=f"read {name}")

    def send(self, request: bytes) -> None:
        """Queues a serialised StepRequest; at most the pipeline's depth of them are ever in the queue."""
        self._num_due += 1
        self._requests.put_nowait(request)

    @property
    def is_idle(self) -> bool:
        """Whether nothing was sent that is not answered."""
        return not self._num_due

    @property
    def has_answer(self) -> bool:
        """Whether `receive` would return at once."""
        return bool(self._responses)

    async def receive(self) -> pb.StepResponse:
        """Returns the next answer. If it is cancelled, the answer is still there.

        Raises:
            ExecutorLost: The stream of this or of another executor of the group ended.
        """
        while not self._responses:
            if self._loss.done():
                self._loss.result()
                raise AssertionError("a loss always is an exception")
            self._news.clear()
            await self._news.wait()
        return self._responses.popleft()

    def close(self) -> None:
        """Ends the stream; a step that runs is not waited for."""
        self._writing.cancel()
        self._reading.cancel()
        self._call.cancel()

    async def _write(self) -> None:
        """Writes what is sent until the call ends. `_read` says why."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._call.write(await self._requests.get())

    async def _read(self) -> None:
        try:
            end = await self._keep_answers()
        except grpc.aio.AioRpcError as error:
            reason = error_details(error).reason
            kind = KINDS.get(reason, ExecutorLost)
            if not reason:
                reason = error.code().name
                kind = UNREASONED.get(error.code(), ExecutorLost)
            end = kind(f"{self.name}: {reason}: {error.details()}")
        self._on_end(end)

    async def _keep_answers(self) -> ExecutorLost:
        """Keeps the answers until there is one that cannot be, or none follows. Says which."""
        read = pb.StepResponse.FromString
        async for data in self._call:
            if not self._num_due:  # nobody would ever take it
                return ExecutorLied("answered a step that it was not sent")
            if len(data) > self.max_answer_bytes:
                return ExecutorLied(
                    f"answered a step with {len(data)} bytes, where at most "
                    f"{self.max_answer_bytes} are due"
                )
            try:
                self._responses.append(read(data))
            except DecodeError:
                return ExecutorLied("answered a step with what is no StepResponse")
            self._num_due -= 1
            now = self._clock()
            if now - self.answer_time > MIN_GAP_S:
                self._on_late_answer(now)
            self.answer_time = now
            self._news.set()
        return ExecutorLost(f"{self.name}: it ended the Step stream")


@dataclass(slots=True)
class _Estimate:
    num_steps: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DeadlineSettings(StepSettings):
    """Settings of the deadline of steps."""

    step_deadline_factor: float = setting(
        20.0, above(1, ", or steps that take as long as usual would be overdue")
    )
    """An executor counts as lost, too, past so many times what steps of its kind take, once a few
    of them were seen."""
    min_step_deadline_s: float = setting(5.0, above(0))
    """But not before so many seconds."""


class StepDeadline:
    """Deadline of steps, learnt from earlier ones.

    What a step takes depends on whether it runs prompts or drafts, whether a graph runs it, and on
    its tokens. So steps are told apart by these, tokens by powers of two, and each kind keeps an
    upper estimate: it follows a slower step by a fifth of the difference and a faster one by a
    hundredth, which settles near the slowest twentieth and forgets a single hiccup. A kind that was
    rarely seen has no estimate yet; only the longest limit holds for it, so that a first prefill is
    never cut.
    """

    def __init__(self, settings: DeadlineSettings) -> None:
        self._settings = settings
        self._estimates: dict[Kind, _Estimate] = {}

    def limit_s(self, agreement: Agreement) -> float:
        """Returns how long a step may take."""
        settings, estimate = self._settings, self._estimates.get(_kind_of(agreement))
        if estimate is None or estimate.num_steps < MIN_STEPS:
            return settings.step_timeout_s
        usual_s = settings.step_deadline_factor * estimate.seconds
        return min(max(usual_s, settings.min_step_deadline_s), settings.step_timeout_s)

    def add(self, agreement: Agreement, seconds: float) -> None:
        """Notes how long a step took."""
        estimate = self._estimates.setdefault(_kind_of(agreement), _Estimate(seconds=seconds))
        estimate.num_steps += 1
        difference = seconds - estimate.seconds
        estimate.seconds += (RISE if difference > 0 else FALL) * difference

    def forget(self) -> None:
        """Starts anew: other executors may be slower, and first steps always are."""
        self._estimates.clear()


def _kind_of(agreement: Agreement) -> Kind:
    has_graph = agreement.graph_size is not None
    size = max(agreement.global_num_tokens).bit_length()
    return agreement.has_extend, agreement.num_draft_tokens, has_graph, size
