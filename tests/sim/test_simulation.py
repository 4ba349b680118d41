"""If these fail, some client got another's tokens, waits for ever, or a block is lost for good."""

import asyncio
import random

import numpy as np
import pytest

from protos.errors import RpcError
from router.admission import Admission
from router.cell import Cell
from router.engine import Engine
from router.errors import Cancelled, DeadlineExceeded, QueueFull
from router.group import GroupShape
from router.readers import Readers
from router.request import OutputOptions, Request, SamplingParams, StopConditions
from router.sequence_table import RowStatus
from router.step_builder import NO_GRAPHS, GraphSizes
from tests.sim import virtual_clock
from tests.sim.fake_executors import EOS, VOCAB_SIZE, FakeExecutors, expected_output


class World:
    """One router with one group, and clients that check what they get."""

    def __init__(self, rng: random.Random, **faults: float) -> None:
        self.rng = rng
        dp_size, attn_tp_size = rng.choice([1, 2, 3]), rng.choice([1, 1, 2])
        graph_sizes = GraphSizes((2, 4) if attn_tp_size == 2 else (1, 2, 4), (4, 8, 16), "prefill")
        self.shape = GroupShape(
            dp_size=dp_size,
            num_blocks=tuple(rng.randint(14, 40) for _ in range(dp_size)),
            block_size=4,
            rows_per_rank=rng.choice([2, 5, 8]),
            max_num_batched_tokens=rng.choice([8, 16, 40]),
            max_num_logits=rng.choice([8, 16]),
            max_model_len=48,
            attn_tp_size=attn_tp_size,
            graph_sizes=rng.choice([NO_GRAPHS, graph_sizes]),
        )
        self.executors = FakeExecutors(self.shape, rng, **faults)
        self.admission = Admission(max_sequences=60, max_tokens=1200)
        self.cell = Cell(Readers(max_readers=500))
        self.engine = Engine(
            0,
            self.executors,
            self.admission,
            self.cell.readers,
            pipeline_depth=rng.choice([1, 2, 3]),
            min_chunk_tokens=rng.choice([1, 8]),
            retry_delay_s=0.1,
            on_end=self.cell.on_end,
        )
        self.cell.drive([self.engine])
        self.prefixes = [self.tokens(rng.randint(4, 24)) for _ in range(3)]
        self.pieces = [self.tokens(self.shape.block_size) for _ in range(4)]
        self.num_right = 0

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randint(1, VOCAB_SIZE - 1) for _ in range(count)]

    def recombined(self) -> list[int]:
        """Blocks that other prompts have too, behind other blocks."""
        return [token for piece in self.rng.choices(self.pieces, k=4) for token in piece]

    def make_request(self, number: int) -> Request:
        rng = self.rng
        prompt = rng.choice([*self.prefixes, self.recombined(), []])
        prompt = prompt + self.tokens(rng.randint(1, 20))
        ignore_eos = rng.random() < 0.3
        now = asyncio.get_running_loop().time()
        return Request(
            request_id=f"r{number}",
            prompt=np.array(prompt, np.int32),
            sampling=SamplingParams(),
            stop=StopConditions(
                max_tokens=rng.randint(1, self.shape.max_model_len - len(prompt)),
                stop_token_ids=() if ignore_eos else (EOS,),
            ),
            output=OutputOptions(logprobs=rng.random() < 0.2, prompt_logprobs=rng.random() < 0.15),
            reader=self.cell.readers.open(),
            arrival_time=now,
            n=rng.choice([1, 1, 1, 3]),
            priority=rng.choice([0, 0, 0, 5, -5]),
            deadline=now + rng.uniform(0.05, 3) if rng.random() < 0.1 else None,
            is_columnar=rng.random() < 0.3,
        )

    async def client(self, number: int) -> None:
        """Sends one request, perhaps cancels it, and checks every token of the others."""
        await asyncio.sleep(self.rng.choice([0.0, self.rng.uniform(0, 4)]))
        request = self.make_request(number)
        try:
            self.cell.submit(request)
        except QueueFull:
            self.cell.readers.close(request.reader)
            return
        if self.rng.random() < 0.25:
            loop = asyncio.get_running_loop()
            loop.call_later(self.rng.uniform(0, 2), self.cell.cancel, request)
        got: list[list[int]] = [[] for _ in request.sequences]
        while request.is_live:
            await request.reader.wait()
            if self.rng.random() < 0.1:
                await asyncio.sleep(self.rng.uniform(0, 0.5))  # a slow reader
            if not request.is_columnar:
                for sequence in request.sequences:
                    got[sequence.index] += sequence.take_tokens().tolist()
        for sequence in request.sequences:
            got[sequence.index] += sequence.take_tokens().tolist()
        self.cell.readers.close(request.reader)
        self.check_outcome(request, got)

    def check_outcome(self, request: Request, got: list[list[int]]) -> None:
        errors: list[RpcError] = [s.error for s in request.sequences if s.error is not None]
        assert all(isinstance(error, Cancelled | DeadlineExceeded) for error in errors)
        stop = request.stop
        expected = expected_output(request.prompt, stop.max_tokens, stop.stop_token_ids)
        for sequence, tokens in zip(request.sequences, got, strict=True):
            if sequence.error is not None:
                assert tokens == expected[: len(tokens)]
                continue
            assert tokens == expected
            assert len(sequence.logprobs) == (len(tokens) if request.output.logprobs else 0)
            wants_prompt = request.output.prompt_logprobs and sequence.index == 0
            num_scored = len(request.prompt) - 1 if wants_prompt else 0
            assert [t.token_id for t in sequence.prompt_logprobs] == (
                request.prompt[1:].tolist() if num_scored else []
            )
            self.num_right += 1

    async def run(self, num_clients: int) -> None:
        async with asyncio.timeout(3600), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self.engine.run())
            while self.cell.model is None:
                await asyncio.sleep(0.01)
            await asyncio.gather(*(self.client(number) for number in range(num_clients)))
            # Steps in flight of the last sequences to end still hold their blocks.
            while any(rank.num_running for rank in self.cell.status()[0].ranks):
                await asyncio.sleep(0.1)
            self.check_nothing_is_left()
            self.check_steps_are_counted_by_what_ran_them()
            running.cancel()

    def check_steps_are_counted_by_what_ran_them(self) -> None:
        [status] = self.cell.status()
        ways = [(count.runner, count.size, count.miss) for count in status.graphs]
        assert len(set(ways)) == len(ways)
        assert sum(count.num_steps for count in status.graphs) == status.step
        for runner, size, miss in ways:
            sizes = {"decode": self.shape.graph_sizes.decode, "prefill": (4, 8, 16), "eager": (0,)}
            assert size in sizes[runner]
            assert bool(miss) == (runner == "eager")

    def check_nothing_is_left(self) -> None:
        assert self.cell.num_live == 0
        assert len(self.admission) == self.admission.num_tokens == 0
        assert self.cell.readers.num_free == 500
        scheduler = self.engine._scheduler
        if scheduler is None:  # forming again
            return
        assert (scheduler.table.status == RowStatus.FREE).all()
        assert (scheduler.table.num_in_flight == 0).all()
        for cache in scheduler.caches:
            cache.check()
            assert cache.pool.num_used == 0


@pytest.mark.parametrize("seed", range(60))
def test_every_request_ends_and_every_block_comes_back(seed: int) -> None:
    rng = random.Random(seed)
    virtual_clock.run(_simulate(rng))


@pytest.mark.parametrize("seed", range(20))
def test_slow_ranks_and_lost_executors_change_no_output(seed: int) -> None:
    rng = random.Random(1000 + seed)
    virtual_clock.run(_simulate(rng, loss_rate=0.004, slow_rate=0.02))


async def _simulate(rng: random.Random, **faults: float) -> None:
    world = World(rng, **faults)
    await world.run(num_clients=40)
    assert world.num_right > 0
