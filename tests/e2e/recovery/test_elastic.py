"""A group goes on without executors that stay away, and its answers do not change by it."""

import asyncio
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from deploy.local.demo_tasks import solved_lines
from deploy.local.launch import STOP_TIMEOUT_S, LocalStack
from router.client import Client, Unavailable
from tests.e2e.conftest import FLOAT32_ARGS, PATIENT_STEPS
from tests.e2e.support.logs import logged
from tests.e2e.support.stacks import first_member, served
from tests.e2e.support.streams import long_stream

PROMPTS = [solved_lines(number, 60 * number) + "\n17+25=" for number in range(1, 7)]


async def answers(client: Client, num_prompts: int = len(PROMPTS)) -> list[list[int]]:
    prompts = PROMPTS[:num_prompts]
    return list(await asyncio.gather(*[long_stream(client, prompt=p) for p in prompts]))


async def test_three_executors_become_one_and_three_again_and_answer_as_one(tmp_path: Path):
    async with served(None, dp_size=1, executor_args=FLOAT32_ARGS) as (_, client):
        expected = await answers(client)
    settings = {
        "dp_size": 3,
        "min_dp_size": 1,
        "executor_args": FLOAT32_ARGS,
        "router_args": (*PATIENT_STEPS, "--grow-after-s", "0.5"),
    }
    async with served(tmp_path, **settings) as (stack, client):
        is_over = asyncio.Event()

        async def ask_on() -> int:
            num_right = 0
            while not is_over.is_set():
                assert await answers(client) == expected
                num_right += 1
            return num_right

        asking = asyncio.create_task(ask_on())
        for number in (0, 2):
            # Who is in two losses is a suspect, for whom an epoch may end before a spare has loaded.
            assert await answers(client) == expected
            await stack.executors[number].kill()
            formed = await logged(stack.router, "group_ready", 2 + number // 2)
        assert [record["dp_size"] for record in formed] == [3, 2, 1]
        for number in (0, 2):
            await asyncio.sleep(0.3)
            await stack.start_again(number)
            formed = await logged(stack.router, "group_ready", 4 + number // 2)
        assert [record["dp_size"] for record in formed] == [3, 2, 1, 2, 3]
        grown = await logged(stack.router, "group_placed", 5)
        assert [record["change"] for record in grown[3:]] == ["grow", "grow"]
        assert [record["loads"] for record in grown[3:]] == [[0, 0], [0, 0, 0]], "staged before"
        is_over.set()
        assert await asking > 0


async def test_a_spare_takes_the_place_of_an_executor_that_never_comes_back(tmp_path: Path):
    settings = {
        "dp_size": 2,
        "min_dp_size": 2,
        "spares": 1,
        "executor_args": FLOAT32_ARGS,
        "router_args": PATIENT_STEPS,
    }
    async with served(tmp_path, **settings) as (stack, client):
        expected = await answers(client)
        asking = asyncio.create_task(answers(client))
        await asyncio.sleep(0.2)
        await (await first_member(stack)).kill()
        assert await asking == expected
        before, after = await logged(stack.router, "group_placed", 2)
        assert after["change"] == "replace"
        [spare] = set(stack.executor_addresses).difference(before["executors"])
        assert after["executors"] == [before["executors"][1], spare]


async def driver_of(stack: LocalStack, dp_size: int) -> int:
    """Returns which router drives a group of so many ranks, once another one stands by."""
    async with AsyncExitStack() as exits:
        clients = [await exits.enter_async_context(Client(each)) for each in stack.addresses]
        while True:
            for number, client in enumerate(clients):
                with suppress(Unavailable):
                    status = await client.get_router_status()
                    [group] = status.groups
                    if status.is_ready and group.num_standbys and len(group.ranks) == dp_size:
                        return number
            await asyncio.sleep(0.01)


async def test_a_standby_router_takes_an_elastic_group_of_any_size_and_has_it_grow_back(
    tmp_path: Path,
):
    settings = {
        "dp_size": 3,
        "min_dp_size": 1,
        "num_routers": 2,
        "executor_args": FLOAT32_ARGS,
        "router_args": (*PATIENT_STEPS, "--grow-after-s", "0.5", "--first-form-wait-s", "5"),
    }
    async with served(tmp_path, **settings) as (stack, client):
        expected = await answers(client, 2)
        is_over = asyncio.Event()

        async def ask_on() -> int:
            num_right = 0
            while not is_over.is_set():
                assert await answers(client, 2) == expected
                num_right += 1
            return num_right

        asking = asyncio.create_task(ask_on())
        driver = await driver_of(stack, 3)
        await asyncio.sleep(0.3)
        await asyncio.gather(stack.routers[driver].kill(), stack.executors[0].kill())
        await stack.start_router_again(driver)
        other = await driver_of(stack, 2)
        assert other != driver
        await stack.executors[1].kill()
        assert await driver_of(stack, 1) == other
        assert await stack.routers[other].stop(STOP_TIMEOUT_S) == 0
        await stack.start_router_again(other)
        assert await driver_of(stack, 1) == driver
        for number, dp_size in ((0, 2), (1, 3)):
            await stack.start_again(number)
            assert await driver_of(stack, dp_size) == driver
        is_over.set()
        assert await asking > 0
