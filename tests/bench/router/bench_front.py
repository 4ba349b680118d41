"""Times the public API: Generate, a stream per request, against GenerateMany, one for all.

    python -m tests.bench.router.bench_front [--streams 64,256] [--step-ms 20] [--tokens 100]

The real frontend, engines, engine and scheduler run in this process; executors are a timer in it,
one step of all sequences every `step-ms`. Clients are one other process, on a few channels. So a
Generate stream gets one message per token, 1 / step-ms times a second, and GenerateMany one
message per step with the tokens of all. `bare` is what gRPC's own part of Generate takes: as many streams
of a handler that writes one and the same message when a timer says so, and does nothing else.

CPU is what this process used, engine and timer included, per token that the clients got; messages
and tokens per second are what they got of what was offered (streams / step-ms). Where less came
than was offered, this process was busy all the time.
"""

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import uvloop

from protos.serving.v1 import serving_pb2 as pb
from protos.serving.v1.serving_pb2_grpc import GenerationServiceStub
from protos.transport.limits import PortLimits
from router.api.generate import GenerationServicer
from router.engine.engine import Engine
from router.engine.engines import Engines
from router.requests.request import Listeners
from router.requests.waiting_queue import WaitingQueue
from router.scheduling.step import GroupInfo, InFlight, ServedModel, StepResult
from tests.bench.support.options import parse_options
from tests.bench.support.quiet import quiet
from tests.bench.support.routing import python_module
from tests.router.support.fake_engines import generation, listening
from tests.router.support.running_engines import drive_group, stepping
from tests.router.support.stepper import make_shape

PROMPT_LEN = 8
MAX_MODEL_LEN = 2048
NUM_CHANNELS = 4


class TimerExecutors:
    """One rank whose steps take their time and give token 1. Implements engine.Executors."""

    def __init__(self, step_s: float, num_rows: int) -> None:
        self._step_s = step_s
        self._num_rows = num_rows
        self._end = 0.0
        self._ends: deque[float] = deque()
        self.suspicions = Counter[str]()
        self.num_standbys = 0

    wants_border = is_driver = False
    held_model = None

    def may_try_suspects(self) -> bool:
        return True

    def elastic(self) -> pb.ElasticStatus | None:
        return None

    def members(self) -> list[pb.MemberStatus]:
        return []

    async def form(self) -> GroupInfo:
        names = {"name": "timer", "architecture": "Timer", "fingerprint": ""}
        model = ServedModel(vocab_size=1000, max_model_len=MAX_MODEL_LEN, **names)
        shape = make_shape(
            num_blocks=1 + self._num_rows * MAX_MODEL_LEN // 16,
            block_size=16,
            rows_per_rank=self._num_rows,
            max_num_batched_tokens=8192,
            max_num_logits=2 * self._num_rows,
            max_model_len=MAX_MODEL_LEN,
        )
        return GroupInfo(epoch=1, model=model, shape=shape, addresses=("timer",))

    def send(self, step: InFlight) -> None:
        now = asyncio.get_running_loop().time()
        self._end = max(self._end, now) + self._step_s
        self._ends.append(self._end)

    async def receive(self, step: InFlight) -> StepResult:
        await asyncio.sleep(max(0.0, self._ends.popleft() - asyncio.get_running_loop().time()))
        return StepResult(np.ones(sum(step.plan.num_sampled), dtype=np.int32), None, [0], [0])

    async def news(self) -> None:
        await asyncio.Event().wait()

    async def lost(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


def timer_engines(step_s: float, num_rows: int, max_listeners: int) -> tuple[Engines, Engine]:
    """Returns engines whose only group has so many rows, and as many sequences may wait."""
    engines = Engines(Listeners(max_listeners))
    waiting = WaitingQueue(max_sequences=num_rows, max_tokens=10**9)
    executors = TimerExecutors(step_s, num_rows)
    return engines, drive_group(engines, executors, waiting, min_chunk_tokens=512, retry_delay_s=1)


class BareServicer(GenerationServicer):
    """Answers Generate with one and the same message, as often as tokens are asked for."""

    def __init__(self, engines: Engines, step_s: float) -> None:
        super().__init__(engines, None, "bench")
        self._step_s = step_s
        self._num_open = 0
        self._step = asyncio.get_running_loop().create_future()

    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: Any
    ) -> None:
        message = pb.GenerateResponse(request_id="0" * 32, token_ids=[1])
        self._num_open += 1
        if self._num_open == 1:
            self._next_step()
        for _ in range(request.stop.max_tokens):
            await self._step
            await context.write(message)
        self._num_open -= 1

    def _next_step(self) -> None:
        self._step.set_result(None)
        loop = asyncio.get_running_loop()
        self._step = loop.create_future()
        if self._num_open:
            loop.call_later(self._step_s, self._next_step)


async def measure(method: str, num_streams: int, num_tokens: int, step_ms: float) -> None:
    """Serves one run of the clients and prints its line."""
    engines, engine = timer_engines(step_ms / 1e3, num_streams, max_listeners=num_streams + 1)
    servicer = GenerationServicer(engines, None, "bench")
    if method == "bare":
        servicer = BareServicer(engines, step_ms / 1e3)
    service = generation(servicer)
    load = (f"--method={method}", f"--streams={num_streams}", f"--tokens={num_tokens}")
    async with (
        listening(service, options=PortLimits().server_options()) as address,
        stepping(engine),
        python_module("tests.bench.router.bench_front", f"--client={address}", *load) as lines,
    ):
        await lines.readline()  # the first token has come
        cpu_s, started = time.process_time(), time.perf_counter()
        line = await lines.readline()
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - started
    if not line:
        raise RuntimeError("the client process failed; its error is above")
    got = json.loads(line)
    print(
        f"{method:<14}{num_streams:>8}{num_streams / step_ms * 1e3:>10.0f}"
        f"{got['tokens'] / wall_s:>10.0f}{got['messages'] / wall_s:>12.0f}"
        f"{cpu_s / got['tokens'] * 1e6:>12.1f}{cpu_s / got['messages'] * 1e6:>12.1f}"
        f"{cpu_s / wall_s:>8.2f}",
        flush=True,
    )


# ---- the client process


class Counts:
    """What came; says so when the first token did."""

    def __init__(self) -> None:
        self.messages = self.tokens = 0

    def add(self, num_tokens: int) -> None:
        if self.messages == 0:
            print("first", flush=True)
        self.messages += 1
        self.tokens += num_tokens


def make_message(number: int, num_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1 + number % 900] * PROMPT_LEN),
        stop=pb.StopConditions(max_tokens=num_tokens),
    )


def open_channels(address: str) -> list[grpc.aio.Channel]:
    """Returns channels with a connection of its own each."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    return [grpc.aio.insecure_channel(address, options) for _ in range(NUM_CHANNELS)]


async def run_client(address: str, method: str, num_streams: int, num_tokens: int) -> None:
    channels = open_channels(address)
    stubs = [GenerationServiceStub(channel) for channel in channels]
    counts = Counts()
    messages = [make_message(number, num_tokens) for number in range(num_streams)]

    async def generate(number: int) -> None:
        async for response in stubs[number % NUM_CHANNELS].Generate(messages[number]):
            counts.add(len(response.token_ids))

    async def starts() -> AsyncIterator[pb.GenerateManyRequest]:
        for tag, message in enumerate(messages):
            yield pb.GenerateManyRequest(tag=tag, start=message)

    if method != "GenerateMany":
        await asyncio.gather(*(generate(number) for number in range(num_streams)))
    else:
        async for response in stubs[0].GenerateMany(starts()):
            in_finishes = sum(len(r.response.token_ids) for r in response.responses)
            counts.add(len(response.token_ids) // 4 + in_finishes)
    print(json.dumps({"messages": counts.messages, "tokens": counts.tokens}), flush=True)
    for channel in channels:
        await channel.close()


async def run(streams: tuple[int, ...], num_tokens: int, step_ms: float) -> None:
    print(f"public API, a step every {step_ms:g} ms, {num_tokens} tokens per stream")
    print(
        f"{'':<14}{'streams':>8}{'offered':>10}{'tokens/s':>10}{'messages/s':>12}"
        f"{'CPU us/tok':>12}{'CPU us/msg':>12}{'cores':>8}"
    )
    for num_streams in streams:
        for method in ("bare", "Generate", "GenerateMany"):
            await measure(method, num_streams, num_tokens, step_ms)


def main() -> None:
    quiet()
    roles = {"client": str, "method": str}  # of the other process
    options = parse_options(__doc__, streams=(64, 256), tokens=100, step_ms=20.0, **roles)
    if options.client:
        uvloop.run(run_client(options.client, options.method, options.streams[0], options.tokens))
    else:
        uvloop.run(run(options.streams, options.tokens, options.step_ms))


if __name__ == "__main__":
    main()
