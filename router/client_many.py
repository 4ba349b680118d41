"""The client's side of GenerateMany: many requests on one stream."""

import asyncio
import itertools
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, Unpack

import grpc
import numpy as np

from protos.errors import ErrorDetails
from protos.serving.v1 import serving_pb2
from router.client_messages import (
    CallFailed,
    Collector,
    Completion,
    Delta,
    Options,
    Prompt,
    Unavailable,
    failure_of_call,
    failure_of_tag,
    to_delta,
    to_request,
)

Call = grpc.aio.StreamStreamCall[serving_pb2.GenerateManyRequest, serving_pb2.GenerateManyResponse]


class Many:
    """A stream of many requests. Made by `Client.many`; use it in one `async with`.

    Leaving the block waits for what still runs; an exception cancels it. A stream that breaks
    fails all its requests and is not opened again: leave the block and ask for another.

    Args:
        open_call: Opens the stream.
    """

    def __init__(self, open_call: Callable[[], Call]) -> None:
        self._open_call = open_call
        self._tags = itertools.count()
        self._running: dict[int, _Running] = {}
        # One entry per request started or cancelled: its callers wait, so they bound it.
        self._outgoing: asyncio.Queue[serving_pb2.GenerateManyRequest | None] = asyncio.Queue()
        self._failure: CallFailed | None = None

    async def __aenter__(self) -> Self:
        self._call = self._open_call()
        self._writing = asyncio.create_task(self._write())
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._outgoing.put_nowait(None)
                await self._reading
        finally:
            self._call.cancel()
            self._writing.cancel()
            await asyncio.gather(self._writing, self._reading, return_exceptions=True)

    async def generate(
        self, prompt: Prompt, **options: Unpack[Options]
    ) -> AsyncGenerator[Delta, None]:
        """Yields what comes of a prompt. Closing the generator cancels the request.

        Raises:
            CallFailed: The request failed, or the stream did.
        """
        deltas: asyncio.Queue[Delta | None] = asyncio.Queue()  # bounded by max_tokens
        tag, ended = self._start(prompt, options, deltas.put_nowait)
        ended.add_done_callback(lambda _: deltas.put_nowait(None))
        try:
            while (delta := await deltas.get()) is not None:
                yield delta
            ended.result()
        finally:
            self._stop(tag, ended)

    async def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Returns one whole continuation. Cancelling the task cancels the request.

        Raises:
            CallFailed: The request failed, or the stream did.
        """
        [completion] = await self.complete_all(prompt, **options)
        return completion

    async def complete_all(self, prompt: Prompt, **options: Unpack[Options]) -> list[Completion]:
        """Returns all `n` continuations, by index."""
        collector = Collector(options.get("n") or 1)
        tag, ended = self._start(prompt, options, collector.add)
        try:
            await ended
        finally:
            self._stop(tag, ended)
        return collector.completions()

    def _start(
        self, prompt: Prompt, options: Options, on_delta: Callable[[Delta], None]
    ) -> tuple[int, asyncio.Future[None]]:
        if self._failure is not None:
            raise self._failure
        options.setdefault("request_id", uuid.uuid4().hex)  # columns do not carry it
        request = to_request(prompt, options)
        tag = next(self._tags)
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running[tag] = _Running(options["request_id"], on_delta, ended, request.n or 1)
        self._outgoing.put_nowait(serving_pb2.GenerateManyRequest(tag=tag, start=request))
        return tag, ended

    def _stop(self, tag: int, ended: asyncio.Future[None]) -> None:
        """Cancels a request that nobody waits for any more; no-op for one that has ended."""
        if not ended.cancel() and not ended.cancelled():
            ended.exception()  # counts as seen: who closes a generator asks for no result
        if tag in self._running:
            cancel = serving_pb2.CancelTag()
            self._outgoing.put_nowait(serving_pb2.GenerateManyRequest(tag=tag, cancel=cancel))

    async def _write(self) -> None:
        try:
            while (message := await self._outgoing.get()) is not None:
                await self._call.write(message)
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the stream is over, and _read says why

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self._receive(message)
        except grpc.aio.AioRpcError as error:
            self._failure = failure_of_call(error)
        finally:
            if self._failure is None:
                self._failure = Unavailable(
                    grpc.StatusCode.UNAVAILABLE, "the stream has ended", ErrorDetails()
                )
            for tag in list(self._running):
                self._fail(tag, self._failure)

    def _receive(self, message: serving_pb2.GenerateManyResponse) -> None:
        token_ids = np.frombuffer(message.token_ids, "<i4").tolist()
        num_tokens = np.frombuffer(message.num_tokens, "<i4").tolist()
        ends = itertools.accumulate(num_tokens)
        tags = np.frombuffer(message.tags, "<u4").tolist()
        for tag, count, end in zip(tags, num_tokens, ends, strict=True):
            running = self._running[tag]
            running.on_delta(
                Delta(request_id=running.request_id, token_ids=token_ids[end - count : end])
            )
        for response in message.responses:
            running = self._running[response.tag]
            running.on_delta(to_delta(response.response))
            if response.response.HasField("finish"):
                running.num_open -= 1
                if not running.num_open:
                    self._running.pop(response.tag)
                    if not running.ended.done():
                        running.ended.set_result(None)
        for error in message.errors:
            self._fail(error.tag, failure_of_tag(error))

    def _fail(self, tag: int, failure: CallFailed) -> None:
        ended = self._running.pop(tag).ended
        if not ended.done():
            ended.set_exception(failure)


@dataclass(slots=True)
class _Running:
    """A request on the stream.

    Attributes:
        ended: Done when nothing more comes; cancelled when nobody waits.
        num_open: Continuations that have not finished.
    """

    request_id: str
    on_delta: Callable[[Delta], None]
    ended: asyncio.Future[None]
    num_open: int
