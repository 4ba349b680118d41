"""Lease of this executor: which router drives it, and whether another one may.

Join, Prepare      beats, steps            its streams end, or 600 ms of silence
──┼──────────────────┼───────────────────────┼──────▶
  └────── others: HELD ──────────────────────┘ the first that asks
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from executor.errors import Held
from protos.executor.lease import is_held

STANDBY_S = 1.0  # without a beat, after which a router is not taken for one that stands by


class Driver(NamedTuple):
    """The router that last took this executor. See the message Driver."""

    router_id: bytes
    silent_ms: int
    has_stream: bool

    @property
    def is_held(self) -> bool:
        """Whether it keeps other routers out."""
        return is_held(self.silent_ms, has_stream=self.has_stream)


class Lease:
    """The router that last took this executor, and the signs of its life.

    Args:
        clock: Seconds, from anywhere on.
        on_change: Called when there is another driver, when it may be gone, and when a router begins or
            ceases to stand by, unless it has only fallen silent. It gets the id of the router that needs no
            news of the change, since that one's own Step stream has ended; None if there is none.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[bytes | None], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._on_change = on_change
        self._router_id: bytes | None = None
        self._sign_time = 0.0
        self._is_taken = False  # and no stream of it was seen since
        self._has_steps = False
        self._attending: Counter[bytes] = Counter()  # calls by router
        self._driving: Counter[bytes] = Counter()  # of these, on which it says that it drives
        self._beat_times: dict[bytes, float] = {}  # of its last beat, on any of them

    @property
    def driver(self) -> Driver | None:
        """The router that drives this executor, or last did; None before the first."""
        router_id = self._router_id
        if router_id is None:
            return None
        beats = self._driving[router_id] > 0
        silent_s = 0.0 if self._has_steps and not beats else self._clock() - self._sign_time
        return Driver(
            router_id=router_id,
            silent_ms=round(1000 * silent_s),
            has_stream=beats or self._has_steps or self._is_taken,
        )

    @property
    def num_standbys(self) -> int:
        """Routers that attend this executor, beat, and do not drive it."""
        since = self._clock() - STANDBY_S
        return sum(
            time > since and not self._driving[each] for each, time in self._beat_times.items()
        )

    def check(self, router_id: bytes) -> None:
        """Does nothing if a router may take this executor.

        Raises:
            Held: Another one drives it.
        """
        driver = self.driver
        if driver is not None and driver.router_id != router_id and driver.is_held:
            name = driver.router_id.hex()
            raise Held(
                f"router {name or 'of an older release'} drives this executor, and was heard of "
                f"{driver.silent_ms} ms ago",
                metadata={"router_id": name},
            )

    def take(self, router_id: bytes) -> None:
        """Notes that a router has taken this executor."""
        is_new, self._router_id = self._router_id != router_id, router_id
        self._sign_time = self._clock()
        if is_new:
            self._is_taken, self._has_steps = not self._driving[router_id], False
            self._on_change(None)

    def note_steps(self, *, is_open: bool) -> None:
        """Notes that the driver's Step stream was opened or has ended."""
        self._has_steps = is_open
        self.note_step()
        if not is_open:
            self._on_change(self._router_id)

    def note_step(self) -> None:
        """Notes a step of the driver."""
        self._sign_time = self._clock()
        self._is_taken = False

    def attend(self, router_id: bytes) -> None:
        """Notes that a router attends this executor."""
        self._attending[router_id] += 1
        self._on_change(None)

    def note_beat(self, router_id: bytes, *, is_driver: bool, was_driver: bool) -> None:
        """Notes a beat.

        Args:
            router_id: Of the router.
            is_driver: Whether it says that it drives.
            was_driver: Whether it did in the call's beat before.
        """
        self._driving[router_id] += is_driver - was_driver
        self._beat_times[router_id] = self._clock()
        if router_id == self._router_id:
            self._sign_time = self._clock()
            self._is_taken &= not is_driver
        if is_driver != was_driver:
            self._on_change(None)

    def leave(self, router_id: bytes, *, was_driver: bool) -> None:
        """Notes that a router's call has ended."""
        self._driving[router_id] -= was_driver
        self._attending[router_id] -= 1
        if not self._attending[router_id]:
            del self._attending[router_id], self._driving[router_id], self._beat_times[router_id]
        self._on_change(None)
