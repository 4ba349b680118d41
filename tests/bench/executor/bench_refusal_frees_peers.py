"""Time from one executor's refusal of a step until all others have left their group.

    python -m tests.bench.executor.bench_refusal_frees_peers [--sizes 2,4] [--rounds 20]

The router's ExecutorGroup and Scheduler, in this process, drive the demo model on that many executor
processes over TCP on loopback. Each round forms the group, runs some steps of one sequence per
executor, and sends one executor a step with a row that does not exist. By then the others run the
same step and wait for it in a collective. All clocks are the machine's.

    refused   the executor's worker raises InvalidStep
    heard     the router has an ExecutorLost that names the executor
    left      the last of the others has closed its groups, and its compute thread is free again

Exits with 1 if the median of `left` is above 50 ms at any size. Executors share the cores with one
another and with the router: on a machine that is busy otherwise, look at the least.
"""

import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from executor.build.executor import build_worker
from executor.parallel.rendezvous import open_store
from executor.server.service import ExecutorServicer
from protos.executor.v1 import executor_pb2 as pb
from protos.transport.port import ServiceConfig
from router.errors import ExecutorLost
from router.executors.group import ExecutorGroup
from router.scheduling.step import InFlight
from tests.bench.support.options import parse_options
from tests.bench.support.quiet import quiet
from tests.bench.support.routing import scheduler_of
from tests.executor.support.servers import config_of
from tests.router.support.peers import group_of
from tests.support.paths import DEMO_MODEL

HOST = "127.0.0.1"
REQUIRED_MS = 50.0
STEPS_BEFORE = 6
MISSING_ROW = (99).to_bytes(4, "little")

Events = list[tuple[str, float]]


def run_executor(rank: int, dp_size: int, pipe: Connection) -> None:
    """Serves one executor; answers each message on the pipe with what happened since the last."""
    quiet()
    torch.set_num_threads(1)
    events: Events = []

    def build() -> Any:
        config = config_of(DEMO_MODEL, rank, dp_size, block_size=16, num_threads=1)
        worker, description = build_worker(config)
        noted: Any = worker
        noted.execute = partial(note_failure, events, worker.execute)
        noted.leave = partial(note_leave, events, worker.leave)
        return worker, description

    async def serve() -> None:
        servicer = ExecutorServicer(
            is_first=rank == 0,
            store_host=HOST,
            open_store=lambda secret: open_store(HOST, secret),
        )
        server, port = await servicer.start(ServiceConfig(listen=f"{HOST}:0"))
        await servicer.load(build)
        pipe.send(port)
        while await asyncio.to_thread(pipe.recv):
            pipe.send(events)
            events.clear()
        await servicer.stop()
        await server.stop(None)

    asyncio.run(serve())


def note_failure(
    events: Events, execute: Callable[[pb.StepRequest], pb.StepResponse], request: pb.StepRequest
) -> pb.StepResponse:
    try:
        return execute(request)
    except Exception as error:
        events.append((type(error).__name__, time.perf_counter()))
        raise


def note_leave(events: Events, leave: Callable[[], None]) -> None:
    leave()
    events.append(("left", time.perf_counter()))


async def run_round(group: ExecutorGroup, pipes: list[Connection]) -> tuple[float, float]:
    """Returns the milliseconds from the refusal until the router has heard of it and all have left."""
    shape = (await group.form()).shape
    scheduler = scheduler_of(shape, max_tokens=100, num_requests=shape.dp_size)
    for pipe in pipes:
        take_events(pipe)  # those of joining
    refusing = len(pipes) - 1
    try:
        for number in range(STEPS_BEFORE + 1):
            plan = scheduler.schedule()
            assert plan is not None
            if number == STEPS_BEFORE:
                corrupt(group, refusing)
            group.send(step := InFlight(plan, 0.0, 0.0))
            scheduler.commit(plan, await group.receive(step))
        raise AssertionError("no executor refused the last step")
    except ExecutorLost as error:
        heard, problem = time.perf_counter(), str(error)
    assert f"dp_rank {refusing}" in problem, problem
    assert "INVALID_STEP" in problem, problem
    await asyncio.sleep(0.5)  # until the last has left; clocks tell when
    by_rank = [take_events(pipe) for pipe in pipes]
    refused = dict(by_rank.pop(refusing))["InvalidStep"]
    ends = []
    for events in by_rank:
        first = dict(reversed(events))  # one whose step had not begun has no PeerLost
        assert "left" in first, events
        assert first.keys() <= {"PeerLost", "left"}, events
        ends += first.values()
    return (heard - refused) * 1e3, (max(ends) - refused) * 1e3


def corrupt(group: ExecutorGroup, rank: int) -> None:
    """Has the next step of a rank name a row that its executor does not have."""
    stream: Any = group._streams[rank]
    send = stream.send

    def send_wrong(data: bytes) -> None:
        request = pb.StepRequest.FromString(data)
        request.ranks[0].sequences.rows = MISSING_ROW
        send(request.SerializeToString())

    stream.send = send_wrong


def take_events(pipe: Connection) -> Events:
    pipe.send(True)
    events: Events = pipe.recv()
    return events


async def measure(num_executors: int, num_rounds: int) -> list[tuple[float, float]]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(num_executors):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=run_executor, args=(rank, num_executors, theirs), daemon=True
        )
        process.start()
        pipes.append(ours)
        processes.append(process)
    addresses = [f"{HOST}:{await asyncio.to_thread(pipe.recv)}" for pipe in pipes]
    group = group_of(addresses)
    rounds = [await run_round(group, pipes) for _ in range(num_rounds)]
    await group.close()
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(False)
        process.join()
    return rounds


def main() -> None:
    quiet()
    options = parse_options(__doc__, sizes=(2, 4), rounds=20)
    is_met = True
    print(f"{'executors':<11}{'heard ms':>10}{'left ms':>10}{'min':>8}{'max':>8}   (medians first)")
    for size in options.sizes:
        heard, left = zip(*asyncio.run(measure(size, options.rounds)), strict=True)
        median = statistics.median(left)
        print(
            f"{size:<11}{statistics.median(heard):>10.1f}{median:>10.1f}{min(left):>8.1f}"
            f"{max(left):>8.1f}",
            flush=True,
        )
        is_met = is_met and median <= REQUIRED_MS
    print(f"required: at most {REQUIRED_MS:g} ms: {'met' if is_met else 'NOT MET'}")
    sys.exit(0 if is_met else 1)


if __name__ == "__main__":
    main()
