"""Interceptors of a gRPC port: checks of callers, calls admitted, requests parsed from their bytes.

A call passes `NameInterceptor` and `TokenInterceptor`, as far as a port has them
(protos/transport/port.py), and then `RequestReader`.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from protos.telemetry.scrapes import SCRAPE_EVICTED
from protos.transport.admission import Admission, FirstMessageLate, Refusals, TooManyCalls
from protos.transport.channel import KINDS
from protos.transport.credentials import AUTHORIZATION, SCHEME, UNAUTHENTICATED, AcceptedTokens
from protos.transport.errors import RpcError, abort_on_error, refuse
from protos.transport.limits import PortLimits

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]  # generic in its type stubs only
else:
    Handler = grpc.RpcMethodHandler

UNREAD = b"other types of SAN"  # what gRPC says of each alternative name of another kind
NEEDED = "send the metadata 'authorization: Bearer TOKEN'"

Context = grpc.aio.ServicerContext[Any, Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]
Caller = tuple[str, ...]  # names that tell it apart; none where callers bring nothing

_token_name: ContextVar[str] = ContextVar("token_name")


def caller_of(context: Context) -> Caller:
    """Returns who calls: the name of the call's token, then those in the client's certificate.

    Of a certificate, the alternative names (DNS, URI, IP, email), or the common name where it has none.
    """
    token, names = _token_name.get(None), context.peer_identities() or ()
    if UNREAD in names:  # of everybody's certificate that has one: it tells nobody apart
        others = [name for name in names if name != UNREAD]
        names = others or context.auth_context()["x509_common_name"]
    certified = [name.decode(errors="backslashreplace") for name in names]
    return (*([] if token is None else [token]), *certified)


class Unauthenticated(RpcError):
    """The caller is not identified. The message says what is missing, never what was sent."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = UNAUTHENTICATED


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls through that bring a token; others never reach a handler.

    Args:
        tokens: The tokens that are taken.
        open_services: Full names of services that need no token.
        refusals: Where refused calls are counted.
    """

    def __init__(
        self, tokens: AcceptedTokens, open_services: Collection[str], refusals: Refusals
    ) -> None:
        self._tokens = tokens
        self._open = _prefixes(open_services)
        self._missing, self._repeated, self._other, self._wrong = [
            _refusing(problem, refusals)
            for problem in (
                f"no token: {NEEDED}",
                "'authorization' is there more than once: send one token",
                f"'authorization' has another scheme than Bearer: {NEEDED}",
                "the token is not one that is taken here, or no longer",
            )
        ]

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        if not handler_call_details.method.startswith(self._open):
            refusing = self._refuse(handler_call_details.invocation_metadata)
            if refusing is not None:
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
        name = self._tokens.name_of(value[len(SCHEME) :])
        if name is None:
            return self._wrong
        _token_name.set(name)  # a call is a task of its own, handler included
        return None


class NameInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls through whose client certificate has one of some names.

    For a CA that signs certificates of others too. The handshake has checked the certificate.

    Args:
        names: Alternative names (DNS, URI or IP) of which the certificate needs one.
        open_services: Full names of services that may be called with any certificate.
        refusals: Where refused calls are counted.
    """

    def __init__(
        self, names: Collection[str], open_services: Collection[str], refusals: Refusals
    ) -> None:
        self._names = frozenset(names)
        self._refusals = refusals
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
            self._refusals.add(Unauthenticated.reason, context)
            async with abort_on_error(context):
                shown = ", ".join(sorted(names)) or "no name"
                raise Unauthenticated(
                    f"the client certificate has {shown}; callers here have another name"
                )


class MalformedMessage(RpcError):
    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "MALFORMED_MESSAGE"


# Reasons with which ports refuse, of either service.
PORT_REFUSALS = (
    *(e.reason for e in (Unauthenticated, MalformedMessage, TooManyCalls, FirstMessageLate)),
    SCRAPE_EVICTED,
)


class RequestReader(grpc.aio.ServerInterceptor):
    """Admits calls, parses requests, and refuses with a reason what is none. Stands last of a port's.

    gRPC by itself ends a call whose bytes it cannot parse with UNKNOWN, as if it were a bug here,
    and never ends a call that was half-closed before its only message.

    Args:
        limits: Of the port.
        refusals: Where refused calls are counted.
        checks: By full name of a method that answers with a stream, a function of the call's context that
            raises an RpcError where it is refused. It is called first, since to parse a message takes
            longer than to refuse a call.
        unshared: Full names of methods that may have all calls that may be open.
        patient: Full names of methods whose first message may come at any time.
    """

    def __init__(
        self,
        limits: PortLimits,
        refusals: Refusals,
        *,
        checks: Mapping[str, Callable[[Context], None]] | None = None,
        unshared: Collection[str] = (),
        patient: Collection[str] = (),
    ) -> None:
        self._checks = checks or {}
        self._patient = patient
        self._refusals = refusals
        self._admission = Admission(limits, unshared, refusals)
        self._handlers: dict[str, Handler] = {}  # by method

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        method = handler_call_details.method
        handler = self._handlers.get(method)
        if handler is None:
            handler = await continuation(handler_call_details)
            if handler is not None:  # there is such a method
                handler = self._handlers[method] = self._reading(method, handler)
        return handler

    def _reading(self, method: str, handler: Handler) -> Handler:
        _, behavior = _behavior(handler)
        admission, check = self._admission, self._checks.get(method)

        async def take(messages: AsyncIterator[Any], context: Context) -> Any:
            if method in self._patient:
                return messages
            if handler.request_streaming:
                return _Stream(messages, admission, context)
            try:
                return await admission.first(messages, context)
            except StopAsyncIteration:
                self._refusals.count(MalformedMessage.reason)
                raise MalformedMessage(
                    "the call ended without a message; send exactly one"
                ) from None

        async def respond(messages: AsyncIterator[Any], context: Context) -> Any:
            if check is not None:
                try:
                    check(context)
                except RpcError as error:
                    return refuse(context, error)
            async with abort_on_error(context):
                admission.enter(method, context)
                try:
                    return await behavior(await take(messages, context), context)
                finally:
                    admission.leave(method)

        async def generate(messages: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            async with abort_on_error(context):
                admission.enter(method, context)
                try:
                    async for response in behavior(await take(messages, context), context):
                        yield response
                finally:
                    admission.leave(method)

        is_generator = inspect.isasyncgenfunction(behavior)
        parse = _parser(handler.request_deserializer, self._refusals)
        return _Handler(handler, generate if is_generator else respond, parse)


class _Stream:
    """Messages of a call that may send several, of which the first one has to come in time."""

    def __init__(
        self, messages: AsyncIterator[Any], admission: Admission, context: Context
    ) -> None:
        self._messages = messages
        self._first: Any = lambda: admission.first(messages, context)

    def __aiter__(self) -> "_Stream":
        return self

    def __anext__(self) -> Awaitable[Any]:
        if self._first is None:
            return self._messages.__anext__()
        first, self._first = self._first(), None
        return first  # type: ignore[no-any-return]


class _Handler(Handler):
    """A method that is always given a stream of messages, also where its request is one message."""

    def __init__(self, handler: Handler, behavior: Any, parse: Callable[[bytes], Any]) -> None:
        self.request_streaming = True
        self.response_streaming = handler.response_streaming
        self.request_deserializer = parse
        self.response_serializer = handler.response_serializer
        self.unary_unary = self.unary_stream = None
        self.stream_unary = None if handler.response_streaming else behavior
        self.stream_stream = behavior if handler.response_streaming else None


def _parser(
    deserialize: Callable[[bytes], Any] | None, refusals: Refusals
) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        try:
            return data if deserialize is None else deserialize(data)
        except DecodeError as error:
            refusals.count(MalformedMessage.reason)
            raise MalformedMessage(f"{len(data)} bytes came: {error}") from error

    return parse


def _behavior(handler: Handler) -> tuple[str, Any]:
    """Returns a method's kind, and the function that answers its calls."""
    return next((kind, found) for kind in KINDS if (found := getattr(handler, kind)) is not None)


def _prefixes(services: Collection[str]) -> tuple[str, ...]:
    return tuple(f"/{service}/" for service in services)


def _refusing(problem: str, refusals: Refusals) -> Any:
    """Returns a handler that reads nothing, for any kind of method."""

    async def refuse(requests: Any, context: Context) -> None:
        refusals.add(Unauthenticated.reason, context)
        async with abort_on_error(context):
            raise Unauthenticated(problem)

    return grpc.stream_stream_rpc_method_handler(refuse)
