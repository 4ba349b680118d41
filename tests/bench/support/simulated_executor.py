"""An executor process without a model: real gRPC in front, a device that only takes its time.

    python -m tests.bench.support.simulated_executor [--step-ms 5] [--rows 256]

A step starts when it has arrived and the step before it has ended, and takes `step-ms`. Every
sampling sequence gets token 1. Prints its address once it listens and, at the end of each Step
stream, one line of JSON: for each step the device's time since the end of the one before it, and
how much of that it was idle, in microseconds.
"""

import asyncio
import json
import queue
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import uvloop

from protos.executor.step_checksums import agreement_crc32, part_crc32
from protos.executor.v1 import executor_pb2 as pb
from protos.executor.v1 import executor_pb2_grpc
from tests.bench.support.options import parse_options
from tests.router.support.peers import description

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
VOCAB_SIZE = 1000


class Device(threading.Thread):
    """Runs steps one after another; its times are exact, whatever the thread's own wake-ups are."""

    def __init__(self, step_s: float, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True)
        self.periods_us: list[float] = []
        self.idle_us: list[float] = []
        self._step_s = step_s
        self._loop = loop
        self._steps: queue.SimpleQueue[tuple[float, asyncio.Future[None]]] = queue.SimpleQueue()
        self._end: float | None = None

    def launch(self) -> asyncio.Future[None]:
        """Queues a step that arrives now. Returns when it ends."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._steps.put((time.perf_counter(), done))
        return done

    def run(self) -> None:
        while True:
            arrival, done = self._steps.get()
            start = arrival if self._end is None else max(arrival, self._end)
            end = start + self._step_s
            if self._end is not None:
                self.periods_us.append((end - self._end) * 1e6)
                self.idle_us.append((start - self._end) * 1e6)
            self._end = end
            if (left := end - time.perf_counter()) > 0:
                time.sleep(left)
            self._loop.call_soon_threadsafe(_set_done, done)


def _set_done(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


class SimulatedExecutor(executor_pb2_grpc.ExecutorServiceServicer):
    """The only member of its group."""

    def __init__(self, step_s: float, num_rows: int) -> None:
        self._step_s = step_s
        self._num_rows = num_rows
        self._epoch = 0

    async def Describe(self, request: Any, context: Any) -> pb.DescribeResponse:
        num_blocks = 1 + self._num_rows * (MAX_MODEL_LEN // BLOCK_SIZE)
        return description(
            dp_rank=0,
            dp_size=1,
            model=pb.ModelInfo(
                vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE
            ),
            num_kv_blocks=num_blocks,
            num_rows=self._num_rows,
            budget=pb.TokenBudget(
                max_num_batched_tokens=8192,
                max_num_seqs=self._num_rows,
                max_num_logits=2 * self._num_rows,
            ),
            epoch=self._epoch,
        )

    async def Prepare(self, request: pb.PrepareRequest, context: Any) -> pb.PrepareResponse:
        self._epoch = request.epoch
        return pb.PrepareResponse(store_address="127.0.0.1:1")

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinResponse:
        return pb.JoinResponse()

    async def Step(
        self, requests: AsyncIterator[pb.StepRequest], context: Any
    ) -> AsyncIterator[pb.StepResponse]:
        device = Device(self._step_s, asyncio.get_running_loop())
        device.start()
        answers: asyncio.Queue[tuple[pb.StepRequest, asyncio.Future[None]] | None] = asyncio.Queue()

        async def read() -> None:
            async for request in requests:
                answers.put_nowait((request, device.launch()))
            answers.put_nowait(None)

        reading = asyncio.create_task(read())
        try:
            while (pending := await answers.get()) is not None:
                request, done = pending
                await done
                yield _answer(request)
        finally:
            reading.cancel()
            print(
                json.dumps({"periods_us": device.periods_us, "idle_us": device.idle_us}), flush=True
            )


def _answer(request: pb.StepRequest) -> pb.StepResponse:
    [part] = request.ranks
    columns = part.sequences
    num_sampled = columns.samples.count(1) if columns.samples else len(columns.rows) // 4
    tokens = np.ones(num_sampled, dtype="<i4").tobytes()
    return pb.StepResponse(
        epoch=request.epoch,
        step_id=request.step_id,
        agreement_crc32=agreement_crc32(request),
        part_crc32=part_crc32(request),
        ranks=[pb.RankResult(dp_rank=part.dp_rank, next_token_ids=tokens)],
    )


async def serve(step_ms: float, num_rows: int) -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    servicer = SimulatedExecutor(step_ms / 1e3, num_rows)
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


def main() -> None:
    options = parse_options(__doc__, step_ms=5.0, rows=256)
    uvloop.run(serve(options.step_ms, options.rows))


if __name__ == "__main__":
    main()
