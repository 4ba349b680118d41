"""Who may call: a server's checks of every call, and a caller's token on every call."""

import inspect
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, cast

import grpc

from protos.transport.errors import OnRefused, RpcError, abort_on_error, nobody_counts
from protos.transport.tokens import SCHEME, AcceptedTokens

AUTHORIZATION = "authorization"
NEEDED = "send the metadata 'authorization: Bearer TOKEN'"

Context = grpc.aio.ServicerContext[Any, Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class Unauthenticated(RpcError):
    """The caller did not show who it is. Says what is missing, never what was sent."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls through that bring a token; others never reach a handler.

    Args:
        tokens: Those that are taken.
        open_services: Full names of services that need none.
        on_refused: Told the reason of each call that is refused.
    """

    def __init__(
        self,
        tokens: AcceptedTokens,
        open_services: Collection[str],
        on_refused: OnRefused = nobody_counts,
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
        """Returns the handler that says why not; None if all is well."""
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
        on_refused: Told the reason of each call that is refused.
    """

    def __init__(
        self,
        names: Collection[str],
        open_services: Collection[str],
        on_refused: OnRefused = nobody_counts,
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
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        [kind] = [kind for kind in kinds if getattr(handler, kind) is not None]
        behaviour = getattr(handler, kind)

        async def call(request: Any, context: Context) -> Any:
            await self._check(context)
            return await behaviour(request, context)

        async def generate(request: Any, context: Context) -> Any:
            await self._check(context)
            async for response in behaviour(request, context):
                yield response

        is_generator = inspect.isasyncgenfunction(behaviour)
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


def with_token(channel: grpc.aio.Channel, token: Callable[[], str]) -> grpc.aio.Channel:
    """Returns a channel whose calls bring a token.

    gRPC's call credentials would refuse a channel without TLS, and its interceptors would put a
    queue before every message of a stream.

    Args:
        channel: What carries the calls.
        token: Returns the token, at each call.
    """
    return cast(grpc.aio.Channel, _TokenChannel(channel, token))


class _TokenChannel:
    def __init__(self, channel: grpc.aio.Channel, token: Callable[[], str]) -> None:
        self._channel = channel
        self._token = token

    def __getattr__(self, name: str) -> Any:
        """Finds what makes callables, and passes the rest on as it is."""
        found = getattr(self._channel, name)
        if name in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            return lambda *args, **kwargs: self._bring_token(found(*args, **kwargs))
        return found

    async def __aenter__(self) -> "_TokenChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    def _bring_token(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            *args: Any, metadata: Sequence[tuple[str, str]] | None = None, **kwargs: Any
        ) -> Any:
            authorization = (AUTHORIZATION, f"{SCHEME}{self._token()}")
            return method(*args, metadata=(*(metadata or ()), authorization), **kwargs)

        return call


def _prefixes(services: Collection[str]) -> tuple[str, ...]:
    return tuple(f"/{service}/" for service in services)


def _refusing(problem: str) -> Any:
    """Returns a handler that reads nothing, whatever the method takes."""

    async def refuse(requests: Any, context: Context) -> None:
        async with abort_on_error(context):
            raise Unauthenticated(problem)

    return grpc.stream_stream_rpc_method_handler(refuse)
