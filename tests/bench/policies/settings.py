"""Named settings that are compared: Lockstep's, its peers' defaults, and sweeps of both."""

from collections.abc import Callable, Mapping

from tests.bench.policies.lockstep import lockstep
from tests.bench.policies.peers import DEFAULT, sweep
from tests.bench.policies.world import Policy, Sizes

Builds = Mapping[str, Callable[[Sizes], Policy]]

LARGE_CHUNKS = ("vLLM 8192", "SGLang 8192, tokens", "TensorRT-LLM 8192, balanced")
OWN = "Lockstep"  # with which the names of its settings begin
LOCKSTEP: Builds = {
    OWN: lockstep(),
    f"{OWN}, bound is target": lockstep(max_token_gap_ms=50.0),
}
LOCKSTEP_SWEEP: Builds = {
    f"{OWN} {target:g} to {factor * target:g} ms, weight {weight:g}": lockstep(
        target_token_gap_ms=float(target),
        max_token_gap_ms=float(factor * target),
        first_token_weight=weight,
    )
    for target in (15, 18, *range(21, 32), 33, 35, 37, 40, 45, 50, 60, 75, 100, 150, 200)
    for factor in (1, 4)
    for weight in (10.0, 1e9)
    if factor * target <= 400
}
PEER_SWEEP: Builds = sweep()
ALL: Builds = {**LOCKSTEP, **LOCKSTEP_SWEEP, **DEFAULT, **PEER_SWEEP}
