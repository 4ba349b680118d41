"""What each DP rank carries, while the waiting sequences of one step are bound to ranks."""

import numpy as np

from router.block_pool import BlockIds
from router.group import GroupShape
from router.prefix_cache import PrefixCache
from router.sequence_table import RowStatus, SequenceTable

# What a cached token weighs against one to be run when ranks are compared: attention reads it
# at every step of its sequence. With it, 16 blocks of KV weigh as much as one block to be run.
KV_WORK = 1 / 16


class RankLoads:
    """Work and promised blocks of every rank, kept up as sequences are bound.

    Args:
        num_decodes: [dp_size] decodes that run in this step.
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
        rows = np.flatnonzero(table.status == RowStatus.EXTEND)
        ranks = table.rank_of(rows)
        prompt_left = table.num_extend[rows] - table.num_computed[rows]
        blocks_left = self._num_blocks_for(table.num_extend[rows]) - table.num_blocks[rows]
        self._num_tokens = np.array(num_decodes)
        np.add.at(self._num_tokens, ranks, prompt_left)
        self._num_promised_blocks = np.zeros(shape.dp_size, dtype=np.int64)
        np.add.at(self._num_promised_blocks, ranks, blocks_left)

    @property
    def work(self) -> list[float]:
        """[dp_size] tokens to run, and KV to read counted in such tokens."""
        return [
            float(num_tokens) + KV_WORK * pool.num_used * self._shape.block_size
            for num_tokens, pool in zip(self._num_tokens, self._pools, strict=True)
        ]

    def has_room(self, rank: int) -> bool:
        """Whether the rank could run something of another sequence in this step."""
        has_tokens = self._num_tokens[rank] < self._shape.max_num_batched_tokens
        return bool(has_tokens) and self._table.has_free_row(rank)

    def fits(self, rank: int, num_tokens: int, cached_blocks: BlockIds) -> bool:
        """Whether the rank's pool has place for all known tokens of a sequence and one more.

        Beyond that, one free block is left for each sequence that the rank already has, which
        will want it soon. An empty rank takes any sequence that the model's length admits.
        """
        num_bound = self._table.num_bound(rank)
        if num_bound == 0:
            return True
        pool = self._pools[rank]
        num_new = int(self._num_blocks_for(num_tokens)) - len(cached_blocks)
        num_taken = num_new + pool.num_unused(cached_blocks)
        num_spare = pool.num_available - int(self._num_promised_blocks[rank])
        return num_taken + num_bound <= num_spare

    def add(self, rank: int, num_tokens: int, cached_blocks: BlockIds) -> None:
        """Counts a sequence that was just bound."""
        self._num_tokens[rank] += num_tokens - len(cached_blocks) * self._shape.block_size
        self._num_promised_blocks[rank] += self._num_blocks_for(num_tokens) - len(cached_blocks)

    def _num_blocks_for(self, num_tokens: "np.ndarray | int") -> "np.ndarray | int":
        """Blocks for this many tokens and the one that they lead to."""
        return num_tokens // self._shape.block_size + 1
