"""Speed of the machine just now: bytes that all cores read in a second, and bfloat16 products.

    python -m tests.bench.peers.probe

A turn of the benchmark is worth as much as the machine was while it ran, which on a virtual one
changes within minutes.
"""

import statistics
import time
from collections.abc import Callable

import torch

from tests.bench.peers.workload import report

NUM_READ = 1 << 28  # float32: far more than caches hold
WIDTH = 2048
REPEATS = 9


def median_s(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[2:])


def main() -> None:
    many = torch.ones(NUM_READ)
    square = torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16)
    report(
        "probe",
        gb_per_s=4 * NUM_READ / median_s(many.sum) / 1e9,
        gflop_per_s=2 * WIDTH**3 / median_s(lambda: square @ square) / 1e9,
    )


if __name__ == "__main__":
    main()
