"""Named settings that are compared: Lockstep's, its peers' defaults, and sweeps of both."""

from collections.abc import Callable, Mapping

from tests.bench.policies.lockstep import lockstep
from tests.bench.policies.peers import DEFAULT, sweep
from tests.bench.policies.world import Policy, Sizes

Builds = Mapping[str, Callable[[Sizes], Policy]]

LARGE_CHUNKS = ("vLLM 8192", "SGLang 8192, tokens", "TensorRT-LLM 8192, balanced")
OWN = "Lockstep"  # with which the names of its settings begin
NO_HOLD = 1e9  # weight of first tokens: prompts are never held, nor trimmed
LOCKSTEP: Builds = {
    OWN: lockstep(),
    f"{OWN}, bound is target": lockstep(max_token_gap_ms=50.0),
}
LOCKSTEP_SWEEP: Builds = {
    f"{OWN} {target:g} to {factor * target:g} ms, weight {NO_HOLD:g}": lockstep(
        target_token_gap_ms=float(target),
        max_token_gap_ms=float(factor * target),
        first_token_weight=NO_HOLD,
    )
    for target in (
        15,
        18,
        21,
        22,
        23,
        25,
        27,
        30,
        35,
        38,
        40,
        45,
        50,
        60,
        75,
        85,
        100,
        115,
        125,
        150,
        175,
        200,
        300,
        400,
    )
    for factor in (1, 4)
    if factor * target <= 800
}
PEER_SWEEP: Builds = sweep()
ALL: Builds = {**LOCKSTEP, **LOCKSTEP_SWEEP, **DEFAULT, **PEER_SWEEP}
