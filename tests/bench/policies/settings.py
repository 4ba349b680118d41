"""Named settings that are compared: Lockstep's, its peers' defaults, and sweeps of both."""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain

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
TARGETS = [round(15 * 1.06 ** (n / 2), 1) for n in range(113)]  # to 390 ms


def _sweep_at(target: float) -> Builds:
    """Returns our settings of one target in milliseconds, none of which holds prompts."""
    name = f"{OWN} {target:g} ms"
    common = {"target_token_gap_ms": target, "first_token_weight": NO_HOLD}
    return {
        name: lockstep(**common, max_token_gap_ms=target),
        f"{name}, order of arrival": lockstep(
            **common, max_token_gap_ms=target, prompt_order_weight=0.0
        ),
        f"{name}, at most {4 * target:g}": lockstep(**common),
    }


def sweep_below(gaps: Iterable[float]) -> list[str]:
    """Returns the names of our settings of the four targets next below each gap in milliseconds."""
    chosen = {target for gap in gaps for target in [t for t in TARGETS if t <= gap][-4:]}
    return [name for target in sorted(chosen) for name in _sweep_at(target)]


LOCKSTEP_SWEEP: Builds = dict(chain.from_iterable(_sweep_at(t).items() for t in TARGETS))
PEER_SWEEP: Builds = sweep()
ALL: Builds = {**LOCKSTEP, **LOCKSTEP_SWEEP, **DEFAULT, **PEER_SWEEP}
