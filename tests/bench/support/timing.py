"""Times of calls that take turns, so that neighbours on the same cores slow all alike."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

K = TypeVar("K")


def in_turns(
    calls: Mapping[K, Callable[[], object]],
    rounds: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    repeats: int = 1,
    least_s: float = 0.0,
) -> dict[K, list[float]]:
    """Runs each call once to warm up, then all of them in every round.

    Args:
        clock: In seconds.
        repeats: Of a call in a round, at least.
        least_s: Shorter calls are repeated in a round until they take about as long.

    Returns:
        Seconds of each call, for every round.
    """

    def once(call: Callable[[], object], repeats: int) -> float:
        started = clock()
        for _ in range(repeats):
            call()
        return (clock() - started) / repeats

    counts = {
        key: max(repeats, int(least_s / max(once(call, 1), 1e-9))) for key, call in calls.items()
    }
    times: dict[K, list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            times[key].append(once(call, counts[key]))
    return times


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Returns the median of the ratios of neighbouring rounds."""
    return statistics.median(one / other for one, other in zip(times, others, strict=True))
