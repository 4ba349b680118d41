"""Target of attacks: the ports of a running stack, and what an attacker knows of them."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.attack.frames import Connection, call_headers
from tests.support.listening import listening_at

CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
GENERATE = "/lockstep.serving.v1.GenerationService/Generate"


@dataclass(frozen=True)
class Target:
    """A stack under attack.

    Attributes:
        public: host:port of the router's callers.
        health: Of its probes.
        metrics: Of its metrics.
        envoy_metrics: Of those of Envoy, if callers come that way.
        executors: Of the executors.
        pids: Of the executors' processes.
        log_dir: Where the processes' logs are.
        tokens: Of two callers of the router, if it asks for them.
        executor_token: That the router has for the executors; strangers have none.
        size: Share of a whole attack to run.
        hold_s: How long what was sent is held open.
    """

    public: str
    health: str
    metrics: str
    executors: tuple[str, ...]
    pids: tuple[int, ...]
    log_dir: Path
    tokens: tuple[str, ...]
    executor_token: str | None
    envoy_metrics: str | None = None
    size: float = 1.0
    hold_s: float = 1.5

    def headers(self, path: str) -> bytes:
        """Returns the headers of a call, by another caller than the honest one."""
        return call_headers(path, *self.tokens[-1:])

    def inner_ports(self) -> Iterator[tuple[str, int]]:
        """Yields the ports on which executors listen for one another."""
        known = {int(address.rpartition(":")[2]) for address in self.executors}
        for pid in self.pids:
            for host, port in sorted(listening_at(pid)):
                if port not in known:
                    yield host, port

    def share(self, count: int) -> int:
        return max(1, round(count * self.size))

    def hold(self, *connections: Connection) -> None:
        """Keeps connections open for a while."""
        end = time.monotonic() + self.hold_s
        while time.monotonic() < end and not all(c.is_closed for c in connections):
            time.sleep(0.05)


class Outcome(NamedTuple):
    """What an attack did, as people read it.

    Attributes:
        sent: And what came of it.
        fault: What it gained that it must not; "" if nothing.
        details: What stands below the table.
    """

    sent: str
    fault: str = ""
    details: tuple[str, ...] = ()


Attack = Callable[[Target], Outcome]
"""Attacks a target; blocks."""
