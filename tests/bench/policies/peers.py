"""Schedulers of vLLM, SGLang and TensorRT-LLM for data-parallel attention, as models of their policies.

What is modelled: the choice of the rank, what runs in a step, KV, prefix caches and preemption
(`ranks.py`). What is not: kernels and host time, of which they are given none, and what they do
beside, such as priorities. All plan one step ahead, which is their default. Read in their sources
between November 2025 and September 2026; scheduling of DP ranks in vLLM V1 (`DPLBAsyncMPClient`,
`Scheduler.schedule`), SGLang (`data_parallel_controller.py`, `scheduler.py`, `prefill_delayer.py`) and
TensorRT-LLM (`py_executor.py`, `_schedule_new_requests` with `attention_dp_config`).
"""

from collections import deque
from collections.abc import Callable

from tests.bench.policies.ranks import Part, Rank
from tests.bench.policies.world import Gaps, Job, Sizes, Work

Build = Callable[[Sizes], "Peer"]


class Peer:
    """What the three have in common: ranks, and one step of all of them at a time."""

    def __init__(self, sizes: Sizes) -> None:
        self.gaps = Gaps()
        self.ranks = [Rank(sizes, self.gaps) for _ in range(sizes.num_ranks)]

    @property
    def num_preemptions(self) -> int:
        return sum(rank.num_preemptions for rank in self.ranks)

    def submit(self, job: Job) -> None:
        self.pick(job).send(job)

    def pick(self, job: Job) -> Rank:
        """Returns the rank that a job is sent to on arrival."""
        raise NotImplementedError

    def run(self, parts: list[Part]) -> None:
        """Fills the ranks' parts of the next step."""
        raise NotImplementedError

    def plan(self, now: float) -> Work | None:
        parts = [Part() for _ in self.ranks]
        self.run(parts)
        tokens = [part.num_tokens for part in parts]
        if not any(tokens):
            return None
        pairs = [part.num_pairs for part in parts]
        has_prompts = any(pairs)
        return Work(tokens, [part.num_kv for part in parts], pairs if has_prompts else None, parts)

    def wait_s(self, work: Work) -> float:
        return 0.0

    def commit(self, work: Work, now: float) -> None:
        parts = work.handle
        assert isinstance(parts, list)
        for rank, part in zip(self.ranks, parts, strict=True):
            rank.commit(part, now)


def least_tokens(ranks: list[Rank]) -> Rank:
    """The rank with the fewest prompt tokens that were sent there and are not run."""
    return min(ranks, key=lambda rank: (rank.num_queued, rank.num_running))


def longest_prefix(ranks: list[Rank], job: Job) -> Rank:
    """SGLang's router: the longest prefix if it covers half, unless the ranks' loads are too uneven."""
    loads = [len(rank.waiting) + rank.num_running for rank in ranks]
    is_uneven = max(loads) - min(loads) > 32 and max(loads) > 1.1 * min(loads)
    cached = [rank.num_cached(job) for rank in ranks]
    if not is_uneven and 2 * max(cached) >= job.num_prompt:
        return ranks[cached.index(max(cached))]
    return ranks[loads.index(min(loads))]


class Vllm(Peer):
    """Decodes first, then prompts in order of arrival up to a budget; the rank is picked on arrival.

    Args:
        budget: `--max-num-batched-tokens`.
        route: "counts", as it comes: least 4 x waiting + running, told each 100 ms; "tokens"; "cache".
        cap: `--long-prefill-token-threshold`; 0: none.
        interval: `--prefill-schedule-interval`: prompts in every so manieth step only.
    """

    def __init__(
        self, sizes: Sizes, budget: int, *, route: str = "counts", cap: int = 0, interval: int = 1
    ) -> None:
        super().__init__(sizes)
        self._budget, self._route, self._cap, self._interval = budget, route, cap, interval
        self._counts, self._count_time = [0] * sizes.num_ranks, -1.0
        self._turn = self._num_steps = 0

    def pick(self, job: Job) -> Rank:
        if self._route == "tokens":
            return least_tokens(self.ranks)
        if self._route == "cache":
            return longest_prefix(self.ranks, job)
        if job.arrival - self._count_time >= 0.1:
            self._count_time = job.arrival
            self._counts = [4 * len(rank.waiting) + rank.num_running for rank in self.ranks]
        self._turn += 1
        num = len(self.ranks)
        index = min(range(num), key=lambda i: (self._counts[i], (i - self._turn) % num))
        self._counts[index] += 4
        return self.ranks[index]

    def run(self, parts: list[Part]) -> None:
        self._num_steps += 1
        is_turn = self._num_steps % self._interval == 0
        is_idle = not any(rank.decodes for rank in self.ranks)
        for rank, part in zip(self.ranks, parts, strict=True):
            if rank.decodes:
                rank.run_decodes(part)
            if is_turn or is_idle or rank.num_queued > self._budget:
                budget = self._budget - part.num_tokens
                rank.run_prompts(part, budget, cap=self._cap or 1 << 30)


class Sglang(Peer):
    """A rank with prompts runs nothing else; the others decode in the same step.

    Args:
        chunk: Prompt tokens of a rank in a step: `--chunked-prefill-size` over the ranks.
        route: "turns", as it comes; "tokens"; "cache".
        mixed: `--enable-mixed-chunk`: decodes run beside prompts and count against the chunk.
        interval: `--prefill-decode-interval`: steps without prompts after each one with.
        delay: `--enable-prefill-delayer`: steps for which prompts wait until all ranks have some.
    """

    def __init__(
        self,
        sizes: Sizes,
        chunk: int,
        *,
        route: str = "turns",
        mixed: bool = False,
        interval: int = 0,
        delay: int = 0,
    ) -> None:
        super().__init__(sizes)
        self._chunk, self._route, self._mixed = chunk, route, mixed
        self._interval, self._delay = interval, delay
        self._turn = self._num_since = self._num_delayed = 0

    def pick(self, job: Job) -> Rank:
        if self._route == "tokens":
            return least_tokens(self.ranks)
        if self._route == "cache":
            return longest_prefix(self.ranks, job)
        self._turn += 1
        return self.ranks[self._turn % len(self.ranks)]

    def run(self, parts: list[Part]) -> None:
        # The output that running jobs may still want is kept free in part.
        reserves = [0.21 * 300 * len(rank.decodes) for rank in self.ranks]
        has_prompts = [
            bool(rank.prompts) or rank.can_admit(reserve)
            for rank, reserve in zip(self.ranks, reserves, strict=True)
        ]
        runs_prompts = any(has_prompts)
        if any(rank.decodes for rank in self.ranks):
            self._num_since += 1
            runs_prompts &= self._num_since > self._interval
            if runs_prompts and not all(has_prompts):
                self._num_delayed += 1
                runs_prompts = self._num_delayed > self._delay
        if runs_prompts:
            self._num_since = self._num_delayed = 0
        for rank, part, has, reserve in zip(self.ranks, parts, has_prompts, reserves, strict=True):
            runs = runs_prompts and has
            if rank.decodes and (self._mixed or not runs):
                rank.run_decodes(part)
            if runs:
                rank.run_prompts(part, self._chunk - part.num_tokens, reserve=reserve)


class TensorRt(Peer):
    """One queue; each step hands jobs to the ranks with the fewest prompt tokens.

    Args:
        budget: `max_num_tokens`.
        timeout: `attention_dp_config.timeout_iters`: steps that prompts wait for all ranks to have
            some; 0: not balanced.
        batching: `batching_wait_iters`: as many again for more of them.
    """

    def __init__(self, sizes: Sizes, budget: int, *, timeout: int = 0, batching: int = 0) -> None:
        super().__init__(sizes)
        self._budget, self._timeout, self._batching = budget, timeout, batching
        self._queue: deque[Job] = deque()
        self._num_rows = sizes.num_rows
        self._num_waited = self._num_batched = 0

    def submit(self, job: Job) -> None:
        self._queue.append(job)

    def run(self, parts: list[Part]) -> None:
        while self._queue:
            open_ranks = [
                rank
                for rank in self.ranks
                if rank.num_queued < self._budget
                and rank.num_running + len(rank.waiting) < self._num_rows
            ]
            if not open_ranks:
                break
            rank = min(open_ranks, key=lambda rank: rank.num_queued + len(rank.decodes))
            rank.send(self._queue.popleft())
        runs_prompts = self._may_run_prompts()
        for rank, part in zip(self.ranks, parts, strict=True):
            if rank.decodes:
                rank.run_decodes(part)
            if runs_prompts:
                rank.run_prompts(part, self._budget - part.num_tokens)

    def _may_run_prompts(self) -> bool:
        if not self._timeout or not any(rank.decodes for rank in self.ranks):
            return True
        if any(one.num_computed for rank in self.ranks for one in rank.prompts):
            return True
        has_prompts = [rank.num_queued > 0 for rank in self.ranks]
        if not all(has_prompts) and self._num_waited < self._timeout:
            self._num_waited += any(has_prompts)
            return False
        is_full = all(rank.num_queued >= self._budget for rank in self.ranks)
        if not is_full and self._num_batched < self._batching:
            self._num_batched += 1
            return False
        self._num_waited = self._num_batched = 0
        return True


def _setting(kind: Callable[..., Peer], *args: object, **options: object) -> Build:
    return lambda sizes: kind(sizes, *args, **options)


# As they come on eight H200s, and what their documents recommend.
DEFAULT: dict[str, Build] = {
    "SGLang 1024": _setting(Sglang, 1024),
    "SGLang 8192, tokens": _setting(Sglang, 8192, route="tokens"),
    "vLLM 8192": _setting(Vllm, 8192),
    "vLLM 2048": _setting(Vllm, 2048),
    "TensorRT-LLM 8192, balanced": _setting(TensorRt, 8192, timeout=50, batching=10),
}


def sweep() -> dict[str, Build]:
    """Returns every setting of the three that is compared."""
    settings: dict[str, Build] = {}
    for budget in (512, 1024, 2048, 4096, 8192):
        for route in ("counts", "tokens", "cache"):
            for interval in (1, 4):
                name = f"vLLM {budget}, {route}, each {interval}"
                settings[name] = _setting(Vllm, budget, route=route, interval=interval)
        for route in ("turns", "tokens", "cache"):
            settings[f"SGLang {budget}, {route}"] = _setting(Sglang, budget, route=route)
        for options in ({"mixed": True}, {"interval": 2}, {"interval": 8}, {"delay": 30}):
            [(option, value)] = options.items()
            name = f"SGLang {budget}, tokens, {option} {value}"
            settings[name] = _setting(Sglang, budget, route="tokens", **options)
        for timeout, batching in ((0, 0), (50, 0), (50, 10), (10, 4)):
            name = f"TensorRT-LLM {budget}, waits {timeout}+{batching}"
            settings[name] = _setting(TensorRt, budget, timeout=timeout, batching=batching)
    return settings
