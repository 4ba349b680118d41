"""Prefix cache of one DP rank: names of its full KV blocks, by which a prompt's beginning is found.

A full block is named by a hash over its tokens and the hash of the block before it, so one name
stands for a whole prefix, and the longest cached prefix is a walk along the names. Before the first
block stands a salt: requests of another salt have other names for equal tokens.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b
from itertools import compress, repeat
from operator import contains
from typing import NamedTuple

import numpy as np

from router.requests.request import Int32Array
from router.scheduling.kv.block_log import BlockLog
from router.scheduling.kv.block_pool import NO_BLOCKS, BlockIds, BlockPool, Mask
from router.scheduling.kv.tails import Tail, Tails
from router.scheduling.step import GroupShape, window_reach

BlockHash = bytes

NEW_HASH = blake2b(digest_size=16)
WINDOW = b"w"  # at the end of a block's name: it holds the keys and values of windowed layers
PART = b"p"  # likewise: of a block that is not full


def extend_block_hashes(
    hashes: list[BlockHash], tokens: Int32Array, block_size: int, salt: bytes
) -> None:
    """Appends the hashes of the full blocks of ``tokens`` that ``hashes`` does not have yet.

    128 bits: among 2**40 blocks, two of different prefixes share a name with probability 2**-49.
    """
    parent, new_hash = hashes[-1] if hashes else salt, NEW_HASH.copy
    data = tokens[len(hashes) * block_size :].tobytes()
    width = block_size * tokens.itemsize
    for start in range(0, len(data) - width + 1, width):
        name = new_hash()  # faster than a call with an argument
        name.update(parent + data[start : start + width])
        parent = name.digest()
        hashes.append(parent)


def part_name(parent: bytes, tokens: Int32Array, turn: tuple[float, int, int]) -> bytes:
    """Returns the name of a block of which only the first tokens are computed.

    Args:
        parent: Name of the block before it, or the salt.
        tokens: int32, these.
        turn: Of its sequence (`Sequence.turn`): others that have the same tokens have blocks of their own.
    """
    name = NEW_HASH.copy()
    name.update(parent + tokens.tobytes() + repr(turn).encode())
    return name.digest() + PART


class CachedPrefix(NamedTuple):
    """Blocks of a rank's cache that hold the beginning of a prompt.

    Attributes:
        blocks: Of all of it.
        window_blocks: For windowed layers, the last of it that the next token's window needs.
        num_part_tokens: Tokens in the last block, if that is not full: who uses it writes behind them.
    """

    blocks: BlockIds
    window_blocks: BlockIds
    num_part_tokens: int = 0

    @property
    def num_full_blocks(self) -> int:
        return len(self.blocks) - bool(self.num_part_tokens)

    def num_tokens(self, block_size: int) -> int:
        """Returns how many tokens it has."""
        return self.num_full_blocks * block_size + self.num_part_tokens


NO_PREFIX = CachedPrefix(NO_BLOCKS, NO_BLOCKS)


class Wanted:
    """Full blocks of a prompt, which caches are asked for.

    Nobody has most prompts' first block, and then the others' names are not worked out.

    Args:
        names: Of the prompt's blocks as far as they are known; the others are added.
        tokens: int32, theirs: those behind the last full block are not wanted.
        block_size: Tokens of each.
        salt: What stands before the first.
    """

    def __init__(
        self, names: list[BlockHash], tokens: Int32Array, block_size: int, salt: bytes
    ) -> None:
        self._names = names
        self._num_blocks = len(tokens) // block_size
        self._tokens = tokens
        self._block_size = block_size
        self._salt = salt
        self._keys: dict[int, bytes] = {}

    def __len__(self) -> int:
        return self._num_blocks

    @property
    def first(self) -> BlockHash:
        """The name of the first block, of at least one."""
        return self._names_of(1)[0]

    @property
    def hashes(self) -> list[BlockHash]:
        """The names of all."""
        return self._names_of(self._num_blocks)[: self._num_blocks]

    def name_all(self) -> None:
        """Works out the names of all."""
        self._names_of(self._num_blocks)

    def _names_of(self, count: int) -> list[BlockHash]:
        if len(self._names) < count:
            tokens = self._tokens[: count * self._block_size]
            extend_block_hashes(self._names, tokens, self._block_size, self._salt)
        return self._names

    def key(self, place: int) -> bytes:
        """What a tail has that begins with this block (`Tail.key`); b"": none is wanted.

        Caches mostly ask for the same.
        """
        key = self._keys.get(place)
        if key is None:
            start = place * self._block_size
            parent = self._names_of(place)[place - 1] if place else self._salt
            first = self._tokens[start : start + self._block_size].tobytes()
            key = self._keys[place] = parent + first if place < self._num_blocks else b""
        return key

    def tokens_from(self, place: int) -> Int32Array:
        """Returns int32 [B, block_size], the tokens of its blocks from one on."""
        size = self._block_size
        return self._tokens[place * size : self._num_blocks * size].reshape(-1, size)


class PrefixCache:
    """The named blocks of one rank, and the pool that they are in.

    Where rows have a second block list for windowed layers, its blocks are in the same pool and
    under the same names, but for a suffix. A prefix then counts as far as the window's blocks at its
    end are there too; those before them are not needed, and were mostly evicted.

    Args:
        num_blocks: Blocks of the pool.
        window_reach: Blocks that a window needs before that of the next token; None: no windows.
        is_logged: Whether somebody may ask what the blocks hold.

    Attributes:
        log: Of what they hold; None where nobody may ask.
    """

    def __init__(
        self, num_blocks: int, window_reach: int | None = None, *, is_logged: bool = False
    ) -> None:
        self._window_reach = window_reach
        self.pool = BlockPool(num_blocks, on_evict=self._forget)
        self._block_of: dict[BlockHash, int] = {}
        self.log = BlockLog(self._block_of, num_blocks) if is_logged else None
        self._hash_of = np.full(num_blocks, b"", dtype=object)  # b"": the block has no name
        self._is_named = np.zeros(num_blocks, dtype=np.bool_)
        self._tails = Tails(num_blocks)
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    @classmethod
    def of_group(cls, shape: GroupShape, *, is_logged: bool = False) -> "list[PrefixCache]":
        """Returns an empty cache for each rank."""
        reach = window_reach(shape.kv_window, shape.block_size) if shape.kv_window else None
        return [cls(num_blocks, reach, is_logged=is_logged) for num_blocks in shape.num_blocks]

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens of all sequences that was found here, 0 to 1."""
        return self.num_hit_tokens / max(1, self.num_queried_tokens)

    def has_first(self, name: BlockHash, key: bytes) -> bool:
        """Whether a block has a name, or a tail begins with it by its key."""
        return name in self._block_of or key in self._tails.by_key

    def find(self, wanted: Wanted) -> CachedPrefix:
        """Returns what `match` does, once what is wanted of tails has its names."""
        prefix, hashes = self.match(wanted.hashes), wanted.hashes
        while wanted.key(start := len(prefix.blocks)) in self._tails.by_key:
            tail = self._tails.pop(wanted.key(start))
            if tail is None:
                break
            count, size = tail.num_equal(wanted.tokens_from(start)), len(tail.block_ids)
            self._name(hashes[start : start + count], tail.block_ids[:count])
            if count < size:
                self.leave(tail.part(hashes[start + count - 1], count, size))
            prefix = self.match(hashes)
        return prefix

    def match(self, hashes: list[BlockHash]) -> CachedPrefix:
        """Returns the blocks of the longest cached prefix. Takes no reference."""
        if not hashes or hashes[0] not in self._block_of:
            return NO_PREFIX
        block_ids = []
        for name in hashes:
            block_id = self._block_of.get(name)
            if block_id is None:
                break
            block_ids.append(block_id)
        if self._window_reach is None:
            return CachedPrefix(np.array(block_ids, dtype=np.int32), NO_BLOCKS)
        end = start = len(block_ids)
        while start > 0 and end - start < self._window_reach:
            start -= 1
            if hashes[start] + WINDOW not in self._block_of:
                end = start
        window_ids = [self._block_of[name + WINDOW] for name in hashes[start:end]]
        return CachedPrefix(
            np.array(block_ids[:end], dtype=np.int32), np.array(window_ids, dtype=np.int32)
        )

    def estimate(self, wanted: Wanted) -> int:
        """Returns about how many blocks `find` would find: it looks at few, by halving."""
        count = bisect_left(wanted.hashes, True, key=lambda name: name not in self._block_of)
        tail = self._tails.get(wanted.key(count))
        return count if tail is None else count + tail.num_equal(wanted.tokens_from(count))

    def insert(self, hashes: list[BlockHash], block_ids: BlockIds) -> list[bool] | None:
        """Names used blocks without a name. A name that another has stays with that one.

        Returns which blocks got their name; None: all of them.
        """
        self.pool.keep(block_ids)
        return self._name(hashes, block_ids)

    def leave(self, tail: Tail) -> None:
        """Takes kept blocks of a sequence that ends; they have names once somebody wants them."""
        other = self._tails.add(tail)
        if other is not None:  # of two that begin alike, blocks that are the same are kept once
            for each in (other, tail):
                hashes: list[BlockHash] = []
                num_tokens = each.tokens.shape[1]
                extend_block_hashes(hashes, each.tokens.reshape(-1), num_tokens, each.parent)
                self._name(hashes, each.block_ids)

    def _name(self, hashes: list[BlockHash], block_ids: BlockIds) -> list[bool] | None:
        """Names kept blocks. Those whose name another has are not kept any more."""
        if not hashes:
            return None
        ids, is_owner = block_ids.tolist(), None
        owners = list(map(self._block_of.setdefault, hashes, ids))
        if owners != ids:  # others have some of the names
            is_owner = [owner == block_id for owner, block_id in zip(owners, ids, strict=True)]
            self.pool.discard(block_ids[~np.array(is_owner)])
            hashes, ids = list(compress(hashes, is_owner)), list(compress(ids, is_owner))
        self._hash_of[ids] = hashes
        self._is_named[ids] = True
        return is_owner

    def add_part(self, prefix: CachedPrefix, name: bytes, num_tokens: int) -> CachedPrefix:
        """Returns a prefix with the block of so many tokens that follows it, if that is there."""
        block_id = self._block_of.get(name)
        if block_id is None:
            return prefix
        blocks = np.append(prefix.blocks, np.int32(block_id))
        return CachedPrefix(blocks, prefix.window_blocks, num_tokens)

    def use(self, prefix: CachedPrefix) -> None:
        """Adds a reference to a prefix's blocks. One that is not full is its user's alone from now on."""
        self.pool.share(prefix.blocks)
        self.pool.share(prefix.window_blocks)
        if prefix.num_part_tokens:
            part = prefix.blocks[-1:]
            self.pool.discard(part)
            self._forget(part)

    def is_missing(self, name: BlockHash) -> bool:
        """Whether no block has this name."""
        return name not in self._block_of

    def unname(self, is_void: Mask) -> None:
        """Takes the names of used blocks, as far as they have any: nobody finds these any more.

        Args:
            is_void: bool [num_blocks].
        """
        self._forget(self.pool.give_up(is_void))

    @property
    def num_named(self) -> int:
        """Blocks that a prompt may find, whether in use or not."""
        return len(self._block_of) + len(self._tails)

    def _forget(self, block_ids: BlockIds) -> None:
        if len(self._tails):
            self._tails.forget(block_ids)
        block_ids = block_ids[self._is_named.take(block_ids)]
        names = self._hash_of.take(block_ids).tolist()
        self._hash_of[block_ids] = b""
        self._is_named[block_ids] = False
        for name in names:
            del self._block_of[name]
        if self.log is not None:
            self.log.forget(names)


class PrefixCaches:
    """The caches of a group's ranks, which a prompt is looked up in at once.

    Most prompts are in none of them: then a look into two dictionaries of each is all.

    Args:
        caches: [dp_size] of each rank.
    """

    def __init__(self, caches: SequenceOf[PrefixCache]) -> None:
        self._caches = caches
        self._names: list[Collection[bytes]] = [cache._block_of for cache in caches]
        self._keys: list[Collection[bytes]] = [cache._tails.by_key for cache in caches]

    def __getitem__(self, rank: int) -> PrefixCache:
        return self._caches[rank]

    def __iter__(self) -> Iterator[PrefixCache]:
        return iter(self._caches)

    def find(self, wanted: Wanted) -> dict[int, CachedPrefix]:
        """Returns what `PrefixCache.find` does, by rank, of those that have anything."""
        if not len(wanted):
            return {}
        name, key = wanted.first, wanted.key(0)
        if not (
            any(map(contains, self._names, repeat(name)))
            or any(map(contains, self._keys, repeat(key)))
        ):
            return {}
        found = {
            rank: cache.find(wanted)
            for rank, cache in enumerate(self._caches)
            if cache.has_first(name, key)
        }
        return {rank: prefix for rank, prefix in found.items() if prefix is not NO_PREFIX}
