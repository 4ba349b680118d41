"""The recent past is what people look at when something has just gone wrong."""

import asyncio
import logging
from dataclasses import replace

import pytest

from protos.serving.v1 import serving_pb2 as pb
from router.engine import engines as engines_module
from router.engine.recent import SHARE_SAMPLES, Events, FlowShares, History
from router.requests.flows import FlowCounts
from router.scheduling.counters import GroupMeasures
from tests.router.support.running_engines import complete, running
from tests.router.support.statuses import rank, ready


def test_an_event_has_what_the_log_says_but_whose_request_it_was() -> None:
    now = 100.0
    events = Events(lambda: now)
    ids = {"group": 1, "epoch": 7, "step_id": 30}
    events.note(logging.WARNING, "group_lost", **ids, problem="10.0.0.7:50061 hangs", steps=2)
    events.note(logging.ERROR, "request_failed", **ids, request_id="order-17")
    now = 101.5
    lost, failed = events.messages()
    assert (lost.name, lost.level, lost.group, lost.epoch) == ("group_lost", "warning", 1, 7)
    assert (lost.problem, lost.details) == ("10.0.0.7:50061 hangs", "steps=2")
    assert lost.age.ToMilliseconds() == 1500
    assert (failed.level, failed.details) == ("error", "")


def test_of_many_events_and_samples_the_last_ones_are_kept() -> None:
    events, history = Events(lambda: 0.0), History()
    for number in range(1000):
        events.note(logging.DEBUG, f"event_{number}")
        history.add(float(number), pb.GroupStatus(num_waiting=number), GroupMeasures().totals())
    assert [e.name for e in events.messages()] == [f"event_{n}" for n in range(968, 1000)]
    assert list(history.message().num_waiting) == list(range(700, 1000))


def test_rates_are_per_second_however_late_a_sample_was() -> None:
    totals, history = GroupMeasures().totals(), History()
    status = ready(rank(0), rank(1), num_waiting=5)
    assert history.message() == pb.History()
    for time, num_tokens in ((0.0, 0), (1.0, 100), (3.0, 500)):
        history.add(time, status, replace(totals, num_output_tokens=num_tokens))
    told = history.message()
    assert list(told.output_tokens_per_s) == [100, 200]
    assert list(told.num_waiting) == [5, 5]
    assert list(told.num_running) == [16, 16]
    assert list(told.num_used_blocks) == [60, 60]


async def test_a_router_tells_its_state_its_last_events_and_its_last_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines_module, "SAMPLE_S", 0.001)
    async with running() as engines:
        sampling = asyncio.create_task(engines.keep_history())
        await complete(engines, "a", [1, 2, 3], max_tokens=6)
        sampling.cancel()
        told = engines.overview("1.2.3")
        assert (told.version, told.model) == ("1.2.3", "fake")
        assert (told.is_ready, told.is_draining) == (True, False)
        [formed] = told.events
        assert (formed.name, formed.group, formed.epoch) == ("group_ready", 0, 1)
        [group] = told.groups
        assert 0 < sum(group.history.output_tokens_per_s) < sum(group.history.total_tokens_per_s)

        engines.begin_drain(delay_s=5.0, grace_s=30.0)
        told = engines.overview("1.2.3")
        assert (told.is_ready, told.is_draining) == (False, True)
        assert [event.name for event in told.events] == ["draining", "group_ready"]
        assert told.events[0].details == "live_requests=0 delay_s=5.0 grace_s=30.0"
        assert not told.events[0].HasField("group")


def test_a_flow_is_told_its_share_of_what_was_given_lately() -> None:
    shares, flows = FlowShares(), {"old": FlowCounts(1, 2, 1000)}
    assert [flow.served_share for flow in shares.messages(flows)] == [1.0]
    for number in range(2 * SHARE_SAMPLES):
        flows["old"].num_served_tokens += 10
        if number >= SHARE_SAMPLES:
            flows.setdefault("new", FlowCounts()).num_served_tokens += 30
        shares.add(flows)
    old, new = shares.messages(flows)
    assert (old.flow, old.num_waiting, old.num_running, old.num_served_tokens) == (
        "old",
        1,
        2,
        1200,
    )
    assert (old.served_share, new.served_share) == (0.25, 0.75)
