"""Executor metrics: where its time goes is the first question when a group is slow."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from executor.build.executor import build_worker
from executor.metrics import PHASES, Measures, Numbers, collector
from executor.worker import Worker
from protos.telemetry.metrics import Histogram
from protos.transport.certificates import Validity
from tests.executor.support.servers import config_of, reason_of, serving
from tests.executor.support.steps import decode_part, prompt_part, step

PROMPT = [5, 17, 33, 2, 90, 41, 8]


@pytest.fixture
def measures() -> Measures:
    return Measures()


@pytest.fixture
def worker(tiny_checkpoint: Path, measures: Measures) -> Worker:
    config = config_of(tiny_checkpoint, 0, 1, decode_graph_sizes=(4,), prefill_graph_sizes=(16, 32))
    worker, _ = build_worker(config, measures)
    worker.join(1, "")
    return worker


def test_steps_and_their_rows_are_counted(worker: Worker, measures: Measures):
    worker.execute(step(1, prompt_part(0, PROMPT, [1, 2]), num_tokens=[7], num_logits=[1]))
    worker.execute(step(2, decode_part(0, 7), num_tokens=[1], graph_size=4))
    worker.execute(step(3, decode_part(0, 8, block_ids=[3]), num_tokens=[1]))

    assert measures.steps == {("extend", False): 1, ("decode", True): 1, ("decode", False): 1}
    assert measures.scheduled_tokens == 9
    assert measures.padding_tokens == 3
    assert sum(measures.execute_s.counts) == 3


def test_phases_add_up_to_what_the_router_is_told(
    worker: Worker, measures: Measures, monkeypatch: pytest.MonkeyPatch
):
    """By a clock that gains a microsecond each time it is looked at."""
    now_ns = itertools.count(1_000_000_000, 1000)
    clock = SimpleNamespace(perf_counter_ns=lambda: next(now_ns))
    monkeypatch.setattr("executor.metrics.time", clock)
    part = prompt_part(0, PROMPT, [1, 2])
    response = worker.execute(step(1, part, num_tokens=[7], num_logits=[1]))

    assert measures.phase_ns["queue"] == 0
    for phase in ("fill", "forward", "sample", "read"):
        assert measures.phase_ns[phase] > 0
    assert response.forward_ns == sum(measures.phase_ns.values())
    assert measures.execute_s.total == pytest.approx(response.forward_ns / 1e9)


def test_the_time_of_a_step_begins_when_the_one_before_has_ended(
    monkeypatch: pytest.MonkeyPatch,
):
    """Of two that were launched before either had run."""
    measures, now_ns = Measures(), iter((0, 1, 20, 21, 100, 150))
    monkeypatch.setattr(
        "executor.metrics.time", SimpleNamespace(perf_counter_ns=lambda: next(now_ns))
    )
    times = []
    for _ in range(2):
        measures.begin_step()
        measures.end_phase("forward")
        times.append(measures.launched())
    sizes: dict[str, Any] = {"num_tokens": 1, "num_rows": 1, "is_replay": True}
    assert [measures.end_step(each, "decode", **sizes) for each in times] == [100, 50]
    assert measures.phase_ns["read"] == 99 + 50


def test_a_step_that_is_refused_is_not_counted_as_run(worker: Worker, measures: Measures):
    with pytest.raises(Exception, match="without having started"):
        worker.execute(step(1, decode_part(0, 7), num_tokens=[1]))
    assert not measures.steps
    assert measures.scheduled_tokens == 0


async def test_a_server_counts_joins_waits_and_refusals_by_reason(
    tiny_checkpoint: Path, measures: Measures
):
    config = config_of(tiny_checkpoint, 0, 1)
    async with serving(lambda: build_worker(config, measures), measures=measures) as (_, client):
        assert await client.joins_and_runs(1)
        assert await reason_of(client.steps(3)) == "STEP_OUT_OF_ORDER"

    assert measures.joins == {"joined": 1, "failed": 0}
    assert measures.steps == {("idle", False): 1}
    assert measures.failures["STEP_OUT_OF_ORDER"] == 1
    assert measures.phase_ns["queue"] > 0


def test_what_prometheus_gets_is_what_was_counted(monkeypatch: pytest.MonkeyPatch):
    dates = {"tls_cert": Validity(17.0, 23.0)}
    monkeypatch.setattr("executor.metrics.first_to_expire", lambda: dates)

    def series_of(*numbers: Any) -> dict[str, Any]:
        return {
            family.name: dict(family.series) for family in collector(lambda: Numbers(*numbers))()
        }

    measures = Measures()
    measures.begin_step()
    measures.end_phase("fill")
    measures.end_step(measures.launched(), "decode", num_tokens=3, num_rows=4, is_replay=True)
    measures.failures["STEP_FAILED"] += 2
    series = series_of(measures, 2, 1, 64, 3, 7, {"allocated": 5})
    assert series["lockstep_executor_info"] == {("2", "1"): 1.0}
    for edge, seconds in (("begin", 17), ("expiry", 23)):
        name = f"lockstep_executor_certificate_{edge}_timestamp_seconds"
        assert series[name] == {("tls_cert",): seconds}
    assert series["lockstep_executor_epoch"] == {(): 7}
    assert series["lockstep_executor_ready"] == {(): 1.0}
    assert series["lockstep_executor_kv_blocks"] == {(): 64}
    assert series["lockstep_executor_device_memory_bytes"] == {("allocated",): 5}
    assert series["lockstep_executor_steps_total"] == {("decode", "replay"): 1}
    assert series["lockstep_executor_tokens_total"] == {("scheduled",): 3, ("padding",): 1}
    assert series["lockstep_executor_failed_steps_total"]["STEP_FAILED",] == 2
    assert series["lockstep_executor_failed_steps_total"]["INVALID_STEP",] == 0
    assert series["lockstep_executor_step_seconds_total"]["fill",] > 0
    assert len(series["lockstep_executor_step_seconds_total"]) == len(PHASES)
    [histogram] = series["lockstep_executor_execute_seconds"].values()
    assert isinstance(histogram, Histogram)
    assert sum(histogram.counts) == 1

    in_no_epoch = series_of(Measures(), 0, 0, 0, 0, None, {})
    assert in_no_epoch["lockstep_executor_epoch"] == {(): 0}
    assert in_no_epoch["lockstep_executor_ready"] == {(): 0.0}
