"""Groups of executors that are numbers in memory (fake_rank.py), on a virtual device.

They die and hang when a test says so, and of poison: requests that no step survives. The rank that
died begins with nothing in its KV; the others keep theirs, as far as answered steps wrote it.
"""

import asyncio
import itertools
import math
import random
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from protos.serving.v1 import serving_pb2 as pb
from router.errors import ExecutorLost, GroupGrows
from router.requests.request import Sequence as LiveSequence
from router.scheduling.step import (
    Agreement,
    BatchMode,
    GroupInfo,
    GroupShape,
    InFlight,
    PaddingMode,
    RankBatch,
    ServedModel,
    StepPlan,
    StepResult,
)
from tests.router.support.fake_rank import EOS, VOCAB_SIZE, FakeRank, Ran
from tests.router.support.plans import join_results

DEAD_SHARE = 0.6  # of losses, in which a process is lost and its KV with it

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Poison:
    """Which steps of a request kill: those that compute a position, or its decodes.

    Attributes:
        position: None: it is the decodes.
        period: One in so many of them.
    """

    position: int | None
    period: int = 1

    def kills(self, ran: Ran) -> bool:
        """Whether a step that computes so much does."""
        if self.position is not None:
            return ran.start <= self.position < ran.end
        return ran.is_decode and ran.end % self.period == 0


class Misled(BaseException):
    """A step that no executor can run, or that spoils what another reads.

    No Exception: an engine would count that, form its group again, and go on.
    """


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
        acceptance: See FakeRank.
        is_elastic: Whether the group forms with other ranks each time: those whose executors died are
            gone, others may be, too, and there are new ones.

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
        acceptance: float = 0.7,
        is_elastic: bool = False,
    ) -> None:
        self.shape = shape
        self.num_epochs = 0
        self.num_losses = 0
        self.suspicions = Counter[str]()
        self.num_standbys = 0
        self.is_driver = False
        self.held_model: ServedModel | None = None
        self.plans: list[StepPlan] = []
        self.num_lost_alone: Counter[LiveSequence] = Counter()
        self._rng = rng
        self._loss_rate = loss_rate
        self._slow_rate = slow_rate
        self._step_s = step_s
        self._poison = poison or {}
        self._acceptance = acceptance
        self._is_elastic, self._first_shape = is_elastic, shape
        self._drafts = random.Random(17)
        self._device_time = 0.0
        self._up_time = 0.0
        self._pending: deque[Pending] = deque()
        self._is_followed: bool | None = None  # by the draft model, as its first plain step said
        self._ranks: list[FakeRank] = []
        self._dead: set[int] = set()
        self._kv_ids = [self._new_kv_id() for _ in range(shape.dp_size)]
        self._loss: asyncio.Future[None] | None = None
        self._border: asyncio.Future[None] | None = None

    def _new_kv_id(self) -> str:
        return f"kv{next(_NUMBERS)}"

    def kill(self, down_s: float, error: ExecutorLost | None = None) -> None:
        """Ends an executor now, and starts it again after a while; or its connection only."""
        if self._rng.random() < DEAD_SHARE:
            self._dead.add(self._rng.randrange(self.shape.dp_size))
        now = asyncio.get_running_loop().time()
        self._up_time = max(self._up_time, now + down_s)
        if self._loss is not None and not self._loss.done():
            self._loss.set_exception(error or ExecutorLost("it died"))
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
        self._border = asyncio.get_running_loop().create_future()
        self._restart_dead()
        if self._is_elastic and self.num_epochs > 1:
            self._reshape()
        model = ServedModel(
            name="fake",
            architecture="Fake",
            fingerprint="fake",
            vocab_size=VOCAB_SIZE,
            max_model_len=self.shape.max_model_len,
            eos_token_ids=(EOS,),
        )
        return GroupInfo(
            epoch=self.num_epochs,
            model=model,
            shape=self.shape,
            addresses=tuple(f"fake:{rank}" for rank in range(self.shape.dp_size)),
            kv_ids=tuple(self._kv_ids),
        )

    def _restart_dead(self) -> None:
        """Begins an epoch on every rank: with nothing in its KV where an executor died."""
        if not self._ranks:
            self._ranks = FakeRank.of_group(
                self.shape, acceptance=self._acceptance, rng=self._drafts
            )
        for rank in self._dead:
            self._kv_ids[rank] = self._new_kv_id()
            self._ranks[rank] = FakeRank.empty(
                self.shape,
                self.shape.num_blocks[rank],
                acceptance=self._acceptance,
                rng=self._drafts,
            )
        self._dead.clear()
        for rank in self._ranks:
            rank.begin_epoch()

    def _reshape(self) -> None:
        """Has the ranks of this epoch be others than those of the last one."""
        most = self._first_shape.dp_size
        stay = [rank for rank in range(self.shape.dp_size) if self._rng.random() < 0.7][:most]
        num_new = self._rng.randint(0 if stay else 1, most - len(stay))
        num_blocks = [self.shape.num_blocks[rank] for rank in stay]
        num_blocks += self._first_shape.num_blocks[:num_new]
        self.shape = replace(self.shape, dp_size=len(num_blocks), num_blocks=tuple(num_blocks))
        fields = {"acceptance": self._acceptance, "rng": self._drafts}
        new = [FakeRank.empty(self.shape, blocks, **fields) for blocks in num_blocks[len(stay) :]]
        self._ranks = [self._ranks[rank] for rank in stay] + new
        self._kv_ids = [self._kv_ids[rank] for rank in stay] + [self._new_kv_id() for _ in new]

    def send(self, step: InFlight) -> None:
        try:
            self._send(step.plan)
        except AssertionError as error:
            raise Misled from error

    def _send(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        batches = plan.batches  # made at each look
        self._check_agreement(plan.agreement, batches)
        _check_load(plan, batches)
        now = asyncio.get_running_loop().time()
        factor = 100.0 if self._rng.random() < self._slow_rate else self._rng.uniform(0.2, 1.8)
        seconds = self._step_s * factor
        queued_s = max(0.0, self._device_time - now)
        self._device_time = max(self._device_time, now) + seconds
        times = {"queued_ns": int(queued_s * 1e9), "forward_ns": int(seconds * 1e9)}
        died_before = any(step.result is None for step in self._pending)
        is_lost = died_before or self._rng.random() < self._loss_rate
        result = join_results(
            [
                rank.run(batch, plan.agreement)._replace(**times)
                for rank, batch in zip(self._ranks, batches, strict=True)
            ]
        )
        steps = [ran for rank in self._ranks for ran in rank.ran]
        is_lost = is_lost or any(map(self._is_poisoned, steps))
        ran = frozenset(step.sequence for step in steps)
        self._pending.append(Pending(self._device_time, None if is_lost else result, ran))

    def _is_poisoned(self, ran: Ran) -> bool:
        poison = self._poison.get(ran.sequence.request.request_id)
        return poison is not None and poison.kills(ran)

    async def receive(self, step: InFlight) -> StepResult:
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
        try:
            for rank in self._ranks:
                rank.answered()
        except AssertionError as error:
            raise Misled from error
        return result

    def members(self) -> list[pb.MemberStatus]:
        return []

    @property
    def wants_border(self) -> bool:
        return self._border is not None and self._border.done()

    def may_try_suspects(self) -> bool:
        return True

    def elastic(self) -> pb.ElasticStatus | None:
        return None

    async def news(self) -> None:
        await asyncio.Event().wait()

    async def lost(self) -> None:
        assert self._loss is not None
        assert self._border is not None
        ends = self._loss, self._border
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        next(end for end in ends if end.done()).result()

    def end_at_border(self) -> None:
        """Ends the epoch as soon as no step runs."""
        if self._border is not None and not self._border.done():
            self._border.set_exception(GroupGrows("it grows"))
            self._border.exception()

    async def close(self) -> None:
        pass

    def _check_agreement(self, agreement: Agreement, batches: list[RankBatch]) -> None:
        width = agreement.num_draft_tokens
        speculation = self.shape.speculation
        assert width in (0, 0 if speculation is None else speculation.num_draft_tokens)
        has_draft_rows = speculation is not None and speculation.extends and not width
        num_draft_rows, num_sampled = list[int](), list[int]()
        for rank, batch in enumerate(batches):
            num_tokens = len(batch.rows) if batch.num_tokens is None else batch.num_tokens.sum()
            if width:
                num_tokens = width * len(batch.rows)
                assert agreement.global_num_tokens_for_logprob[rank] == num_tokens
            assert agreement.global_num_tokens[rank] == num_tokens
            assert (batch.mode is BatchMode.IDLE) == (len(batch.rows) == 0)
            num_draft_rows.append(int(num_tokens) + _num_prompts_ended(batch))
            is_whole = batch.samples is None
            num_sampled.append(len(batch.rows) if is_whole else int(batch.samples.sum()))
        draft_counts = agreement.global_num_tokens_for_draft, agreement.global_num_sampled
        if has_draft_rows and self._is_followed is None:
            self._is_followed = draft_counts != ((), ())
        assert draft_counts == (
            (tuple(num_draft_rows), tuple(num_sampled))
            if has_draft_rows and self._is_followed
            else ((), ())
        )
        assert not (width and self._is_followed is False)
        assert not (width and agreement.has_extend)
        assert max(agreement.global_num_tokens) > 0
        assert agreement.has_extend == any(b.mode is BatchMode.EXTEND for b in batches)
        assert agreement.has_extend == any(map(_runs_prompts, batches))
        self._check_graph(agreement)

    def _check_graph(self, agreement: Agreement) -> None:
        """What an executor refuses, and what all ranks must be able to replay."""
        size, counts = agreement.graph_size, agreement.global_num_tokens
        if agreement.num_draft_tokens:  # its graphs are known by their sequences
            counts = tuple(count // agreement.num_draft_tokens for count in counts)
        assert (size is None) == (agreement.graph_miss is not None)
        if size is None:
            self._check_padding_mode(agreement)
            return
        sizes = self.shape.graph_sizes
        assert size in (sizes.extend if agreement.has_extend else sizes.decode)
        assert size >= max(counts)
        assert size % self.shape.attn_tp_size == 0
        assert agreement.padding_mode is PaddingMode.MAX_LEN
        if agreement.has_extend:
            assert min(counts) > 0
            assert size <= 2 * max(counts)

    def _check_padding_mode(self, agreement: Agreement) -> None:
        """An eager step gathers fewer bytes: by rows as attention TP holds them, in equal shards."""
        attn_tp_size, counts = self.shape.attn_tp_size, agreement.global_num_tokens
        rows = [math.ceil(count / attn_tp_size) * attn_tp_size for count in counts]
        is_mostly_padding = sum(rows) < max(rows) * len(rows) / 2
        is_uneven = len(counts) > 1 and agreement.has_extend
        expected = PaddingMode.SUM_LEN if is_mostly_padding or is_uneven else PaddingMode.MAX_LEN
        assert agreement.padding_mode is expected


def _check_load(plan: StepPlan, batches: list[RankBatch]) -> None:
    """What a step's time is predicted from, against what each row runs."""
    num_pairs = [0.0] * len(batches)
    for rank, batch in enumerate(batches):
        is_decode = np.ones(len(batch.rows), dtype=np.bool_)
        if batch.mode is BatchMode.EXTEND:
            assert batch.token_ids is not None
            assert batch.num_tokens is not None
            is_decode = batch.token_ids[batch.num_tokens.cumsum() - batch.num_tokens] == -1
            counts, starts = batch.num_tokens[~is_decode], batch.num_computed_tokens[~is_decode]
            num_pairs[rank] = float((counts * (starts + counts / 2)).sum())
        assert plan.kv_tokens[rank] == batch.num_computed_tokens[is_decode].sum()
    assert (plan.num_pairs is not None) == plan.agreement.has_extend
    assert plan.num_pairs is None or plan.num_pairs.tolist() == num_pairs


def _runs_prompts(batch: RankBatch) -> bool:
    """Whether some sequence runs more known tokens than its last, or does not sample behind it."""
    if batch.token_ids is None or batch.num_tokens is None:
        return False
    assert batch.samples is not None
    return bool((batch.num_tokens > 1).any() or not batch.samples.all())


def _num_prompts_ended(batch: RankBatch) -> int:
    """How many of the sequences run known tokens, and sample behind them."""
    if batch.samples is None:
        return 0
    assert batch.token_ids is not None
    assert batch.num_tokens is not None
    firsts = batch.num_tokens.cumsum() - batch.num_tokens
    return int(np.count_nonzero(batch.samples & (batch.token_ids[firsts] != -1)))
