"""If these fail, executors that are placed at Join do not answer as one that has everything does."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from executor.model.weights import Loader
from protos.executor.v1 import executor_pb2 as pb
from tests.executor.support.fake_worker import TIMEOUT_S
from tests.executor.support.ranks.elastic import (
    describe,
    elastic_executors,
    form,
    map_for,
    placement_of,
    resident,
)
from tests.executor.support.ranks.generated import generate
from tests.executor.support.servers import (
    Client,
    error_of,
    form_group,
    group_of,
    join_request,
    reason_of,
)

PROMPTS = [[5, 17, 33, 2, 90, 41, 8, 8, 60], [7, 3, 44], [61, 9, 9, 12, 80]]
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def alone(tiny_checkpoint: Path) -> list[list[int]]:
    """What one executor that has all experts from the start answers to each prompt."""

    async def answers() -> list[list[int]]:
        tokens = []
        async with group_of(tiny_checkpoint, 1) as clients:
            for epoch, prompt in enumerate(PROMPTS, start=1):
                await form_group(clients, epoch)
                tokens += await generate(clients, [prompt], NUM_TOKENS, epoch)
        return tokens

    return asyncio.run(answers())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"moe_a2a": "torch"},
        {"moe_a2a": "torch", "moe_a2a_extend": "all-to-all"},
    ],
    ids=str,
)
@pytest.mark.parametrize("replays", [False, True], ids=["eager", "graphs"])
async def test_a_group_shrinks_and_grows_and_each_member_loads_only_the_difference(
    tiny_checkpoint: Path, alone: list[list[int]], settings: dict[str, Any], replays: bool
):
    """8 experts are 3 + 3 + 2, 4 + 4 and 8. The second executor is lost first, then the first."""
    async with elastic_executors(tiny_checkpoint, 4, 3, min_dp_size=1, **settings) as (
        first,
        second,
        third,
        spare,
    ):
        epochs = [
            ([first, second, third], [3, 3, 2]),
            ([first, third], [1, 2]),
            ([third], [4]),
            ([third, second], [0, 3]),
            ([third, second, spare], [0, 0, 2]),
            ([spare, second, third], [0, 0, 0]),
        ]
        for epoch, (members, loads) in enumerate(epochs, start=1):
            assert await form(members, epoch) == loads, epoch
            prompts = PROMPTS[: len(members)]
            assert (
                await generate(members, prompts, NUM_TOKENS, epoch, replays=replays)
                == (alone[: len(members)])
            )


async def test_executors_that_share_attention_are_placed_in_pairs(
    tiny_checkpoint: Path, alone: list[list[int]]
):
    async with elastic_executors(tiny_checkpoint, 4, 2, 2) as clients:
        for epoch, members in enumerate((clients, clients[2:], clients), start=1):
            loads = await form(members, epoch, attn_tp_size=2)
            assert loads == ([2, 2, 2, 2] if epoch == 1 else [2, 2] if epoch == 2 else [0] * 4)
            prompts = PROMPTS[: len(members) // 2]
            tokens = await generate(members, prompts, NUM_TOKENS, epoch, attn_tp_size=2)
            assert tokens == alone[: len(prompts)]


async def test_an_elastic_executor_is_a_spare_until_it_is_placed(tiny_checkpoint: Path):
    async with elastic_executors(tiny_checkpoint, 2, 3) as (client, other):
        description = await describe(client)
        assert description.capability == pb.Capability(
            min_dp_size=2, max_dp_size=3, max_expert_slots=4
        )
        assert (description.coordinates.dp_size, description.coordinates.ep_size) == (0, 0)
        assert resident(description) == [-1] * 4
        assert await client.status("readiness") == health_pb2.HealthCheckResponse.SERVING
        assert await reason_of(client.executor.Join(join_request(1))) == "NOT_PLACED"
        slot_map = await map_for([client, other])
        request = join_request(1)
        request.placement.CopyFrom(placement_of(slot_map, 2))
        assert await reason_of(client.executor.Join(request)) == "INVALID_PLACEMENT"
        await form([other, client], 1)
        placed = (await describe(client)).coordinates
        assert placed == placement_of(slot_map, 1).coordinates


async def test_experts_that_are_staged_need_not_be_loaded_and_those_in_use_stay(
    tiny_checkpoint: Path, alone: list[list[int]]
):
    async with elastic_executors(tiny_checkpoint, 3, 2, min_dp_size=1) as (one, two, spare):
        await form([one, two], 1)
        bytes_per_expert = (await describe(one)).model.bytes_per_expert
        for client, rank, missing in ((one, 0, 0), (spare, 1, 4)):
            placement = placement_of(await map_for([one, two]), rank)
            assert await stage(client, placement) == missing * bytes_per_expert
        shrunk = placement_of(await map_for([one]), 0)
        assert await stage(one, shrunk) == 4 * bytes_per_expert
        swapped = placement_of(tuple(reversed(await map_for([one, two]))), 0)
        reason, problem = await error_of(one.executor.Stage(pb.StageRequest(placement=swapped)))
        assert (reason, "slot 0 is to have expert 4" in problem) == ("NO_ROOM", True)
        assert await generate([one, two], PROMPTS[:2], NUM_TOKENS, 1) == alone[:2]
        assert await form([one, spare], 2) == [0, 0]
        assert await generate([one, spare], PROMPTS[:2], NUM_TOKENS, 2) == alone[:2]
        assert await form([one], 3) == [0]
        assert await generate([one], PROMPTS[:1], NUM_TOKENS, 3) == alone[:1]


async def test_who_was_alone_in_its_group_is_a_spare_when_the_stream_has_ended(
    tiny_checkpoint: Path, alone: list[list[int]]
):
    async with elastic_executors(tiny_checkpoint, 1, 1) as [client]:
        await form([client], 1)
        swapped = placement_of((tuple(range(8))[::-1],), 0)
        staging = client.executor.Stage(pb.StageRequest(placement=swapped))
        assert await reason_of(staging) == "NO_ROOM"
        assert await generate([client], PROMPTS[:1], NUM_TOKENS, 1) == alone[:1]
        assert await reason_of(client.steps(1)) == "NOT_JOINED"
        assert await stage(client, swapped) > 0
        assert await form([client], 2) == [0]
        assert await generate([client], PROMPTS[:1], NUM_TOKENS, 2) == alone[:1]


async def test_who_joined_a_group_that_did_not_form_is_a_spare_when_an_empty_stream_has_ended(
    tiny_checkpoint: Path,
):
    async with elastic_executors(tiny_checkpoint, 2, 2) as clients:
        await form(clients, 1)
        swapped = placement_of(tuple(reversed(await map_for(clients))), 0)
        staging = clients[0].executor.Stage(pb.StageRequest(placement=swapped))
        assert await reason_of(staging) == "NO_ROOM"
        assert [answer async for answer in clients[0].steps()] == []
        assert await stage(clients[0], swapped) > 0


@pytest.mark.parametrize("way", ["the call", "a Stage", "a Join"])
async def test_staging_ends_with_its_call_or_for_what_is_newer(tiny_checkpoint: Path, way: str):
    async with elastic_executors(tiny_checkpoint, 1, 1) as [client]:
        placement = placement_of(await map_for([client]), 0)
        slow = pb.StageRequest(placement=placement, max_bytes_per_s=1)
        call = client.executor.Stage(slow)
        first = await call.read()
        assert first.bytes_done < first.bytes_total
        if way == "the call":
            call.cancel()
        if way != "a Join":
            assert await stage(client, placement) > 0
        if way == "a Join":
            assert (await form([client], 1))[0] > 0
        if way != "the call":
            last = first
            while answer := await call.read():
                last = answer
            assert last.bytes_done < last.bytes_total
        assert sorted(resident(await describe(client))) == [*range(8)]


async def test_staging_that_comes_while_a_join_is_under_way_does_not_hold_it_up(
    tiny_checkpoint: Path,
):
    """As that of another router, which does not know of the Join."""
    async with elastic_executors(tiny_checkpoint, 2, 2) as clients:
        slot_map = await map_for(clients)
        address = await clients[0].prepare(1)
        requests = [join_request(2, address) for _ in clients]
        for rank, request in enumerate(requests):
            request.placement.CopyFrom(placement_of(slot_map, rank))
        first = clients[0].executor.Join(requests[0])
        while (await describe(clients[0])).epoch < 2:
            pass
        slow = pb.StageRequest(placement=requests[0].placement, max_bytes_per_s=1)
        call = clients[0].executor.Stage(slow)
        told = await call.read()
        assert told.bytes_done < told.bytes_total
        second = clients[1].executor.Join(requests[1])
        async with asyncio.timeout(TIMEOUT_S):
            assert (await first).loaded_bytes == told.bytes_total
            await second
        assert await call.read() is grpc.aio.EOF


async def test_experts_that_cannot_be_read_fail_the_join_and_not_the_next(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, alone: list[list[int]]
):
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("the disk is gone")

    async with elastic_executors(tiny_checkpoint, 1, 1) as [client]:
        placement = placement_of(await map_for([client]), 0)
        request = join_request(1)
        request.placement.CopyFrom(placement)
        with monkeypatch.context() as failing:
            failing.setattr(Loader, "fill", fail)
            reason, problem = await error_of(client.executor.Join(request))
            assert (reason, "the disk is gone" in problem) == ("LOAD_FAILED", True)
            staging = client.executor.Stage(pb.StageRequest(placement=placement))
            assert [await staging.read(), await reason_of(staging)][1] == "LOAD_FAILED"
        await form([client], 2)
        assert await generate([client], PROMPTS[:1], NUM_TOKENS, 2) == alone[:1]


async def stage(client: Client, placement: pb.Placement) -> int:
    """Stages a share. Returns the bytes that were missing."""
    call = client.executor.Stage(pb.StageRequest(placement=placement))
    *_, last = [answer async for answer in call]
    assert last.bytes_done == last.bytes_total
    return last.bytes_total
