"""An executor that is told to stop must end, even if the step that it waits for does not."""

import asyncio
from typing import Any

import pytest

from executor import __main__ as executor_main
from executor.__main__ import _serve_until, _stop
from executor.server.supervisor import STUCK

TEST_TIMEOUT_S = 120.0


class Servicer:
    """Stops once its step has ended."""

    epoch = 1
    is_driven = False

    def __init__(self) -> None:
        self.step_ended = asyncio.Event()
        self.has_left = False

    async def stop(self) -> None:
        await self.step_ended.wait()
        self.has_left = True


class Server:
    has_stopped = False

    async def stop(self, grace: float) -> None:
        self.has_stopped = True


@pytest.fixture
def servicer() -> Any:
    return Servicer()


@pytest.mark.parametrize("end", ["step", "second signal", "time"])
async def test_it_waits_for_the_step_in_flight_unless_a_second_signal_or_its_time_ends_the_wait(
    servicer: Any, end: str
):
    server, at_once = Server(), asyncio.Event()
    timeout_s = 0.01 if end == "time" else 600.0
    stopping = asyncio.create_task(_stop(servicer, server, timeout_s, at_once))
    await asyncio.sleep(0)
    assert not server.has_stopped
    if end == "step":
        servicer.step_ended.set()
    elif end == "second signal":
        at_once.set()
    await asyncio.wait_for(stopping, TEST_TIMEOUT_S)
    assert server.has_stopped
    assert servicer.has_left == (end == "step")


@pytest.mark.parametrize("way", ["in time", "second signal"])
async def test_one_that_a_router_drove_answers_for_a_moment_more(
    servicer: Any, monkeypatch: pytest.MonkeyPatch, way: str
):
    """The router may ask why its stream ended. A second signal ends that, too."""
    monkeypatch.setattr(executor_main, "FAREWELL_S", 0.01 if way == "in time" else 600.0)
    server, at_once = Server(), asyncio.Event()
    servicer.is_driven = True
    stopping = asyncio.create_task(_stop(servicer, server, 600.0, at_once))
    servicer.step_ended.set()
    if way == "second signal":
        for _ in range(20):  # one that did not wait would have stopped by then
            await asyncio.sleep(0)
        assert servicer.has_left
        assert not server.has_stopped
        at_once.set()
    await asyncio.wait_for(stopping, TEST_TIMEOUT_S)
    assert servicer.has_left
    assert server.has_stopped


async def test_what_goes_wrong_is_not_swallowed(servicer: Any):
    async def fail() -> None:
        raise RuntimeError("mine")

    servicer.stop = fail
    with pytest.raises(RuntimeError, match="mine"):
        await _stop(servicer, Server(), 600.0, asyncio.Event())


@pytest.mark.parametrize(("event", "exit_code"), [(0, 0), (1, STUCK)])
async def test_an_executor_serves_until_it_is_told_to_stop_or_is_stuck(event: int, exit_code: int):
    ends = [asyncio.Event(), asyncio.Event()]
    serving = asyncio.create_task(_serve_until(*ends))
    await asyncio.sleep(0)
    assert not serving.done()
    ends[event].set()
    assert await asyncio.wait_for(serving, TEST_TIMEOUT_S) == exit_code
