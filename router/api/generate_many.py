"""GenerateMany: many requests on one stream, one reader and one message per wake for all.

    client ──start, cancel──▶ _read ──submit──▶ cell
                                │                 │ tokens of plain requests, as columns
                                │ refused         │ everything else, as responses
                                ▼                 ▼
    client ◀──────────────── _take ◀── one wake ─┘

No Python runs per token of a plain request, and none per request until it ends.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from protos.serving.v1 import serving_pb2
from protos.transport.errors import RpcError
from router.api.responses import tagged_error, take_response
from router.api.text.tokenizer import Tokenizer
from router.api.validation import read_request
from router.engine.engines import Cell
from router.errors import InvalidRequest, ShuttingDown
from router.requests.listeners import Reader
from router.requests.request import Request, Sequence

# Waiting to be sent, because the client does not read; past these, nothing more of it is read.
MAX_REFUSALS = 256
MAX_ENDS = 256

Write = Callable[[serving_pb2.GenerateManyResponse], Awaitable[None]]


class ManyCall:
    """One GenerateMany stream.

    Args:
        cell: What runs the requests.
        tokenizer: Of the model, where the router has one.
        reader: Of this stream alone.
    """

    def __init__(self, cell: Cell, tokenizer: Tokenizer | None, reader: Reader) -> None:
        self._cell = cell
        self._tokenizer = tokenizer
        self._reader = reader
        self._live: dict[int, Request] = {}
        self._detailed: dict[int, Request] = {}  # those of _live whose tokens are no columns
        self._refusals: asyncio.Queue[serving_pb2.TaggedError] = asyncio.Queue(MAX_REFUSALS)
        self._was_taken = asyncio.Event()

    async def run(
        self, messages: AsyncIterator[serving_pb2.GenerateManyRequest], write: Write
    ) -> None:
        """Serves the stream until the client has half-closed it and every request has ended.

        Raises:
            InvalidRequest: A message fits no rule of the stream, so no tag can carry the error.
            ShuttingDown: The router takes no more requests, and those of this stream have ended.
        """
        self._check_open()
        reading = asyncio.create_task(self._read(messages))
        reading.add_done_callback(self._on_read)
        try:
            while not (reading.done() and self._is_idle):
                if self._cell.is_shutting_down and self._is_idle:
                    raise _shutting_down()
                await self._reader.wait()
                if reading.done():
                    reading.result()  # raises what it raised
                message = self._take()
                if message.ByteSize():
                    await write(message)
        finally:
            reading.remove_done_callback(self._on_read)  # the reader is another call's soon
            reading.cancel()  # from here on it submits nothing
            for request in self._live.values():
                self._cell.cancel(request)
            await asyncio.gather(reading, return_exceptions=True)

    def _check_open(self) -> None:
        """Refuses a new stream where one that is open would be ended."""
        if self._cell.is_shutting_down:
            raise self._counted(_shutting_down())

    @property
    def _is_idle(self) -> bool:
        return not self._live and self._refusals.empty()

    async def _read(self, messages: AsyncIterator[serving_pb2.GenerateManyRequest]) -> None:
        async for message in messages:
            while len(self._reader.ended) >= MAX_ENDS:
                self._was_taken.clear()
                await self._was_taken.wait()
            match message.WhichOneof("action"):
                case "start":
                    await self._start(message.tag, message.start)
                case "cancel":
                    if message.tag in self._live:
                        self._cell.cancel(self._live[message.tag])
                case _:
                    raise self._counted(
                        InvalidRequest("action", "there is none; set start or cancel")
                    )

    def _on_read(self, reading: asyncio.Task[None]) -> None:
        self._reader.wake()

    async def _start(self, tag: int, message: serving_pb2.GenerateRequest) -> None:
        if tag in self._live:
            problem = f"{tag} is that of a request that still runs on this stream; use another"
            raise self._counted(InvalidRequest("tag", problem))
        try:
            self._cell.check_room()
            request = await read_request(
                message,
                model=self._cell.model,
                tokenizer=self._tokenizer,
                reader=self._reader,
                tag=tag,
            )
            self._live[tag] = request
            if not request.is_columnar:
                self._detailed[tag] = request
            self._cell.submit(request)
        except RpcError as error:
            self._forget(tag)
            await self._refusals.put(tagged_error(tag, self._counted(error)))
            self._reader.wake()

    def _counted(self, error: RpcError) -> RpcError:
        """Counts a refusal and returns it."""
        self._cell.measures.refused[error.reason] += 1
        return error

    def _forget(self, tag: int) -> None:
        self._live.pop(tag, None)
        self._detailed.pop(tag, None)

    def _take(self) -> serving_pb2.GenerateManyResponse:
        """Returns all that is new. Nothing else runs meanwhile, so columns come first."""
        columns = self._cell.take_columns(self._reader)
        message = serving_pb2.GenerateManyResponse(
            tags=columns.tags.astype("<u4", copy=False).tobytes(),
            num_tokens=columns.num_tokens.astype("<i4", copy=False).tobytes(),
            token_ids=columns.token_ids.astype("<i4", copy=False).tobytes(),
        )
        for request in self._detailed.values():
            for sequence in request.sequences:
                if not sequence.is_ended:
                    _add_response(message, sequence)
        failed: dict[int, RpcError] = {}
        while self._reader.ended:
            sequence = self._reader.ended.popleft()
            tag = sequence.request.tag
            _add_response(message, sequence)
            if sequence.error is not None:  # all sequences of a request that are live fail at once
                failed[tag] = sequence.error
            if not sequence.request.is_live:
                self._forget(tag)
        message.errors.extend(tagged_error(tag, error) for tag, error in failed.items())
        while not self._refusals.empty():
            message.errors.append(self._refusals.get_nowait())
        self._was_taken.set()
        return message


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("this router is shutting down: open a stream to another one")


def _add_response(message: serving_pb2.GenerateManyResponse, sequence: Sequence) -> None:
    response = take_response(sequence)
    if response is not None:
        message.responses.add(tag=sequence.request.tag, response=response)
