"""Stream of many requests: a client's side of GenerateMany, and a new stream where one is refused."""

import asyncio
import itertools
import random
import struct
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Self, Unpack

import grpc

from protos.serving.v1 import serving_pb2
from protos.transport.error_details import ErrorDetails
from router.client.messages import (
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

# Before each further attempt; the same as the channel's retry policy has for calls.
RETRY_DELAYS_S = (0.1, 0.2, 0.4, 0.8, None)


class Many:
    """A stream of many requests. Made by `Client.many`; use it in one `async with`.

    A request that meets Unavailable before anything came of it is sent again on a new stream, as
    gRPC does for calls. What else fails is the caller's, and a stream that breaks for another reason
    is not opened again.

    Leaving the block waits for what still runs; an exception cancels it.

    Args:
        open_call: Opens a stream.
    """

    def __init__(self, open_call: Callable[[], Call]) -> None:
        self._open_call = open_call
        self._tags = itertools.count()
        self._streams: list[_Stream] = []  # the last one takes new requests

    async def __aenter__(self) -> Self:
        self._streams = []  # opened at the first request: a router waits some seconds for it only
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                for stream in self._streams:
                    await stream.finish()
        finally:
            await asyncio.gather(*[stream.close() for stream in self._streams])

    async def generate(
        self, prompt: Prompt, **options: Unpack[Options]
    ) -> AsyncGenerator[Delta, None]:
        """Yields what comes of a prompt. Closing the generator cancels the request.

        Raises:
            CallFailed: The request failed, or the stream did.
        """
        for delay_s in RETRY_DELAYS_S:
            deltas: asyncio.Queue[Delta | None] = asyncio.Queue()  # bounded by max_tokens
            running = self._start(prompt, options, deltas.put_nowait)
            running.ended.add_done_callback(_closes(deltas))
            try:
                while (delta := await deltas.get()) is not None:
                    yield delta
                running.ended.result()
                return
            except Unavailable:
                if running.has_begun or delay_s is None:
                    raise
            finally:
                running.stop()
            await _pause(delay_s)

    async def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Returns one whole continuation. Cancelling the task cancels the request.

        Raises:
            CallFailed: The request failed, or the stream did.
        """
        [completion] = await self.complete_all(prompt, **options)
        return completion

    async def complete_all(self, prompt: Prompt, **options: Unpack[Options]) -> list[Completion]:
        """Returns all `n` continuations, by index."""
        for delay_s in RETRY_DELAYS_S:
            collector = Collector(options.get("n") or 1)
            running = self._start(prompt, options, collector.add)
            try:
                await running.ended
                break
            except Unavailable:
                if running.has_begun or delay_s is None:
                    raise
            finally:
                running.stop()
            await _pause(delay_s)
        return collector.completions()

    def _start(
        self, prompt: Prompt, options: Options, on_delta: Callable[[Delta], None]
    ) -> "_Running":
        options.setdefault("request_id", uuid.uuid4().hex)  # columns do not carry it
        request = to_request(prompt, options)
        if not self._streams or self._streams[-1].is_refusing:
            self._streams = [stream for stream in self._streams if not stream.has_ended]
            for stream in self._streams:
                stream.half_close_if_idle()  # what runs on the others may end there
            self._streams.append(_Stream(self._open_call()))
        return self._streams[-1].start(next(self._tags), request, on_delta)


class _Stream:
    """One GenerateMany call, and the requests that run on it.

    Attributes:
        is_refusing: Whether its router takes no requests, or is gone.
    """

    def __init__(self, call: Call) -> None:
        self.is_refusing = False
        self._call = call
        self._running: dict[int, _Running] = {}
        # One entry per request started or cancelled: its callers wait, so they bound it.
        self._outgoing: asyncio.Queue[serving_pb2.GenerateManyRequest | None] = asyncio.Queue()
        self._failure: CallFailed | None = None
        self._writing = asyncio.create_task(self._write())
        self._reading = asyncio.create_task(self._read())

    @property
    def has_ended(self) -> bool:
        return self._reading.done()

    def start(
        self, tag: int, request: serving_pb2.GenerateRequest, on_delta: Callable[[Delta], None]
    ) -> "_Running":
        """Sends a request.

        Raises:
            CallFailed: The stream has broken.
        """
        if self._failure is not None:
            raise self._failure
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running = _Running(self, tag, request.request_id, on_delta, ended, request.n or 1)
        self._running[tag] = running
        self._outgoing.put_nowait(serving_pb2.GenerateManyRequest(tag=tag, start=request))
        return running

    def cancel(self, tag: int) -> None:
        """Ends a request that nobody waits for any more; no-op for one that has ended."""
        if tag in self._running:
            cancel = serving_pb2.CancelTag()
            self._outgoing.put_nowait(serving_pb2.GenerateManyRequest(tag=tag, cancel=cancel))

    def half_close_if_idle(self) -> None:
        """Lets it end if nothing runs on it. No request may follow."""
        if not self._running:
            self._outgoing.put_nowait(None)

    async def finish(self) -> None:
        """Returns when all its requests have ended. None may follow."""
        self._outgoing.put_nowait(None)
        await self._reading

    async def close(self) -> None:
        """Ends the call and all requests on it."""
        self._call.cancel()
        self._writing.cancel()
        await asyncio.gather(self._writing, self._reading, return_exceptions=True)

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
            self.is_refusing = isinstance(self._failure, Unavailable)
            for tag in list(self._running):
                self._fail(tag, self._failure)

    def _receive(self, message: serving_pb2.GenerateManyResponse) -> None:
        token_ids, num_tokens = _column("i", message.token_ids), _column("i", message.num_tokens)
        ends = itertools.accumulate(num_tokens)
        tags = _column("I", message.tags)
        for tag, count, end in zip(tags, num_tokens, ends, strict=True):
            running = self._running[tag]
            running.take(
                Delta(request_id=running.request_id, token_ids=token_ids[end - count : end])
            )
        for response in message.responses:
            running = self._running[response.tag]
            running.take(to_delta(response.response))
            if response.response.HasField("finish"):
                running.num_open -= 1
                if not running.num_open:
                    self._running.pop(response.tag)
                    if not running.ended.done():
                        running.ended.set_result(None)
        for error in message.errors:
            failure = failure_of_tag(error)
            running = self._running[error.tag]
            if isinstance(failure, Unavailable) and not running.has_begun:
                self.is_refusing = True
            self._fail(error.tag, failure)

    def _fail(self, tag: int, failure: CallFailed) -> None:
        ended = self._running.pop(tag).ended
        if not ended.done():
            ended.set_exception(failure)


@dataclass(slots=True)
class _Running:
    """A request on a stream.

    Attributes:
        ended: Done when nothing more comes; cancelled when nobody waits.
        num_open: Continuations that have not finished.
        has_begun: Whether anything came of it.
    """

    stream: _Stream
    tag: int
    request_id: str
    on_delta: Callable[[Delta], None]
    ended: asyncio.Future[None]
    num_open: int
    has_begun: bool = False

    def take(self, delta: Delta) -> None:
        self.has_begun = True
        self.on_delta(delta)

    def stop(self) -> None:
        """Cancels it if it still runs: nobody waits for it any more."""
        if not self.ended.cancel() and not self.ended.cancelled():
            self.ended.exception()  # counts as seen: who closes a generator asks for no result
        self.stream.cancel(self.tag)


def _column(code: str, data: bytes) -> list[int]:
    """Returns little-endian numbers of four bytes; `code` is that of `struct`."""
    return list(struct.unpack(f"<{len(data) // 4}{code}", data))


def _closes(deltas: asyncio.Queue[Delta | None]) -> Callable[[asyncio.Future[None]], None]:
    return lambda _: deltas.put_nowait(None)


async def _pause(delay_s: float | None) -> None:
    """Waits, more or less: callers that were refused together shall not come back together."""
    assert delay_s is not None, "who has no delay left has raised"
    await asyncio.sleep(delay_s * random.uniform(0.8, 1.2))
