"""Elastic executors in this process, placed as a router places them. For tests."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from executor.build.executor import build_worker
from protos.executor.placement import GHOST, SlotMap, num_slots_for, place_experts
from protos.executor.v1 import executor_pb2 as pb
from tests.executor.support.servers import Client, config_of, join_request, serving


def placement_of(slot_map: SlotMap, rank: int, attn_tp_size: int = 1) -> pb.Placement:
    """Returns the place of one of the executors that a map of experts is for."""
    return pb.Placement(
        coordinates=pb.Coordinates(
            dp_rank=rank // attn_tp_size,
            dp_size=len(slot_map) // attn_tp_size,
            attn_tp_rank=rank % attn_tp_size,
            attn_tp_size=attn_tp_size,
            ep_rank=rank,
            ep_size=len(slot_map),
        ),
        expert_slots=len(slot_map[0]),
        expert_of_slot=np.array(slot_map, "<i4").tobytes(),
    )


async def describe(client: Client) -> pb.DescribeResponse:
    description: pb.DescribeResponse = await client.executor.Describe(pb.DescribeRequest())
    return description


def resident(description: pb.DescribeResponse) -> list[int]:
    return np.frombuffer(description.resident_experts, "<i4").tolist()


async def map_for(members: Sequence[Client]) -> SlotMap:
    """Returns where a group's experts are to be, such that as few as possible are loaded."""
    found = [await describe(client) for client in members]
    num_experts = found[0].model.num_experts
    return place_experts(
        {rank: resident(each) for rank, each in enumerate(found)},
        range(len(members)),
        num_slots=num_slots_for(num_experts, len(members)),
        num_experts=num_experts,
    )


async def form(members: Sequence[Client], epoch: int, attn_tp_size: int = 1) -> list[int]:
    """Has executors join an epoch, in order of their ranks. Returns how many experts each loaded."""
    slot_map = await map_for(members)
    address = await members[0].prepare(epoch)

    async def join(rank: int, client: Client) -> int:
        request = join_request(epoch, address)
        request.placement.CopyFrom(placement_of(slot_map, rank, attn_tp_size))
        bytes_per_expert = (await describe(client)).model.bytes_per_expert
        answer = await client.executor.Join(request)
        assert answer.loaded_bytes % bytes_per_expert == 0
        loaded: int = answer.loaded_bytes // bytes_per_expert
        held = resident(await describe(client))[: len(slot_map[0])]
        wanted = slot_map[rank]
        assert [h for h, w in zip(held, wanted, strict=True) if w != GHOST] == [
            w for w in wanted if w != GHOST
        ]
        return loaded

    return await asyncio.gather(*(join(rank, client) for rank, client in enumerate(members)))


@asynccontextmanager
async def elastic_executors(
    path: Path, count: int, max_dp_size: int, attn_tp_size: int = 1, **settings: Any
) -> AsyncIterator[list[Client]]:
    """Runs elastic executors in this process; that of number i is for attn_tp_rank i % attn_tp_size."""
    async with AsyncExitStack() as stack:
        clients = []
        for number in range(count):
            config = config_of(
                path,
                number % attn_tp_size,
                1,
                attn_tp_size,
                max_dp_size=max_dp_size,
                **settings,
            )
            serve = serving(lambda config=config: build_worker(config), dp_rank=0)
            clients.append((await stack.enter_async_context(serve))[1])
        yield clients
