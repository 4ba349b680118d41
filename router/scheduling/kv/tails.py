"""Tails of one rank's prefix cache: full blocks of ended sequences that have no names yet.

To name a block takes hashing it, and most outputs are not asked for again. So what an ended sequence
leaves is kept as it is, under the name of the block before it and the tokens of its first block. The
prompt that comes so far has its own names, and compares tokens:

    prompt    [ named | named | 17 4 9 2 | 8 8 1 0 | 5 6 7 7 ]
                          │
                          └─ 17 4 9 2 ─▶ tail [ 17 4 9 2 | 8 8 1 0 | 3 3 3 1 ]
                                                named      named     a tail of its own
"""

from typing import NamedTuple

import numpy as np

from router.requests.request import Int32Array
from router.scheduling.kv.block_pool import BlockIds

HELD_SHARE = 4  # tails may have so many times the pool's blocks, most of them gone


class Tail(NamedTuple):
    """Blocks that follow one another in a sequence.

    Attributes:
        parent: Name of the block before them, or the salt.
        tokens: int32 [B, block_size].
        block_ids: int32 [B].
    """

    parent: bytes
    tokens: Int32Array
    block_ids: BlockIds

    @property
    def key(self) -> bytes:
        """What is asked for: no two tails of a cache have it."""
        first: bytes = self.tokens[0].tobytes()
        return self.parent + first

    def part(self, parent: bytes, start: int, end: int) -> "Tail":
        """Returns the tail of its blocks from `start` to before `end`."""
        return Tail(parent, self.tokens[start:end], self.block_ids[start:end])

    def num_equal(self, tokens: Int32Array) -> int:
        """Returns how many of its blocks are those of int32 [B, block_size], before one that is not."""
        count = min(len(tokens), len(self.tokens))
        is_equal = (self.tokens[:count] == tokens[:count]).all(axis=1)
        return count if is_equal.all() else int(is_equal.argmin())


class Tails:
    """The tails of one cache, by what prompts ask for.

    Blocks are evicted in passing: what a tail still has is looked at when somebody asks for it.

    Args:
        num_blocks: Blocks of the rank's pool.

    Attributes:
        by_key: The number of each and itself, as it was added; for others to look into, who may keep it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.by_key: dict[bytes, tuple[int, Tail]] = {}
        self._last_number = 0
        self._num_blocks = 0
        self._num_held = 0  # blocks of all tails, those that were evicted among them
        self._max_held = HELD_SHARE * num_blocks
        self._number_of = np.zeros(num_blocks, dtype=np.int64)  # 0: of no tail

    def __len__(self) -> int:
        """Blocks that are there."""
        return self._num_blocks

    def add(self, tail: Tail) -> Tail | None:
        """Adds a tail. If one begins alike, takes that out instead and returns what it still has."""
        key, count, number = tail.key, len(tail.block_ids), self._last_number + 1
        if self.by_key.setdefault(key, (number, tail))[0] != number:
            if (other := self.pop(key)) is not None:
                return other
            self.by_key[key] = number, tail
        self._last_number = number
        self._number_of[tail.block_ids] = number
        self._num_blocks += count
        self._num_held += count
        if self._num_held > self._max_held:
            self._sweep()
        return None

    def get(self, key: bytes) -> Tail | None:
        """Returns a tail as far as it is there."""
        number, tail = self.by_key.get(key, (0, None))
        if tail is None:
            return None
        is_gone = self._number_of[tail.block_ids] != number
        if not is_gone[0]:
            return tail.part(
                tail.parent, 0, int(is_gone.argmax()) if is_gone.any() else len(is_gone)
            )
        return None

    def pop(self, key: bytes) -> Tail | None:
        """Takes a tail out, as far as it is there."""
        tail = self.get(key)
        _, whole = self.by_key.pop(key, (0, None))
        if whole is not None:
            self._num_held -= len(whole.block_ids)
        if tail is not None:
            self.forget(tail.block_ids)
        return tail

    def forget(self, block_ids: BlockIds) -> None:
        """Drops blocks of any tails, or of none."""
        self._num_blocks -= int(np.count_nonzero(self._number_of[block_ids]))
        self._number_of[block_ids] = 0

    def _sweep(self) -> None:
        """Drops the tails of which nothing is there."""
        number_of = self._number_of
        held = list(self.by_key.items())
        self.by_key.clear()
        self.by_key.update(
            (key, (number, tail))
            for key, (number, tail) in held
            if number_of[tail.block_ids[0]] == number
        )
        self._num_held = sum(len(tail.block_ids) for _, tail in self.by_key.values())
