"""Client of a router: prompts in, tokens and text out.

    async with Client("router:50051") as client:
        completion = await client.complete("Once upon a time", max_tokens=64, temperature=0.8)
        print(completion.text, completion.finish.reason)

        async for delta in client.generate([1, 2, 3], max_tokens=64):
            print(delta.token_ids)

        async with client.many() as many:  # one stream for all: cheaper for both sides
            await asyncio.gather(*[many.complete(prompt) for prompt in prompts])

A call that meets UNAVAILABLE before its first answer is sent again by gRPC, up to 4 times in
about 2 seconds: a router that drains refuses in this way. One whose router dies goes on from the tokens
that came, here or at another router, and its caller sees a pause (`resume.py`); an answer without a
stream is asked for again. Nothing else is sent again: a timeout has no time left, what was rejected
stays wrong, and an overloaded router asks for a pause (`Overloaded.retry_delay_s`) that only the caller
can place. `many` does the same for each request on its stream.
"""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, Self, Unpack

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from protos.serving.v1 import serving_pb2, serving_pb2_grpc
from protos.serving.v1.serving_pb2 import GetModelResponse
from protos.transport.addresses import is_loopback
from protos.transport.channel import ChannelOpener, Option
from protos.transport.credentials import TlsFiles, WatchedTls, token_sender
from router.client.many import Many
from router.client.messages import (
    CallFailed,
    Chat,
    Collector,
    Completion,
    Delta,
    Interrupted,
    Options,
    Prompt,
    failure_of_call,
    to_chat,
    to_request,
)
from router.client.resume import METADATA, Attempts, Resumption, no_end, with_patience

Credentials = grpc.ChannelCredentials | TlsFiles | None

SERVING = 1  # of grpc.health.v1
RELOAD_S = 1.0  # TLS files are looked at so often at most, since every call asks
_SERVICE = serving_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
# The published policy, for clients in any language: README.md has it as JSON.
SERVICE_CONFIG: dict[str, Any] = {
    "loadBalancingConfig": [{"round_robin": {}}],  # over all addresses of a headless Service
    "methodConfig": [
        {
            "name": [{"service": _SERVICE}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}
HEALTH_CONFIG: dict[str, Any] = {"healthCheckConfig": {"serviceName": _SERVICE}}
# Calls on one connection, below what a router takes of it (--max-connection-streams): gRPC would let
# more of them wait. There are as many connections as that takes.
MAX_CONNECTION_CALLS = 100
_MAX_MESSAGE_BYTES = 64 << 20
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # What is kept to be sent again. A prompt beyond gRPC's own 256 KiB would not be retried.
    ("grpc.per_rpc_retry_buffer_size", _MAX_MESSAGE_BYTES),
    # One that restarts is back within seconds; by itself gRPC looks ever less often, in the end
    # every two minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 300),
    # A router that is gone without a word is noticed while a call is open: within a second or so where
    # tokens came, else within two, as gRPC pings once a second at most. Its own threads answer pings, so
    # a router that has much to do is not taken for one that is gone.
    ("grpc.keepalive_time_ms", 250),
    ("grpc.keepalive_timeout_ms", 500),
    ("grpc.http2.ping_timeout_ms", 750),  # of pings that measure the way, in place of those
    ("grpc.http2.max_pings_without_data", 0),  # any number: a call that reads sends nothing
]


class Client:
    """Connections to a router, or to all addresses of a name: one for each hundred calls.

    Args:
        target: What gRPC calls a target: "host:port", "dns:///name:port", "unix:path".
        credentials: For TLS: TlsFiles(ca=..., cert=..., key=...), which are read again when they
            change, or what gRPC has for it. None for plain text.
        token: Goes with every call: a bearer token, or a file whose first line it is, which is
            read again when it changes.
        plaintext: Whether the token may leave this machine in plain text.
        watches_health: Ask every address whether it is ready, and send requests to ready
            ones. For a target that names several routers, such as "ipv4:host:port,host:port"; not
            behind a proxy, which looks after that itself, and would pass the question on to any one
            of them. None: where the target lists several addresses.
        resume: Whether requests whose call breaks off are sent again, to go on from the tokens that
            came; `Completion.num_resumes` tells how often. Without a seed, a request that samples
            gets one.
        resume_for_s: Seconds without a token after which such a request fails all the same.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file or the token makes no sense, or it would be sent in plain text.
    """

    def __init__(
        self,
        target: str,
        credentials: Credentials = None,
        *,
        token: str | Path | None = None,
        plaintext: bool = False,
        watches_health: bool | None = None,
        resume: bool = True,
        resume_for_s: float = 60.0,
    ) -> None:
        self._target = target
        self._resumption = Resumption(resume_for_s if resume else 0.0)
        self._opener = channel_opener(target, credentials, token, plaintext=plaintext)
        self._watches_health = "," in target if watches_health is None else watches_health
        self._channels: list[grpc.aio.Channel] = []  # replaced ones too

    async def __aenter__(self) -> Self:
        self._connect()
        return self

    def _connect(self) -> None:
        self._lanes: list[_Lane] = []
        # Status, health and cancels are for routers that are not ready, too: requests may wait there. It
        # connects when it is used.
        operator_channel = self._open_channel(SERVICE_CONFIG)
        self._operator_stub = serving_pb2_grpc.GenerationServiceStub(operator_channel)
        # Its messages have one field each, as these have: no further package is needed.
        self._check_health: Any = operator_channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=StringValue.SerializeToString,
            response_deserializer=Int32Value.FromString,
        )

    def _open_channel(self, config: dict[str, Any], *more: Option) -> grpc.aio.Channel:
        service_config = ("grpc.service_config", json.dumps(config))
        options: list[Option] = [*_CHANNEL_OPTIONS, service_config, *more]
        self._channels.append(self._opener.open(self._target, options))
        return self._channels[-1]

    def _lane(self) -> "_Lane":
        """Returns one that has room for a call, after renewing them."""
        self._renew()
        for lane in self._lanes:
            if lane.num_calls < MAX_CONNECTION_CALLS:
                return lane
        config = SERVICE_CONFIG | (HEALTH_CONFIG if self._watches_health else {})
        channel = self._open_channel(config, ("grpc.use_local_subchannel_pool", 1))
        self._lanes.append(_Lane(channel))
        return self._lanes[-1]

    def _renew(self) -> None:
        """Has calls from now on use the TLS files as they are; running ones go on as before."""
        if self._opener.has_changed():
            self._connect()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Renews the channels before a call, and gives its failure a type."""
        self._renew()
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise failure_of_call(error) from error

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()

    async def generate(
        self, prompt: Prompt, **options: Unpack[Options]
    ) -> AsyncGenerator[Delta, None]:
        """Yields what comes of a prompt. Closing the generator cancels the request.

        Args:
            prompt: Text, a Chat, or token ids.
            options: See Options, and serving.proto for what they mean.

        Raises:
            CallFailed: The request failed.
        """
        attempts = self._attempts(prompt, options)
        async with aclosing(self._deltas(attempts, self._stream)) as deltas:
            async for delta in deltas:
                yield delta

    def _attempts(self, prompt: Prompt, options: Options) -> Attempts:
        request = to_request(prompt, options)
        return Attempts(request, options.get("timeout_s"), self._resumption)

    async def _deltas(
        self, attempts: Attempts, call: Callable[[Attempts], AsyncGenerator[Delta, None]]
    ) -> AsyncGenerator[Delta, None]:
        """Yields what comes of a request, over as many calls as it takes."""
        while True:
            try:
                async with aclosing(call(attempts)) as deltas:
                    async for delta in deltas:
                        yield delta
                failure: CallFailed = no_end()
            except CallFailed as error:
                failure = error
            if attempts.has_ended:
                return
            await asyncio.sleep(attempts.pause_after(failure))

    async def _stream(self, attempts: Attempts) -> AsyncGenerator[Delta, None]:
        """Yields what comes of one call of Generate."""
        with self._calling():
            call, is_there = self._open("Generate", attempts)
            try:
                message = await with_patience(call.read(), attempts.patience_s, is_there)
                while message is not grpc.aio.EOF:
                    if (delta := attempts.take(message)) is not None:
                        yield delta
                    message = await call.read()
            finally:
                call.cancel()

    async def _ask(self, attempts: Attempts) -> AsyncGenerator[Delta, None]:
        """Yields what comes of one call of Complete."""
        with self._calling():
            call, is_there = self._open("Complete", attempts)
            answer = await with_patience(call, attempts.patience_s, is_there)
        for message in answer.continuations:
            if (delta := attempts.take(message)) is not None:
                yield delta

    def _open(self, method: str, attempts: Attempts) -> tuple[Any, Callable[[], bool]]:
        """Opens the next call of a request. Returns it, and what says whether a router is there."""
        lane = self._lane()
        call = lane.call(
            method,
            attempts.next_request(),
            timeout=attempts.call_timeout_s,
            metadata=METADATA if attempts.num_resumes else None,
            wait_for_ready=attempts.patience_s is not None,
        )
        return call, lane.is_connected

    async def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Returns one whole continuation. Cancelling the task cancels the request.

        Raises:
            CallFailed: The request failed.
        """
        [completion] = await self.complete_all(prompt, **options)
        return completion

    async def complete_all(self, prompt: Prompt, **options: Unpack[Options]) -> list[Completion]:
        """Returns all `n` continuations, by index.

        Raises:
            CallFailed: The request failed.
        """
        return await self._collect(prompt, options, self._stream)

    async def _collect(
        self,
        prompt: Prompt,
        options: Options,
        call: Callable[[Attempts], AsyncGenerator[Delta, None]],
    ) -> list[Completion]:
        collector = Collector(options.get("n") or 1)
        attempts = self._attempts(prompt, options)
        try:
            async with aclosing(self._deltas(attempts, call)) as deltas:
                async for delta in deltas:
                    collector.add(delta)
        except Interrupted as error:
            error.so_far = collector.so_far(error.request_id)
            raise
        return collector.completions(attempts.num_resumes)

    async def complete_unary(self, prompt: Prompt, **options: Unpack[Options]) -> list[Completion]:
        """Returns all `n` continuations, by index, from one answer instead of a stream.

        For proxies that know no streams. Nothing comes before the end, `first_token_s` included. So a
        request whose router dies starts over, with the same seed.

        Raises:
            CallFailed: The request failed.
        """
        return await self._collect(prompt, options, self._ask)

    def many(self) -> Many:
        """Returns a stream for many requests, to be opened by `async with`."""

        def open_call(**options: Any) -> tuple[Any, Callable[[], bool]]:
            lane = self._lane()
            return lane.call("GenerateMany", **options), lane.is_connected

        return Many(open_call, self._resumption)

    async def tokenize(self, prompt: str | Chat) -> list[int]:
        """Returns the tokens of a prompt, of any number.

        Raises:
            Rejected: The router has no tokenizer, or it gives none.
        """
        request = serving_pb2.TokenizeRequest(**_encodable(prompt))
        with self._calling():
            response = await self._lane().call("Tokenize", request)
        return list(response.token_ids)

    async def count_tokens(self, prompt: str | Chat) -> int:
        """Returns how many tokens a prompt has.

        Raises:
            Rejected: As of `tokenize`.
        """
        request = serving_pb2.CountTokensRequest(**_encodable(prompt))
        with self._calling():
            response = await self._lane().call("CountTokens", request)
        return int(response.num_tokens)

    async def detokenize(
        self, token_ids: Iterable[int], *, skip_special_tokens: bool = True
    ) -> str:
        """Returns the text of tokens.

        Raises:
            Rejected: The router has no tokenizer, or the model no such tokens.
        """
        request = serving_pb2.DetokenizeRequest(
            token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        with self._calling():
            response = await self._lane().call("Detokenize", request)
        return str(response.text)

    async def cancel(self, request_id: str) -> None:
        """Ends a live request; its caller gets Cancelled.

        Raises:
            Rejected: No live request has this id.
            Unavailable: No router that was asked has it, nor takes requests: another one may have it.
        """
        with self._calling():
            await self._operator_stub.Cancel(serving_pb2.CancelRequest(request_id=request_id))

    async def get_model(self) -> GetModelResponse:
        """Returns the model served.

        Raises:
            Unavailable: No group of executors has formed yet.
        """
        with self._calling():
            response: GetModelResponse = await self._lane().call(
                "GetModel", serving_pb2.GetModelRequest()
            )
        return response

    async def get_status(self) -> list[serving_pb2.GroupStatus]:
        """Returns what every group is doing, by number."""
        return list((await self.get_router_status()).groups)

    async def get_router_status(self) -> serving_pb2.GetStatusResponse:
        """Returns what the router is doing: its state, its groups, and what last happened."""
        with self._calling():
            response = await self._operator_stub.GetStatus(serving_pb2.GetStatusRequest())
        return response

    async def health(self, service: str = "") -> bool:
        """Returns whether a service of grpc.health.v1 is SERVING.

        Args:
            service: Empty or "readiness": should it get requests? "liveness": does it run?

        Raises:
            Rejected: It is not one that the router knows.
        """
        with self._calling():
            status: Int32Value = await self._check_health(StringValue(value=service))
        return status.value == SERVING


def _encodable(prompt: str | Chat) -> dict[str, Any]:
    return {"text": prompt} if isinstance(prompt, str) else {"chat": to_chat(prompt)}


class _Lane:
    """A channel with a connection of its own to each address, and its calls."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stub = serving_pb2_grpc.GenerationServiceStub(channel)
        self.num_calls = 0

    def is_connected(self) -> bool:
        """Whether a router is there that takes calls."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    def call(self, method: str, *message: Any, **options: Any) -> Any:
        call = getattr(self._stub, method)(*message, **options)
        self.num_calls += 1
        call.add_done_callback(self._on_done)
        return call

    def _on_done(self, call: Any) -> None:
        self.num_calls -= 1


def channel_opener(
    target: str,
    credentials: Credentials = None,
    token: str | Path | None = None,
    *,
    plaintext: bool = False,
) -> ChannelOpener:
    """Returns the opener of channels to a router.

    Args:
        target: gRPC's name of the router.
        credentials: For TLS; files are read again when they change. None is plain text.
        token: It, or the file whose first line it is, which is read again when it changes.
        plaintext: Whether a token may leave this machine in plain text.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file or the token makes no sense, or it would be sent in plain text.
    """
    if token is not None and credentials is None and not plaintext and not _is_here(target):
        raise ValueError(
            f"target {target}: the token would be sent in plain text that others can read: give "
            f"credentials, or plaintext=True where the network itself keeps others out"
        )
    if isinstance(token, str) and not re.fullmatch(r"[!-~]+", token):
        raise ValueError("token: need visible ASCII characters only; a line's end is none")
    tls: Any = credentials
    if isinstance(credentials, TlsFiles):
        tls = WatchedTls("tls", credentials, cert="cert", ca="ca", interval_s=RELOAD_S)
    if isinstance(token, str):
        return ChannelOpener(tls, token=lambda: token)
    return ChannelOpener(tls, token=None if token is None else token_sender(token))


def _is_here(target: str) -> bool:
    """Returns whether a target names only this machine."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    addresses = re.sub(r"^(dns:(//[^/]*/)?|ipv[46]:(///)?)", "", target).split(",")
    return all(is_loopback(address) for address in addresses)
