"""If these fail, KV that was kept over a loss and is wrong goes unnoticed, or right KV is dropped."""

import asyncio
import random
from typing import Any

import pytest

from protos.settings import check_settings
from protos.transport.interceptors import Caller
from router.engine import kept_check
from router.engine.engines import Engines
from router.engine.settings import EngineSettings
from router.requests.request import Listeners
from router.requests.waiting_queue import WaitingQueue
from tests.router.support import fake_executors
from tests.router.support.fake_executors import FakeExecutors
from tests.router.support.requests import make_request
from tests.router.support.running_engines import drive_group, stepping
from tests.router.support.stepper import assert_right, make_shape
from tests.support.virtual_clock import on_virtual_clock

NUM_REQUESTS = 4


async def lose_once(
    share: float, *, is_stale: bool, num_rows: int = 8, caller: Caller = ()
) -> tuple[Any, list[Any], int]:
    """Runs requests over one loss after which all KV is there, or is not what it was.

    Returns the engine's measures, the requests, and how many sequences ran from their first token on.
    """
    engines = Engines(Listeners(max_listeners=4))
    executors = FakeExecutors(make_shape(dp_size=2, rows_per_rank=num_rows), random.Random(0))
    waiting = WaitingQueue(max_sequences=20, max_tokens=1000)
    engine = drive_group(engines, executors, waiting, verify_kept_kv=share)
    async with stepping(engine):
        listener = engines.listeners.open()
        requests = [
            make_request(
                [1 + number, *range(1, 12)], listener, 30, request_id=str(number), caller=caller
            )
            for number in range(NUM_REQUESTS)
        ]
        for request in requests:
            engines.submit(request)
        while min(request.sequences[0].num_output_tokens for request in requests) < 3:
            await asyncio.sleep(0.01)
        executors.kill(0.1)
        for rank in executors._ranks:
            rank.kv += is_stale
        while any(request.is_live for request in requests) or waiting or engine.num_running:
            await asyncio.sleep(0.1)
    batches = [batch for plan in executors.plans for batch in plan.batches]
    num_from_first = sum(int((batch.num_computed_tokens == 0).sum()) for batch in batches)
    return engine.measures, requests, num_from_first


@pytest.fixture(autouse=True)
def nobody_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_executors, "DEAD_SHARE", 0.0)


@on_virtual_clock
async def test_kv_that_is_right_is_kept() -> None:
    measures, requests, num_from_first = await lose_once(1.0, is_stale=False)
    assert measures.kept_kv.checks == {"equal": NUM_REQUESTS, "differs": 0}
    assert measures.totals().losses["lost"] == 1
    assert measures.totals().num_recomputed_tokens == {"kept": 0, "lost": 0}
    assert num_from_first == 2 * NUM_REQUESTS  # at first, and as checks
    assert_right(*requests)


@on_virtual_clock
async def test_a_check_takes_no_callers_place() -> None:
    """Where callers are told apart, and all rows run."""
    measures, requests, _ = await lose_once(1.0, is_stale=False, num_rows=2, caller=("alice",))
    assert sum(measures.kept_kv.checks.values()) > 0
    assert [rank.preemptions for rank in measures.totals().ranks] == [0, 0]
    assert not measures.flow_counts(), "there is still one flow only"
    assert_right(*requests)


@on_virtual_clock
async def test_kv_that_is_wrong_is_dropped_and_the_group_formed_again_without_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_check, "MAX_DIFFERENCE", 0.0)  # what the fakes have by chance is less
    measures, requests, num_from_first = await lose_once(1.0, is_stale=True)
    assert measures.kept_kv.checks["differs"] > 0
    assert measures.totals().faults["stale_kv"] == 1
    assert measures.totals().losses["lost"] == 2
    assert num_from_first == 3 * NUM_REQUESTS  # at first, as checks, and again
    assert [request.sequences[0].error for request in requests] == [None] * NUM_REQUESTS


@on_virtual_clock
async def test_without_a_share_nothing_is_checked() -> None:
    measures, _, num_from_first = await lose_once(0.0, is_stale=True)
    assert measures.kept_kv.checks == {"equal": 0, "differs": 0}
    assert num_from_first == NUM_REQUESTS


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_is_between_0_and_1(share: float) -> None:
    with pytest.raises(ValueError, match=r"verify_kept_kv=.*need 0 to 1"):
        check_settings(EngineSettings(verify_kept_kv=share))
