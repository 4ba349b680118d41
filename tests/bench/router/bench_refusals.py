"""How much thousands of refused calls a second slow the streams that were accepted.

    python -m tests.bench.router.bench_refusals [--kind generate] [--streams 64] [--rate 5000] [--turns 6]

The real frontend, engines, engine and scheduler run in this process, with the timer of bench_front for
executors. One other process reads the accepted streams; all rows run and the waiting line is full,
so every call of a third process (http2_load) is refused with QUEUE_FULL. That one rests and calls in
turns of two seconds, so that the two token rates come from one run.

Kinds of refusal: "generate" is a Generate call each, "vllm" the same of VllmEngine; "many" is a
GenerateMany stream with one request each, "many10" one with ten; "token" is a Generate call whose
bearer token is missing.

Required: the streams keep nine tenths of their tokens. On a machine with fewer free cores than the
three processes want, the kernel's shares decide as much as the router does; so CPU is printed too,
what this process used for a refused call: the accepted streams lose nothing while it fits beside
their own. Where fewer calls came than were asked for, this process was busy all the time.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import uvloop

from protos.serving.v1 import serving_pb2
from protos.serving.v1.serving_pb2_grpc import GenerationServiceStub
from protos.transport.admission import Refusals
from protos.transport.channel import with_token
from protos.transport.interceptors import RequestReader
from protos.transport.limits import PortLimits
from protos.transport.port import ServiceConfig
from router.api.generate import GENERATE, GENERATE_VLLM, UNSHARED, GenerationServicer
from router.engine.engines import Engines
from tests.bench.router.bench_front import (
    MAX_MODEL_LEN,
    NUM_CHANNELS,
    PROMPT_LEN,
    make_message,
    open_channels,
    timer_engines,
)
from tests.bench.support.options import parse_options
from tests.bench.support.quiet import quiet
from tests.bench.support.routing import python_module
from tests.router.support.fake_engines import generation, listening
from tests.router.support.running_engines import stepping

STEP_S = 0.02
TURN_S = 2.0
SAMPLE_S = 0.05
REQUIRED_SHARE = 0.9
GENERATE_MANY = GENERATE + "Many"
# Method, requests in one call, and the reason with which they are refused.
KINDS = {
    "generate": (GENERATE, 1, "QUEUE_FULL"),
    "vllm": (GENERATE_VLLM, 1, "QUEUE_FULL"),
    "many": (GENERATE_MANY, 1, "QUEUE_FULL"),
    "many10": (GENERATE_MANY, 10, "QUEUE_FULL"),
    "token": (GENERATE, 1, "UNAUTHENTICATED"),
}
TOKEN = "a-token-of-the-benchmark"


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters at one moment, on the clock that all processes share."""

    time: float
    count: float


def rate_within(samples: list[Sample], begin: float, end: float) -> float:
    """Returns how much the count grew a second."""
    inside = [sample for sample in samples if begin <= sample.time <= end]
    first, last = inside[0], inside[-1]
    return (last.count - first.count) / (last.time - first.time)


async def sample(count: Callable[[], float], samples: list[Sample]) -> None:
    while True:
        samples.append(Sample(time.monotonic(), count()))
        await asyncio.sleep(SAMPLE_S)


@asynccontextmanager
async def full_router(num_streams: int, kind: str) -> AsyncIterator[tuple[Engines, str]]:
    """Runs a router with so many rows, and as many may wait. Yields it and its address."""
    engines, engine = timer_engines(STEP_S, num_streams, max_listeners=8192)
    servicer = GenerationServicer(engines, None, "bench")
    services = [generation(servicer)]
    limits = PortLimits(max_connection_streams=10_000)  # the load is one connection
    refusals = Refusals(engines.measures.add_refusal)
    reader = RequestReader(limits, refusals, checks=servicer.checks(), unshared=UNSHARED)
    interceptors: list[grpc.aio.ServerInterceptor] = [reader]
    if kind == "token":
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "tokens").write_text(TOKEN)
            security = ServiceConfig(auth_tokens=Path(folder) / "tokens")
            interceptors = [*security.interceptors(refusals), *interceptors]
    if kind == "vllm":
        from router.api.vllm_engine import VllmEngineServicer, add_vllm_engine

        vllm = VllmEngineServicer(servicer, engines, None, "bench", is_ready=lambda: True)
        services.append(partial(add_vllm_engine, servicer=vllm))
    async with (
        listening(*services, interceptors=interceptors, options=limits.server_options()) as address,
        stepping(engine),
    ):
        yield engines, address


def refused_message(kind: str) -> bytes:
    """Returns a request as the kind's method takes it."""
    message = make_message(1, 100)
    if kind.startswith("many"):
        return serving_pb2.GenerateManyRequest(tag=1, start=message).SerializeToString()
    if kind == "vllm":
        from smg_grpc_proto.generated import vllm_engine_pb2

        prompt = vllm_engine_pb2.TokenizedInput(input_ids=message.token_ids.ids)
        return bytes(vllm_engine_pb2.GenerateRequest(tokenized=prompt).SerializeToString())
    return message.SerializeToString()


async def measure(num_streams: int, rate: float, turns: int, kind: str) -> bool:
    """Runs all turns and prints what came of them. Returns whether enough tokens did."""
    method, num_messages, reason = KINDS[kind]
    reading = ("tests.bench.router.bench_refusals", f"--streams={num_streams}")
    load = (
        *("tests.bench.support.http2_load", f"--method={method}"),
        *(f"--rate={rate / num_messages}", f"--seconds={TURN_S}", f"--turns={turns}"),
        *(f"--message={refused_message(kind).hex()}", f"--messages={num_messages}"),
    )
    async with (
        full_router(num_streams, kind) as (engines, address),
        python_module(*reading, f"--read={address}") as counts,
    ):
        await counts.readline()  # all streams have a token, and the line is full
        tokens: list[Sample] = []
        cpu: list[Sample] = []
        refused: list[Sample] = []
        tasks = [
            asyncio.create_task(_collect(counts, tokens)),
            asyncio.create_task(sample(time.process_time, cpu)),
            asyncio.create_task(sample(lambda: engines.measures.refused[reason], refused)),
        ]
        async with python_module(*load, f"--address={address}") as lines:
            calling = [json.loads(line) async for line in lines]
        for task in tasks:
            task.cancel()
    if len(calling) < turns:
        raise RuntimeError("the process that calls failed; its error is above")
    shares, per_call = [], []
    print(f"{'refused/s':>10}{'tokens/s':>10}{'at rest':>10}{'share':>8}{'cores':>8}{'at rest':>9}")
    for turn in calling:
        during = (turn["from"], turn["to"])
        at_rest = (turn["from"] - TURN_S + 0.1, turn["from"])
        came, came_at_rest = (rate_within(tokens, *span) for span in (during, at_rest))
        used, used_at_rest = (rate_within(cpu, *span) for span in (during, at_rest))
        num_refused = rate_within(refused, *during)
        shares.append(came / came_at_rest)
        per_call.append((used - used_at_rest) / num_refused * 1e6)
        print(
            f"{num_refused:>10.0f}{came:>10.0f}{came_at_rest:>10.0f}{shares[-1]:>8.2f}"
            f"{used:>8.2f}{used_at_rest:>9.2f}"
        )
    share = statistics.median(shares)
    print(f"the streams keep {share:.2f} of their tokens, median of the turns")
    print(f"a refused request takes {statistics.median(per_call):.0f} us of the router's CPU time")
    return share >= REQUIRED_SHARE


async def _collect(lines: asyncio.StreamReader, samples: list[Sample]) -> None:
    async for line in lines:
        samples.append(Sample(*json.loads(line)))


# ---- the process that reads the accepted streams


async def read_streams(address: str, num_streams: int) -> None:
    """Prints a line when every stream has a token, then how many there are, over and over."""
    counts = [0] * num_streams
    channels = [with_token(channel, lambda: TOKEN) for channel in open_channels(address)]
    stubs = [GenerationServiceStub(channel) for channel in channels]

    async def read(number: int) -> None:
        message = make_message(number, MAX_MODEL_LEN - PROMPT_LEN)
        async for response in stubs[number % NUM_CHANNELS].Generate(message):
            counts[number] += len(response.token_ids)

    async with asyncio.TaskGroup() as tasks:
        for number in range(num_streams):
            tasks.create_task(read(number))
        while not all(counts):
            await asyncio.sleep(SAMPLE_S)
        for number in range(num_streams, 2 * num_streams):
            counts.append(0)
            tasks.create_task(read(number))  # these wait, and fill the line
        await asyncio.sleep(1.0)
        print("ready", flush=True)
        while True:
            print(json.dumps([time.monotonic(), sum(counts)]), flush=True)
            await asyncio.sleep(SAMPLE_S)


async def run(options: argparse.Namespace) -> None:
    print(
        f"{options.streams} streams, a token each every {STEP_S * 1e3:.0f} ms, and "
        f"{options.rate:.0f} requests a second refused ({options.kind}), in turns of {TURN_S:g} s"
    )
    if not await measure(options.streams, options.rate, options.turns, options.kind):
        sys.exit(f"required are {REQUIRED_SHARE:g}")


def main() -> None:
    quiet()
    load = {"kind": "generate", "streams": 64, "rate": 5000.0, "turns": 6}
    options = parse_options(__doc__, read=str, **load)  # of the process that reads
    if options.kind not in KINDS:
        sys.exit(f"kind={options.kind}: need one of {', '.join(KINDS)}")
    uvloop.run(read_streams(options.read, options.streams) if options.read else run(options))


if __name__ == "__main__":
    main()
