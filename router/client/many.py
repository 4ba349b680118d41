"""Stream of many requests: a client's side of GenerateMany, and a new stream where one is refused."""

import asyncio
import itertools
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, Unpack

import grpc

from protos.serving.v1 import serving_pb2
from protos.transport.error_details import ErrorDetails
from router.client.messages import (
    CallFailed,
    Collector,
    Completion,
    Delta,
    Interrupted,
    Options,
    Prompt,
    TimedOut,
    Unavailable,
    failure_of_call,
    failure_of_tag,
    to_request,
)
from router.client.resume import Attempts, Resumption, no_end, with_patience

Call = grpc.aio.StreamStreamCall[serving_pb2.GenerateManyRequest, serving_pb2.GenerateManyResponse]
Taken = serving_pb2.GenerateResponse | list[int]  # a response, or tokens of a column

# Before each further attempt; the same as the channel's retry policy has for calls.
RETRY_DELAYS_S = (0.1, 0.2, 0.4, 0.8)


class Many:
    """A stream of many requests. Made by `Client.many`; use it in one `async with`.

    A request that meets Unavailable before anything came of it is sent again on a new stream, as
    gRPC does for calls, and one that breaks off goes on from the tokens that came, as those of
    `Client.generate` do. What else fails is the caller's, be it a request or the stream with all that
    runs on it: where that has ended, the next request opens another.

    Leaving the block waits for what still runs; an exception cancels it.

    Args:
        open_call: Opens a stream, with gRPC's options. Returns it, and what says whether a router is there.
        resumption: Of the client.
    """

    def __init__(
        self, open_call: Callable[..., tuple[Call, Callable[[], bool]]], resumption: Resumption
    ) -> None:
        self._open_call = open_call
        self._resumption = resumption
        self._tags = itertools.count()
        self._streams: list[_Stream] = []  # the last one takes new requests
        self._num_running = 0  # requests
        self._is_idle = asyncio.Event()
        self._is_over = False

    async def __aenter__(self) -> Self:
        self._streams = []  # opened at the first request: a router waits some seconds for it only
        self._is_idle.set()
        self._is_over = False
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                await self._is_idle.wait()  # some may go on on another stream
                for stream in self._streams:
                    await stream.finish()
        finally:
            self._is_over = True
            await asyncio.gather(*[stream.close() for stream in self._streams])

    async def generate(
        self, prompt: Prompt, **options: Unpack[Options]
    ) -> AsyncGenerator[Delta, None]:
        """Yields what comes of a prompt. Closing the generator cancels the request.

        Raises:
            CallFailed: The request failed, or the stream did.
        """
        attempts = self._attempts(prompt, options)
        deltas: asyncio.Queue[Delta | None] = asyncio.Queue()  # bounded by max_tokens
        running = asyncio.create_task(self._run(attempts, deltas.put_nowait))
        running.add_done_callback(_closes(deltas))
        try:
            while (delta := await deltas.get()) is not None:
                yield delta
            running.result()
        finally:
            running.cancel()

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
        attempts = self._attempts(prompt, options)
        try:
            await self._run(attempts, collector.add)
        except Interrupted as error:
            error.so_far = collector.so_far(error.request_id)
            raise
        return collector.completions(attempts.num_resumes)

    def _attempts(self, prompt: Prompt, options: Options) -> Attempts:
        request = to_request(prompt, options)
        return Attempts(request, options.get("timeout_s"), self._resumption, RETRY_DELAYS_S)

    async def _run(self, attempts: Attempts, on_delta: Callable[[Delta], None]) -> None:
        """Returns when a request has ended, on as many streams as it takes."""

        def take(taken: Taken) -> None:
            if isinstance(taken, list):
                delta: Delta | None = attempts.take_tokens(taken)
            else:
                delta = attempts.take(taken)
            if delta is not None:
                on_delta(delta)

        self._num_running += 1
        self._is_idle.clear()
        try:
            while (failure := await self._attempt(attempts, take)) is not None:
                if self._is_over:
                    raise failure
                await asyncio.sleep(attempts.pause_after(failure))
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._is_idle.set()

    async def _attempt(
        self, attempts: Attempts, take: Callable[[Taken], None]
    ) -> CallFailed | None:
        """Sends a request. Returns what ended it before its outputs had ended, if anything did."""
        try:
            running = self._start(attempts, take)
            try:
                async with asyncio.timeout(attempts.call_timeout_s):
                    await running.ended
            finally:
                running.stop()
        except CallFailed as error:
            return error
        except TimeoutError:
            problem = "the request had not ended in time, and no router said so"
            return TimedOut(grpc.StatusCode.DEADLINE_EXCEEDED, problem, ErrorDetails())
        return None

    def _start(self, attempts: Attempts, take: Callable[[Taken], None]) -> "_Running":
        if not self._streams or self._streams[-1].is_refusing:
            self._streams = [stream for stream in self._streams if not stream.has_ended]
            for stream in self._streams:
                stream.half_close_if_idle()  # what runs on the others may end there
            patience_s = attempts.patience_s
            call, is_there = self._open_call(wait_for_ready=patience_s is not None)
            patient = partial(with_patience, patience_s=patience_s, is_there=is_there)
            self._streams.append(_Stream(call, patient))
        request = attempts.next_request()
        return self._streams[-1].start(next(self._tags), request, take)


class _Stream:
    """One GenerateMany call, and the requests that run on it.

    Attributes:
        is_refusing: Whether its router takes no requests, or it has ended.

    Args:
        call: As it was opened.
        patient: Waits for its first message, and raises Unavailable if there is no router.
    """

    def __init__(self, call: Call, patient: Callable[[Awaitable[Any]], Awaitable[Any]]) -> None:
        self.is_refusing = False
        self._call = call
        self._running: dict[int, _Running] = {}
        # One entry per request started or cancelled: its callers wait, so they bound it.
        self._outgoing: asyncio.Queue[serving_pb2.GenerateManyRequest | None] = asyncio.Queue()
        self._has_begun = False  # anything came
        self._writing = asyncio.create_task(self._write())
        self._reading = asyncio.create_task(self._read(patient))

    @property
    def has_ended(self) -> bool:
        return self._reading.done()

    def start(
        self, tag: int, request: serving_pb2.GenerateRequest, take: Callable[[Taken], None]
    ) -> "_Running":
        """Sends a request. Call it only while it `is_refusing` none."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        num_ended = sum(each.has_ended for each in request.resume.continuations)
        running = _Running(self, tag, take, ended, (request.n or 1) - num_ended)
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
        """Lets its router end it, if there is one, as all its requests have ended. None may follow."""
        self._outgoing.put_nowait(None)
        if self._has_begun:
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

    async def _read(self, patient: Callable[[Awaitable[Any]], Awaitable[Any]]) -> None:
        failure: CallFailed = no_end()
        try:
            message = await patient(self._call.read())
            while message is not grpc.aio.EOF:
                self._has_begun = True
                self._receive(message)
                message = await self._call.read()
        except Unavailable as error:
            failure = error
        except grpc.aio.AioRpcError as error:
            failure = failure_of_call(error)
        finally:
            self.is_refusing = True
            self._call.cancel()  # its requests may go on on another one, and would meet themselves
            self._writing.cancel()
            for tag in list(self._running):
                self._fail(tag, failure)

    def _receive(self, message: serving_pb2.GenerateManyResponse) -> None:
        """Hands out what came. Under a tag that no request has, it is nobody's."""
        token_ids, num_tokens = _column("i", message.token_ids), _column("i", message.num_tokens)
        ends = itertools.accumulate(num_tokens)
        tags = _column("I", message.tags)
        for tag, count, end in zip(tags, num_tokens, ends, strict=True):
            if (running := self._running.get(tag)) is not None:
                running.take(token_ids[end - count : end])
        for response in message.responses:
            if (running := self._running.get(response.tag)) is None:
                continue
            running.take(response.response)
            if response.response.HasField("finish"):
                running.num_open -= 1
                if not running.num_open:
                    self._running.pop(response.tag)
                    if not running.ended.done():
                        running.ended.set_result(None)
        for error in message.errors:
            failure = failure_of_tag(error)
            if isinstance(failure, Unavailable):
                self.is_refusing = True
            self._fail(error.tag, failure)

    def _fail(self, tag: int, failure: CallFailed) -> None:
        running = self._running.pop(tag, None)
        if running is not None and not running.ended.done():
            running.ended.set_exception(failure)


@dataclass(slots=True)
class _Running:
    """A request on a stream.

    Attributes:
        take: Told of what comes.
        ended: Done when nothing more comes; cancelled when nobody waits.
        num_open: Continuations that have not finished.
    """

    stream: _Stream
    tag: int
    take: Callable[[Taken], None]
    ended: asyncio.Future[None]
    num_open: int

    def stop(self) -> None:
        """Cancels it if it still runs: nobody waits for it any more."""
        if not self.ended.cancel() and not self.ended.cancelled():
            self.ended.exception()  # counts as seen: who closes a generator asks for no result
        self.stream.cancel(self.tag)


def _column(code: str, data: bytes) -> list[int]:
    """Returns little-endian numbers of four bytes; `code` is that of `struct`."""
    return list(struct.unpack(f"<{len(data) // 4}{code}", data))


def _closes(deltas: asyncio.Queue[Delta | None]) -> Callable[[asyncio.Task[None]], None]:
    def close(running: asyncio.Task[None]) -> None:
        deltas.put_nowait(None)
        if not running.cancelled():
            running.exception()  # counts as seen: who closes a generator asks for no result

    return close
