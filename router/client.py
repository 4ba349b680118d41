"""The client library: prompts in, tokens and text out, no protobuf in between.

    async with Client("router:50051") as client:
        completion = await client.complete("Once upon a time", max_tokens=64, temperature=0.8)
        print(completion.text, completion.finish.reason)

        async for delta in client.generate([1, 2, 3], max_tokens=64):
            print(delta.token_ids)

        async with client.many() as many:  # one stream for all: cheaper for both sides
            await asyncio.gather(*[many.complete(prompt) for prompt in prompts])

A call that meets UNAVAILABLE before its first answer is sent again by gRPC, up to 5 times in
about 2 seconds. Nothing else is: a timeout has no time left, what was rejected stays wrong, and
an overloaded router asks for a pause (`Overloaded.retry_delay_s`) that only the caller can
place. Streams of `many` are not retried either; their caller knows what of them it still wants.
"""

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.serving.v1 import serving_pb2, serving_pb2_grpc
from router.client_many import Many
from router.client_messages import (
    CallFailed,
    Cancelled,
    Collector,
    Completion,
    Delta,
    Finish,
    ModelInfo,
    Options,
    Overloaded,
    Prompt,
    Rejected,
    TimedOut,
    TokenLogprob,
    Unavailable,
    failure_of_call,
    to_delta,
    to_group,
    to_model,
    to_request,
)
from router.status import GroupStatus

__all__ = [
    "CallFailed",
    "Cancelled",
    "Client",
    "Completion",
    "Delta",
    "Finish",
    "GroupStatus",
    "Many",
    "ModelInfo",
    "Options",
    "Overloaded",
    "Prompt",
    "Rejected",
    "TimedOut",
    "TokenLogprob",
    "Unavailable",
]

_SERVICE = serving_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],  # over all addresses of a headless Service
    "methodConfig": [
        {
            "name": [
                {"service": _SERVICE, "method": method}
                for method in ("Generate", "Cancel", "GetModel", "GetStatus")
            ],
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
_MAX_MESSAGE_BYTES = 64 << 20
_CHANNEL_OPTIONS = [
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # A router that is gone without a word is noticed after this time, even while none is due.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]
_ANSWER_GRACE_S = 1.0  # the router ends a request on time; this is for one that does not answer


class Client:
    """One channel to a router, or to all addresses of a name.

    Args:
        target: What gRPC calls a target: "host:port", "dns:///name:port", "unix:path".
        credentials: For TLS; None for plain text.
    """

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._target = target
        self._credentials = credentials

    async def __aenter__(self) -> Self:
        if self._credentials is None:
            self._channel = grpc.aio.insecure_channel(self._target, _CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(
                self._target, self._credentials, _CHANNEL_OPTIONS
            )
        self._stub = serving_pb2_grpc.GenerationServiceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)  # its stub lacks methods
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._channel.close()

    async def generate(
        self, prompt: Prompt, **options: Unpack[Options]
    ) -> AsyncGenerator[Delta, None]:
        """Yields what comes of a prompt. Closing the generator cancels the request.

        Args:
            prompt: Text, or token ids.
            options: See Options, and serving.proto for what they mean.

        Raises:
            CallFailed: The request failed.
        """
        timeout_s = options.get("timeout_s")
        call = self._stub.Generate(
            to_request(prompt, options),
            timeout=None if timeout_s is None else timeout_s + _ANSWER_GRACE_S,
        )
        try:
            with _typed_failures():
                async for message in call:
                    yield to_delta(message)
        finally:
            call.cancel()

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
        collector = Collector(options.get("n") or 1)
        async with aclosing(self.generate(prompt, **options)) as deltas:
            async for delta in deltas:
                collector.add(delta)
        return collector.completions()

    def many(self) -> Many:
        """Returns a stream for many requests, to be opened by `async with`."""
        return Many(self._stub.GenerateMany)

    async def cancel(self, request_id: str) -> None:
        """Ends a live request; whoever waits for it gets Cancelled.

        Raises:
            Rejected: No live request has this id.
        """
        with _typed_failures():
            await self._stub.Cancel(serving_pb2.CancelRequest(request_id=request_id))

    async def get_model(self) -> ModelInfo:
        """Returns the model served.

        Raises:
            Unavailable: No group of executors has formed yet.
        """
        with _typed_failures():
            return to_model(await self._stub.GetModel(serving_pb2.GetModelRequest()))

    async def get_status(self) -> list[GroupStatus]:
        """Returns what every group is doing, by number."""
        with _typed_failures():
            response = await self._stub.GetStatus(serving_pb2.GetStatusRequest())
        return [to_group(group) for group in response.groups]

    async def health(self, service: str = "") -> bool:
        """Returns whether a service of grpc.health.v1 is SERVING.

        Args:
            service: Empty or "readiness": should it get requests? "liveness": does it run?

        Raises:
            Rejected: It is not one that the router knows.
        """
        with _typed_failures():
            request = health_pb2.HealthCheckRequest(service=service)
            response: health_pb2.HealthCheckResponse = await self._health.Check(request)
        return response.status == health_pb2.HealthCheckResponse.SERVING


@contextmanager
def _typed_failures() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise failure_of_call(error) from error
