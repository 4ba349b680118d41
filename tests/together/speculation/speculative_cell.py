"""The router's scheduler and real executors in one process, with nothing but messages between them.

Steps are planned ahead of the results of those before them, as the router does: two in flight.
Executors that share a group run in a thread each.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch

from deploy.local.demo_tasks import EVEN_MIX, problems, solved_lines
from executor.batch.kv_pool import KVPool
from executor.build.executor import build_worker
from executor.config import ExecutorConfig
from executor.model.cpu_kernels.library import load
from executor.parallel.epochs import JoinAttempt
from executor.parallel.rendezvous import open_store
from executor.speculative.speculator import Speculator
from executor.worker import Pending, Worker
from protos.executor.v1 import executor_pb2 as pb
from router.executors.formation import Member, check_group, describe_group
from router.executors.step_codec import decode_step, encode_step
from router.requests.request import FinishReason, OutputOptions, Request, SamplingParams
from router.scheduling.speculation import NO_DRAFTS, DraftCounts
from router.scheduling.step import GroupShape, StepPlan
from tests.router.support.stepper import ALWAYS, Stepper
from tests.support.paths import DEMO_DRAFTS as DRAFTS
from tests.support.paths import DEMO_MODEL as MODEL

HOST, TIMEOUT_S = "127.0.0.1", 300.0
SECRET = bytes(32)
NEWLINE = ord("\n") + 3
# In which an executor by itself answers to the same last bit, whatever else it does.
EXACT_DTYPE = "bfloat16" if load() else "float32"


class Cell:
    """The executors of one group. Its steps need no router but a ``Router`` below.

    Args:
        dp_size: DP ranks.
        attn_tp_size: Executors of each.
        settings: Of ``ExecutorConfig``.

    Attributes:
        runs_deferred: Whether executors run what a step leaves as soon as it is answered.
    """

    def __init__(self, *, dp_size: int = 1, attn_tp_size: int = 1, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "model": MODEL,
            "dtype": "float32",
            "device": "cpu",
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 128,
            "max_model_len": 96,
            "num_kv_blocks": 8 * 24 + 1,
            "prefill_graphs": "off",
        } | settings
        if defaults.get("decode_graphs") != "off":
            most = defaults["max_num_seqs"]
            defaults.setdefault("decode_graph_sizes", (max(most // 2, 1), most))
        self.dp_size, self.attn_tp_size, self.dtype = dp_size, attn_tp_size, defaults["dtype"]
        self.workers: list[Worker] = []
        members = []
        for place in range(dp_size * attn_tp_size):
            dp_rank, attn_tp_rank = divmod(place, attn_tp_size)
            config = ExecutorConfig(
                dp_rank=dp_rank,
                dp_size=dp_size,
                attn_tp_rank=attn_tp_rank,
                attn_tp_size=attn_tp_size,
                peer_timeout_s=TIMEOUT_S,
                **defaults,
            )
            worker, description = build_worker(config)
            self.workers.append(worker)
            members.append(Member(f"executor{place}", description))
        check_group(members)
        info = describe_group(members, 1, "demo")
        self.shape: GroupShape = info.shape
        self.model = info.model
        self.vocab_size = info.model.vocab_size
        self._pool = ThreadPoolExecutor(len(self.workers))
        self._store = open_store(HOST, SECRET) if len(self.workers) > 1 else None
        self.epoch = 0
        self.runs_deferred = True

    def join(self) -> None:
        """Begins an epoch, in which no row has started."""
        self.epoch += 1
        address = "" if self._store is None else f"{HOST}:{self._store.port}"
        attempt = JoinAttempt(self.epoch, SECRET)
        list(self._pool.map(lambda worker: worker.join(self.epoch, address, attempt), self.workers))

    def launch(self, requests: Sequence[bytes]) -> list[Pending]:
        """Launches a step on all executors."""

        def launch(place: int) -> Pending:
            request = pb.StepRequest.FromString(requests[place // self.attn_tp_size])
            worker = self.workers[place]
            pending = worker.launch(request)
            if self.runs_deferred:
                worker.run_deferred()
            return pending

        places = range(len(self.workers))
        return [launch(0)] if len(places) == 1 else list(self._pool.map(launch, places))

    def finish(self, step: Sequence[Pending]) -> list[pb.StepResponse]:
        """Returns the answer of each DP rank's first executor to a step that was launched."""
        answers = [
            worker.finish(pending) for worker, pending in zip(self.workers, step, strict=True)
        ]
        return answers[:: self.attn_tp_size]

    def close(self) -> None:
        for worker in self.workers:
            worker.leave()
        self._pool.shutdown()
        if self._store is not None:
            self._store.close()


class Router(Stepper):
    """A scheduler whose steps a cell launches when they are planned, and finishes when they are due.

    Attributes:
        widths: ``num_draft_tokens`` of each step planned.
        counts: ``global_num_tokens`` of each.
    """

    def __init__(self, cell: Cell, drafts: dict[str, Any] = ALWAYS, **options: Any) -> None:
        super().__init__(cell.shape, **drafts, **options)
        self.ranks = []  # the cell's are real ones
        cell.join()
        self._cell = cell
        self.widths: list[int] = []
        self.counts: list[tuple[int, ...]] = []

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.before_step(plan)
            requests, _ = encode_step(plan, self._cell.epoch, len(self.widths))
            self.results.append(self._cell.launch(requests))
            self.widths.append(plan.agreement.num_draft_tokens)
            self.counts.append(plan.agreement.global_num_tokens)
            self.in_flight.append(plan)
        return plan

    def commit(self) -> DraftCounts:
        responses = self._cell.finish(self.results[0])
        result = decode_step(responses, self.in_flight[0], self._cell.vocab_size)
        # Untimed, so that plans are the same on any machine.
        self.results[0] = result._replace(forward_ns=[0] * len(responses))
        return super().commit()

    def lose(self) -> None:
        """Loses the steps in flight, and the group forms again: executors keep their KV."""
        super().lose()
        self._cell.join()

    def before_step(self, plan: StepPlan) -> None:
        """Called between planning a step and running it."""

    @property
    def num_preemptions(self) -> int:
        return sum(self.scheduler.num_preemptions)

    @property
    def num_hit_tokens(self) -> int:
        return sum(cache.num_hit_tokens for cache in self.scheduler.caches)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a row gained in a speculative step."""
        return self.scheduler.gate.tokens_per_step or 0.0


class LosingRouter(Router):
    """Loses an executor every few steps, with two in flight."""

    num_lost = 0

    def commit(self) -> DraftCounts:
        if len(self.widths) < 15 * (self.num_lost + 1):
            return super().commit()
        self.lose()
        self.num_lost += 1
        return NO_DRAFTS


def poison_free_blocks(router: Router) -> None:
    """Has every block that nobody uses any more turn into NaN: what reads it shows."""

    def poisoning(free_up: Callable[[Any], None], pools: list[KVPool]) -> Callable[[Any], None]:
        def poison(block_ids: Any) -> None:
            for pool in pools:
                for tensor in pool.tensors:
                    tensor.view(pool.num_physical_blocks, -1)[block_ids] = torch.nan
            free_up(block_ids)

        return poison

    cell = router._cell
    for rank, of_rank in enumerate(router.scheduler.caches):
        first = rank * cell.attn_tp_size
        pools = [worker._kv_pool for worker in cell.workers[first : first + cell.attn_tp_size]]
        free_up: Any = poisoning(of_rank.pool.free_up, pools)
        of_rank.pool.free_up = free_up  # type: ignore[method-assign]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What a client wants.

    Attributes:
        delay: Steps after which it comes.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 16
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    logprobs: bool = False
    prompt_logprobs: bool = False
    num_top: int = 2
    n: int = 1
    grammar: str = ""
    grammar_after: tuple[int, ...] = ()
    delay: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What it gets."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[float, ...]
    top_ids: tuple[tuple[int, ...], ...]
    given_logprobs: tuple[float, ...]  # of the tokens named, of which none is likely


def serve(router: Router, asks: Sequence[Ask], depth: int = 2) -> list[list[Answer]]:
    """Returns what each continuation of each request gives, with ``depth`` steps in flight."""
    requests: list[Request | None] = [None] * len(asks)
    planned = 0
    for turn in range(5000 + 10 * len(asks)):
        for place, ask in enumerate(asks):
            if requests[place] is None and ask.delay <= turn:
                requests[place] = _submit(router, ask)
        while len(router.in_flight) < depth and router.plan() is not None:
            planned += 1
        router.check()
        if router.in_flight:
            router.commit()
        elif None not in requests:
            router.check_idle()
            return [
                [_answer(sequence) for sequence in request.sequences]
                for request in requests
                if request is not None
            ]
    raise AssertionError(f"still busy after {planned} steps")


def _submit(router: Router, ask: Ask) -> Request:
    return router.submit(
        ask.prompt,
        ask.max_tokens,
        stop_token_ids=ask.stop_ids,
        min_tokens=ask.min_tokens,
        sampling=ask.sampling,
        output=OutputOptions(
            logprobs=ask.logprobs,
            prompt_logprobs=ask.prompt_logprobs,
            top_logprobs=ask.num_top if ask.logprobs or ask.prompt_logprobs else 0,
            logprob_ids=(NEWLINE, 50) if ask.logprobs or ask.prompt_logprobs else (),
        ),
        n=ask.n,
        grammar=ask.grammar,
        grammar_after=ask.grammar_after,
    )


def _answer(sequence: Any) -> Answer:
    assert sequence.error is None, sequence.error
    scored = [*sequence.prompt_logprobs, *sequence.logprobs]
    return Answer(
        tuple(sequence.tokens[sequence.num_prompt_tokens : sequence.num_tokens].tolist()),
        sequence.finish_reason,
        tuple(one.logprob for one in scored),
        tuple(tuple(one.top_ids.tolist()) for one in scored),
        tuple(value for one in scored for value in one.given_logprobs.tolist()),
    )


@cache
def plain_cell(dtype: str = "float32") -> Cell:
    """Returns a cell without a draft model that has room for everybody."""
    return Cell(dtype=dtype, max_num_seqs=16, num_kv_blocks=16 * 24 + 1)


_PLAIN_ANSWERS: dict[str, list[list[Answer]]] = {}


def plain_answers(asks: tuple[Ask, ...], dtype: str = "float32") -> list[list[Answer]]:
    """Returns what plain decoding answers, worked out once."""
    key = repr((asks, dtype))
    if key not in _PLAIN_ANSWERS:
        _PLAIN_ANSWERS[key] = serve(Router(plain_cell(dtype)), asks)
    return _PLAIN_ANSWERS[key]


def expect_plain(router: Router, asks: Sequence[Ask], depth: int = 2) -> list[list[Answer]]:
    """Asserts that requests are answered as plain decoding answers them, in bfloat16 to the last bit.

    Returns the answers.
    """
    dtype = router._cell.dtype
    expected = plain_answers(tuple(replace(ask, delay=0) for ask in asks), dtype)
    answers = serve(router, asks, depth)
    assert dtype == "float32" or answers == expected
    for place, (got, wanted) in enumerate(zip(answers, expected, strict=True)):
        expect_alike(got, wanted, f"{place}: {asks[place]}")
    return answers


def expect_alike(got: list[Answer], wanted: list[Answer], of: str) -> None:
    """Asserts that continuations are equal, but for what float32 rounds in another batch."""
    for one, other in zip(got, wanted, strict=True):
        assert one.tokens == other.tokens, of
        assert one.finish_reason == other.finish_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        assert one.top_ids == other.top_ids
        assert one.given_logprobs == pytest.approx(other.given_logprobs, abs=1e-3)


@cache
def demo_prompts(seed: int, count: int, context_tokens: int = 0) -> tuple[tuple[int, ...], ...]:
    """Returns problems that the demo model solves, each behind some that are solved."""
    return tuple(
        tuple(byte + 3 for byte in (solved_lines(seed, context_tokens) + problem.prompt).encode())
        for problem in problems(seed, count, EVEN_MIX)
    )


# A draft, and drafts that each of its steps goes on from.
WAYS = [(name, topk) for name in ("eagle", "mtp", "frozen_kv") for topk in (1, 2, 4)]
WAYS.insert(6, ("mtp3", 1))
MAX_LEN = 64  # of a mixed request
FAR_WAYS = [(name, topk) for name, topk in WAYS if topk != 2]  # chains, and the widest trees
CHAINS = [name for name, topk in WAYS if topk == 1]


def settings_of(name: str, topk: int) -> dict[str, Any]:
    tree = {"draft_topk": topk, "num_draft_tokens": 7} if topk > 1 else {}
    return {"draft_model": DRAFTS / name, **tree}


@contextmanager
def cell_of(**settings: Any) -> Iterator[Cell]:
    cell = Cell(**settings)
    try:
        yield cell
    finally:
        cell.close()


def mixed_asks(seed: int, count: int) -> list[Ask]:
    """Returns requests of all kinds that greedy decoding knows, which come one after another."""
    rng = random.Random(seed)
    long, short = demo_prompts(seed, count, 24), demo_prompts(seed, count)
    asks = []
    for place in range(count):
        kind, is_long = rng.randrange(8), rng.random() < 0.6
        prompt = (long if is_long and len(long[place]) < MAX_LEN - 8 else short)[place]
        asks.append(
            Ask(
                prompt=prompt,
                max_tokens=min(rng.randint(1, 24), MAX_LEN - len(prompt)),
                stop_ids=rng.choice([(), (NEWLINE,), (NEWLINE, 49 + rng.randrange(10))]),
                min_tokens=rng.choice([0, 0, 1, 3]),
                sampling=SamplingParams(
                    {0: {"repetition_penalty": 1.3}, 1: {"frequency_penalty": 0.4}}.get(kind, {}),
                    logit_bias=((50, 2.0),) if kind == 2 else (),
                ),
                logprobs=kind == 3,
                prompt_logprobs=kind == 4,
                n=2 if kind == 5 else 1,
                delay=rng.randrange(6),
            )
        )
    return asks


def speculator_of(worker: Worker) -> Speculator:
    assert worker._speculation is not None
    return worker._speculation.speculator


def state_of(cell: Cell, row: int) -> list[torch.Tensor]:
    """Returns what the draft model goes on from in a row."""
    state = speculator_of(cell.workers[0])._state
    return [x[row].clone() for x in (state.scores, state.hidden, state.carries)]
