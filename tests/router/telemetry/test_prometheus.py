"""A dashboard is only as right as the numbers behind it, and a scrape must never hold up a step."""

import asyncio
import math
import random
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import structlog

from protos.serving.v1 import serving_pb2
from protos.telemetry.metrics import Family, Histogram
from protos.telemetry.scrapes import serve_metrics
from protos.transport.admission import Refusals
from protos.transport.certificates import Validity
from router import app
from router.api.generate import GenerationServicer
from router.api.health import Health
from router.config import RouterConfig
from router.engine.engines import Engines
from router.errors import InvalidRequest, QueueFull
from router.requests.request import Listeners
from router.requests.waiting_queue import WaitingQueue
from router.telemetry.prometheus import collector, families, take_snapshot
from tests.router.support.calls import connected, failure
from tests.router.support.fake_engines import FakeEngines
from tests.router.support.fake_executors import FakeExecutors
from tests.router.support.running_engines import complete, drive_group, running
from tests.router.support.stepper import make_shape, speculation
from tests.support.scraping import Samples, scrape


async def samples_of(engines: Engines) -> Samples:
    port = serve_metrics("127.0.0.1:0", collector(engines, "1.2"))
    try:
        return await scrape(f"127.0.0.1:{port.number}")
    finally:
        await asyncio.to_thread(port.close)


async def test_a_scrape_says_what_happened(monkeypatch: pytest.MonkeyPatch):
    dates = {"tls_cert": Validity(17.0, 23.0)}
    monkeypatch.setattr("router.telemetry.prometheus.first_to_expire", lambda: dates)
    async with running() as engines:
        prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
        first = await complete(engines, "a", prompt, max_tokens=6)
        again = await complete(engines, "b", prompt, max_tokens=6)
        engines.measures.refused[QueueFull.reason] += 2
        samples = await samples_of(engines)

    for edge, seconds in (("begin", 17), ("expiry", 23)):
        name = f"lockstep_router_certificate_{edge}_timestamp_seconds"
        assert samples[name] == {("tls_cert",): seconds}
    rank = str(first.sequences[0].dp_rank)
    assert samples["lockstep_router_info"] == {("fake", "1.2"): 1}
    assert samples["lockstep_router_ready"][()] == 1
    assert samples["lockstep_router_refused_requests_total"]["QUEUE_FULL",] == 2
    assert samples["lockstep_router_refused_requests_total"][InvalidRequest.reason,] == 0
    assert samples["lockstep_router_ended_sequences_total"]["LENGTH",] == 2
    assert samples["lockstep_router_time_to_first_token_seconds_count"]["0",] == 2
    assert samples["lockstep_router_inter_token_seconds_count"]["0",] == 10
    assert samples["lockstep_router_request_seconds_count"][()] == 2
    assert samples["lockstep_router_output_tokens_total"]["0",] == 12
    assert again.sequences[0].dp_rank == first.sequences[0].dp_rank
    assert samples["lockstep_router_prompt_tokens_total"]["0", rank] == 18
    assert samples["lockstep_router_prefix_hit_tokens_total"]["0", rank] == 8
    # 9 tokens of the prompt, then 1 of it, then all but the last of 6 tokens, twice.
    assert samples["lockstep_router_scheduled_tokens_total"]["0", rank] == 9 + 1 + 2 * 5
    steps = samples["lockstep_router_steps_total"]
    assert steps == {("0", "not_captured", "eager"): 12}
    other = "1" if rank == "0" else "0"
    assert samples["lockstep_router_idle_steps_total"] == {("0", rank): 0, ("0", other): 12}
    assert samples["lockstep_router_imbalance_tokens_total"]["0", other] == 20
    blocks = samples["lockstep_router_kv_blocks"]
    assert blocks["0", rank, "used"] == 0
    assert blocks["0", rank, "cached"] > 0
    assert samples["lockstep_router_kv_usage_ratio"]["0",] == 0
    assert samples["lockstep_router_epochs_total"]["0",] == 1
    assert samples["lockstep_router_step_seconds_total"]["0", "plan"] > 0
    assert samples["process_resident_memory_bytes"][()] > 1e6


async def test_a_scrape_says_what_came_of_drafts():
    async with running(sizes={"speculation": speculation()}, acceptance=1.0) as engines:
        before = await samples_of(engines)
        await complete(engines, "a", [1, 2, 3], max_tokens=9)
        samples = await samples_of(engines)

    # One token of the prompt, then four twice: three drafts in each are right.
    assert samples["lockstep_router_speculative_steps_total"]["0",] == 2
    assert samples["lockstep_router_drafts_total"]["0",] == 6
    assert samples["lockstep_router_accepted_drafts_total"]["0",] == 6
    assert samples["lockstep_router_tokens_per_draft_step"]["0",] == 4
    assert samples["lockstep_router_drafts_paused"]["0",] == 0
    assert samples["lockstep_router_output_tokens_total"]["0",] == 9
    assert samples["lockstep_router_inter_token_seconds_count"]["0",] == 8
    assert before["lockstep_router_drafts_total"]["0",] == 0
    assert "lockstep_router_tokens_per_draft_step" not in before


async def test_a_group_without_a_draft_model_says_nothing_of_whether_drafts_pay():
    async with running() as engines:
        families_now = families(take_snapshot(engines, "1"))
        series = {family.name: family.series for family in families_now}
    assert series["lockstep_router_drafts_total"] == [(("0",), 0)]
    assert series["lockstep_router_drafts_paused"] == []


async def test_a_router_without_a_group_answers_too():
    """That is when somebody will look."""
    engines = Engines(Listeners(max_listeners=2))
    drive_group(
        engines,
        FakeExecutors(make_shape(), random.Random(0)),
        WaitingQueue(max_sequences=4, max_tokens=100),
        pipeline_depth=1,
    )
    samples = await samples_of(engines)

    assert samples["lockstep_router_ready"][()] == 0
    assert samples["lockstep_router_group_ready"] == {("0",): 0}
    assert "lockstep_router_kv_usage_ratio" not in samples


async def test_a_loop_that_stands_still_fails_the_scrape(monkeypatch: pytest.MonkeyPatch):
    """So that Prometheus says that the router is down, instead of showing its last numbers."""
    monkeypatch.setattr("router.telemetry.prometheus.SNAPSHOT_TIMEOUT_S", 0.05)
    async with running() as engines:
        port = serve_metrics("127.0.0.1:0", collector(engines, "1"))
        url = f"http://127.0.0.1:{port.number}/metrics"
        with ThreadPoolExecutor(1) as threads, pytest.raises(urllib.error.HTTPError) as caught:
            # Until this one ends, the loop's thread stands still.
            threads.submit(urllib.request.urlopen, url, timeout=120).result()
        assert caught.value.code == 500
        caught.value.close()
        await asyncio.to_thread(port.close)


async def test_labels_name_things_that_there_are_few_of():
    """Each value of each label is a series that Prometheus keeps for weeks."""
    async with running(dp_size=3) as engines:
        for number in range(5):
            await complete(engines, f"name-of-request-{number}", [number + 1, 2], max_tokens=2)
        before = _num_series(engines)
        for number in range(20):
            await complete(engines, f"other-{number}", [number + 1, 2, 3], max_tokens=3)
        assert _num_series(engines) == before


def _num_series(engines: Engines) -> int:
    return sum(len(list(family.series)) for family in families(take_snapshot(engines, "1")))


def test_a_histogram_counts_as_prometheus_does():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        histogram.observe(value)
    histogram.observe(2.0, 3)
    family = Family("lockstep_x_seconds", "histogram", "h", (), [((), histogram)])
    samples = {(s.name, s.labels.get("le")): s.value for s in family.to_metric().samples}

    assert samples == {
        ("lockstep_x_seconds_bucket", "1.0"): 2,
        ("lockstep_x_seconds_bucket", "2.0"): 6,
        ("lockstep_x_seconds_bucket", "+Inf"): 7,
        ("lockstep_x_seconds_count", None): 7,
        ("lockstep_x_seconds_sum", None): 16.0,
    }
    assert math.isfinite(histogram.total)


def test_a_copy_of_a_histogram_stays_as_it_was():
    histogram = Histogram((1.0,))
    copied = histogram.copy()
    histogram.observe(0.5)
    assert (copied.counts, copied.total) == ([0, 0], 0.0)


def test_an_address_that_is_taken_is_named():
    port = serve_metrics("127.0.0.1:0", lambda: ())
    with pytest.raises(OSError, match=f"metrics_listen=127.0.0.1:{port.number}: .*free it"):
        serve_metrics(f"127.0.0.1:{port.number}", lambda: ())
    port.close()


async def test_refusals_are_counted_by_reason_whichever_way_a_request_came():
    engines = FakeEngines(max_listeners=1)
    async with connected(engines) as stub:
        no_prompt = serving_pb2.GenerateRequest()
        await failure(stub.Generate(no_prompt))
        assert engines.measures.refused["INVALID_REQUEST"] == 1

        stream = stub.GenerateMany()
        await stream.write(serving_pb2.GenerateManyRequest(tag=1, start=no_prompt))
        assert (await stream.read()).errors[0].reason == "INVALID_REQUEST"
        assert engines.measures.refused["INVALID_REQUEST"] == 2

        await failure(stub.Generate(no_prompt))  # the stream has the only listener
        assert engines.measures.refused["QUEUE_FULL"] == 1
        stream.cancel()
    assert +engines.measures.ended == {}


async def test_calls_that_are_turned_away_at_the_door_are_counted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Engines, "check_open", lambda _: None)  # as where a group is ready
    (tmp_path / "tokens").write_text("right-token-0123456789\n")
    config = RouterConfig(
        groups=(("127.0.0.1:1",),), listen="127.0.0.1:0", auth_tokens=tmp_path / "tokens"
    )
    engines, right = Engines(Listeners(4)), ("authorization", "Bearer right-token-0123456789")
    servicer = GenerationServicer(engines, None, "1")
    with structlog.testing.capture_logs() as lines:
        refusals = Refusals(engines.measures.add_refusal)
        server = await app.start_server(config, engines, servicer, Health(), refusals, [])
    [address] = [line["address"] for line in lines if line["event"] == "listening"]
    async with grpc.aio.insecure_channel(address) as channel:
        method = channel.unary_stream("/lockstep.serving.v1.GenerationService/GenerateMany")
        for data, metadata in ((b"", []), (b"\xff", [right])):
            await failure(method(data, metadata=metadata))
    await server.stop(None)
    assert +engines.measures.refused == {"UNAUTHENTICATED": 1, "MALFORMED_MESSAGE": 1}
