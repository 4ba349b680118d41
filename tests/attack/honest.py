"""Honest client: calls that must all be answered, and be answered right, while others attack."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.client import CallFailed, Client, Options

PROMPT = "\n17+25="
PLAIN: Options = {"max_tokens": 8, "ignore_eos": True}
STOPPED: Options = {**PLAIN, "stop_strings": ("never",)}
SCORED: Options = {**PLAIN, "logprobs": True, "top_logprobs": 2}
KINDS = (PLAIN, STOPPED, SCORED)
TIMEOUT_S = 15.0
PROBE_EVERY_S = 0.2


@dataclass
class Calls:
    """What came of the honest calls.

    Attributes:
        seconds: Of each Generate.
        num_calls: Those and health checks, each of which is on a connection of its own.
        failures: Of calls that failed, or were answered with other tokens than the first.
    """

    seconds: list[float] = field(default_factory=list)
    num_calls: int = 0
    failures: list[str] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)

    def ms(self, share: float) -> float:
        """Returns the time in which this share of the calls was answered."""
        return 1e3 * sorted(self.seconds)[int(share * (len(self.seconds) - 1))]

    async def generate(self, client: Client, options: Options) -> None:
        self.num_calls += 1
        begun = time.monotonic()
        try:
            answer = await client.complete(PROMPT, timeout_s=TIMEOUT_S, **options)
        except CallFailed as error:
            self.failures.append(f"Generate: {error}")
            await asyncio.sleep(0.05)
        else:
            self._tokens = self._tokens or answer.token_ids
            if answer.token_ids != self._tokens:
                self.failures.append(f"Generate: {answer.token_ids} for {self._tokens}")
        self.seconds.append(time.monotonic() - begun)

    async def probe(self, address: str) -> None:
        """Asks on a new connection, as load balancers and new clients do."""
        self.num_calls += 1
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(address, options) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                self.failures.append(f"Check: {error.code().name}: {error.details()}")


@asynccontextmanager
async def honest_calls(
    address: str,
    token: Path | None = None,
    kinds: Sequence[Options] = KINDS,
    pause_s: float = 0.0,
) -> AsyncIterator[Calls]:
    """Makes calls of these kinds within the block, and waits for the last ones at its end.

    Args:
        pause_s: Between two calls of a kind.
    """
    calls, is_over = Calls(), asyncio.Event()

    async def ask(client: Client, options: Options) -> None:
        while not is_over.is_set():
            await calls.generate(client, options)
            await asyncio.sleep(pause_s)

    async def probe() -> None:
        while not is_over.is_set():
            await calls.probe(address)
            await asyncio.sleep(PROBE_EVERY_S)

    async with Client(address, token=token) as client, asyncio.TaskGroup() as tasks:
        for options in kinds:
            tasks.create_task(ask(client, options))
        tasks.create_task(probe())
        try:
            yield calls
        finally:
            is_over.set()
