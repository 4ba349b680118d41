"""Step stream of an executor: the answers that an open call is owed, and how it ends."""

import asyncio
from concurrent.futures import Future

from protos.executor.v1 import executor_pb2 as pb
from protos.transport.errors import RpcError

# Steps taken off a stream and not answered yet. A router sends 2; more only wait.
MAX_UNANSWERED_STEPS = 8

# Errors are returned, not raised: nobody awaits the answers of a call that was cancelled. None
# is the answer of a step that was dropped.
Answer = pb.StepResponse | RpcError | None
Reading = Future[Answer]  # of a step whose tokens are on their way


class StepStream:
    """One open Step call: the answers it is owed, in order, and how it ends.

    Attributes:
        answers: Awaitable answers; None after the last one.
        has_ended: Whether steps that have not begun are dropped.
        under_way: Numbers of the steps that have begun and not ended.
        is_over: Set when the router has been told how the call ended.
        epoch: The epoch whose group is left when the call is over; None: no group is.
    """

    def __init__(self) -> None:
        self.answers: asyncio.Queue[asyncio.Future[Answer | Reading] | None] = asyncio.Queue()
        self.unanswered = asyncio.Semaphore(MAX_UNANSWERED_STEPS)
        self.has_ended = False
        self.under_way: set[int] = set()
        self.is_over = asyncio.Event()
        self.epoch: int | None = None
        self._loop = asyncio.get_running_loop()

    def end(self, error: RpcError) -> None:
        """Answers what has begun, then ends the call with ``error``."""
        self.has_ended = True
        self.refuse(error)

    def refuse(self, error: RpcError) -> None:
        """Answers all steps that came, then ends the call with ``error``."""
        ending: asyncio.Future[Answer | Reading] = self._loop.create_future()
        ending.set_result(error)
        self.answers.put_nowait(ending)

    def refuse_soon(self, error: RpcError) -> None:
        """Does so from another thread."""
        self._loop.call_soon_threadsafe(self.refuse, error)
