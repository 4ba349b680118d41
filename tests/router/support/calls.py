"""Calls of the public API on fake engines, and what comes of them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from protos.executor.sampling_fields import INT32, SAMPLING_FIELDS
from protos.serving.v1 import serving_pb2 as pb
from protos.serving.v1 import serving_pb2_grpc
from router.api.text import Tokenizer
from tests.router.support.fake_engines import FakeEngines, serve

PROMPT = [5, 6, 7]
# A value of each number, none of which is its default.
SAMPLING: dict[str, Any] = {
    field.name: 7 if field.dtype == INT32 else 0.5**number
    for number, field in enumerate(SAMPLING_FIELDS, start=1)
}


@asynccontextmanager
async def connected(engines: FakeEngines, tokenizer: Tokenizer | None = None) -> AsyncIterator[Any]:
    async with (
        serve(engines, tokenizer) as target,
        grpc.aio.insecure_channel(target) as channel,
    ):
        yield serving_pb2_grpc.GenerationServiceStub(channel)


def prompt(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), **fields)


def resumed(
    message: pb.GenerateRequest, *outputs: Sequence[int] | None, attempt: int = 1, **fields: Any
) -> pb.GenerateRequest:
    """Returns a request that goes on from an output of each continuation; None: that has ended.

    Args:
        fields: Of Resume.
    """
    continuations = [
        pb.Continuation(
            index=index,
            token_ids=np.array(output or (), "<i4").tobytes(),
            has_ended=output is None,
        )
        for index, output in enumerate(outputs)
    ]
    again = pb.GenerateRequest.FromString(message.SerializeToString())
    again.resume.CopyFrom(pb.Resume(continuations=continuations, attempt=attempt, **fields))
    return again


async def responses(call: Any) -> list[Any]:
    """Reads what is left. Not by `async for`: gRPC allows that only from the start."""
    messages = []
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
    return messages


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (responses(call) if hasattr(call, "read") else call)
    return caught.value
