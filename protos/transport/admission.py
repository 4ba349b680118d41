"""Admission of calls to a port: how many are open, and how long their first messages take.

A call that has sent its headers holds memory here, whether or not a message follows, and gRPC takes
a message of any announced length into memory before a handler sees it. So calls of every kind are
counted, and of each connection a few first messages are read at once: others stay with the sender
beyond the 64 KiB that gRPC takes of a stream that nobody reads.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection
from typing import Any

import grpc
import structlog

from protos.transport.errors import OnRefused, RpcError
from protos.transport.limits import PortLimits

log = structlog.stdlib.get_logger(__name__)

WARNING_INTERVAL_S = 60.0
NUM_SHARES = 8  # a method has one of them, unless it may have all calls
MAX_READS = 8  # first messages that are read at once on one connection
HURRIED_S = 2.0  # for each of them, while others wait for their turn


class TooManyCalls(RpcError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "TOO_MANY_CALLS"
    retry_delay_s = 1.0


class FirstMessageLate(RpcError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "FIRST_MESSAGE_LATE"


class Refusals:
    """Counts refused calls, and warns of each reason once a minute, with a caller's address.

    Args:
        on_refused: Called with the reason of each.
    """

    def __init__(self, on_refused: OnRefused = lambda reason: None) -> None:
        self._on_refused = on_refused
        self._num_unsaid = Counter[str]()
        self._said: dict[str, float] = {}

    def count(self, reason: str) -> None:
        """Counts one that a caller's mistake explains."""
        self._on_refused(reason)

    def add(self, reason: str, context: Any) -> None:
        """Counts one, of which a warning tells; `context` is its call's."""
        self._on_refused(reason)
        self._num_unsaid[reason] += 1
        now = time.monotonic()
        if now - self._said.get(reason, -WARNING_INTERVAL_S) >= WARNING_INTERVAL_S:
            self._said[reason] = now
            num_calls = self._num_unsaid.pop(reason)
            log.warning("calls_refused", reason=reason, peer=context.peer(), calls=num_calls)


class Admission:
    """Open calls of one port, and first messages on their way to it.

    Args:
        limits: Of the port.
        unshared: Full names of methods that may have all calls.
        refusals: Where refused ones are counted.
    """

    def __init__(self, limits: PortLimits, unshared: Collection[str], refusals: Refusals) -> None:
        self._max_calls = limits.max_calls
        self._timeout_s = limits.first_message_timeout_s
        self._unshared = unshared
        self._refusals = refusals
        self._num_open = 0
        self._num_open_of = Counter[str]()
        self._reads: dict[str, _Reads] = {}  # by connection, while there are any

    def enter(self, method: str, context: Any) -> None:
        """Counts a call until `leave`.

        Raises:
            TooManyCalls: There are too many; this one is not counted.
        """
        limit = self._max_calls
        if method not in self._unshared:
            limit = max(1, limit // NUM_SHARES)
        if self._num_open >= self._max_calls or self._num_open_of[method] >= limit:
            self._refusals.add(TooManyCalls.reason, context)
            raise TooManyCalls(
                f"as many calls are open as may be: {limit} of {method}, {self._max_calls} of all "
                f"methods; try again, or send many requests on one GenerateMany stream",
                metadata={"limit": limit},
            )
        self._num_open += 1
        self._num_open_of[method] += 1

    def leave(self, method: str) -> None:
        """A counted call has ended."""
        self._num_open -= 1
        self._num_open_of[method] -= 1

    async def first(self, messages: AsyncIterator[Any], context: Any) -> Any:
        """Returns a call's first message.

        Raises:
            FirstMessageLate: It did not come in time.
            StopAsyncIteration: The call ended without one.
        """
        peer = context.peer()
        reads = self._reads.get(peer)
        if reads is None:
            reads = self._reads[peer] = _Reads()
        reads.num_calls += 1
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                await reads.take_turn(deadline, self._timeout_s)
                try:
                    return await anext(messages)
                finally:
                    reads.end_turn(deadline)
        except TimeoutError:
            self._refusals.add(FirstMessageLate.reason, context)
            raise FirstMessageLate(
                f"no whole message within {self._timeout_s:g} s, or {HURRIED_S:g} s while other "
                f"calls of the connection wait: open a call when its message is there"
            ) from None
        finally:
            reads.num_calls -= 1
            if not reads.num_calls:
                del self._reads[peer]


class _Reads:
    """First messages that are read, or are to be, on one connection.

    Attributes:
        num_calls: Calls that have not had theirs.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._num_free = MAX_READS
        self._unhurried: list[asyncio.Timeout] = []  # of messages that are read, oldest first
        # The newest goes first: where a connection brings calls of several clients, one that sends
        # nothing does not hold up the others.
        self._waiting: list[asyncio.Future[None]] = []

    async def take_turn(self, deadline: asyncio.Timeout, timeout_s: float) -> None:
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(timeout_s)
        self._unhurried.append(deadline)

    async def _wait(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        if self._unhurried and not (oldest := self._unhurried.pop(0)).expired():
            begin = (oldest.when() or 0.0) - timeout_s
            oldest.reschedule(max(loop.time(), begin + min(HURRIED_S, timeout_s)))
        turn = loop.create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was this call's turn
                self._pass_on()
            elif turn in self._waiting:  # else it stays below newer ones, perhaps for ever
                self._waiting.remove(turn)
            raise

    def end_turn(self, deadline: asyncio.Timeout) -> None:
        if deadline in self._unhurried:
            self._unhurried.remove(deadline)
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.pop()
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
