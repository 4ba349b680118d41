"""Executors that keep numbers where real ones keep KV.

What a token's keys and values depend on is that token and every one before it. So each KV position
here holds a hash over the tokens up to it, chained through what the position before holds, and a
sequence's next token is a hash over all that its blocks hold. A block that was handed out twice
or shared behind another prefix, a row that kept an old block, or a token that was fed at the wrong
place changes the output, as it would on a real executor. So does a row that begins with another
seed than its sequence has.

They die and hang when a test says so, and of poison: requests that no step survives.
"""

import asyncio
import math
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from router.block_pool import SCRATCH_BLOCK
from router.errors import ExecutorLost
from router.group import GroupInfo, GroupShape
from router.model import ServedModel
from router.request import Sequence as LiveSequence
from router.step import (
    Agreement,
    DpPaddingMode,
    ForwardMode,
    RankBatch,
    RankResult,
    StepPlan,
    StepResult,
)

VOCAB_SIZE = 50
EOS = 0


def extend_kv(before: int, token: int) -> int:
    """What a position holds, given what the one before it holds (0 at the start)."""
    return (before * 1_000_003 + int(token) + 1) % (1 << 61)


def next_token(kv: Sequence[int], seed: int = 0) -> int:
    """The model: ends a sequence about once in 40 tokens."""
    state = 17 + seed
    for held in kv:
        state = (state * 1_000_003 + held) % (1 << 61)
    return EOS if state % 40 == 0 else 1 + state % (VOCAB_SIZE - 1)


def expected_output(
    prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int], seed: int = 0
) -> list[int]:
    """What a sequence must give, computed without any router."""
    kv: list[int] = []
    for token in prompt:
        kv.append(extend_kv(kv[-1] if kv else 0, token))
    output: list[int] = []
    while len(output) < max_tokens:
        output.append(next_token(kv, seed))
        if output[-1] in stop_ids:
            break
        kv.append(extend_kv(kv[-1], output[-1]))
    return output


@dataclass
class FakeRank:
    """One DP rank's memory."""

    kv: np.ndarray  # [num_blocks, block_size]: extend_kv of the token whose KV is there, or -1
    tables: dict[int, list[int]] = field(default_factory=dict)
    last_tokens: dict[int, int] = field(default_factory=dict)
    sequences: dict[int, LiveSequence] = field(default_factory=dict)

    def run(self, batch: RankBatch, shape: GroupShape) -> RankResult:
        num_seqs = len(batch.rows)
        num_tokens = np.ones(num_seqs, np.int32) if batch.num_tokens is None else batch.num_tokens
        num_new = (
            np.zeros(num_seqs, np.int32) if batch.num_new_blocks is None else batch.num_new_blocks
        )
        num_all = int(num_tokens.sum())
        known_ids = np.full(num_all, -1) if batch.token_ids is None else batch.token_ids
        samples = np.ones(num_seqs, np.uint8) if batch.samples is None else batch.samples
        num_scored = np.zeros(num_seqs, np.int32) if batch.num_scored is None else batch.num_scored
        assert len(set(batch.rows.tolist())) == num_seqs <= shape.rows_per_rank
        assert num_all == len(known_ids) <= shape.max_num_batched_tokens
        assert samples.sum() + num_scored.sum() <= shape.max_num_logits
        for start in batch.starts:
            self.tables[start.row] = []
            self.last_tokens.pop(start.row, None)
            self.sequences[start.row] = start.sequence
        new_blocks = iter([] if batch.new_block_ids is None else batch.new_block_ids.tolist())
        token_ids = iter(known_ids.tolist())
        sampled = []
        for i, row in enumerate(batch.rows.tolist()):
            table = self.tables[row]
            table += [next(new_blocks) for _ in range(num_new[i])]
            assert SCRATCH_BLOCK not in table
            assert len(set(table)) == len(table)
            end = int(batch.num_computed_tokens[i] + num_tokens[i])
            assert len(table) == -(-end // shape.block_size)
            for position in range(int(batch.num_computed_tokens[i]), end):
                token = next(token_ids)
                token = self.last_tokens[row] if token == -1 else token
                before = self._held(table, position - 1, shape) if position else 0
                block, offset = divmod(position, shape.block_size)
                self.kv[table[block], offset] = extend_kv(before, token)
            if samples[i]:
                seed = self.sequences[row].seed
                token = next_token(self.kv[table].reshape(-1)[:end].tolist(), seed)
                self.last_tokens[row] = token
                sampled.append(token)
        num_scores = sum(len(s.scored_ids) + (s.sample_index is not None) for s in batch.scorings)
        return RankResult(
            np.array(sampled, np.int32),
            np.zeros(num_scores, np.float32),
            np.zeros(0, np.int32),
            np.zeros(0, np.float32),
        )

    def _held(self, table: list[int], position: int, shape: GroupShape) -> int:
        block, offset = divmod(position, shape.block_size)
        return int(self.kv[table[block], offset])


@dataclass(frozen=True)
class Poison:
    """Which steps of a request kill: those that compute a position, or all of its decodes."""

    position: int | None

    def kills(self, start: int, end: int, num_prompt: int) -> bool:
        """Whether a step that computes the positions from ``start`` to ``end`` does."""
        if self.position is not None:
            return start <= self.position < end
        return start >= num_prompt and end == start + 1


class Pending(NamedTuple):
    """A step that has not come back.

    Attributes:
        result: None if the executors die of it.
        ran: The sequences that it runs.
    """

    done_time: float
    result: StepResult | None
    ran: frozenset[LiveSequence]


class FakeExecutors:
    """A group with a virtual device: each step takes a random time, and ranks may die.

    Args:
        shape: The group.
        rng: Of times and losses.
        loss_rate: Share of steps after which an executor is lost.
        slow_rate: Share of steps that take a hundred times as long.
        poison: By request id.

    Attributes:
        num_losses: Epochs that ended.
        num_lost_alone: How often each sequence was the only one in the lost steps.
    """

    def __init__(
        self,
        shape: GroupShape,
        rng: random.Random,
        *,
        loss_rate: float = 0.0,
        slow_rate: float = 0.0,
        step_s: float = 0.01,
        poison: dict[str, Poison] | None = None,
    ) -> None:
        self.shape = shape
        self.num_epochs = 0
        self.num_losses = 0
        self.plans: list[StepPlan] = []
        self.num_lost_alone: Counter[LiveSequence] = Counter()
        self._rng = rng
        self._loss_rate = loss_rate
        self._slow_rate = slow_rate
        self._step_s = step_s
        self._poison = poison or {}
        self._device_time = 0.0
        self._up_time = 0.0
        self._pending: deque[Pending] = deque()
        self._ranks: list[FakeRank] = []
        self._loss: asyncio.Future[None] | None = None

    def kill(self, down_s: float) -> None:
        """Ends an executor now, and starts it again after a while."""
        now = asyncio.get_running_loop().time()
        self._up_time = max(self._up_time, now + down_s)
        if self._loss is not None and not self._loss.done():
            self._loss.set_exception(ExecutorLost("it died"))
            self._loss.exception()
            self.num_losses += 1
            lost = frozenset[LiveSequence]().union(*(step.ran for step in self._pending))
            if len(lost) == 1:
                self.num_lost_alone.update(lost)

    def hang(self, deadline_s: float, down_s: float) -> None:
        """Lets an executor stand still. That is noticed only if a step waits for it."""
        now = asyncio.get_running_loop().time()
        self._device_time = max(self._device_time, now) + deadline_s
        self._pending = deque(
            step._replace(done_time=step.done_time + deadline_s, result=None)
            for step in self._pending
        )
        self._up_time = now + down_s

    async def form(self) -> GroupInfo:
        if asyncio.get_running_loop().time() < self._up_time:
            raise ExecutorLost("not up again yet")
        if self.num_epochs and self._rng.random() < 0.3:
            raise ExecutorLost("its model is still loading")
        await asyncio.sleep(0.05)
        self.num_epochs += 1
        self._pending.clear()
        self._device_time = 0.0
        self._loss = asyncio.get_running_loop().create_future()
        self._ranks = [
            FakeRank(np.full((num_blocks, self.shape.block_size), -1, np.int64))
            for num_blocks in self.shape.num_blocks
        ]
        model = ServedModel(
            name="fake",
            architecture="Fake",
            fingerprint="fake",
            vocab_size=VOCAB_SIZE,
            max_model_len=self.shape.max_model_len,
            eos_token_ids=(EOS,),
        )
        addresses = tuple(f"fake:{rank}" for rank in range(self.shape.dp_size))
        return GroupInfo(epoch=self.num_epochs, model=model, shape=self.shape, addresses=addresses)

    def send(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._check_agreement(plan)
        now = asyncio.get_running_loop().time()
        factor = 100.0 if self._rng.random() < self._slow_rate else self._rng.uniform(0.2, 1.8)
        self._device_time = max(self._device_time, now) + self._step_s * factor
        died_before = any(step.result is None for step in self._pending)
        is_lost = died_before or self._rng.random() < self._loss_rate
        results = tuple(
            rank.run(batch, self.shape)
            for rank, batch in zip(self._ranks, plan.batches, strict=True)
        )
        ran = frozenset(
            rank.sequences[row]
            for rank, batch in zip(self._ranks, plan.batches, strict=True)
            for row in batch.rows.tolist()
        )
        is_lost = is_lost or self._is_poisoned(plan)
        self._pending.append(Pending(self._device_time, None if is_lost else results, ran))

    def _is_poisoned(self, plan: StepPlan) -> bool:
        for rank, batch in zip(self._ranks, plan.batches, strict=True):
            num_tokens = [1] * len(batch.rows)
            if batch.num_tokens is not None:
                num_tokens = batch.num_tokens.tolist()
            starts = batch.num_computed_tokens.tolist()
            for row, start, count in zip(batch.rows.tolist(), starts, num_tokens, strict=True):
                request = rank.sequences[row].request
                poison = self._poison.get(request.request_id)
                if poison and poison.kills(start, start + count, len(request.prompt)):
                    return True
        return False

    async def receive(self) -> StepResult:
        assert self._loss is not None
        while (wait_s := self._pending[0].done_time - asyncio.get_running_loop().time()) > 0:
            await asyncio.wait({self._loss}, timeout=wait_s)
            if self._loss.done():
                self._loss.result()
        if self._pending[0].result is None:
            self.kill(self._rng.uniform(0.0, 0.5))
            self._loss.result()
        result = self._pending.popleft().result
        assert result is not None
        return result

    async def lost(self) -> None:
        assert self._loss is not None
        await asyncio.shield(self._loss)

    async def close(self) -> None:
        pass

    def _check_agreement(self, plan: StepPlan) -> None:
        agreement = plan.agreement
        for rank, batch in enumerate(plan.batches):
            num_tokens = len(batch.rows) if batch.num_tokens is None else batch.num_tokens.sum()
            assert agreement.global_num_tokens[rank] == num_tokens
            assert (batch.mode is ForwardMode.IDLE) == (len(batch.rows) == 0)
        assert max(agreement.global_num_tokens) > 0
        assert agreement.has_extend == any(b.mode is ForwardMode.EXTEND for b in plan.batches)
        self._check_graph(agreement)

    def _check_graph(self, agreement: Agreement) -> None:
        """What an executor refuses, and what all ranks must be able to replay."""
        size, counts = agreement.graph_size, agreement.global_num_tokens
        assert (size is None) == (agreement.graph_miss is not None)
        if size is None:
            self._check_padding_mode(agreement)
            return
        sizes = self.shape.graph_sizes
        assert size in (sizes.extend if agreement.has_extend else sizes.decode)
        assert size >= max(counts)
        assert size % self.shape.attn_tp_size == 0
        assert agreement.padding_mode is DpPaddingMode.MAX_LEN
        if agreement.has_extend:
            assert min(counts) > 0
            assert size <= 2 * max(counts)

    def _check_padding_mode(self, agreement: Agreement) -> None:
        """An eager step gathers fewer bytes: by rows as attention TP holds them, in equal shards."""
        attn_tp_size, counts = self.shape.attn_tp_size, agreement.global_num_tokens
        rows = [math.ceil(count / attn_tp_size) * attn_tp_size for count in counts]
        is_mostly_padding = sum(rows) < max(rows) * len(rows) / 2
        is_uneven = len(counts) > 1 and agreement.has_extend
        expected = (
            DpPaddingMode.SUM_LEN if is_mostly_padding or is_uneven else DpPaddingMode.MAX_LEN
        )
        assert agreement.padding_mode is expected
