"""Times a scrape of a busy router's metrics, and what it takes from the event loop.

    python -m tests.bench.router.bench_scrape [--ranks 16] [--scrapes 300]

A group has stepped for a while, on fake executors, and stands still when it is measured. `snapshot`
is the part of a scrape that runs on the event loop, between two steps; `text` is the rest, in a
thread; `scrape` is all of it, over HTTP on loopback. CPU times are of the one thread: what
neighbours on the same cores take is not in them.
"""

import asyncio
import random
import statistics
import time
import urllib.request
from collections.abc import Callable

from prometheus_client import generate_latest

from protos.telemetry import scrapes as scrapes_module
from protos.telemetry.metrics import new_registry
from protos.telemetry.scrapes import serve_metrics
from router.engine.engines import Engines
from router.requests.request import Listeners
from router.requests.waiting_queue import WaitingQueue
from router.telemetry.prometheus import collector, families, take_snapshot
from tests.bench.support.options import parse_options
from tests.router.support.fake_executors import FakeExecutors
from tests.router.support.requests import make_request
from tests.router.support.running_engines import drive_group, stepping
from tests.router.support.stepper import make_shape


async def run(num_ranks: int, num_scrapes: int) -> None:
    engines = Engines(Listeners(max_listeners=4))
    shape = make_shape(dp_size=num_ranks, num_blocks=4000, max_model_len=12000)
    engine = drive_group(
        engines,
        FakeExecutors(shape, random.Random(0), step_s=0.02),
        WaitingQueue(max_sequences=1000, max_tokens=1_000_000),
    )
    async with stepping(engine):
        listener = engines.listeners.open()
        for number in range(2 * num_ranks):
            engines.submit(make_request(range(1, 9), listener, 11_000, request_id=str(number)))
        await asyncio.sleep(1.0)
    scrapes_module.PAGE_AGE_S = 0.0  # else most of the scrapes would get the same page
    port = serve_metrics("127.0.0.1:0", collector(engines, "bench"))
    url = f"http://127.0.0.1:{port.number}/metrics"

    def scrape() -> tuple[float, int]:
        started = time.perf_counter()
        with urllib.request.urlopen(url) as answer:
            text = answer.read()
        return time.perf_counter() - started, text.count(b"\n")

    scrapes = [await asyncio.to_thread(scrape) for _ in range(num_scrapes)]
    snapshots = [_cpu_s(lambda: take_snapshot(engines, "bench")) for _ in range(num_scrapes)]
    now = take_snapshot(engines, "bench")
    registry = new_registry(lambda: families(now))
    texts = [_cpu_s(lambda: generate_latest(registry)) for _ in range(num_scrapes)]
    await asyncio.to_thread(port.close)
    print(f"{num_ranks} ranks, {scrapes[-1][1]} lines; ms: median and min of {num_scrapes}")
    for name, times in (
        ("scrape, wall", [seconds for seconds, _ in scrapes]),
        ("snapshot on the loop, CPU", snapshots),
        ("text from it, CPU", texts),
    ):
        print(f"{name:<28}{statistics.median(times) * 1e3:>8.3f}{min(times) * 1e3:>8.3f}")


def _cpu_s(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


def main() -> None:
    options = parse_options(__doc__, ranks=16, scrapes=300)
    asyncio.run(run(options.ranks, options.scrapes))


if __name__ == "__main__":
    main()
