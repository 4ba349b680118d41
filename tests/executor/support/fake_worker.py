"""A worker without a model, and what tests of the server around it wait with."""

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from executor.batch.placement import Loaded, Placement
from executor.parallel.epochs import JoinAttempt
from protos.executor.v1 import executor_pb2 as pb

TIMEOUT_S = 60.0


class FakeWorker:
    """Answers with the step's number as its token. Steps wait for ``gate``.

    As a GPU's, it ``is_ahead``: a step waits after it was launched, in ``finish``.

    Where it trails, each step leaves something to be run behind its answer, which waits for
    ``deferred_gate``. Leaves are counted from the last join on.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.begun: list[int] = []
        self.num_joins = self.num_leaves = 0
        self.has_peers = self.waits_for_peers = False
        self.form_group: Callable[[int, str, int, bytes], Any] | None = (
            None  # what a join waits for
        )
        self.failure: Exception | None = None
        self.is_ahead = False
        self.unread_failure: Exception | None = None
        self.num_unread = self.num_unread_at_join = 0
        self.servicer: Any = None  # who has it
        self.trails = self.has_deferred = False
        self.deferred_gate = threading.Event()
        self.deferred_gate.set()
        self.deferred_failure: Exception | None = None
        self.num_deferred_run = 0

    def run_deferred(self) -> None:
        if not self.has_deferred:
            return
        self.has_deferred = False
        assert self.deferred_gate.wait(TIMEOUT_S)
        self.num_deferred_run += 1
        if self.deferred_failure is not None:
            raise self.deferred_failure

    def launch(self, request: pb.StepRequest) -> Any:
        self.has_deferred = self.trails
        self.begun.append(request.step_id)
        assert self.is_ahead or self.gate.wait(TIMEOUT_S)
        if self.failure is not None:
            raise self.failure
        self.num_unread += 1
        return SimpleNamespace(request=request, is_done=not self.is_ahead)

    def finish(self, pending: Any) -> pb.StepResponse:
        assert self.gate.wait(TIMEOUT_S)
        self.num_unread -= 1
        if self.unread_failure is not None:
            raise self.unread_failure
        return pb.StepResponse(epoch=pending.request.epoch, step_id=pending.request.step_id)

    experts = None  # it is not elastic

    def join(
        self,
        epoch: int,
        store_address: str,
        attempt: JoinAttempt,
        placement: Placement | None = None,
    ) -> Loaded:
        self.num_joins += 1
        self.num_unread_at_join = self.num_unread
        self.num_leaves = 0
        if self.form_group is not None:
            attempt.form(self.form_group, "store.test:1")
        if self.failure is not None:
            raise self.failure
        return Loaded()

    def leave(self) -> None:
        self.num_leaves += 1


class HeldGroups:
    """Groups of an epoch, whose members come when a test says so."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_form = threading.Event()
        self.is_closed = threading.Event()
        self.num_closed = 0

    def form(self, epoch: int, host: str, port: int, secret: bytes) -> "HeldGroups":
        self.begun.set()
        assert self.may_form.wait(TIMEOUT_S)
        return self

    def close(self) -> None:
        self.num_closed += 1
        self.is_closed.set()


async def read_ids(call: Any, count: int) -> list[int]:
    return [(await call.read()).step_id for _ in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0)


async def held_step(worker: FakeWorker, client: Any) -> Any:
    """Returns a stream of epoch 1 whose step the worker has begun; its gate must open to end it."""
    await client.join(1)
    worker.gate.clear()
    call = await client.begin(1)
    await until(lambda: worker.begun == [1])
    return call
