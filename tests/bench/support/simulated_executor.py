"""An executor process without a model: its real server, in front of a device that only takes its time.

    python -m tests.bench.support.simulated_executor [--step-ms 5] [--launch-ms 0.5] [--rows 256]

A step's launch keeps the host busy for `launch-ms`. The step starts then, or when the step before
it has ended, and takes `step-ms`. Every sampling sequence gets token 1. Prints its address and the number of
its process once it listens and, at the end of each Step stream, one line of JSON: for each step the device's
time since the end of the one before it, and how much of that it was idle, in microseconds.
"""

import json
import os
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import numpy as np
import uvloop

from executor.batch.placement import Loaded, Placement
from executor.parallel.epochs import JoinAttempt
from executor.server.service import ExecutorServicer
from protos.executor.step_checksums import agreement_crc32, part_crc32
from protos.executor.v1 import executor_pb2 as pb
from protos.transport.port import ServiceConfig
from tests.bench.support.options import parse_options
from tests.bench.support.quiet import quiet
from tests.router.support.peers import description

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
VOCAB_SIZE = 1000


class Launched(NamedTuple):
    """A step, and when the device will have run it."""

    request: pb.StepRequest
    end_s: float
    is_done: bool = False


class SimulatedWorker:
    """The only member of its group. Its times are exact, whatever its threads' wake-ups are."""

    has_peers = has_deferred = waits_for_peers = False
    experts = None

    def __init__(self, step_s: float, launch_s: float) -> None:
        self._step_s = step_s
        self._launch_s = launch_s
        self.reset()

    def reset(self) -> None:
        self.periods_us: list[float] = []
        self.idle_us: list[float] = []
        self._end_s: float | None = None

    def launch(self, request: pb.StepRequest) -> Launched:
        launched_s = time.perf_counter() + self._launch_s
        while (now_s := time.perf_counter()) < launched_s:
            pass
        start_s = now_s if self._end_s is None else max(now_s, self._end_s)
        end_s = start_s + self._step_s
        if self._end_s is not None:
            self.periods_us.append((end_s - self._end_s) * 1e6)
            self.idle_us.append((start_s - self._end_s) * 1e6)
        self._end_s = end_s
        return Launched(request, end_s)

    def finish(self, pending: Launched) -> pb.StepResponse:
        if (left_s := pending.end_s - time.perf_counter()) > 0:
            time.sleep(left_s)
        return _answer(pending.request)

    def run_deferred(self) -> None:
        pass

    def join(
        self,
        epoch: int,
        store_address: str,
        attempt: JoinAttempt,
        placement: Placement | None = None,
    ) -> Loaded:
        self.reset()
        return Loaded()

    def leave(self) -> None:
        pass


class SimulatedExecutor(ExecutorServicer):
    """Reports what its device did, at the end of each stream."""

    def __init__(self, worker: SimulatedWorker) -> None:
        super().__init__(is_first=False, store_host="127.0.0.1", open_store=_open_none)
        self._simulated = worker

    async def Step(  # type: ignore[override]
        self, requests: AsyncIterator[pb.StepRequest], context: Any
    ) -> None:
        try:
            await super().Step(requests, context)
        finally:
            worker = self._simulated
            report = {"periods_us": worker.periods_us, "idle_us": worker.idle_us}
            print(json.dumps(report), flush=True)


def _open_none(secret: bytes) -> Any:
    raise AssertionError("a group of one needs no store")


def describe(num_rows: int) -> pb.DescribeResponse:
    return description(
        dp_rank=0,
        dp_size=1,
        model=pb.ModelInfo(
            vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE
        ),
        num_kv_blocks=1 + num_rows * (MAX_MODEL_LEN // BLOCK_SIZE),
        num_rows=num_rows,
        budget=pb.TokenBudget(
            max_num_batched_tokens=8192, max_num_seqs=num_rows, max_num_logits=2 * num_rows
        ),
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


async def serve(step_ms: float, launch_ms: float, num_rows: int) -> None:
    worker = SimulatedWorker(step_ms / 1e3, launch_ms / 1e3)
    servicer = SimulatedExecutor(worker)
    server, port = await servicer.start(ServiceConfig(listen="127.0.0.1:0"))
    await servicer.load(lambda: (worker, describe(num_rows)))
    print(f"127.0.0.1:{port} {os.getpid()}", flush=True)
    await server.wait_for_termination()


def main() -> None:
    quiet()
    options = parse_options(__doc__, step_ms=5.0, launch_ms=0.5, rows=256)
    uvloop.run(serve(options.step_ms, options.launch_ms, options.rows))


if __name__ == "__main__":
    main()
