"""How a router stops without losing a request.

    SIGTERM ──── delay ────▶ ──────── grace ────────▶ ─── flush ──▶ the server stops
       NOT_SERVING,            new requests: UNAVAILABLE,  what is left ends with UNAVAILABLE,
       requests still taken    running ones finish         behind the tokens that it has

The delay is for load balancers, which take a moment to see NOT_SERVING. UNAVAILABLE is what the
published retry policy sends again, elsewhere. A second SIGTERM or SIGINT ends both waits at once.
"""

import asyncio
import signal
from collections.abc import Callable

import structlog

from router.api.health import Health
from router.engine.engines import Engines

log = structlog.stdlib.get_logger(__name__)

FLUSH_S = 1.0  # for the last messages of calls whose requests were ended
POLL_S = 0.02


class StopSignals:
    """Counts SIGTERM and SIGINT.

    Attributes:
        asked: Set by the first.
        at_once: Set by the second.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def listen(self) -> None:
        """Takes the signals of this process, from now on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.receive)

    def receive(self) -> None:
        (self.at_once if self.asked.is_set() else self.asked).set()


async def drain(
    engines: Engines, health: Health, *, delay_s: float, grace_s: float, at_once: asyncio.Event
) -> None:
    """Returns when no call is open, or those that are had their grace.

    Args:
        delay_s: How long new requests are still taken.
        grace_s: How long running ones may then go on.
        at_once: Set when nobody wants to wait any longer.
    """
    health.set_ready(False)
    log.info("draining", live_requests=engines.num_live, delay_s=delay_s, grace_s=grace_s)
    await _wait(lambda: False, delay_s, at_once)
    engines.shut_down()
    log.info(
        "refusing_requests", live_requests=engines.num_live, open_calls=engines.listeners.num_open
    )
    # Calls, not requests: one whose client reads slowly still has tokens to deliver.
    await _wait(lambda: not engines.listeners.num_open, grace_s, at_once)
    num_cut = engines.num_live
    engines.cancel_all()
    await _wait(lambda: not engines.listeners.num_open, FLUSH_S, asyncio.Event())
    log.info("drained", cut_requests=num_cut, cut_calls=engines.listeners.num_open)


async def _wait(is_done: Callable[[], bool], timeout_s: float, at_once: asyncio.Event) -> None:
    """Returns when it is done, time is over, or nobody wants to wait."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not (is_done() or at_once.is_set()) and (left_s := deadline - loop.time()) > 0:
        await asyncio.sleep(min(left_s, POLL_S))
