"""The published retry policy: what a router refuses while it stops must end up at another one."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from router.api.health import SERVICE, Health
from router.client import Cancelled, Client, Rejected, Unavailable
from router.client.client import HEALTH_CONFIG, SERVICE_CONFIG
from router.errors import Moved
from tests.router.support.fake_engines import MODEL, FakeEngines, serve

README = (Path(__file__).parents[3] / "protos" / "README.md").read_text()


class Pair:
    """Two routers at one name, the first of which stops."""

    def __init__(self) -> None:
        model = replace(MODEL, max_model_len=1 << 20)
        self.routers = [FakeEngines(model, max_listeners=64) for _ in range(2)]
        self.healths = [Health(), Health()]
        for engines, health in zip(self.routers, self.healths, strict=True):
            engines.echoes = True
            health.set_ready(True)


@asynccontextmanager
async def serving(pair: Pair) -> AsyncIterator[str]:
    [one, other], [one_health, other_health] = pair.routers, pair.healths
    async with serve(one, health=one_health) as first, serve(other, health=other_health) as second:
        yield f"ipv4:{first},{second}"


async def complete_some(client: Client, count: int = 20) -> None:
    for _ in range(count):
        assert (await client.complete([5])).token_ids == [5]


async def test_what_one_router_refuses_another_one_takes():
    pair = Pair()
    async with serving(pair) as target, Client(target) as client:
        pair.routers[0].shut_down()
        await complete_some(client)
        assert pair.routers[1].arrivals.qsize() == 20


async def test_a_client_that_watches_health_asks_only_those_that_are_ready():
    pair = Pair()
    async with serving(pair) as target, Client(target, watches_health=True) as client:
        first = pair.routers[0].arrivals
        while not all(engines.arrivals.qsize() for engines in pair.routers):
            await complete_some(client, 1)
        pair.healths[0].set_ready(False)
        asked_before = 0
        while first.qsize() != asked_before:  # until the client has heard of it
            asked_before = first.qsize()
            await complete_some(client)
        pair.healths[0].set_ready(True)
        while first.qsize() == asked_before:
            await complete_some(client, 1)


async def test_a_router_that_is_not_ready_still_tells_its_status_and_health():
    pair = Pair()
    for health in pair.healths:
        health.set_ready(False)
    async with serving(pair) as target, Client(target, watches_health=True) as client:
        assert await client.get_status() == []
        assert await client.health("liveness")
        with pytest.raises(Unavailable):
            await client.complete([5])


async def test_a_request_is_cancelled_by_its_id_where_another_router_stands_by():
    """Also while its own is not ready, as when it has lost an executor."""
    pair = Pair()
    [driver, standby], [health, standbys_health] = pair.routers, pair.healths
    driver.echoes = False
    standby.refusal = Moved()
    standbys_health.set_ready(False)
    async with serving(pair) as target, Client(target) as client:
        running = [asyncio.create_task(client.complete([5])) for _ in range(6)]
        ids = [(await driver.arrivals.get()).request_id for _ in running]
        health.set_ready(False)
        for request_id in ids:
            await client.cancel(request_id)
        for ended in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(ended, Cancelled)
        for request_id in ids[:2]:
            with pytest.raises(Rejected) as caught:
                await client.cancel(request_id)
            assert caught.value.reason == "REQUEST_NOT_FOUND"


async def test_a_prompt_larger_than_grpc_keeps_by_itself_is_sent_again():
    pair = Pair()
    async with serving(pair) as target, Client(target) as client:
        pair.routers[0].shut_down()
        prompt = [7] * 600_000  # as many bytes on the wire; gRPC would keep 256 KiB
        for _ in range(4):
            assert (await client.complete(prompt, max_tokens=1)).token_ids == prompt  # an echo


async def test_a_stream_of_many_that_meets_a_stopping_router_is_opened_at_another():
    pair = Pair()
    async with serving(pair) as target, Client(target) as client:
        pair.routers[0].shut_down()
        for _ in range(6):
            async with client.many() as many:
                assert (await many.complete([5])).token_ids == [5]


async def test_a_request_that_is_refused_on_a_stream_goes_to_another_router():
    pair = Pair()
    for engines in pair.routers:
        engines.echoes = False
    async with serving(pair) as target, Client(target) as client, client.many() as many:
        running = asyncio.create_task(many.complete([5]))
        while not any(engines.live for engines in pair.routers):
            await asyncio.sleep(0)
        [stopping, other] = sorted(pair.routers, key=lambda engines: not engines.live)
        [sequence] = (await stopping.arrivals.get()).sequences
        stopping.shut_down()
        other.echoes = True

        assert (await many.complete([6])).token_ids == [6]
        assert other.arrivals.qsize() == 1
        deltas = [delta async for delta in many.generate([7])]
        assert [delta.token_ids for delta in deltas] == [[7]]
        stopping.give(sequence, [10])
        stopping.finish(sequence)
        assert (await running).token_ids == [10]  # where it began


async def test_a_request_that_nobody_takes_fails_in_the_end():
    pair = Pair()
    async with serving(pair) as target, Client(target) as client, client.many() as many:
        for engines in pair.routers:
            engines.shut_down()
        for asking in (many.complete([5]), anext(many.generate([5]))):
            with pytest.raises(Unavailable) as caught:
                await asking
            assert caught.value.reason == "SHUTTING_DOWN"


def test_the_readme_publishes_the_policy_of_the_client_library():
    [published] = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    assert json.loads(published) == SERVICE_CONFIG
    assert HEALTH_CONFIG == {"healthCheckConfig": {"serviceName": SERVICE}}
    assert json.dumps(HEALTH_CONFIG)[1:-1] in README
