"""Choice of the rank for a waiting sequence, from what every rank runs and holds."""

import math
from bisect import insort
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from router.scheduling.kv.block_pool import BlockPools
from router.scheduling.kv.prefix_cache import NO_PREFIX, CachedPrefix
from router.scheduling.sequence_table import SequenceTable
from router.scheduling.step import GroupShape
from router.scheduling.step_budget import Prices, Prompt, Turn

Float64Array = npt.NDArray[np.float64]

KV_STEPS = 20  # in which a rank's KV, once more, costs it and its neighbours the reading
MAX_KV_WORK = 0.5  # of a token's: at 1, a prefix that others still use would be computed elsewhere
INTERRUPTED = 8  # times what tokens weigh that an interrupted answer waits for: others do, too
BEHIND = 0.25  # what a token of a prompt that runs later weighs against one that runs before


def fill_level(
    num_decodes: SequenceOf[int], num_prompt_tokens: SequenceOf[int], *, max_tokens: int, floor: int
) -> int:
    """Returns the number of tokens up to which every rank fills its step with prompt tokens.

    A step is as long as its fullest rank, so ranks fill up to one level, as water does. That
    level is what the rank with the least to do can reach; below ``floor`` it does not go, or a
    short prompt on one rank would hold up a long one on another. The level bounds only
    prompts: decodes always run.

    Args:
        num_decodes: [dp_size] tokens that each rank runs anyway.
        num_prompt_tokens: [dp_size] prompt tokens that each rank could run.
        max_tokens: Upper bound of a rank's tokens.
        floor: The least level, unless ``max_tokens`` is below.
    """
    reachable = [
        decodes + prompt
        for decodes, prompt in zip(num_decodes, num_prompt_tokens, strict=True)
        if prompt > 0
    ]
    if not reachable:
        return 0
    return min(max_tokens, max(floor, min(reachable), *num_decodes))


class RankLoads:
    """Work and promised blocks of every rank, kept up as sequences are bound.

    Args:
        pools: Of all ranks.
        prompts: [dp_size] bound prompts of each rank, in order. Those that are bound are added.
        num_decodes: [dp_size] decodes that run in this step.
        chunk: Prompt tokens that a rank may run in this step if all have some.
        prices: What a token to run and one to read weigh against each other.

    Attributes:
        is_stuck: Whether the sequence that found no rank lacked rows or blocks, not time.
    """

    def __init__(
        self,
        shape: GroupShape,
        table: SequenceTable,
        pools: BlockPools,
        prompts: list[list[Prompt]],
        num_decodes: list[int],
        chunk: int,
        prices: Prices,
    ) -> None:
        self._shape = shape
        self._table = table
        self._pools = pools
        self._max_window_blocks = shape.max_window_blocks
        self._prompts = prompts
        self._num_decodes = np.array(num_decodes)
        self._limits = np.minimum(chunk, shape.max_num_batched_tokens - self._num_decodes)
        self._limits[table.num_bound_rows == table.rows_per_rank] = 0
        # A price of a token may be learnt as next to nothing.
        self._kv_work = min(MAX_KV_WORK, KV_STEPS * prices.kv / prices.token) * shape.block_size
        self._num_left = np.zeros(shape.dp_size, dtype=np.int64)
        self._num_promised_blocks = dict[int, int]()  # by rank, of those that were looked at
        busy = [rank for rank, of_rank in enumerate(prompts) if of_rank]
        self._last_turn = max((prompts[rank][-1].turn for rank in busy), default=())
        for rank in busy:
            self._num_left[rank] = sum(prompt.left for prompt in prompts[rank])
        self._work: Float64Array = self._num_decodes + self._kv_work * pools.num_used
        # Of a sequence behind all others: infinite where they take up the whole step, or all rows.
        self._costs = self._work + self._num_left
        self._costs[self._num_left >= self._limits] = math.inf
        self.is_stuck = False

    def pick(
        self,
        turn: Turn,
        num_tokens: int,
        found: Mapping[int, CachedPrefix],
        *,
        is_interrupted: bool = False,
        home: int | None = None,
    ) -> int | None:
        """Picks the rank on which a sequence has its first token soonest.

        Args:
            turn: Its place in the line.
            num_tokens: Known tokens of the sequence.
            found: Its prefix in the caches of the ranks that have any of it.
            is_interrupted: Whether its caller waits for it to go on: after a loss many do at once, and
                until the last one does, what ranks run weighs more than the KV that they read later.
            home: The rank that has its KV since before a loss: it goes on there if there is place, and
                what little it has to run takes nobody's time.

        Returns:
            The rank; None if there is none that has a row, place in its pool, and time to run
            something of the sequence in this step.
        """
        block_size, costs, weight = self._shape.block_size, self._costs, 1
        self.is_stuck = False
        if home is not None and self._has_room(home, num_tokens, found):
            return home
        if is_interrupted or turn < self._last_turn:
            weight = INTERRUPTED if is_interrupted else 1
            behind = self._num_left_behind(turn)
            before = self._num_left - behind
            work = self._work + BEHIND * behind
            costs = np.where(before < self._limits, work + weight * before, math.inf)
        if found:
            costs = costs.copy()
            for rank, prefix in found.items():
                costs[rank] -= weight * len(prefix.blocks) * block_size
        best = int(costs.argmin())
        if home is None and costs[best] < math.inf and self._has_room(best, num_tokens, found):
            return best
        has_room = self._rooms() >= self._num_missing(num_tokens, 0)
        for rank in found:
            has_room[rank] = self._has_room(rank, num_tokens, found)
        costs = np.where(has_room, costs, math.inf)
        rank = int(costs.argmin())
        if costs[rank] < math.inf:
            return rank
        self.is_stuck = not np.count_nonzero(has_room)
        return None

    def _num_left_behind(self, turn: Turn) -> npt.NDArray[np.int64]:
        """Returns int64 [dp_size], prompt tokens that run later than a place in the line."""
        behind = np.zeros(len(self._prompts), dtype=np.int64)
        for rank, prompts in enumerate(self._prompts):
            for prompt in reversed(prompts):
                if prompt.turn < turn:
                    break
                behind[rank] += prompt.left
        return behind

    def _has_room(self, rank: int, num_tokens: int, found: Mapping[int, CachedPrefix]) -> bool:
        """Whether a rank has a row and blocks for a sequence."""
        pool, num_bound = self._pools[rank], self._table.num_bound(rank)
        if not 0 < num_bound < self._table.rows_per_rank:
            return not num_bound
        num_kept = self._num_promised(rank) + num_bound * self._table.num_lists
        cached = found.get(rank, NO_PREFIX)
        num_unused = pool.num_unused(cached.blocks) + pool.num_unused(cached.window_blocks)
        num_missing = self._num_missing(num_tokens, len(cached.blocks))
        return num_unused + num_missing <= pool.num_available - num_kept

    def add(self, rank: int, prompt: Prompt) -> None:
        """Counts a prompt that was just bound."""
        insort(self._prompts[rank], prompt)
        self._last_turn = max(self._last_turn, prompt.turn)
        num_left = int(self._num_left[rank]) + prompt.left
        self._num_left[rank] = num_left
        if rank in self._num_promised_blocks:
            self._num_promised_blocks[rank] += self._num_promised_to(prompt)
        work = int(self._num_decodes[rank]) + self._kv_work * self._pools[rank].num_used
        self._work[rank] = work
        has_place = num_left < self._limits[rank] and self._table.has_free_row(rank)
        self._costs[rank] = work + num_left if has_place else math.inf

    def _num_promised(self, rank: int) -> int:
        """Returns the blocks that a rank's bound prompts still take."""
        num_blocks = self._num_promised_blocks.get(rank)
        if num_blocks is None:
            num_blocks = sum(map(self._num_promised_to, self._prompts[rank]))
            self._num_promised_blocks[rank] = num_blocks
        return num_blocks

    def _num_promised_to(self, prompt: Prompt) -> int:
        num_held = int(self._table.num_blocks[prompt.row])
        return self._num_missing(prompt.done + prompt.left, num_held)

    def _rooms(self) -> Float64Array:
        """Returns float64 [dp_size], how many blocks another sequence may take of each rank.

        Those are all for its known tokens and one more. Beyond them, one free column is left for
        each sequence that the rank already has, which will want it soon. An empty rank takes any
        sequence that the model's length admits.
        """
        table = self._table
        num_bound = table.num_bound_rows
        num_promised = np.array([self._num_promised(rank) for rank in range(table.dp_size)])
        num_kept = num_promised + num_bound * table.num_lists
        rooms = np.where(num_bound > 0, self._pools.num_available - num_kept, math.inf)
        rooms[num_bound == table.rows_per_rank] = -1
        return rooms

    def _num_missing(self, num_tokens: int, num_held: int) -> int:
        """Blocks for this many tokens and the one that they lead to, where a row holds so many."""
        num_missing = num_tokens // self._shape.block_size + 1 - num_held
        return num_missing + min(num_missing, self._max_window_blocks)
