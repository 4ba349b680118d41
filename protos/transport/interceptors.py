"""Interceptors of a gRPC port: checks of callers, and requests parsed from their bytes.

A call passes `NameInterceptor` and `TokenInterceptor`, as far as a port has them
(protos/transport/port.py), and then `RequestReader`.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from protos.transport.channel import KINDS
from protos.transport.credentials import AUTHORIZATION, SCHEME, AcceptedTokens
from protos.transport.errors import OnRefused, RpcError, abort_on_error, refuse

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]  # generic in its type stubs only
else:
    Handler = grpc.RpcMethodHandler

NEEDED = "send the metadata 'authorization: Bearer TOKEN'"

Context = grpc.aio.ServicerContext[Any, Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]


class Unauthenticated(RpcError):
    """The caller is not identified. The message says what is missing, never what was sent."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls through that bring a token; others never reach a handler.

    Args:
        tokens: The tokens that are taken.
        open_services: Full names of services that need no token.
        on_refused: Called with the reason of each call that is refused.
    """

    def __init__(
        self,
        tokens: AcceptedTokens,
        open_services: Collection[str],
        on_refused: OnRefused = lambda reason: None,
    ) -> None:
        self._tokens = tokens
        self._on_refused = on_refused
        self._open = _prefixes(open_services)
        self._missing = _refusing(f"no token: {NEEDED}")
        self._repeated = _refusing("'authorization' is there more than once: send one token")
        self._other = _refusing(f"'authorization' has another scheme than Bearer: {NEEDED}")
        self._wrong = _refusing("the token is not one that is taken here, or no longer")

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        if not handler_call_details.method.startswith(self._open):
            refusing = self._refuse(handler_call_details.invocation_metadata)
            if refusing is not None:
                self._on_refused(Unauthenticated.reason)
                return refusing
        return await continuation(handler_call_details)

    def _refuse(self, metadata: Any) -> Any | None:
        """Returns the handler that refuses the call with a reason; None if the token is taken."""
        given = [value for key, value in metadata or () if key == AUTHORIZATION]
        if not given:
            return self._missing
        if len(given) > 1:
            return self._repeated
        value = given[0]
        if not isinstance(value, str) or value[: len(SCHEME)].lower() != SCHEME.lower():
            return self._other
        return None if self._tokens.accepts(value[len(SCHEME) :]) else self._wrong


class NameInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls through whose client certificate has one of some names.

    For a CA that signs certificates of others too. The handshake has checked the certificate.

    Args:
        names: Alternative names (DNS, URI or IP) of which the certificate needs one.
        open_services: Full names of services that may be called with any certificate.
        on_refused: Called with the reason of each call that is refused.
    """

    def __init__(
        self,
        names: Collection[str],
        open_services: Collection[str],
        on_refused: OnRefused = lambda reason: None,
    ) -> None:
        self._names = frozenset(names)
        self._on_refused = on_refused
        self._open = _prefixes(open_services)
        self._checked: dict[str, Any] = {}  # handlers, by method; there are only so many

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        method = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None or method.startswith(self._open):
            return handler
        # The certificate is known to a call's context, so the check is part of the handler. What
        # an interceptor behind this one decides differs from call to call, and is not kept.
        kept = self._checked.get(method)
        if kept is None or kept[0] is not handler:
            kept = self._checked[method] = (handler, self._check_in(handler))
        return kept[1]

    def _check_in(self, handler: Any) -> Any:
        kind, behavior = _behavior(handler)

        async def call(request: Any, context: Context) -> Any:
            await self._check(context)
            return await behavior(request, context)

        async def generate(request: Any, context: Context) -> Any:
            await self._check(context)
            async for response in behavior(request, context):
                yield response

        is_generator = inspect.isasyncgenfunction(behavior)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(
            generate if is_generator else call,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    async def _check(self, context: Context) -> None:
        found = context.auth_context().get("x509_subject_alternative_name", ())
        names = {name.decode(errors="replace") for name in found}
        if not names & self._names:
            self._on_refused(Unauthenticated.reason)
            async with abort_on_error(context):
                shown = ", ".join(sorted(names)) or "no name"
                raise Unauthenticated(
                    f"the client certificate has {shown}; callers here have another name"
                )


class MalformedMessage(RpcError):
    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "MALFORMED_MESSAGE"


class RequestReader(grpc.aio.ServerInterceptor):
    """Parses requests, and refuses with a reason what is no request. Stands last of a port's.

    gRPC by itself ends a call whose bytes it cannot parse with UNKNOWN, as if it were a bug here,
    and never ends a call that was half-closed before its only message.

    Args:
        checks: By full name of a method that answers with a stream, a function that raises an
            RpcError where its calls are refused. It is called first, since to parse a message takes
            longer than to refuse a call.
        on_refused: Called with the reason of each message that is none.
    """

    def __init__(
        self,
        checks: Mapping[str, Callable[[], None]] | None = None,
        on_refused: OnRefused = lambda reason: None,
    ) -> None:
        self._checks = checks or {}
        self._on_refused = on_refused
        self._handlers: dict[str, Handler] = {}  # by method

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
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
    """A method that is always given a stream of messages, also where its request is one message."""

    def __init__(self, handler: Handler, behavior: Any, on_refused: OnRefused) -> None:
        self.request_streaming = True
        self.response_streaming = handler.response_streaming
        self.request_deserializer = _parser(handler.request_deserializer, on_refused)
        self.response_serializer = handler.response_serializer
        self.unary_unary = self.unary_stream = None
        self.stream_unary = None if handler.response_streaming else behavior
        self.stream_stream = behavior if handler.response_streaming else None


def _reading(handler: Handler, check: Callable[[], None] | None, on_refused: OnRefused) -> Handler:
    _, behavior = _behavior(handler)

    async def take(messages: AsyncIterator[Any]) -> Any:
        if handler.request_streaming:
            return messages
        async for message in messages:
            return message
        on_refused(MalformedMessage.reason)
        raise MalformedMessage("the call ended without a message; send exactly one")

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


def _behavior(handler: Handler) -> tuple[str, Any]:
    """Returns a method's kind, and the function that answers its calls."""
    return next((kind, found) for kind in KINDS if (found := getattr(handler, kind)) is not None)


def _prefixes(services: Collection[str]) -> tuple[str, ...]:
    return tuple(f"/{service}/" for service in services)


def _refusing(problem: str) -> Any:
    """Returns a handler that reads nothing, for any kind of method."""

    async def refuse(requests: Any, context: Context) -> None:
        async with abort_on_error(context):
            raise Unauthenticated(problem)

    return grpc.stream_stream_rpc_method_handler(refuse)
