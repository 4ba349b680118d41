"""Generation service: a client's message becomes a Request, its tokens become responses."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message

from protos.serving.v1 import serving_pb2, serving_pb2_grpc
from protos.transport.errors import RpcError, abort_on_error
from protos.transport.interceptors import Caller, caller_of
from router.api.generate_many import ManyCall
from router.api.messages import (
    Takings,
    Whole,
    begin_response,
    empty_response,
    model_response,
    name_request,
    read_request,
    read_timeout,
    refill_response,
    served,
    take_response,
)
from router.api.prompts import Encodable, decode, encode_prompt
from router.api.text import Tokenizer
from router.api.unknown_fields import refuse_unknown_fields
from router.engine.engines import Engines
from router.engine.status import hide_from_callers
from router.errors import QueueFull, RequestNotFound
from router.requests.callers import DEFAULTS, CallerSettings
from router.requests.request import Int32Array, Listener, Request

Context = grpc.aio.ServicerContext[Any, Any]
Write = Callable[[serving_pb2.GenerateResponse], Awaitable[None]]

GENERATE = "/lockstep.serving.v1.GenerationService/Generate"
GENERATE_VLLM = "/vllm.grpc.engine.VllmEngine/Generate"  # the same by a gateway's words
COMPLETE = "/lockstep.serving.v1.GenerationService/Complete"

RESUME_METADATA = ("lockstep-resume", "1")  # of a call whose request is resumed

UNSHARED = (GENERATE, GENERATE_VLLM, COMPLETE)  # methods that may have all calls that may be open


class GenerationServicer(serving_pb2_grpc.GenerationServiceServicer):
    """Serves GenerationService from the engines.

    Handlers write instead of yielding: an abandoned generator is closed when it is collected, a
    cancelled coroutine cancels its request at once.

    Args:
        engines: What runs the requests.
        tokenizer: Of the model; None where clients send token ids only.
        version: This router's, for GetStatus.
        settings: What a caller may see and take.
    """

    def __init__(
        self,
        engines: Engines,
        tokenizer: Tokenizer | None,
        version: str,
        settings: CallerSettings = DEFAULTS,
    ) -> None:
        self._engines = engines
        self._tokenizer = tokenizer
        self._version = version
        self._settings = settings
        self._takings = Takings()

    async def Generate(  # type: ignore[override]  # the stub knows generators only
        self, request: serving_pb2.GenerateRequest, context: Context
    ) -> None:
        async with abort_on_error(context, name_request(request)):
            caller, timeout_s = self.flow_of(context), context.time_remaining()
            await self.run(request, context.write, caller=caller, call_timeout_s=timeout_s)

    async def GenerateMany(  # type: ignore[override]
        self, request_iterator: AsyncIterator[serving_pb2.GenerateManyRequest], context: Context
    ) -> None:
        async with abort_on_error(context):
            with self._open_listener() as listener:
                caller, settings = self.flow_of(context), self._settings
                parts = self._engines, self._tokenizer, listener, caller, settings, self._takings
                call = ManyCall(*parts)
                await call.run(request_iterator, context.write)

    async def Complete(
        self, request: serving_pb2.GenerateRequest, context: Context
    ) -> serving_pb2.CompleteResponse:
        whole = Whole()
        async with abort_on_error(context, name_request(request)):
            caller, timeout_s = self.flow_of(context), context.time_remaining()
            await self.run(request, whole.add, caller=caller, call_timeout_s=timeout_s)
        return whole.answer()

    async def Tokenize(
        self, request: serving_pb2.TokenizeRequest, context: Context
    ) -> serving_pb2.TokenizeResponse:
        prompt = await self._encode(request, context)
        return serving_pb2.TokenizeResponse(token_ids=prompt.tolist())

    async def CountTokens(
        self, request: serving_pb2.CountTokensRequest, context: Context
    ) -> serving_pb2.CountTokensResponse:
        prompt = await self._encode(request, context)
        return serving_pb2.CountTokensResponse(num_tokens=len(prompt))

    async def _encode(self, request: Encodable, context: Context) -> Int32Array:
        async with abort_on_error(context):
            with self._engines.measures.counting_refusals():
                refuse_unknown_fields(request)
                model = served(self._engines.model)
                caller = self.flow_of(context)
                prompt = await encode_prompt(request, model, self._tokenizer, caller)
        return prompt

    async def Detokenize(
        self, request: serving_pb2.DetokenizeRequest, context: Context
    ) -> serving_pb2.DetokenizeResponse:
        async with abort_on_error(context):
            with self._engines.measures.counting_refusals():
                refuse_unknown_fields(request)
                text = await decode(request, served(self._engines.model), self._tokenizer)
        return serving_pb2.DetokenizeResponse(text=text)

    async def Cancel(
        self, request: serving_pb2.CancelRequest, context: Context
    ) -> serving_pb2.CancelResponse:
        async with abort_on_error(context):
            self._check(request)
            name = request.request_id
            if not self.cancel(self.flow_of(context), name):
                self._engines.check_open()  # one that takes requests may have it
                raise RequestNotFound(name)
        return serving_pb2.CancelResponse()

    async def GetModel(
        self, request: serving_pb2.GetModelRequest, context: Context
    ) -> serving_pb2.GetModelResponse:
        async with abort_on_error(context):
            self._check(request)
            model = served(self._engines.model)
        return model_response(model, self._tokenizer)

    async def GetStatus(
        self, request: serving_pb2.GetStatusRequest, context: Context
    ) -> serving_pb2.GetStatusResponse:
        async with abort_on_error(context):
            self._check(request)
        return self.status(context)

    def cancel(self, caller: Caller, request_id: str) -> bool:
        """Ends a request that runs, waits or is being taken. Returns whether there is one."""
        if (found := self._engines.find(caller, request_id)) is None:
            return self._takings.cancel(caller, request_id)
        self._engines.cancel(found)
        return True

    def flow_of(self, context: Context) -> Caller:
        """Returns the flow that a call's requests are of."""
        caller, settings = caller_of(context), self._settings
        if settings.flow_metadata is None:
            return caller
        return settings.flow_of(caller, context.invocation_metadata() or ())

    def _check(self, request: Message) -> None:
        with self._engines.measures.counting_refusals():
            refuse_unknown_fields(request)

    def status(self, context: Context) -> serving_pb2.GetStatusResponse:
        """Returns GetStatus' answer, as far as it is the caller's to know."""
        status = self._engines.overview(self._version)
        if not self._settings.is_operator(caller_of(context)):
            hide_from_callers(status)
        return status

    async def run(
        self,
        message: serving_pb2.GenerateRequest,
        write: Write,
        *,
        caller: Caller,
        call_timeout_s: float | None = None,
    ) -> None:
        """Runs one request of a call, whichever service it came by.

        Args:
            message: As our own API would get it.
            write: Sends one response, which has been serialised or copied when it returns.
            caller: Who called.
            call_timeout_s: What is left of the call's deadline; None if it has none.

        Raises:
            RpcError: The request was refused, or failed.
        """
        with self._open_listener() as listener:
            with self._engines.measures.counting_refusals():
                arrival_time, name = asyncio.get_running_loop().time(), message.request_id
                timeout_s = read_timeout(message, call_timeout_s)
                async with self._takings.within(timeout_s, arrival_time, caller, name):
                    submitted = await read_request(
                        message,
                        model=self._engines.model,
                        tokenizer=self._tokenizer,
                        listener=listener,
                        arrival_time=arrival_time,
                        call_timeout_s=call_timeout_s,
                        caller=caller,
                        settings=self._settings,
                    )
                self._engines.submit(submitted)
            try:
                if begin := begin_response(submitted):
                    await write(begin)
                await _write_responses(submitted, write)
            except RpcError as error:
                self._engines.cancel(submitted, error)  # its other sequences
                raise
            finally:
                self._engines.cancel(submitted)

    def checks(self) -> dict[str, Callable[[Context], None]]:
        """Returns, for RequestReader, what refuses calls before they are read, by method."""
        return dict.fromkeys((GENERATE, GENERATE_VLLM), self.check_room)

    def check_room(self, context: Context) -> None:
        """Refuses any request while none is taken, or none but resumed ones.

        Raises:
            QueueFull, NotReady, ShuttingDown: None is.
        """
        with self._engines.measures.counting_refusals():
            try:
                self._engines.check_room()
            except QueueFull:
                if RESUME_METADATA not in (context.invocation_metadata() or ()):
                    raise

    @contextmanager
    def _open_listener(self) -> Iterator[Listener]:
        """Lends a call its listener. All its sequences have ended when it gives it back."""
        listeners = self._engines.listeners
        with self._engines.measures.counting_refusals():
            if not listeners.num_free:
                raise QueueFull(
                    "as many calls are open as this router takes: try again, or send many "
                    "requests on one GenerateMany stream"
                )
        listener = listeners.open()
        try:
            yield listener
        finally:
            listeners.close(listener)


async def _write_responses(request: Request, write: Write) -> None:
    """Sends what comes of a request until all its sequences have ended.

    One that fails has its tokens so far sent too, before the error.

    What came while an earlier message was written goes out in one: a slow client gets larger
    messages, not a longer queue.
    """
    listener, num_open = request.listener, len(request.sequences)
    first, plain = request.sequences[0], request.output.is_plain and num_open == 1
    refilled = empty_response(first)
    while num_open:
        await listener.wait()
        if plain and not (first.is_ended or request.tells_begin):
            if refill_response(refilled, first):
                await write(refilled)
        else:
            for sequence in request.sequences:
                if not sequence.is_ended and (response := take_response(sequence)):
                    await write(response)
        error: RpcError | None = None
        while listener.ended:
            sequence = listener.ended.popleft()
            if response := take_response(sequence):
                await write(response)
            error = error or sequence.error  # what still runs of the request ends with it
            num_open -= 1
        if error is not None:
            raise error
