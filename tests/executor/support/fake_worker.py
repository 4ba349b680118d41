"""A worker without a model, and what tests of the server around it wait with."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from executor.parallel.join_attempt import JoinAttempt
from protos.executor.v1 import executor_pb2 as pb


class FakeWorker:
    """Answers with the step's number as its token. Steps wait for ``gate``.

    Where it trails, each step leaves something to be run behind its answer, which waits for
    ``behind_gate``.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.begun: list[int] = []
        self.num_joins = self.num_leaves = 0
        self.has_peers = False
        self.form_group: Callable[[int, str, int], Any] | None = None  # what a join waits for
        self.failure: Exception | None = None
        self.servicer: Any = None  # who has it
        self.trails = self.is_behind = False
        self.behind_gate = threading.Event()
        self.behind_gate.set()
        self.behind_failure: Exception | None = None
        self.num_caught_up = 0

    def catch_up(self) -> None:
        if not self.is_behind:
            return
        self.is_behind = False
        assert self.behind_gate.wait(60)
        self.num_caught_up += 1
        if self.behind_failure is not None:
            raise self.behind_failure

    def execute(self, request: pb.StepRequest) -> pb.StepResponse:
        self.is_behind = self.trails
        self.begun.append(request.step_id)
        assert self.gate.wait(60)
        if self.failure is not None:
            raise self.failure
        return pb.StepResponse(epoch=request.epoch, step_id=request.step_id)

    def join(self, epoch: int, store_address: str, attempt: JoinAttempt) -> None:
        self.num_joins += 1
        if self.form_group is not None:
            attempt.form(self.form_group, "store.test:1")
        if self.failure is not None:
            raise self.failure

    def leave(self) -> None:
        self.num_leaves += 1


async def read_ids(call: Any, count: int) -> list[int]:
    return [(await call.read()).step_id for _ in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)
