"""Calls of vllm.grpc.engine.VllmEngine on fake engines, as a gateway makes them."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from router.api.generate import GenerationServicer
from router.api.text import Tokenizer
from router.api.vllm_engine import VllmEngineServicer, add_vllm_engine
from router.requests.callers import DEFAULTS, CallerSettings
from router.requests.request import Sequence
from tests.router.support.calls import PROMPT, responses
from tests.router.support.fake_engines import FakeEngines, front_of, listening


@asynccontextmanager
async def connected(
    engines: FakeEngines,
    tokenizer: Tokenizer | None = None,
    tokenizer_file: Path | None = None,
    is_ready: Callable[[], bool] = lambda: True,
    settings: CallerSettings = DEFAULTS,
) -> AsyncIterator[Any]:
    generation = GenerationServicer(engines, tokenizer, "1.2.3", settings)  # type: ignore[arg-type]
    servicer = VllmEngineServicer(
        generation,
        engines,  # type: ignore[arg-type]
        tokenizer_file,
        "1.2.3",
        is_ready=is_ready,
    )
    add = partial(add_vllm_engine, servicer=servicer)
    async with listening(add, **front_of(generation, engines)) as target:
        async with grpc.aio.insecure_channel(target) as channel:
            yield vllm_engine_pb2_grpc.VllmEngineStub(channel)
        await engines.idle()  # no call may leave anything behind


@asynccontextmanager
async def calling(
    tokenizer: Tokenizer | None = None, **fields: Any
) -> AsyncIterator[tuple[FakeEngines, Any, Any, list[Sequence]]]:
    """Yields a stub, and a Generate call whose request has arrived; `fields` are of `generate`."""
    engines = FakeEngines()
    async with connected(engines, tokenizer) as stub:
        call = stub.Generate(generate(**fields))
        yield engines, stub, call, (await engines.arrivals.get()).sequences


@asynccontextmanager
async def generating(
    tokenizer: Tokenizer | None = None, **fields: Any
) -> AsyncIterator[tuple[FakeEngines, Any, list[Sequence]]]:
    async with calling(tokenizer, **fields) as (engines, _, call, sequences):
        yield engines, call, sequences


def generate(*, stream: bool = True, request_id: str = "mine", **params: Any) -> Any:
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=PROMPT),
        sampling_params=pb.SamplingParams(**params),
        stream=stream,
    )


async def answers(call: Any) -> list[Any]:
    return [getattr(message, message.WhichOneof("response")) for message in await responses(call)]
