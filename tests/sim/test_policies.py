"""If these fail, the comparison of policies tells nothing: a request is lost, or is served for nothing."""

import pytest

from tests.bench.policies.front import draw, front_of, leads
from tests.bench.policies.lockstep import lockstep
from tests.bench.policies.peers import sweep
from tests.bench.policies.traces import OWN, jobs_at, read_trace
from tests.bench.policies.world import COSTS, Sizes, serve

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
