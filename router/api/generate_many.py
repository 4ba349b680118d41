"""GenerateMany stream: many requests, one listener and one message per wake for all.

    client ──start, cancel──▶ _read ──submit──▶ engines
                                │                 │ tokens of plain requests, as columns
                                │ refused         │ everything else, as responses
                                ▼                 ▼
    client ◀──────────────── _take ◀── one wake ─┘

No Python runs per token of a plain request, and none per request until it ends.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from google.protobuf.unknown_fields import UnknownFieldSet

from protos.serving.v1 import serving_pb2
from protos.transport.errors import RpcError
from protos.transport.interceptors import Caller
from router.api.messages import (
    Takings,
    begin_response,
    name_request,
    read_request,
    read_timeout,
    tagged_error,
    take_response,
)
from router.api.text import Tokenizer
from router.api.unknown_fields import refuse_unknown_fields
from router.engine.engines import Engines
from router.errors import Cancelled, InvalidRequest
from router.requests.callers import DEFAULTS, CallerSettings
from router.requests.request import Listener, Request, Sequence

# Waiting to be sent, because the client does not read; past these, nothing more of it is read.
MAX_REFUSALS = 256
MAX_ENDS = 256
# Requests of a stream that other processes make a grammar or a prompt for at once; further ones wait in
# line, up to so many bytes, each counted as the least at least. Reading goes on until these are full.
MAX_PREPARING = 16
MAX_UNPREPARED_BYTES, MIN_UNPREPARED_BYTES = 16 << 20, 4 << 10
# A message with so many bytes of responses takes no further one, as clients have a limit. A client that
# reads slowly gets what is new of all requests at once, which may be more than any of them has.
FULL_BYTES = 1 << 20

Write = Callable[[serving_pb2.GenerateManyResponse], Awaitable[None]]


class ManyCall:
    """One GenerateMany stream.

    Args:
        engines: What runs the requests.
        tokenizer: Of the model, where the router has one.
        listener: Of this stream only.
        caller: Who opened the stream.
        settings: What a caller may ask for.
        takings: Of the router.
    """

    def __init__(
        self,
        engines: Engines,
        tokenizer: Tokenizer | None,
        listener: Listener,
        caller: Caller = (),
        settings: CallerSettings = DEFAULTS,
        takings: Takings | None = None,
    ) -> None:
        self._engines = engines
        self._tokenizer = tokenizer
        self._listener = listener
        self._caller = caller
        self._settings = settings
        self._takings = takings or Takings()
        self._live: dict[int, Request] = {}
        self._detailed: dict[int, Request] = {}  # the live ones whose tokens are no columns
        self._preparing: dict[int, asyncio.Task[None]] = {}  # that are not submitted yet, by tag
        self._num_unprepared_bytes = 0  # of theirs
        self._room = asyncio.Semaphore(MAX_PREPARING)
        self._failed: asyncio.Task[None] | None = None  # one of them, of what nobody expected
        self._begun: list[serving_pb2.TaggedResponse] = []  # to be sent
        self._refusals: asyncio.Queue[serving_pb2.TaggedError] = asyncio.Queue(MAX_REFUSALS)
        self._was_taken = asyncio.Event()
        self._was_prepared = asyncio.Event()

    async def run(
        self, messages: AsyncIterator[serving_pb2.GenerateManyRequest], write: Write
    ) -> None:
        """Serves the stream until the client has half-closed it and every request has ended.

        Raises:
            InvalidRequest: A message fits no rule of the stream, so no tag can carry the error.
            NotReady, Moved, ShuttingDown: The router takes no requests, and this stream's have ended: open
                another one elsewhere, as a proxy may do itself where nothing was answered.
        """
        with self._engines.measures.counting_refusals():
            self._engines.check_open()
        reading = asyncio.create_task(self._read(messages))
        reading.add_done_callback(self._on_read)
        try:
            while not (reading.done() and self._is_idle):
                if self._is_idle:
                    self._engines.check_open()
                await self._listener.wait()
                self._check(reading)
                message = self._take()
                if message.ByteSize():
                    await write(message)
            self._check(reading)  # it may have failed during the last `write`
        finally:
            reading.remove_done_callback(self._on_read)  # the listener is another call's soon
            readers = reading, *self._preparing.values()
            for reader in readers:
                reader.cancel()  # from here on it submits nothing
            for request in self._live.values():
                self._engines.cancel(request)
            await asyncio.gather(*readers, return_exceptions=True)

    def _check(self, reading: asyncio.Task[None]) -> None:
        """Raises what ended the reading of messages, or of one of their requests, before its time."""
        for task in (reading, self._failed):
            if task is not None and task.done():
                task.result()

    @property
    def _is_idle(self) -> bool:
        waits = self._live or self._preparing or self._listener.ended
        return not waits and self._refusals.empty()

    async def _read(self, messages: AsyncIterator[serving_pb2.GenerateManyRequest]) -> None:
        async for message in messages:
            while len(self._listener.ended) >= MAX_ENDS:
                self._was_taken.clear()
                await self._was_taken.wait()
            if len(UnknownFieldSet(message)):  # its own; those of a request are told under its tag
                with self._engines.measures.counting_refusals():
                    refuse_unknown_fields(message)
            match message.WhichOneof("action"):
                case "start":
                    await self._start(message.tag, message.start)
                case "cancel":
                    await self._cancel(message.tag)
                case _:
                    raise self._counted(
                        InvalidRequest("action", "there is none; set start or cancel")
                    )
        if self._preparing:
            await asyncio.wait(self._preparing.values())

    def _on_read(self, reading: asyncio.Task[None]) -> None:
        self._listener.wake()

    async def _start(self, tag: int, message: serving_pb2.GenerateRequest) -> None:
        if tag in self._live or tag in self._preparing:
            problem = f"{tag} is that of a request that still runs on this stream; use another"
            raise self._counted(InvalidRequest("tag", problem))
        arrival_time, name = asyncio.get_running_loop().time(), name_request(message)
        try:
            if _needs_process(message):
                await self._put_off(tag, name, message, arrival_time)
            else:
                await self._submit(tag, message, arrival_time)
        except RpcError as error:
            await self._refuse(tag, error, name)

    async def _put_off(
        self, tag: int, name: str, message: serving_pb2.GenerateRequest, arrival_time: float
    ) -> None:
        """Has a request submitted once its grammar or prompt is made; returns when it has its place in line."""
        timeout_s = read_timeout(message)
        data = message.SerializeToString()  # many empty parts take sixty times as much when parsed
        size = max(len(data), MIN_UNPREPARED_BYTES)
        while self._preparing and self._num_unprepared_bytes + size > MAX_UNPREPARED_BYTES:
            self._was_prepared.clear()
            await self._was_prepared.wait()
        self._num_unprepared_bytes += size
        preparing = self._prepare(tag, name, data, arrival_time, timeout_s)
        self._preparing[tag] = submitting = asyncio.create_task(preparing, name=name)
        submitting.add_done_callback(partial(self._on_submitted, tag, size))

    async def _prepare(
        self, tag: int, name: str, data: bytes, arrival_time: float, timeout_s: float | None
    ) -> None:
        try:
            async with (
                self._takings.within(timeout_s, arrival_time, self._caller, name),
                self._room,
            ):
                message = serving_pb2.GenerateRequest.FromString(data)
                await self._submit(tag, message, arrival_time)
        except RpcError as error:
            await self._refuse(tag, error, name)

    def _on_submitted(self, tag: int, size: int, submitting: asyncio.Task[None]) -> None:
        del self._preparing[tag]
        self._num_unprepared_bytes -= size
        self._was_prepared.set()
        if not submitting.cancelled() and submitting.exception() is not None:
            self._failed = submitting
        self._listener.wake()

    async def _cancel(self, tag: int) -> None:
        """Ends a request, if it is there. What another process does for it may go on, for nobody."""
        if tag in self._live:
            self._engines.cancel(self._live[tag])
        elif tag in self._preparing:
            preparing = self._preparing[tag]
            preparing.cancel()
            await asyncio.wait((preparing,))
            if preparing.cancelled():  # else it is answered
                error = Cancelled("the request was cancelled")
                await self._refusals.put(tagged_error(tag, error, preparing.get_name()))
                self._listener.wake()

    async def _submit(
        self, tag: int, message: serving_pb2.GenerateRequest, arrival_time: float
    ) -> None:
        self._engines.check_room(is_resumed=message.HasField("resume"))
        request = await read_request(
            message,
            model=self._engines.model,
            tokenizer=self._tokenizer,
            listener=self._listener,
            arrival_time=arrival_time,
            tag=tag,
            caller=self._caller,
            settings=self._settings,
        )
        self._live[tag] = request
        if not request.is_columnar:
            self._detailed[tag] = request
        try:
            self._engines.submit(request)
        except RpcError:
            self._forget(request)
            raise
        if begin := begin_response(request):
            self._begun.append(serving_pb2.TaggedResponse(tag=tag, response=begin))
            self._listener.wake()

    async def _refuse(self, tag: int, error: RpcError, request_id: str) -> None:
        await self._refusals.put(tagged_error(tag, self._counted(error), request_id))
        self._listener.wake()

    def _counted(self, error: RpcError) -> RpcError:
        """Counts a refusal and returns it."""
        self._engines.measures.add_refusal(error.reason)
        return error

    def _forget(self, request: Request) -> None:
        if self._live.get(request.tag) is request:  # and no other one, as its last ends come later
            del self._live[request.tag]
            self._detailed.pop(request.tag, None)

    def _take(self) -> serving_pb2.GenerateManyResponse:
        """Returns all that is new. Nothing else runs meanwhile, so columns come first."""
        columns = self._engines.take_columns(self._listener)
        message = serving_pb2.GenerateManyResponse(
            tags=columns.tags.astype("<u4", copy=False).tobytes(),
            num_tokens=columns.num_tokens.astype("<i4", copy=False).tobytes(),
            token_ids=columns.token_ids.astype("<i4", copy=False).tobytes(),
            responses=self._begun,
        )
        self._begun.clear()
        num_bytes = 0  # of responses
        failed: dict[int, tuple[RpcError, str]] = {}
        while self._listener.ended and (num_bytes < FULL_BYTES or failed):
            sequence = self._listener.ended.popleft()
            request = sequence.request
            num_bytes += _add_response(message, sequence)
            if (error := sequence.error) is not None:
                failed[request.tag] = error, request.request_id
                self._engines.cancel(request, error)  # its other sequences, which come next here
            if not request.is_live:
                self._forget(request)
        for request in self._detailed.values():
            for sequence in request.sequences:
                if not sequence.is_ended and num_bytes < FULL_BYTES:
                    num_bytes += _add_response(message, sequence)
        if num_bytes >= FULL_BYTES:
            self._listener.wake()  # the next message has the rest
        message.errors.extend(tagged_error(tag, *failure) for tag, failure in failed.items())
        while not self._refusals.empty():
            message.errors.append(self._refusals.get_nowait())
        self._was_taken.set()
        return message


def _needs_process(message: serving_pb2.GenerateRequest) -> bool:
    """Whether another process may have to make its grammar or its prompt, which takes its time."""
    return message.HasField("constraint") or message.HasField("chat")


def _add_response(message: serving_pb2.GenerateManyResponse, sequence: Sequence) -> int:
    """Adds what is new of a sequence. Returns how many bytes that is."""
    response = take_response(sequence)
    if response is None:
        return 0
    message.responses.add(tag=sequence.request.tag, response=response)
    return response.ByteSize()
