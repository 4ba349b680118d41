"""Ranks of the peers: rows, KV blocks and what runs, as all three of them keep it.

Decodes of a rank run together, so a rank counts its decode steps (`tick`), and a heap says at which of
them a job ends or needs a block. A full rank preempts the job that it admitted last, which computes
prompt and output again. The prefix cache is the router's own, as all peers have one like it.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from router.scheduling.kv.block_pool import BlockIds
from router.scheduling.kv.prefix_cache import PrefixCache
from tests.bench.policies.world import BLOCK, Gaps, Job, Sizes


@dataclass(eq=False, slots=True)
class Running:
    """A job on a rank.

    Attributes:
        num_tokens: Tokens to compute before it decodes.
        num_computed: Of these.
        num_produced: Output tokens, as of its last start.
        start: The rank's tick when it began to decode.
        event: Tick at which the heap has its next event.
        last_time: Of its last token, if it was away since.
    """

    job: Job
    num_tokens: int
    num_computed: int = 0
    num_produced: int = 0
    start: int = 0
    event: int = -1
    last_time: float | None = None
    blocks: list[BlockIds] = field(default_factory=list)
    num_blocks: int = 0


@dataclass(slots=True)
class Part:
    """A rank's part of a step.

    Attributes:
        num_decodes: Rows that decode, and those of them whose last token came otherwise than in the
            decode before.
        firsts: Jobs whose prompt ends.
        ended: Jobs that get their last token.
    """

    num_tokens: int = 0
    num_kv: int = 0
    num_pairs: float = 0.0
    num_decodes: int = 0
    fresh: list[Running] = field(default_factory=list)
    firsts: list[Running] = field(default_factory=list)
    ended: list[Running] = field(default_factory=list)


class Rank:
    """One rank of a peer.

    Attributes:
        waiting: Jobs that were sent here, and those that lost their blocks before them.
        prompts: Admitted jobs whose prompts are not done.
        num_queued: Prompt tokens waiting or admitted and not run.
    """

    def __init__(self, sizes: Sizes, gaps: Gaps) -> None:
        self._sizes = sizes
        self._gaps = gaps
        self.cache = PrefixCache(sizes.num_blocks)
        self.waiting: deque[Running] = deque()
        self.prompts: list[Running] = []
        self.decodes: dict[Running, None] = {}  # in the order of their admission
        self.num_queued = 0
        self.num_preemptions = 0
        self.kv = 0  # computed tokens of the decodes
        self._tick = 0
        self._events: list[tuple[int, int, Running]] = []
        self._numbers = count()
        self._fresh: list[Running] = []
        self._last_time = 0.0

    @property
    def num_running(self) -> int:
        return len(self.prompts) + len(self.decodes)

    def names_of(self, job: Job) -> list[bytes]:
        return [name.to_bytes(8, "little") for name in job.names[: (job.num_prompt - 1) // BLOCK]]

    def num_cached(self, job: Job) -> int:
        return len(self.cache.match(self.names_of(job)).blocks) * BLOCK if job.names else 0

    def send(self, job: Job) -> None:
        self.waiting.append(Running(job, job.num_prompt))
        self.num_queued += job.num_prompt

    def can_admit(self, reserve: float = 0.0) -> bool:
        """Whether the first that waits finds a row, and KV beside a reserve in tokens."""
        if not self.waiting or self.num_running >= self._sizes.num_rows:
            return False
        num_blocks = (self.waiting[0].num_tokens + int(reserve)) // BLOCK + 1
        return num_blocks <= self.cache.pool.num_available or not self.num_running

    def admit(self) -> Running:
        """Gives the first that waits its row, its cached prefix, and blocks for the rest."""
        one = self.waiting.popleft()
        cached = self.cache.match(self.names_of(one.job)).blocks
        pool = self.cache.pool
        pool.share(cached)
        num_missing = one.num_tokens // BLOCK + 1 - len(cached)
        if num_missing > pool.num_available:  # what it found in the cache came out of the same pool
            pool.release(cached)
            cached, num_missing = cached[:0], one.num_tokens // BLOCK + 1
        one.blocks = [cached, pool.acquire(num_missing)]
        one.num_blocks = len(cached) + num_missing
        one.num_computed = len(cached) * BLOCK
        self.num_queued -= one.num_computed
        if one.num_produced == 0:
            one.job.num_cached = one.num_computed
        self.prompts.append(one)
        return one

    def run_prompts(
        self, part: Part, budget: int, *, cap: int = 1 << 30, reserve: float = 0.0
    ) -> None:
        """Runs prompts in order: admitted ones, and then those that wait, up to a budget of tokens.

        Args:
            part: Gets them.
            budget: Tokens at most.
            cap: Tokens of one prompt at most.
            reserve: See `can_admit`.
        """
        index = 0
        while budget > 0:
            if index == len(self.prompts):
                if not self.can_admit(reserve):
                    return
                self.admit()
            one = self.prompts[index]
            num = min(budget, cap, one.num_tokens - one.num_computed)
            budget -= num
            part.num_tokens += num
            part.num_pairs += num * (one.num_computed + num / 2)
            self.num_queued -= num
            one.num_computed += num
            if one.num_computed < one.num_tokens:
                index += 1
                continue
            self.prompts.pop(index)
            self._begin_to_decode(one, part)

    def _begin_to_decode(self, one: Running, part: Part) -> None:
        if one.job.names:
            first, names = len(one.blocks[0]), self.names_of(one.job)
            self.cache.insert(names[first:], np.concatenate(one.blocks)[first : len(names)])
        one.num_produced += 1
        part.firsts.append(one)
        if one.num_produced == one.job.num_output:
            part.ended.append(one)
            return
        one.start = self._tick
        self.decodes[one] = None
        self._fresh.append(one)
        self.kv += one.num_tokens
        self._expect(one)

    def _expect(self, one: Running) -> None:
        """Notes the tick of a job's next event: a block that it needs, or its end."""
        end = one.start + one.job.num_output - one.num_produced - 1
        full = one.start + one.num_blocks * BLOCK - one.num_tokens
        one.event = min(end, full)
        heapq.heappush(self._events, (one.event, next(self._numbers), one))

    def run_decodes(self, part: Part) -> None:
        """Gives each decode a token."""
        events, tick = self._events, self._tick
        ending = []
        while events and events[0][0] <= tick:
            _, _, one = heapq.heappop(events)
            if one not in self.decodes or one.event != tick:
                continue
            length = one.num_tokens + tick - one.start
            if length == one.num_blocks * BLOCK and not self._grow(one):
                continue
            if one.num_produced + tick + 1 - one.start == one.job.num_output:
                ending.append(one)
            else:
                self._expect(one)
        part.num_decodes = len(self.decodes)
        part.num_tokens += part.num_decodes
        part.num_kv = self.kv
        part.fresh, self._fresh = [one for one in self._fresh if one in self.decodes], []
        for one in ending:
            if one in self.decodes:
                self._leave(one, tick)
                part.ended.append(one)
        self.kv += len(self.decodes)
        self._tick += 1

    def _leave(self, one: Running, tick: int) -> None:
        del self.decodes[one]
        self.kv -= one.num_tokens + tick - one.start

    def _grow(self, one: Running) -> bool:
        """Gives a decode a block, preempting the last admitted. Returns whether it is still there."""
        pool = self.cache.pool
        while pool.num_available < 1:
            victim = next(reversed(self.decodes))
            self._preempt(victim)
            if victim is one:
                return False
        one.blocks.append(pool.acquire(1))
        one.num_blocks += 1
        return True

    def _preempt(self, one: Running) -> None:
        self.num_preemptions += 1
        num_gained = self._tick - one.start
        self._leave(one, self._tick)
        self._release(one)
        one.num_tokens, one.num_computed = one.num_tokens + num_gained, 0
        one.num_produced += num_gained
        one.num_tokens += 1  # the token that its last step gave
        if one.last_time is None:
            one.last_time = self._last_time
        self.waiting.appendleft(one)
        self.num_queued += one.num_tokens

    def _release(self, one: Running) -> None:
        for ids in one.blocks:
            self.cache.pool.release(ids)
        one.blocks, one.num_blocks = [], 0

    def commit(self, part: Part, now: float) -> None:
        """A part's step ends: its tokens come."""
        num_fresh = 0
        for one in part.fresh:
            if one.last_time is not None:
                self._gaps.observe(now - one.last_time)
                one.last_time = None if one in self.decodes else now  # preempted meanwhile
                num_fresh += 1
        if part.num_decodes:
            self._gaps.observe(now - self._last_time, part.num_decodes - num_fresh)
            self._last_time = now
        for one in part.firsts:
            if one.job.first is None:
                one.job.first = now
            elif one.last_time is not None:
                self._gaps.observe(now - one.last_time)
            one.last_time = now
        for one in part.ended:
            one.job.end = now
            self._release(one)
