"""Times how long executors that are all there take to form a group, again and again.

    python -m tests.bench.router.bench_formings [--executors 2 4] [--formings 1000]

The real ExecutorGroup of this process and executors of the demo model, in processes of their own, on
loopback: descriptions, rendezvous store, process groups. Each forming is a new epoch. Exits with 1 if
the median or the longest is above what is required of so many executors.
"""

import argparse
import asyncio
import statistics
import sys
import time

import uvloop

from deploy.local.launch import LocalStack
from router.errors import GroupHeld
from router.executors.discovery import find_addresses
from router.executors.group import ExecutorGroup, GroupSettings

REQUIRED_MEDIAN_MS = {2: 10.0, 4: 15.0}
REQUIRED_LONGEST_MS = 100.0
NUM_WARM = 20


async def form_often(num_executors: int, num_formings: int) -> list[float]:
    """Returns milliseconds of each forming, of which the first few are not counted."""
    times_ms = []
    stack = LocalStack(dp_size=num_executors)
    async with stack:
        await stack.router.kill()  # whose group it was
        group = ExecutorGroup(find_addresses(stack.executor_addresses), GroupSettings())
        try:
            await _take(group)
            for _ in range(NUM_WARM + num_formings):
                begun = time.perf_counter()
                await group.form()
                times_ms.append((time.perf_counter() - begun) * 1e3)
        finally:
            await group.close()
    return times_ms[NUM_WARM:]


async def _take(group: ExecutorGroup) -> None:
    """Forms the group as soon as its executors have noticed that the router is gone that drove it."""
    while True:
        try:
            await group.form()
            return
        except GroupHeld:
            await asyncio.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executors", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--formings", type=int, default=1000)
    args = parser.parse_args()
    has_missed = False
    print("executors  formings   median ms      p90      p99  longest")
    for number in args.executors:
        times_ms = uvloop.run(form_often(number, args.formings))  # the router's loop
        parts = statistics.quantiles(times_ms, n=100)
        median_ms, longest_ms = statistics.median(times_ms), max(times_ms)
        print(
            f"{number:9}  {len(times_ms):8}  {median_ms:10.1f}  {parts[89]:7.1f}  {parts[98]:7.1f}"
            f"  {longest_ms:7.1f}",
            flush=True,
        )
        has_missed |= median_ms > REQUIRED_MEDIAN_MS.get(number, float("inf"))
        has_missed |= longest_ms > REQUIRED_LONGEST_MS
    sys.exit(has_missed)


if __name__ == "__main__":
    main()
