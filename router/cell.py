"""Every group that this router drives, and every request that is live in one of them."""

import asyncio
from collections.abc import Sequence as SequenceOf

import numpy as np

from protos.errors import RpcError
from router.engine import Engine
from router.errors import Cancelled, DeadlineExceeded, NotReady, RequestExists, ShuttingDown
from router.model import ServedModel
from router.readers import Reader, Readers
from router.request import Columns, Request, Sequence
from router.status import GroupStatus


class Cell:
    """What the front of the router sees of everything behind it.

    Attributes:
        readers: Where a call opens its reader, and closes it when its sequences have ended.
    """

    def __init__(self, readers: Readers) -> None:
        self.readers = readers
        self._engines: SequenceOf[Engine] = ()
        self._live: dict[str, Request] = {}
        self._is_shutting_down = False

    def drive(self, engines: SequenceOf[Engine]) -> None:
        """Says which engines there are; they report to `on_end`. Called once."""
        self._engines = engines

    @property
    def model(self) -> ServedModel | None:
        """The model served; None until a group has formed."""
        return next((engine.model for engine in self._engines if engine.model), None)

    @property
    def is_ready(self) -> bool:
        """Whether some group can step."""
        return not self._is_shutting_down and any(engine.is_ready for engine in self._engines)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def submit(self, request: Request) -> None:
        """Gives a request to the group that has least to do.

        Raises:
            QueueFull, RequestExists, NotReady, ShuttingDown: It is not taken.
        """
        if self._is_shutting_down:
            raise ShuttingDown("this router is shutting down: send the request to another one")
        if self.model is None:
            raise NotReady("no group of executors has formed yet: try again", retry_delay_s=1.0)
        if request.request_id in self._live:
            raise RequestExists(request.request_id)
        engine = min(
            self._engines,
            key=lambda e: (not e.is_ready, e.num_waiting_tokens, e.num_running, e.group),
        )
        engine.submit(request)
        self._live[request.request_id] = request
        if request.deadline is not None:
            loop = asyncio.get_running_loop()
            request.expiry = loop.call_at(request.deadline, self._expire, request)

    def find(self, request_id: str) -> Request | None:
        """Returns a live request."""
        return self._live.get(request_id)

    def cancel(self, request: Request, error: RpcError | None = None) -> None:
        """Ends what is live of a request; its blocks are free when no step runs them."""
        for sequence in request.sequences:
            if not sequence.is_ended:
                engine = self._engines[sequence.group]
                engine.fail(sequence, error or Cancelled("the request was cancelled"))

    def take_columns(self, reader: Reader) -> Columns:
        """Returns a reader's new tokens of its columnar requests, whichever group they run in."""
        parts = [engine.take_columns(reader) for engine in self._engines]
        if len(parts) == 1:
            return parts[0]
        return Columns(
            np.concatenate([part.tags for part in parts]),
            np.concatenate([part.num_tokens for part in parts]),
            np.concatenate([part.token_ids for part in parts]),
        )

    def status(self) -> list[GroupStatus]:
        return [engine.status() for engine in self._engines]

    def shut_down(self) -> None:
        """Refuses new requests from now on."""
        self._is_shutting_down = True

    def cancel_all(self) -> None:
        """Ends every live request; the router is about to stop."""
        error = ShuttingDown("this router shut down before the request had ended: send it again")
        for request in list(self._live.values()):
            self.cancel(request, error)

    def on_end(self, sequence: Sequence) -> None:
        """Tells the reader, and forgets the request when its last sequence ends."""
        request = sequence.request
        sequence.progress.end_time = asyncio.get_running_loop().time()
        request.reader.ended.append(sequence)
        request.reader.wake()
        if not request.is_live:
            del self._live[request.request_id]
            if request.expiry is not None:
                request.expiry.cancel()

    def _expire(self, request: Request) -> None:
        assert request.deadline is not None
        after_s = request.deadline - request.arrival_time
        self.cancel(
            request,
            DeadlineExceeded(f"the request had not ended {after_s:.3g} s after its arrival"),
        )
