"""The answers that an open Step call is owed, and how it ends."""

import asyncio
from typing import Self

from protos.executor.v1 import executor_pb2 as pb
from protos.transport.errors import RpcError

# Steps taken off a stream and not answered yet. A router sends 2; more only wait.
MAX_UNANSWERED_STEPS = 8

# Errors are returned, not raised: nobody awaits the answers of a call that was cancelled. None
# is the answer of a step that was dropped.
Answer = pb.StepResponse | RpcError | None


class StepStream:
    """One open Step call: the answers it is owed, in order.

    An answer is an awaitable response or error; None after the last one.
    """

    def __init__(self) -> None:
        self.answers: asyncio.Queue[asyncio.Future[Answer] | None] = asyncio.Queue()
        self.unanswered = asyncio.Semaphore(MAX_UNANSWERED_STEPS)
        self.has_ended = False  # steps that have not begun by then are dropped
        self.is_over = asyncio.Event()  # the call itself: the router has been told how it ended
        self.is_stray = False  # it is of another epoch than the one that it found here
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_over.set()

    def end(self, error: RpcError) -> None:
        """Answers what has begun, then ends the call with ``error``."""
        self.has_ended = True
        self.refuse(error)

    def refuse(self, error: RpcError) -> None:
        """Answers all steps that came, then ends the call with ``error``."""
        ending: asyncio.Future[Answer] = self._loop.create_future()
        ending.set_result(error)
        self.answers.put_nowait(ending)

    def refuse_soon(self, error: RpcError) -> None:
        """Does so from another thread."""
        self._loop.call_soon_threadsafe(self.refuse, error)
