"""Lookup of sequences' prefixes in the caches of a group, and of the KV that they left before a loss."""

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from router.requests.request import Sequence
from router.requests.waiting_queue import is_last_suspect
from router.scheduling.kv.prefix_cache import (
    NO_PREFIX,
    CachedPrefix,
    PrefixCache,
    PrefixCaches,
    Wanted,
    part_name,
)
from router.scheduling.kv.row_blocks import RowBlocks


class Found(NamedTuple):
    """What ranks have of a sequence.

    Attributes:
        prefixes: By rank, of those that have anything.
        home: The rank that has its KV since before a loss; None: none does.
        wanted: What was looked for.
    """

    prefixes: dict[int, CachedPrefix]
    home: int | None
    wanted: Wanted

    @property
    def num_blocks(self) -> int:
        """The full blocks of the longest prefix."""
        prefixes = self.prefixes.values()
        return max((each.num_full_blocks for each in prefixes), default=0)

    def num_blocks_of(self, rank: int) -> int:
        """The full blocks that a rank has."""
        return self.prefixes.get(rank, NO_PREFIX).num_full_blocks


class PrefixLookup:
    """Finds what sequences could share.

    Args:
        caches: [dp_size] of each rank.
        blocks: Of the rows that run.
        block_size: Tokens of a block.
        kv_ids: [dp_size] which KV each rank has.

    Attributes:
        caches: As above; likewise the one that follows.
    """

    def __init__(
        self,
        caches: SequenceOf[PrefixCache],
        blocks: RowBlocks,
        block_size: int,
        kv_ids: SequenceOf[str],
    ) -> None:
        self.caches = PrefixCaches(caches)
        self.kv_ids = kv_ids
        self._blocks = blocks
        self._block_size = block_size

    def find(self, sequence: Sequence) -> Found:
        """Returns what there is of a waiting sequence. Takes no reference."""
        wanted = self._wanted_blocks(sequence)
        prefixes = self.caches.find(wanted)
        return Found(prefixes, self._find_home(sequence, wanted, prefixes), wanted)

    def estimate(self, sequence: Sequence) -> int:
        """Returns about how many of a new sequence's tokens are cached, at the rank that has most."""
        wanted = self._wanted_blocks(sequence)
        return self._block_size * max(cache.estimate(wanted) for cache in self.caches)

    def _wanted_blocks(self, sequence: Sequence) -> Wanted:
        """Returns the blocks that it could share: all full ones but the last token's."""
        hashes, tokens, block_size = sequence.block_hashes, sequence.tokens, self._block_size
        salt, count = sequence.request.cache_salt, (len(tokens) - 1) // block_size
        if sequence.hashed_size != block_size:  # by another group
            hashes.clear()
            sequence.hashed_size = block_size
        if not may_find(sequence):
            count = 0
        wanted = Wanted(hashes, tokens[: count * block_size], block_size, salt)
        if sequence.is_interrupted:
            wanted.name_all()  # for others that are (`Binder`)
        self._blocks.name_wanted(wanted)
        return wanted

    def _find_home(
        self, sequence: Sequence, wanted: Wanted, found: dict[int, CachedPrefix]
    ) -> int | None:
        """Returns the rank that has KV of a sequence since before a loss, if one does.

        Adds to what was found there the block that the sequence had not filled.
        """
        progress = sequence.progress
        if not progress.has_kept_kv(self.kv_ids) or not may_find(sequence):
            return None
        home = self.kv_ids.index(progress.kv_id)
        prefix = found.get(home, NO_PREFIX)
        num_full, num_part = divmod(progress.num_computed_tokens, self._block_size)
        if num_part and num_full == len(prefix.blocks):
            parent = wanted.hashes[num_full - 1] if num_full else sequence.request.cache_salt
            end = progress.num_computed_tokens
            name = part_name(parent, sequence.tokens[end - num_part : end], sequence.turn)
            prefix = self.caches[home].add_part(prefix, name, num_part)
        if not len(prefix.blocks):
            return None
        found[home] = prefix
        return home


def may_find(sequence: Sequence) -> bool:
    """Whether cached KV may serve a sequence.

    Not one whose prompt is scored, as all of it has to run for that; nor the last suspect, as it is failed
    when it is lost alone, which is to be its own doing, not that of KV that it finds.
    """
    return not (sequence.needs_prompt_logprobs or is_last_suspect(sequence))
