"""Somebody who was given a request's id must find out from the log alone what became of it."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import structlog

from router.engine.engines import Engines
from router.errors import MovedAsPlanned, ShuttingDown
from router.requests.request import Request
from router.telemetry.request_log import RequestLog
from tests.router.support.running_engines import complete, running

IDS = {"group": 0, "epoch": 7, "step_id": 41}


@pytest.fixture
def log() -> RequestLog:
    return RequestLog(lambda group: {**IDS, "group": group})


@pytest.fixture
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    logger = logging.getLogger("router.telemetry.request_log")
    logger.setLevel(request.param)
    yield
    logger.setLevel(logging.NOTSET)


debug = pytest.mark.parametrize("level", [logging.DEBUG], indirect=True)
info = pytest.mark.parametrize("level", [logging.INFO], indirect=True)


@debug
async def test_a_request_has_a_line_at_its_beginning_and_one_at_its_end(
    level: None, log: RequestLog
):
    with structlog.testing.capture_logs() as lines:
        async with running(dp_size=1, observers=[log]) as engines:
            await complete(engines, "mine", [1, 2, 3], max_tokens=5, caller=("search",))
    taken, ended = [line for line in lines if line.get("request_id") == "mine"]
    assert {**taken, **IDS} == taken
    assert {**ended, **IDS} == ended
    assert taken["caller"] == ended["caller"] == ("search",)
    assert (taken["event"], taken["prompt_tokens"], taken["max_tokens"]) == ("request_taken", 3, 5)
    assert (ended["event"], ended["log_level"]) == ("request_ended", "debug")
    [sequence] = ended["sequences"]
    assert (sequence["outcome"], sequence["output_tokens"]) == ("LENGTH", 5)
    times = [sequence[name] for name in ("first_step_s", "first_token_s", "end_s")]
    assert 0 <= times[0] < times[1] < times[2]


async def end_early(engines: Engines, name: str, end: Callable[[Request], object]) -> None:
    completing = asyncio.create_task(complete(engines, name, [1, 2, 3], max_tokens=25))
    while (request := engines.find((), name)) is None:
        await asyncio.sleep(0)
    end(request)
    await completing


@info
async def test_what_a_caller_ended_or_goes_on_is_not_written_unless_asked_for(
    level: None, log: RequestLog
):
    with structlog.testing.capture_logs() as lines:
        async with running(dp_size=1, observers=[log]) as engines:
            await complete(engines, "well", [1, 2, 3], max_tokens=5)
            await end_early(engines, "ill", engines.cancel)
            leave = partial(engines.cancel, error=MovedAsPlanned())
            await end_early(engines, "goes on elsewhere", leave)
    assert [line for line in lines if "request_id" in line] == []


@info
async def test_what_this_router_gave_up_is_always_written(level: None, log: RequestLog):
    with structlog.testing.capture_logs() as lines:
        async with running(dp_size=1, observers=[log]) as engines:
            await end_early(engines, "cut", lambda request: engines.cancel_all())
    [line] = [line for line in lines if line.get("request_id") == "cut"]
    assert (line["event"], line["log_level"]) == ("request_given_up", "info")
    assert line["sequences"][0]["outcome"] == ShuttingDown.reason
    assert {**line, **IDS} == line


async def test_every_observer_is_told_of_every_request():
    class Told:
        def __init__(self) -> None:
            self.seen: list[str] = []

        def on_submit(self, request: Request) -> None:
            self.seen.append(f"+{request.request_id}")

        def on_end(self, request: Request) -> None:
            self.seen.append(f"-{request.request_id}")

    first, second = Told(), Told()
    async with running(dp_size=1, observers=[first, second]) as engines:
        await complete(engines, "a", [1, 2], max_tokens=2)
    assert first.seen == second.seen == ["+a", "-a"]


async def test_a_loss_names_the_requests_whose_steps_it_took():
    with structlog.testing.capture_logs() as lines:
        async with running(dp_size=1, loss_rate=0.2) as engines:
            await complete(engines, "mine", [1, 2, 3], max_tokens=25)
    losses = [line for line in lines if line["event"] == "group_lost"]
    named = [line for line in lines if line["event"] == "steps_lost"]
    assert losses
    for loss, name in zip(losses, named, strict=True):
        assert [loss[key] for key in IDS] == [name[key] for key in IDS]
        assert set(name["request_ids"]) <= {"mine"}
        assert name["requests"] == len(name["request_ids"])
    assert ["mine"] in [line["request_ids"] for line in named]
