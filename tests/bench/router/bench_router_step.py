"""Times the router's own work per step, in one process and without transport.

    python -m tests.bench.router.bench_router_step [--ranks 16] [--rows 256] [--output 512]
        [--subscribers -1] [--untimed] [--profile]

Every row decodes: 16 ranks of 256 sequences, blocks of 16 tokens, prompts of 128 random tokens and
outputs of 512, all at different places. So in each step about 8 sequences finish, 8 others are
bound and prefilled, and 256 rows get a block. With `--output 16384` hardly any finishes: what is
left is the work for rows that only go on; with `--window 128`, in two lists of blocks. At 512, the
pool is as full as after hours of serving: each block that is acquired evicts a cached one, and each
full block is named for the prefix cache. Two steps are in flight, on a clock of their own: executors
say that they took what a model of 30B-A3B would, so that prompts go by time. One columnar listener
takes all tokens of each step into one GenerateManyResponse. With `--subscribers 0`, what blocks hold is logged, as it is where the service
for gateways is on; with 1, a gateway subscribes to it, and is told every fifth step.

    plan     WaitingQueue.submit, Scheduler.schedule
    encode   encode_step, to bytes for each rank
    decode   FromString for each rank, ran_as_sent and decode_step
    commit   Scheduler.commit
    listeners  take_columns, the message and SerializeToString
    count    EpochStats.add and StepTimes.add: what metrics take from each step
    events   BlockFeed.flush, and SerializeToString of its batches

Making requests and the executors' answers is not counted. The garbage collector is off, as a
collection would hit one phase at random. With `--untimed` executors do not say what they took, and
all prompts that fit run at once. Times are CPU times of the one thread: what neighbours on
the same cores take is not in them, though what they do to the caches is.
"""

import asyncio
import cProfile
import gc
import pstats
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from protos.executor.v1 import executor_pb2 as pb
from protos.memory import manage_memory
from protos.serving.v1 import serving_pb2
from router.api.vllm_kv_events import BlockFeed
from router.executors.step_codec import decode_step, encode_step, ran_as_sent
from router.requests.request import (
    Listeners,
    Request,
    SamplingParams,
    Sequence,
)
from router.requests.waiting_queue import WaitingQueue
from router.scheduling.counters import EpochStats, StepTimes
from router.scheduling.kv.prefix_cache import PrefixCache
from router.scheduling.scheduler import Scheduler, SchedulerSettings
from router.scheduling.step import (
    GroupShape,
    InFlight,
    StepPlan,
    StepResult,
    window_reach,
)
from tests.bench.policies.world import COSTS
from tests.bench.support.options import parse_options
from tests.router.support.requests import make_request

BLOCK_SIZE = 16
PROMPT_LEN = 128
T = TypeVar("T")

VOCAB_SIZE = 150_000
DEPTH = 2
MAX_WARM_UP = 1024  # steps; of outputs of 512, every first one is gone and the pool is full
PHASES = ("plan", "encode", "decode", "commit", "listeners", "count", "events")
EVENT_STEPS = 5  # between two looks at the logs, which are a tenth of a second apart


class Bench:
    """A scheduler under constant load, and what its executors would answer.

    Attributes:
        times: [steps, phases] seconds.
        num_events: [steps] sequences that ended.
    """

    def __init__(
        self,
        num_ranks: int,
        rows_per_rank: int,
        output_len: int = 512,
        kv_window: int = 0,
        num_subscribers: int = -1,
        *,
        is_timed: bool = True,
    ) -> None:
        self.rng = np.random.default_rng(0)
        self.output_len = output_len
        self.is_timed = is_timed
        self.now = 0.0
        blocks_per_row = (PROMPT_LEN + output_len) // BLOCK_SIZE
        if kv_window:
            blocks_per_row += min(blocks_per_row, 2 + window_reach(kv_window, BLOCK_SIZE))
        self.shape = GroupShape(
            dp_size=num_ranks,
            num_blocks=(1 + rows_per_rank * blocks_per_row,) * num_ranks,
            block_size=BLOCK_SIZE,
            rows_per_rank=rows_per_rank,
            max_num_batched_tokens=8192,
            max_num_logits=2 * rows_per_rank,
            max_model_len=PROMPT_LEN + output_len,
            kv_window=kv_window,
        )
        num_rows = num_ranks * rows_per_rank
        listeners = Listeners(max_listeners=16)
        self.listener = listeners.open()
        self.admission = WaitingQueue(max_sequences=num_rows, max_tokens=num_rows * PROMPT_LEN)
        self.scheduler = Scheduler(
            self.shape,
            self.admission,
            listeners,
            SchedulerSettings(),
            clock=lambda: self.now,
            on_end=self._on_end,
            caches=PrefixCache.of_group(self.shape, is_logged=num_subscribers >= 0),
        )
        self._feed = BlockFeed(lambda: [cache.log for cache in self.scheduler.caches], Counter())
        self._loop = asyncio.new_event_loop()
        self._subscribers = [
            self._loop.create_task(self._feed.serve(b"", self._write))
            for _ in range(num_subscribers)
        ]
        self.stats = EpochStats(self.scheduler.caches, self.scheduler.num_preemptions)
        self.step_times = StepTimes()
        self.in_flight: deque[tuple[StepPlan, int, list[bytes]]] = deque()
        self.times: list[list[float]] = []
        self.num_events: list[int] = []
        self._ended: list[Sequence] = []
        self._num_requests = 0
        self._new = [
            self._make_request(int(left)) for left in self.rng.integers(1, output_len, num_rows)
        ]

    def step(self) -> None:
        """Plans and sends a step, and takes the one before it."""
        times: list[float] = []
        new, self._new = self._new, []
        started = time.thread_time()
        for request in new:
            self.admission.submit(request)
        planned = self.scheduler.schedule()
        times.append(time.thread_time() - started)
        assert planned is not None
        self._exchange(planned, times)

    def _exchange(self, plan: StepPlan, times: list[float]) -> None:
        step_id = len(self.times) + 1
        _, checksum = self._timed(times, lambda: encode_step(plan, 1, step_id))
        self.in_flight.append((plan, checksum, self._answer(plan, step_id, checksum)))
        if len(self.in_flight) < DEPTH:
            return

        plan, checksum, answers = self.in_flight.popleft()
        self.now += _seconds_of(plan)
        result = self._timed(times, lambda: _decode(answers, plan, checksum))
        self._timed(times, lambda: self.scheduler.commit(plan, result))
        self._timed(times, self._read)
        self._timed(times, lambda: self._count(plan, result))
        self._timed(times, self._tell)
        with suppress(StopIteration):  # it waits again, as it does between steps
            self.listener.wait().send(None)
        self.times.append(times)
        self.num_events.append(len(self._ended))
        self.listener.ended.clear()
        self._new = [self._make_request(self.output_len) for _ in self._ended]
        self._ended.clear()

    def _count(self, plan: StepPlan, result: StepResult) -> None:
        now = time.perf_counter()
        self.stats.add(plan, result, now)
        self.step_times.add(InFlight(plan, now, now, now), result, now)

    def _tell(self) -> None:
        if self._subscribers and len(self.times) % EVENT_STEPS == 0:
            self._feed.flush()
            self._loop.run_until_complete(asyncio.sleep(0))

    def close(self) -> None:
        """Ends the subscriptions."""
        for task in self._subscribers:
            task.cancel()
        if self._subscribers:
            self._loop.run_until_complete(asyncio.wait(self._subscribers))
        self._loop.close()

    async def _write(self, batch: Any) -> None:
        batch.SerializeToString()

    def _timed(self, times: list[float], work: Callable[[], T]) -> T:
        started = time.thread_time()
        result = work()
        times.append(time.thread_time() - started)
        return result

    def _read(self) -> bytes:
        self.listener.wake()
        columns = self.scheduler.table.take_columns(self.listener.index)
        return serving_pb2.GenerateManyResponse(
            tags=columns.tags.tobytes(),
            num_tokens=columns.num_tokens.tobytes(),
            token_ids=columns.token_ids.tobytes(),
        ).SerializeToString()

    def _answer(self, plan: StepPlan, step_id: int, checksum: int) -> list[bytes]:
        answers, forward_ns = [], int(_seconds_of(plan) * 1e9) if self.is_timed else 0
        for rank, num_sampled in enumerate(plan.num_sampled):
            tokens = self.rng.integers(1, VOCAB_SIZE, num_sampled, dtype=np.int32)
            part = pb.RankResult(dp_rank=rank, next_token_ids=tokens.tobytes())
            response = pb.StepResponse(
                epoch=1,
                step_id=step_id,
                ranks=[part],
                agreement_crc32=checksum,
                part_crc32=rank,
                forward_ns=forward_ns,
            )
            answers.append(response.SerializeToString())
        return answers

    def _make_request(self, num_output_tokens: int) -> Request:
        self._num_requests += 1
        number = self._num_requests
        return make_request(
            self.rng.integers(1, VOCAB_SIZE, PROMPT_LEN, dtype=np.int32),
            self.listener,
            num_output_tokens,
            request_id=str(number),
            sampling=SamplingParams({"temperature": 0.7}, seed=number),
            stop_token_ids=(0,),
            tag=number,
            is_columnar=True,
            arrival_time=self.now,
        )

    def _on_end(self, sequence: Sequence) -> None:
        self._ended.append(sequence)
        sequence.request.listener.ended.append(sequence)
        sequence.request.listener.wake()


def _seconds_of(plan: StepPlan) -> float:
    pairs = None if plan.num_pairs is None else plan.num_pairs.tolist()
    return COSTS["30b"].seconds(plan.agreement.global_num_tokens, plan.kv_tokens.tolist(), pairs)


def _decode(answers: list[bytes], plan: StepPlan, checksum: int) -> StepResult:
    responses = [pb.StepResponse.FromString(answer) for answer in answers]
    assert ran_as_sent(responses, 1, checksum)
    return decode_step(responses, plan, VOCAB_SIZE)


def main() -> None:
    sizes = {"ranks": 16, "rows": 256, "output": 512, "steps": 1000, "window": 0}
    options = parse_options(__doc__, profile=False, untimed=False, subscribers=-1, **sizes)

    manage_memory()  # as the router does
    numbers = options.ranks, options.rows, options.output, options.window, options.subscribers
    bench = Bench(*numbers, is_timed=not options.untimed)
    for _ in range(min(2 * options.output, MAX_WARM_UP)):
        bench.step()
    bench.times.clear()
    bench.num_events.clear()
    gc.collect()
    gc.disable()
    profile = cProfile.Profile(time.thread_time)
    if options.profile:
        profile.enable()
    for _ in range(options.steps):
        bench.step()
    if options.profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)

    bench.close()
    times = np.array(bench.times) * 1e6
    times = np.column_stack((times, times.sum(axis=1)))
    num_cached = sum(cache.pool.num_cached for cache in bench.scheduler.caches)
    num_free = sum(cache.pool.num_free for cache in bench.scheduler.caches)
    print(
        f"router work per step: {options.ranks} ranks x {options.rows} sequences; "
        f"{np.mean(bench.num_events):.1f} end per step; {num_cached} blocks cached, {num_free} free"
    )
    print(f"{'us':<10}{'median':>10}{'mean':>10}{'min':>10}{'p90':>10}")
    for name, column in zip((*PHASES, "total"), times.T, strict=True):
        values = np.median(column), column.mean(), column.min(), np.percentile(column, 90)
        print(f"{name:<10}" + "".join(f"{value:>10.1f}" for value in values))


if __name__ == "__main__":
    main()
