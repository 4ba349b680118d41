"""What each DP rank carries, while the waiting sequences of one step are bound to ranks."""

import numpy as np

from router.scheduling.block_pool import BlockIds
from router.scheduling.group import GroupShape
from router.scheduling.prefix_cache import PrefixCache
from router.scheduling.sequence_table import RowStatus, SequenceTable

# What a cached token weighs against one to be run when ranks are compared: attention reads it
# at every step of its sequence. With it, 16 blocks of KV weigh as much as one block to be run.
KV_WORK = 1 / 16


class RankLoads:
    """Work and promised blocks of every rank, kept up as sequences are bound.

    Plain lists of numbers: there are few ranks, and each is looked at for each new sequence.

    Args:
        num_decodes: [dp_size] decodes that run in this step.

    Attributes:
        work: [dp_size] tokens to run, and KV to read counted in such tokens.
    """

    def __init__(
        self,
        shape: GroupShape,
        table: SequenceTable,
        caches: list[PrefixCache],
        num_decodes: list[int],
    ) -> None:
        self._shape = shape
        self._table = table
        self._pools = [cache.pool for cache in caches]
        self._num_tokens = list(num_decodes)
        self._num_promised_blocks = [0] * shape.dp_size
        for row in np.flatnonzero(table.status == RowStatus.EXTEND).tolist():
            rank, num_extend = table.rank_of(row), int(table.num_extend[row])
            self._num_tokens[rank] += num_extend - int(table.num_computed[row])
            num_missing = self._num_blocks_for(num_extend) - int(table.num_blocks[row])
            self._num_promised_blocks[rank] += num_missing
        self.work = [self._work(rank) for rank in range(shape.dp_size)]

    def ranks_with_room(self) -> list[int]:
        """Ranks that could run something of another sequence in this step."""
        max_tokens = self._shape.max_num_batched_tokens
        return [
            rank
            for rank, num_tokens in enumerate(self._num_tokens)
            if num_tokens < max_tokens and self._table.has_free_row(rank)
        ]

    def fits(self, rank: int, num_tokens: int, cached_blocks: BlockIds) -> bool:
        """Whether the rank's pool has place for all known tokens of a sequence and one more.

        Beyond that, one free block is left for each sequence that the rank already has, which
        will want it soon. An empty rank takes any sequence that the model's length admits.
        """
        num_bound = self._table.num_bound(rank)
        if num_bound == 0:
            return True
        pool = self._pools[rank]
        num_taken = self._num_blocks_for(num_tokens)
        if len(cached_blocks):
            num_taken += pool.num_unused(cached_blocks) - len(cached_blocks)
        return num_taken + num_bound <= pool.num_available - self._num_promised_blocks[rank]

    def add(self, rank: int, num_tokens: int, cached_blocks: BlockIds) -> None:
        """Counts a sequence that was just bound."""
        self._num_tokens[rank] += num_tokens - len(cached_blocks) * self._shape.block_size
        self._num_promised_blocks[rank] += self._num_blocks_for(num_tokens) - len(cached_blocks)
        self.work[rank] = self._work(rank)

    def _work(self, rank: int) -> float:
        num_kv_tokens = self._pools[rank].num_used * self._shape.block_size
        return self._num_tokens[rank] + KV_WORK * num_kv_tokens

    def _num_blocks_for(self, num_tokens: int) -> int:
        """Blocks for this many tokens and the one that they lead to."""
        return num_tokens // self._shape.block_size + 1
