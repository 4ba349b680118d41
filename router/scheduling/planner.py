"""Plan of a step across DP ranks: fill level, rank of a sequence, padding and graph size."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from router.scheduling.block_pool import BlockIds, PrefixCache
from router.scheduling.sequence_table import RowStatus, SequenceTable
from router.scheduling.step import (
    NO_GRAPHS,
    Agreement,
    CapturedSizes,
    GraphMiss,
    GroupShape,
    PaddingMode,
)


def fill_level(
    num_decodes: Sequence[int], num_prompt_tokens: Sequence[int], *, max_tokens: int, floor: int
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


def agree(
    num_tokens: Sequence[int],
    num_logits: Sequence[int],
    *,
    has_extend: bool,
    num_sequences: Sequence[int],
    attn_tp_size: int = 1,
    graph_sizes: CapturedSizes = NO_GRAPHS,
    num_draft_tokens: int = 0,
    num_draft_rows: Sequence[int] = (),
    num_sampled: Sequence[int] = (),
) -> Agreement:
    """Decides padding and graph from each DP rank's counts.

    A rank that replayed another graph, or laid out its gather otherwise, would leave the rest
    waiting in a collective. Only the router sees every rank, so it decides and nobody votes.

    Args:
        num_tokens: [dp_size] tokens of each rank; at least one is not 0. They are sent as they
            are: rounding up for attention TP is every executor's own arithmetic.
        num_logits: [dp_size] rows of logits of each rank.
        has_extend: Whether any rank runs prompt tokens.
        num_sequences: [dp_size] sequences of each rank.
        attn_tp_size: Executors that share a rank's rows.
        graph_sizes: What the executors have captured.
        num_draft_tokens: Tokens that each sequence verifies, and `num_tokens` counts them all; 0:
            the step is not speculative.
        num_draft_rows: [dp_size] rows that the draft model runs behind a step that is not
            speculative; empty where it runs none.
        num_sampled: [dp_size] sequences that sample; empty likewise.
    """
    assert max(num_tokens) > 0, "an idle system takes no step"
    if has_extend:
        picked = pick_extend_graph_size(num_tokens, graph_sizes.extend)
    else:
        picked = pick_graph_size(max(num_sequences), graph_sizes.decode)
    graph_size, graph_miss = (None, picked) if isinstance(picked, GraphMiss) else (picked, None)
    if graph_size is not None:
        padding_mode = PaddingMode.MAX_LEN  # a captured collective has one size
    else:
        padding_mode = pick_padding_mode(
            num_tokens, has_extend=has_extend, attn_tp_size=attn_tp_size
        )
    return Agreement(
        tuple(num_tokens),
        tuple(num_logits),
        has_extend,
        padding_mode,
        graph_size,
        graph_miss,
        num_draft_tokens,
        tuple(num_draft_rows),
        tuple(num_sampled),
    )


def pick_graph_size(size: int, captured: Sequence[int]) -> int | GraphMiss:
    """Returns the smallest captured size that fits, or why none does."""
    if not captured:
        return GraphMiss.NOT_CAPTURED
    index = bisect_left(captured, size)
    return captured[index] if index < len(captured) else GraphMiss.TOO_LARGE


def pick_extend_graph_size(num_tokens: Sequence[int], captured: Sequence[int]) -> int | GraphMiss:
    """Returns the graph for an extend, or why running eagerly is the better choice.

    A rank without tokens has nothing to lay into a graph's attention metadata, and more than
    half a graph of padding costs more than its launches save.
    """
    picked = pick_graph_size(max(num_tokens), captured)
    if isinstance(picked, GraphMiss):
        return picked
    if min(num_tokens) == 0:
        return GraphMiss.IDLE_RANK
    return GraphMiss.MOSTLY_PADDING if picked > 2 * max(num_tokens) else picked


def pick_padding_mode(
    num_tokens: Sequence[int], *, has_extend: bool, attn_tp_size: int = 1
) -> PaddingMode:
    """Picks the gather that moves fewer bytes.

    An all-reduce sends each row twice and an all-gather once, so MAX_LEN wins until more than
    half of its rows are padding. Prompts are too uneven to bet on that. What is gathered are the
    equal shards of ``attn_tp_size`` executors, so a rank's rows count as their next multiple.

    Source: SGLang, srt/layers/dp_attention.py, PaddingMode.get_dp_padding_mode.
    """
    if len(num_tokens) == 1:
        return PaddingMode.MAX_LEN
    if has_extend:
        return PaddingMode.SUM_LEN
    if attn_tp_size > 1:
        num_tokens = [-(-count // attn_tp_size) for count in num_tokens]  # a common factor less
    if 2 * sum(num_tokens) < max(num_tokens) * len(num_tokens):
        return PaddingMode.SUM_LEN
    return PaddingMode.MAX_LEN


def pick_rank(
    num_cached_tokens: Sequence[int], work: Sequence[float], candidates: Sequence[int]
) -> int:
    """Picks the DP rank for a new sequence: a cached prefix counts for as much as it saves.

    Args:
        num_cached_tokens: [dp_size] prompt tokens that each rank would not have to run.
        work: [dp_size] what each rank carries, in tokens.
        candidates: Ranks that can run the sequence in the next step; at least one.
    """
    return min(
        candidates, key=lambda rank: (work[rank] - num_cached_tokens[rank], work[rank], rank)
    )


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

    def _fits(self, rank: int, num_tokens: int, cached_blocks: BlockIds) -> bool:
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

    def pick(
        self, ranks: Sequence[int], num_tokens: int, cached_blocks: Sequence[BlockIds]
    ) -> int | None:
        """Picks the rank for a sequence.

        Args:
            ranks: Ranks that have room for another sequence.
            num_tokens: Known tokens of the sequence.
            cached_blocks: [dp_size] its prefix in each rank's cache.

        Returns:
            One of ``ranks`` into whose pool it fits; None if there is none.
        """
        fitting = [rank for rank in ranks if self._fits(rank, num_tokens, cached_blocks[rank])]
        if not fitting:
            return None
        block_size = self._shape.block_size
        num_cached_tokens = [len(blocks) * block_size for blocks in cached_blocks]
        return pick_rank(num_cached_tokens, self.work, fitting)

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
