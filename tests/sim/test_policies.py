"""If these fail, the comparison of policies tells nothing: a request is lost, or is served for nothing."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from router.requests.request import Request
from router.requests.resume import Resume, take_up
from tests.bench.policies import results
from tests.bench.policies.flows import first_tokens, jain, serve_together, served, stream
from tests.bench.policies.front import draw, front_of, leads
from tests.bench.policies.lockstep import Lockstep, lockstep
from tests.bench.policies.peers import sweep
from tests.bench.policies.results import Results, Run
from tests.bench.policies.traces import OWN, Arrival, jobs_at, read_trace
from tests.bench.policies.world import COSTS, Gaps, Job, Sizes, Work, serve

SETTINGS = {
    name: build
    for name, build in sweep().items()
    if name.startswith(
        ("vLLM 2048, cache", "SGLang 1024, tokens, mixed", "TensorRT-LLM 2048, waits 10")
    )
}
SMALL = Sizes(num_ranks=2, num_rows=8, num_kv_tokens=60_000, max_tokens=2048)


@pytest.mark.parametrize("trace", OWN)
@pytest.mark.parametrize("name", ["Lockstep", *SETTINGS])
def test_every_policy_gives_each_request_each_of_its_tokens_once(name: str, trace: str) -> None:
    """Few rows and little KV: requests wait, and lose their blocks."""
    build = {**SETTINGS, "Lockstep": lockstep()}[name]
    jobs = jobs_at(read_trace(OWN[trace], 60), 20.0)
    figures = serve(build(SMALL), jobs, COSTS["30b"]).figures()
    assert (figures["hits"] > 0) == (trace == "mooncake")
    busy_s = sum(job.num_prompt - job.num_cached for job in jobs) * 14e-6 / SMALL.num_ranks
    assert max(job.end for job in jobs) > busy_s


def test_the_front_has_the_points_that_none_is_better_than() -> None:
    others = {
        "vLLM a": (1.0, 9.0),
        "vLLM b": (2.0, 5.0),
        "SGLang": (3.0, 5.0),
        "vLLM c": (4.0, 2.0),
    }
    assert front_of(others) == ["vLLM a", "vLLM b", "vLLM c"]
    own = {"Lockstep": (1.0, 6.0), "Lockstep b": (2.0, 2.0)}
    assert leads(own, others) == [("vLLM a", 1.0), ("vLLM b", 1.0), ("vLLM c", 2.0)]
    assert draw({"a load": {**own, **others}}).count('r="2.5"') == 6


def test_gaps_count_that_begin_while_requests_come() -> None:
    gaps = Gaps()
    gaps.observe(0.5, 2)
    gaps.observe(0.04, 30)  # until 2 s
    gaps.observe(3.0, 5)
    gaps.leave_out(1, 2.0 - 1.5)
    assert (gaps.values, gaps.counts, gaps.num_left_out) == ([0.5, 3.0], [2, 5], 30)


def test_results_are_kept_until_what_they_follow_from_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [Run(name, OWN["azure"], 20, 2, "30b", 20.0) for name in ("Lockstep", "vLLM 2048")]
    first = Results(tmp_path / "kept", 2).of(runs)
    made: list[Run] = []
    monkeypatch.setattr(results, "figures_of", lambda run: made.append(run) or {"new": 1.0})
    assert Results(tmp_path / "kept", 1).of(runs) == first
    assert not made
    monkeypatch.setattr(results, "_own_code", lambda: "another scheduler")
    assert Results(tmp_path / "kept", 1).of(runs) == [{"new": 1.0}, first[1]]
    others = [runs[0]._replace(rate=21.0), runs[1]._replace(num_ranks=3)]
    Results(tmp_path / "kept", 1).of(others)
    assert made == [runs[0], *others]


@pytest.mark.parametrize("trace", OWN)
def test_a_gap_whose_bound_is_the_target_is_kept(trace: str) -> None:
    """Once step times are learnt; noise is 2 %."""
    arrivals, rate = read_trace(OWN[trace], 250), 60.0 if trace == "azure" else 3.0
    policy = lockstep(max_token_gap_ms=50.0)(Sizes(num_ranks=4))
    serve(policy, jobs_at(arrivals[:80], rate, copy=1), COSTS["30b"])
    policy.gaps.clear()
    jobs = jobs_at(arrivals, rate)
    figures = serve(policy, jobs, COSTS["30b"]).figures()
    assert policy.measures.costs.plain.is_known
    assert policy.measures.costs.plain.error < 0.08
    assert figures["gap p99.9"] < 65
    assert figures["gap p50"] < 50


def test_a_gap_is_kept_before_it_is_known_what_steps_take() -> None:
    """Long prompts come at once, while answers are already streamed."""
    policy = lockstep(target_token_gap_ms=30.0, max_token_gap_ms=30.0)(Sizes(num_ranks=4))
    answers = [Job(number, 0.0, 20, 60) for number in range(8)]
    burst = [Job(8 + number, 0.02, 7000, 20) for number in range(24)]
    last = Job(32, 3.0, 20, 2)  # gaps count until it comes
    figures = serve(policy, [*answers, *burst, last], COSTS["30b"]).figures()
    assert policy.measures.costs.plain.is_known
    assert max(policy.gaps.values) < 0.036
    assert figures["longest s"] < 2.5


def test_prompts_run_under_a_target_that_no_step_keeps_before_that_is_known() -> None:
    policy = lockstep(target_token_gap_ms=0.01)(Sizes(num_ranks=2))
    figures = serve(
        policy, [Job(number, 0.0, 500, 20) for number in range(8)], COSTS["30b"]
    ).figures()
    assert figures["longest s"] < 2.5


def known_policy(sizes: Sizes) -> Lockstep:
    """The real scheduler, which has learnt what steps take and has nothing to do."""
    policy = lockstep()(sizes)
    serve(policy, jobs_at([Arrival(n / 30, 1500, 20) for n in range(150)], 30.0), COSTS["30b"])
    assert policy.measures.costs.plain.is_known
    return policy


def stream_of(rate: float, seconds: float, sizes: tuple[int, int], flow: str = "") -> list[Job]:
    return stream([Arrival(0.0, *sizes), Arrival(1 / rate, *sizes)], rate, seconds, flow=flow)


def test_short_prompts_pass_long_ones_which_begin_all_the_same() -> None:
    short, long = stream_of(40, 5, (700, 40)), stream_of(3, 5, (30_000, 40))
    serve_together(known_policy(Sizes()), COSTS["30b"], short, long)
    assert first_tokens(short)[0] < 500
    assert first_tokens(long)[1] < 8000


@pytest.mark.parametrize("is_told_apart", [True, False])
def test_a_flood_delays_its_own_flow_only(is_told_apart: bool) -> None:
    """It asks for half as much again as there is, and another for 3 %."""
    flows = ("flood", "small") if is_told_apart else ("", "")
    flood, small = stream_of(75, 7, (1500, 60), flows[0]), stream_of(3, 7, (700, 30), flows[1])
    serve_together(known_policy(Sizes(num_ranks=2, num_rows=128)), COSTS["30b"], flood, small)
    p50, p99 = first_tokens(small)
    assert (p50 <= 140) == (p99 <= 400) == is_told_apart


def resumed_beside_streams(
    flows: tuple[str, str], before: Sequence[str] = ()
) -> tuple[float, float]:
    """Returns the seconds of the longest step, and until no request waits, of many that are resumed.

    Args:
        flows: Of answers that are streamed, and of the requests.
        before: Flows that have ended by then.
    """
    policy, steps = known_policy(Sizes(num_ranks=2, num_rows=128)), list[tuple[float, float, int]]()
    submit, commit = policy.waiting.submit, policy.commit

    def resume(request: Request) -> None:
        if request.stop.max_tokens == 12:
            take_up(request, Resume(attempt=1, outputs={0: np.ones(10, np.int32)}, fields={0: ""}))
        submit(request)

    def note(work: Work, now: float) -> None:
        commit(work, now)
        steps.append((work.seconds, now, len(policy.waiting)))

    policy.waiting.submit, policy.commit = resume, note  # type: ignore[method-assign]
    streams = [Job(number, 0.0, 20, 200, flow=flows[0]) for number in range(16)]
    resumed = [Job(16 + number, 0.5, 2000, 12, flow=flows[1]) for number in range(60)]
    ended = [Job(76 + number, 0.0, 20, 2, flow=flow) for number, flow in enumerate(before)]
    serve(policy, streams + resumed + ended, COSTS["30b"])
    longest_s = max(seconds for seconds, _, _ in steps)
    return longest_s, max(now for _, now, num_waiting in steps if num_waiting)


@pytest.mark.parametrize("flows", [("streams", "resumed"), ("", "")])
def test_a_flow_that_resumes_many_requests_makes_no_steps_longer_for_others(
    flows: tuple[str, str],
) -> None:
    """One caller's steps may be long until all of its answers go on."""
    longest_s, _ = resumed_beside_streams(flows)
    assert (longest_s < 0.065) == (flows[0] != flows[1])


def test_a_flow_that_resumes_many_requests_waits_for_none_that_has_ended() -> None:
    _, alone_s = resumed_beside_streams(("", ""))
    _, after_another_s = resumed_beside_streams(("", ""), before=["b"])
    assert after_another_s < 1.1 * alone_s


def test_flows_that_always_have_something_waiting_get_equal_shares() -> None:
    """One of them asks for six times what each other does."""
    policy = known_policy(Sizes(num_ranks=2, num_rows=32))
    flows = [stream_of(rate, 8, (1000, 40), f"{rate}") for rate in (120, 20.0, 20.1, 20.2)]
    serve_together(policy, COSTS["30b"], *flows, until=8.0)
    assert jain(served(policy)[-4:]) >= 0.99
