"""A whole router on a virtual clock: groups of fake executors, and clients that check every token."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from router.engine.engine import Engine
from router.engine.engines import Engines
from router.engine.settings import EngineSettings
from router.errors import Cancelled, DeadlineExceeded, ExecutorFailed, QueueFull
from router.requests.request import (
    Listeners,
    OutputOptions,
    Request,
    SamplingParams,
    Sequence,
    StopConditions,
)
from router.requests.waiting_queue import WaitingQueue
from router.scheduling.sequence_table import NUM_STOP_IDS, RowStatus
from router.scheduling.step import (
    NO_GRAPHS,
    CapturedSizes,
    GroupShape,
    SpeculationShape,
    window_reach,
)
from tests.router.support.block_checks import check_cache
from tests.router.support.fake_executors import FakeExecutors, Poison
from tests.router.support.fake_rank import EOS, VOCAB_SIZE, expected_output
from tests.router.support.running_engines import KnownCosts

Work = Coroutine[Any, Any, None]

MAX_READERS = 500
MAX_MODEL_LEN = 48
EXTEND_SIZES = (4, 8, 16)
MANY_STOP_IDS = (EOS, *range(VOCAB_SIZE, VOCAB_SIZE + NUM_STOP_IDS))  # looked at one by one


@dataclass
class Group:
    """One group, and what drives it."""

    shape: GroupShape
    executors: FakeExecutors
    admission: WaitingQueue
    engine: Engine


class World:
    """One router, and clients that send requests to it and check what they get.

    Args:
        rng: Of everything that is left to chance.
        num_groups: Groups of executors.
        poison: Requests that kill executors, by id.
        shape: Of every group; None: at random.
        windows: What its `kv_window` is drawn from.
        verify_kept_kv: See EngineSettings.
        faults: See FakeExecutors.

    Attributes:
        requests: Those that were taken.
        num_right: Sequences that ended as they should.
        failed: Requests that were failed as poison.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        num_groups: int = 1,
        poison: dict[str, Poison] | None = None,
        shape: GroupShape | None = None,
        windows: tuple[int, ...] = (0, 0, 1, 14),
        verify_kept_kv: float = 0.0,
        **faults: float,
    ) -> None:
        self.rng = rng
        self.poison = poison or {}
        self.block_size = 4
        self.windows = windows
        self.verify_kept_kv = verify_kept_kv
        self.engines = Engines(
            Listeners(MAX_READERS), failover_after_s=rng.choice([0.3, 2.0, 1000.0])
        )
        self.groups = [
            self._build_group(number, shape or self._draw_speculation(self._draw_shape()), **faults)
            for number in range(num_groups)
        ]
        self.engines.drive([group.engine for group in self.groups])
        self.prefixes = [self.tokens(rng.randint(4, 24)) for _ in range(3)]
        self.pieces = [self.tokens(self.block_size) for _ in range(4)]
        self.requests: list[Request] = []
        self.num_right = 0
        self.failed: list[Request] = []

    def _draw_shape(self) -> GroupShape:
        rng = self.rng
        dp_size, attn_tp_size = rng.choice([1, 2, 3]), rng.choice([1, 1, 2])
        decode_sizes = (2, 4) if attn_tp_size == 2 else (1, 2, 4)
        graph_sizes = CapturedSizes(decode_sizes, EXTEND_SIZES, "prefill")
        kv_window = rng.choice(self.windows)
        num_columns = MAX_MODEL_LEN // self.block_size
        least = 1 + num_columns  # blocks without which the longest sequence does not fit
        if kv_window:
            least += min(num_columns, 1 + window_reach(kv_window, self.block_size))
        return GroupShape(
            dp_size=dp_size,
            num_blocks=tuple(rng.randint(least, least + 27) for _ in range(dp_size)),
            block_size=self.block_size,
            rows_per_rank=rng.choice([2, 5, 8]),
            max_num_batched_tokens=rng.choice([8, 16, 40]),
            max_num_logits=rng.choice([8, 16]),
            max_model_len=MAX_MODEL_LEN,
            attn_tp_size=attn_tp_size,
            graph_sizes=rng.choice([NO_GRAPHS, graph_sizes]),
            kv_window=kv_window,
        )

    def _draw_speculation(self, shape: GroupShape) -> GroupShape:
        """Gives about half of all groups a draft model."""
        rng = self.rng
        if rng.random() < 0.5:
            return shape
        num_steps = rng.choice([1, 3, 5])
        width = 1 + num_steps * rng.choice([1, 1, 2])  # a chain, or a tree
        speculation = SpeculationShape(
            algorithm="eagle",
            num_draft_tokens=width,
            num_draft_steps=num_steps,
            topk=1 if width == 1 + num_steps else 2,
            num_reserved_tokens=width + rng.choice([0, 2, 7]),
            kv_lookahead=rng.choice([0, 1]),
            extends=rng.random() < 0.7,
        )
        return replace(shape, speculation=speculation)

    def _build_group(self, number: int, shape: GroupShape, **faults: float) -> Group:
        rng = self.rng
        acceptance = rng.choice([0.0, 0.3, 0.7, 1.0])
        executors = FakeExecutors(shape, rng, poison=self.poison, acceptance=acceptance, **faults)
        admission = WaitingQueue(max_sequences=60, max_tokens=1200)
        engine = Engine(
            number,
            executors,
            admission,
            self.engines.listeners,
            EngineSettings(
                pipeline_depth=rng.choice([1, 2, 3]),
                min_chunk_tokens=rng.choice([1, 8]),
                target_token_gap_ms=rng.choice([0.0, 11.2, 50.0]),
                target_first_token_ms=rng.choice([30.0, 500.0]),
                first_token_weight=rng.choice([1.0, 1e9]),
                retry_delay_s=0.1,
                verify_kept_kv=self.verify_kept_kv,
                min_tokens_per_draft_step=rng.choice([1, 1.5]),
                prompt_steps_between_drafts=rng.choice([1, 2]),
            ),
            on_end=self.engines.on_end,
        )
        engine.measures.costs = KnownCosts()
        return Group(shape, executors, admission, engine)

    # ---- requests

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randint(1, VOCAB_SIZE - 1) for _ in range(count)]

    def recombined(self) -> list[int]:
        """Blocks that other prompts have too, behind other blocks."""
        return [token for piece in self.rng.choices(self.pieces, k=4) for token in piece]

    def make_request(self, number: int, **fields: Any) -> Request:
        rng = self.rng
        prompt = rng.choice([*self.prefixes, self.recombined(), []])
        prompt = prompt + self.tokens(rng.randint(1, 20))
        now = asyncio.get_running_loop().time()
        max_tokens = rng.randint(1, MAX_MODEL_LEN - len(prompt))
        settings: dict[str, Any] = {
            "stop": StopConditions(
                max_tokens=max_tokens,
                min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
                stop_token_ids=rng.choice([(), (EOS,), (EOS, 7), MANY_STOP_IDS]),
            ),
            "output": OutputOptions(
                logprobs=rng.random() < 0.2, prompt_logprobs=rng.random() < 0.15
            ),
            "n": rng.choice([1, 1, 1, 3]),
            "priority": rng.choice([0, 0, 0, 5, -5]),
            "deadline": now + rng.uniform(0.05, 3) if rng.random() < 0.1 else None,
            "is_columnar": rng.random() < 0.3,
            "caller": ((), ("one",), ("other",))[number % 3],
            **fields,
        }
        if "listener" not in settings:
            settings["listener"] = self.engines.listeners.open()
        return Request(
            request_id=f"r{number}",
            prompt=np.array(settings.pop("prompt", prompt), np.int32),
            sampling=SamplingParams(
                seed=rng.choice([0, rng.getrandbits(64)]),
                values=rng.choice([{}, {}, {}, {"presence_penalty": 1.0}]),
            ),
            arrival_time=now,
            **settings,
        )

    # ---- clients

    async def patient_client(
        self, number: int, *, prompt_lens: tuple[int, int] = (1, 30), max_tokens: int = 12
    ) -> None:
        """Sends a request that is never cancelled and has all of its tokens to come."""
        await self.client(
            number,
            may_cancel=False,
            prompt=self.tokens(self.rng.randint(*prompt_lens)),
            stop=StopConditions(max_tokens=max_tokens),
            deadline=None,
            n=1,
        )

    async def client(self, number: int, *, may_cancel: bool = True, **fields: Any) -> None:
        """Sends one request, perhaps cancels it, and checks every token."""
        await asyncio.sleep(self.rng.choice([0.0, self.rng.uniform(0, 4)]))
        request = self.make_request(number, **fields)
        if self._submit(request, may_cancel=may_cancel):
            got: list[list[int]] = [[] for _ in request.sequences]
            while request.is_live:
                await request.listener.wait()
                if self.rng.random() < 0.1:
                    await asyncio.sleep(self.rng.uniform(0, 0.5))  # a slow listener
                if not request.is_columnar:
                    for sequence in request.sequences:
                        got[sequence.index] += sequence.take_tokens().tolist()
            for sequence in request.sequences:
                got[sequence.index] += sequence.take_tokens().tolist()
                self.check_outcome(sequence, got[sequence.index])
        self.engines.listeners.close(request.listener)

    async def stream(self, first_number: int, count: int) -> None:
        """Sends requests on one listener, and takes their tokens as columns, as GenerateMany does."""
        listener = self.engines.listeners.open()
        requests: list[Request] = []
        got: list[list[int]] = []
        for tag in range(count):
            await asyncio.sleep(self.rng.uniform(0, 0.5))
            number, output = first_number + tag, OutputOptions()
            request = self.make_request(
                number, listener=listener, tag=len(requests), is_columnar=True, n=1, output=output
            )
            if self._submit(request):
                requests.append(request)
                got.append([])
        num_open = len(requests)
        while num_open:
            await listener.wait()
            columns = self.engines.take_columns(listener)
            taken = iter(columns.token_ids.tolist())
            for tag, num in zip(columns.tags.tolist(), columns.num_tokens.tolist(), strict=True):
                got[tag] += [next(taken) for _ in range(num)]
            while listener.ended:
                sequence = listener.ended.popleft()
                tag = sequence.request.tag
                got[tag] += sequence.take_tokens().tolist()
                self.check_outcome(sequence, got[tag])
                num_open -= 1
        self.engines.listeners.close(listener)

    def _submit(self, request: Request, *, may_cancel: bool = True) -> bool:
        try:
            self.engines.submit(request)
        except QueueFull:
            return False
        self.requests.append(request)
        if may_cancel and self.rng.random() < 0.25:
            loop = asyncio.get_running_loop()
            loop.call_later(self.rng.uniform(0, 2), self.engines.cancel, request)
        return True

    def check_outcome(self, sequence: Sequence, tokens: list[int]) -> None:
        request, stop = sequence.request, sequence.request.stop
        expected = expected_output(
            request.prompt, stop.max_tokens, stop.stop_token_ids, sequence.seed, stop.min_tokens
        )
        if sequence.error is not None:
            assert tokens == expected[: len(tokens)]
            assert isinstance(sequence.error, Cancelled | DeadlineExceeded | ExecutorFailed)
            if isinstance(sequence.error, ExecutorFailed) and sequence.index == 0:
                self.failed.append(request)
            return
        assert tokens == expected
        assert len(sequence.logprobs) == (len(tokens) if request.output.logprobs else 0)
        wants_prompt = request.output.prompt_logprobs and sequence.index == 0
        num_scored = len(request.prompt) - 1 if wants_prompt else 0
        assert [t.token_id for t in sequence.prompt_logprobs] == (
            request.prompt[1:].tolist() if num_scored else []
        )
        self.num_right += 1

    # ---- the run

    async def run_clients(self, clients: Iterable[Work], trouble: Work | None = None) -> None:
        """Runs clients until all have ended, and trouble, if any, beside them."""
        async with asyncio.timeout(3600), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(group.engine.run()) for group in self.groups]
            while self.engines.model is None:
                await asyncio.sleep(0.01)
            if trouble is not None:
                running.append(tasks.create_task(trouble))
            await asyncio.gather(*clients)
            # Steps in flight of the last sequences to end still hold their blocks.
            while any(group.engine.num_running for group in self.groups):
                await asyncio.sleep(0.1)
            self.check_nothing_is_left()
            self.check_steps_are_counted_by_what_ran_them()
            for task in running:
                task.cancel()

    def check_nothing_is_left(self) -> None:
        assert self.engines.num_live == 0
        assert self.engines.listeners.num_free == MAX_READERS
        for group in self.groups:
            assert group.engine.measures.faults["unexpected"] == 0
            assert len(group.admission) == group.admission.num_tokens == 0
            assert group.engine.waiting.num_tokens == 0
            assert all(flow.is_idle for _, flow in group.admission.line)
            scheduler = group.engine._scheduler
            if scheduler is None:  # forming again
                continue
            assert (scheduler.table.status == RowStatus.FREE).all()
            assert not scheduler.in_flight
            for cache in scheduler.caches:
                check_cache(cache)
                assert cache.pool.num_used == 0

    def check_steps_are_counted_by_what_ran_them(self) -> None:
        for group, status in zip(self.groups, self.engines.status(), strict=True):
            ways = [(count.runner, count.size, count.miss) for count in status.graphs]
            assert len(set(ways)) == len(ways)
            assert sum(count.num_steps for count in status.graphs) == status.step
            decode_sizes = group.shape.graph_sizes.decode
            for runner, size, miss in ways:
                sizes = {"prefill": EXTEND_SIZES, "eager": (0,)}
                assert size in sizes.get(runner, decode_sizes)
                assert runner in (*sizes, "decode", "verify")
                assert bool(miss) == (runner == "eager")


def num_caught(run: Callable[[int], object], num_seeds: int) -> int:
    """Returns of how many seeds a run fails: by a wrong outcome, or a step that no executor can run."""
    count = 0
    for seed in range(num_seeds):
        try:
            run(seed)
        except BaseException:
            count += 1
    print(f"seen by {count} of {num_seeds} seeds")
    return count


async def break_at_random(world: World) -> None:
    """Ten times, an executor of some group dies or stands still."""
    rng = world.rng
    for _ in range(10):
        await asyncio.sleep(rng.expovariate(2.0))
        executors = rng.choice(world.groups).executors
        down_s = rng.choice([0.0, rng.uniform(0, 5)])
        if rng.random() < 0.6:
            executors.kill(down_s)
        else:
            executors.hang(1.0, down_s)


def check_blame(world: World) -> None:
    """Who was failed kills, or was alone by accident each time that somebody else's fault struck."""
    for request in world.failed:
        num_alone = max(
            group.executors.num_lost_alone[sequence] + other.executors.num_lost_alone[sequence]
            for group in world.groups[:1]
            for other in world.groups[-1:]
            for sequence in request.sequences
        )
        assert request.request_id in world.poison or num_alone >= 2
