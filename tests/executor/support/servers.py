"""Executors behind real sockets on loopback, all in this process. For tests."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from executor.build.executor import build_worker
from executor.config import ExecutorConfig
from executor.metrics import Measures
from executor.parallel.rendezvous import StorePort, open_store
from executor.server.service import ExecutorServicer
from protos.executor.v1 import executor_pb2 as pb
from protos.executor.v1 import executor_pb2_grpc
from protos.transport.error_details import error_details
from protos.transport.port import ServiceConfig
from tests.executor.support.ranks.ranks import HOST, SECRET
from tests.executor.support.steps import idle_part, step


class Client:
    """A router's view of one executor."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.executor = executor_pb2_grpc.ExecutorServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        self.reflection = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def join(self, epoch: int, store_address: str = f"{HOST}:1") -> None:
        await self.executor.Join(join_request(epoch, store_address))

    async def prepare(self, epoch: int) -> str:
        """Prepares an epoch. Returns where its store is."""
        request = pb.PrepareRequest(epoch=epoch, secret=SECRET)
        return (await self.executor.Prepare(request)).store_address

    async def joins_and_runs(self, epoch: int) -> bool:
        """Joins an epoch. Returns whether its first step is answered."""
        await self.join(epoch)
        return [response.step_id async for response in self.steps(1, epoch=epoch)] == [1]

    async def status(self, name: str) -> int:
        request = health_pb2.HealthCheckRequest(service=name)
        return (await self.health.Check(request)).status

    def steps(self, *step_ids: int, epoch: int = 1) -> Any:
        """Opens a stream that sends these steps and then half-closes."""
        return self.executor.Step(iter([request(step_id, epoch) for step_id in step_ids]))

    async def begin(self, *step_ids: int, epoch: int = 1) -> Any:
        """Opens a stream that sends these steps and stays open."""
        call = self.executor.Step()
        for step_id in step_ids:
            await call.write(request(step_id, epoch))
        return call


def join_request(epoch: int, store_address: str = f"{HOST}:1") -> pb.JoinRequest:
    return pb.JoinRequest(
        epoch=epoch, store_address=store_address, secret=SECRET, peer_hosts=[HOST]
    )


def request(step_id: int, epoch: int = 1) -> pb.StepRequest:
    """Returns a step in which nothing runs."""
    return step(step_id, idle_part(), num_tokens=[0], epoch=epoch)


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    """Yields a client that has its connection.

    Made while a group forms, it would be taken for one of the group's: this process has both ends.
    """
    async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
        await channel.channel_ready()
        yield Client(channel)


@asynccontextmanager
async def serving(
    build: Callable[[], Any] | None,
    *,
    dp_rank: int = 0,
    measures: Measures | None = None,
    stores: StorePort | None = None,
) -> AsyncIterator[tuple[ExecutorServicer, Client]]:
    servicer = ExecutorServicer(
        is_first=dp_rank == 0,
        store_host=HOST,
        open_store=stores.open if stores else lambda secret: open_store(HOST, secret),
        store_address=stores.address if stores else "",
        measures=measures,
    )
    server, port = await servicer.start(ServiceConfig(listen=f"{HOST}:0"))
    if build is not None:
        await servicer.load(build)
    try:
        async with connected(port) as client:
            yield servicer, client
    finally:
        await servicer.stop()
        await server.stop(None)


async def error_of(call: Any) -> tuple[str, str]:
    """Returns reason and message with which a call, or the next answer of a stream, fails."""
    has_stream = isinstance(call, grpc.aio.StreamStreamCall | grpc.aio.UnaryStreamCall)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if has_stream else call)
    return error_details(caught.value).reason, caught.value.details() or ""


async def reason_of(call: Any) -> str:
    """Returns the reason with which a call, or the next answer of a stream, fails."""
    return (await error_of(call))[0]


def config_of(
    path: Path, rank: int, dp_size: int, attn_tp_size: int = 1, **settings: Any
) -> ExecutorConfig:
    """Returns the settings of the executor of a world rank."""
    sizes = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_kv_blocks": 64}
    return ExecutorConfig(
        model=path,
        listen=f"{HOST}:0",
        dp_rank=rank // attn_tp_size,
        dp_size=dp_size,
        attn_tp_rank=rank % attn_tp_size,
        attn_tp_size=attn_tp_size,
        **{**sizes, **settings},
    )


async def form_group(clients: list[Client], epoch: int) -> None:
    address = await clients[0].prepare(epoch)
    await asyncio.gather(*(client.join(epoch, address) for client in clients))


@asynccontextmanager
async def group_of(
    path: Path, dp_size: int, attn_tp_size: int = 1, **settings: Any
) -> AsyncIterator[list[Client]]:
    """Runs executors in this process, each with its own server and compute thread."""
    async with AsyncExitStack() as stack:
        clients = []
        for rank in range(dp_size * attn_tp_size):
            config = config_of(path, rank, dp_size, attn_tp_size, **settings)
            _, client = await stack.enter_async_context(
                serving(lambda config=config: build_worker(config), dp_rank=rank)
            )
            clients.append(client)
        yield clients
