"""Log of one rank's prefix cache: the tokens behind its names, and what came and went.

Gateways that choose among routers ask which prefixes each one has cached, by their tokens. The
cache has names only, so the log keeps, for each call that names blocks, a run of them with a copy
of their tokens. All else is worked out when somebody asks, or once the runs have become too many.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from router.requests.request import Int32Array

HELD_SHARE = 4  # runs may have so many times the pool's blocks, most of them gone


class BlockRun(NamedTuple):
    """Blocks that follow one another in a sequence.

    Attributes:
        salt: What their names began with (prefix_cache.py): whose they are.
        place: Number of blocks of the sequence before them.
        names: [1 + B] of the block before them, or the salt, and then their own.
        block_ids: int32 [B].
        tokens: int32 [B, block_size].
    """

    salt: bytes
    place: int
    names: list[bytes]
    block_ids: Int32Array
    tokens: Int32Array

    def part(self, start: int, end: int) -> "BlockRun":
        """Returns the run of its blocks from `start` to before `end`."""
        names, block_ids = self.names[start : end + 1], self.block_ids[start:end]
        return BlockRun(self.salt, self.place + start, names, block_ids, self.tokens[start:end])

    def parts(self, is_in: list[bool]) -> Iterator["BlockRun"]:
        """Yields the runs that are left where some of its blocks are not in."""
        edges = np.flatnonzero(np.diff(np.array(is_in, np.int8), prepend=0, append=0)).tolist()
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            yield self.part(start, end)


class Forgotten(NamedTuple):
    """Blocks of one salt that are found no more."""

    salt: bytes
    names: list[bytes]


BlockEvent = BlockRun | Forgotten


class BlockLog:
    """Which tokens the named blocks of a rank hold.

    Blocks of windowed layers are not in it: they are found by the names of the others.

    Args:
        block_of: The cache's own, by name.
        num_blocks: Blocks of the rank's pool.
    """

    def __init__(self, block_of: Mapping[bytes, int], num_blocks: int) -> None:
        self._block_of = block_of
        self._max_held = HELD_SHARE * num_blocks
        self._runs: list[BlockRun] = []
        self._num_held = 0  # blocks of all runs
        self._events: list[BlockRun | list[bytes]] | None = None  # None: nobody takes them
        self._salt_of: dict[bytes, bytes] = {}  # of a name, while somebody does

    def begin(self) -> None:
        """Notes events from now on."""
        self._events = []
        self._salt_of = {name: run.salt for run in self._runs for name in run.names[1:]}

    def end(self) -> None:
        """Notes no events any more."""
        self._events = None
        self._salt_of.clear()

    def take(self) -> list[BlockEvent]:
        """Returns the events since `begin` or the last call, in order."""
        assert self._events is not None
        noted, self._events = self._events, []
        events: list[BlockEvent] = []
        for event in noted:
            if isinstance(event, BlockRun):
                self._salt_of.update(dict.fromkeys(event.names[1:], event.salt))
                events.append(event)
            else:
                by_salt: dict[bytes | None, list[bytes]] = {}
                for name in event:
                    by_salt.setdefault(self._salt_of.pop(name, None), []).append(name)
                events += [Forgotten(salt, names) for salt, names in by_salt.items() if salt]
        return events

    def store(self, run: BlockRun) -> None:
        """Blocks were named."""
        self._runs.append(run)
        self._num_held += len(run.block_ids)
        if self._num_held > self._max_held:
            self._sweep()
        if self._events is not None:
            self._events.append(run)

    def forget(self, names: list[bytes]) -> None:
        """Names are found no more; those of windowed layers may be among them."""
        if self._events is not None:
            self._events.append(names)

    def runs(self, salt: bytes) -> list[BlockRun]:
        """Returns all named blocks of a salt; none stands before the one that it follows."""
        parts: list[BlockRun] = []
        seen: set[bytes] = set()
        for run in self._runs:
            if run.salt == salt:
                names, ids = run.names[1:], run.block_ids.tolist()
                if list(map(self._block_of.get, names)) == ids and seen.isdisjoint(names):
                    seen.update(names)  # all are in, mostly: the loop waits for this
                    parts.append(run)
                    continue
                is_in = [self._is_in(*pair, seen) for pair in zip(names, ids, strict=True)]
                parts += run.parts(is_in) if any(is_in) else ()
        return sorted(parts, key=lambda run: run.place)

    def _is_in(self, name: bytes, block_id: int, seen: set[bytes]) -> bool:
        """Whether a block of a run still has its name, and no other run has both; notes it as seen.

        A name that was forgotten may have come to the same block again.
        """
        if self._block_of.get(name) != block_id or name in seen:
            return False
        seen.add(name)
        return True

    def _sweep(self) -> None:
        """Drops what is not in the cache. Of one run, a block is never evicted before a later one."""
        block_of, runs, seen = self._block_of, list[BlockRun](), set[bytes]()
        for run in reversed(self._runs):
            names, ids = run.names[1:], run.block_ids.tolist()
            if self._is_in(names[0], ids[0], seen):
                pairs = list(zip(names, ids, strict=True))
                num_left = bisect_left(
                    pairs, True, key=lambda pair: block_of.get(pair[0]) != pair[1]
                )
                if num_left < len(ids):
                    run = run.part(0, num_left)
                    run = run._replace(tokens=run.tokens.copy())
                runs.append(run)
        self._runs, self._num_held = runs[::-1], sum(len(run.block_ids) for run in runs)
