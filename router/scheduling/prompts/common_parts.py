"""Common beginnings of interrupted sequences: who runs them, and who waits for that.

After a loss many go on at once. Of those that begin alike one computes that, and the others find it as
soon as it is planned; where its rank has no place for them, one on each further rank. New prompts run at
once, wherever there is time.
"""

from collections.abc import Iterable

import numpy as np

from router.requests.request import Int32Array, Sequence
from router.scheduling.kv.prefix_cache import BlockHash
from router.scheduling.prompts.lookup import Found, may_find
from router.scheduling.prompts.order import PromptOrder
from router.scheduling.sequence_table import SequenceTable
from router.scheduling.step_budget import Turn

SHARED_TOKENS = 64  # for which an interrupted sequence waits for another that runs them


class CommonParts:
    """What bound interrupted sequences are about to run, in one plan.

    Args:
        table: Their rows.
        order: Says their turns.
        bound: Sequences that are bound, interrupted or not.
    """

    def __init__(self, table: SequenceTable, order: PromptOrder, bound: Iterable[Sequence]) -> None:
        self._table = table
        self._order = order
        self._num_blocks = max(1, SHARED_TOKENS // table.block_size)
        self._coming: dict[BlockHash, dict[int, Turn]] = {}
        self._waited_for: dict[bytes, Int32Array] = {}
        for sequence in bound:
            self.note(sequence)

    def note(self, sequence: Sequence) -> None:
        """Notes a block that an interrupted sequence, which is bound, runs before long, and its turn."""
        if sequence.is_interrupted:
            done = int(self._table.num_computed[sequence.row])
            for name in self._last_shared(sequence.block_hashes, done // self._table.block_size):
                ranks = self._coming.setdefault(name, {})
                turn = self._order.turn(sequence, done)
                ranks[sequence.dp_rank] = min(ranks.get(sequence.dp_rank, turn), turn)

    def must_wait(self, sequence: Sequence, found: Found, rank: int | None = None) -> bool:
        """Whether a bound sequence is about to run what an interrupted one would have to run next.

        Args:
            found: What ranks have of it.
            rank: Where it would run, beside the other; None: the rank that has most of it, wherever the
                other runs.
        """
        first = found.num_blocks if rank is None else found.num_blocks_of(rank)
        for name in self._last_shared(found.wanted.hashes, first):
            ranks, own = self._coming.get(name, {}), self._order.turn(sequence)
            if any(turn <= own for each, turn in ranks.items() if rank in (None, each)):
                num_tokens = (first + self._num_blocks) * self._table.block_size
                self._waited_for[self._key_of(sequence)] = sequence.tokens[:num_tokens]
                return True
        return False

    def must_wait_like_another(self, sequence: Sequence) -> bool:
        """Whether an interrupted sequence begins as one before it that waits, as far as that waits for.

        Where thousands do, to look each of them up would take longer than a step. So who has KV of its own
        waits along: what it had before a loss may have been evicted since.
        """
        tokens = self._waited_for.get(self._key_of(sequence))
        if tokens is None or len(sequence.tokens) <= len(tokens) or not may_find(sequence):
            return False
        return np.array_equal(sequence.tokens[: len(tokens)], tokens)

    def _key_of(self, sequence: Sequence) -> bytes:
        first: bytes = sequence.tokens[: self._table.block_size].tobytes()
        return sequence.request.cache_salt + first

    def _last_shared(self, hashes: list[BlockHash], first: int) -> list[BlockHash]:
        """Returns the name of the block from `first` on that makes it worth to wait, if there is one."""
        place = first + self._num_blocks - 1
        return hashes[place : place + 1]
