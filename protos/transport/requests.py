"""Reads requests out of the bytes that came, and refuses with a reason what is no request.

Left alone, gRPC ends a call whose bytes it cannot parse with UNKNOWN, as if it were a bug here, and
never ends one that was half-closed before its only message.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from protos.transport.errors import OnRefused, RpcError, abort_on_error, nobody_counts, refuse

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]  # generic in its type stubs alone
else:
    Handler = grpc.RpcMethodHandler


class MalformedMessage(RpcError):
    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "MALFORMED_MESSAGE"


class RequestReader(grpc.aio.ServerInterceptor):
    """Stands last among a server's interceptors, next to the handlers of every service.

    Args:
        checks: By full name of a method that answers with a stream, what raises an RpcError where
            its calls are refused whatever they say. It is asked first: to read a message takes
            longer than to refuse a call.
        on_refused: Told the reason of each message that is none.
    """

    def __init__(
        self,
        checks: Mapping[str, Callable[[], None]] | None = None,
        on_refused: OnRefused = nobody_counts,
    ) -> None:
        self._checks = checks or {}
        self._on_refused = on_refused
        self._handlers: dict[str, Handler] = {}  # of methods that there are

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        method = handler_call_details.method
        handler = self._handlers.get(method)
        if handler is None:
            handler = await continuation(handler_call_details)
            if handler is not None:  # there is such a method
                handler = self._handlers[method] = _reading(
                    handler, self._checks.get(method), self._on_refused
                )
        return handler


class _Handler(Handler):
    """A method that gRPC takes for one that gets a stream, whether it does or not."""

    def __init__(self, handler: Handler, behavior: Any, on_refused: OnRefused) -> None:
        self.request_streaming = True
        self.response_streaming = handler.response_streaming
        self.request_deserializer = _parser(handler.request_deserializer, on_refused)
        self.response_serializer = handler.response_serializer
        self.unary_unary = self.unary_stream = None
        self.stream_unary = None if handler.response_streaming else behavior
        self.stream_stream = behavior if handler.response_streaming else None


def _reading(handler: Handler, check: Callable[[], None] | None, on_refused: OnRefused) -> Handler:
    behavior: Any = next(
        filter(
            None,
            (
                handler.unary_unary,
                handler.unary_stream,
                handler.stream_unary,
                handler.stream_stream,
            ),
        )
    )
    take = _all_of if handler.request_streaming else partial(_one_of, on_refused=on_refused)

    async def respond(messages: AsyncIterator[Any], context: Any) -> Any:
        async with abort_on_error(context):
            return await behavior(await take(messages), context)

    async def respond_if_checked(messages: AsyncIterator[Any], context: Any) -> Any:
        assert check is not None
        try:
            check()
        except RpcError as error:
            return refuse(context, error)
        return await respond(messages, context)

    async def generate(messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async with abort_on_error(context):
            async for response in behavior(await take(messages), context):
                yield response

    if inspect.isasyncgenfunction(behavior):
        return _Handler(handler, generate, on_refused)
    return _Handler(handler, respond if check is None else respond_if_checked, on_refused)


async def _all_of(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    return messages


async def _one_of(messages: AsyncIterator[Any], on_refused: OnRefused) -> Any:
    async for message in messages:
        return message
    on_refused(MalformedMessage.reason)
    raise MalformedMessage("the call ended without a message; send exactly one")


def _parser(
    deserialize: Callable[[bytes], Any] | None, on_refused: OnRefused
) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        try:
            return data if deserialize is None else deserialize(data)
        except DecodeError as error:
            on_refused(MalformedMessage.reason)
            raise MalformedMessage(f"{len(data)} bytes came: {error}") from error

    return parse
