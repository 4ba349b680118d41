"""Table of cached blocks, as a gateway makes it of SubscribeKvEvents."""

from typing import Any

import numpy as np

from router.scheduling.kv.prefix_cache import NEW_HASH, PrefixCache, extend_block_hashes

NAME_BYTES = NEW_HASH.digest_size  # names of windowed layers' blocks are longer


class BlockTable:
    """Blocks of each rank, from the batches of one subscription.

    Attributes:
        ranks: Of each rank, a block's number to that of the one before it, if any, and its tokens.
        num_chunks_left: Of the snapshot; None before the first chunk.
    """

    def __init__(self) -> None:
        self.ranks: dict[int, dict[int, tuple[int | None, tuple[int, ...]]]] = {}
        self.num_chunks_left: int | None = None
        self._cursors: dict[int, int] = {}
        self._missed: set[int] = set()  # in a snapshot, blocks that others were said to follow

    def apply(self, batch: Any) -> None:
        """Takes a batch, whose number and events must fit what came before."""
        rank, number = batch.dp_rank, batch.sequence_number
        self._is_snapshot = batch.HasField("snapshot")
        if self._is_snapshot:
            if batch.snapshot.index == 0:
                assert batch.events[0].WhichOneof("data") == "cleared"
                self.num_chunks_left = batch.snapshot.count
                self._cursors.clear()
                self._missed.clear()
            assert self.num_chunks_left is not None
            self.num_chunks_left -= 1
            assert batch.snapshot.index == batch.snapshot.count - self.num_chunks_left - 1
        else:
            assert self.num_chunks_left == 0
        assert number == self._cursors.get(rank, number - 1) + 1
        self._cursors[rank] = number
        for event in batch.events:
            self._apply(self.ranks.setdefault(rank, {}), event)

    def _apply(self, blocks: dict[int, tuple[int | None, tuple[int, ...]]], event: Any) -> None:
        match event.WhichOneof("data"):
            case "cleared":
                for of_rank in self.ranks.values():
                    of_rank.clear()
            case "removed":
                for name in event.removed.block_hashes:
                    del blocks[name]
            case "stored":
                stored = event.stored
                before = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
                for block in stored.blocks:
                    assert block.block_size == len(block.token_ids)
                    assert block.block_hash not in blocks
                    assert not (self._is_snapshot and block.block_hash in self._missed)
                    if before is not None and before not in blocks:
                        self._missed.add(before)
                    blocks[block.block_hash] = before, tuple(block.token_ids)
                    before = block.block_hash

    def check(self, rank: int, cache: PrefixCache, salt: bytes) -> set[bytes]:
        """Asserts that what it has of a rank is cached, with these tokens. Returns the names."""
        blocks = self.ranks.get(rank, {})
        cached = {_number(name): name for name in cache._block_of if len(name) == NAME_BYTES}
        assert blocks.keys() <= cached.keys()
        for number, (before, tokens) in blocks.items():
            chain = [tokens]
            while before in blocks:
                before, tokens = blocks[before]
                chain.insert(0, tokens)
            if before is None:  # else one before it was evicted, while others used it
                hashes: list[bytes] = []
                extend_block_hashes(
                    hashes, np.concatenate(chain, dtype=np.int32), len(tokens), salt
                )
                assert cached[number] == hashes[-1]
        return {cached[number] for number in blocks}


def _number(name: bytes) -> int:
    return int.from_bytes(name[:8], "little", signed=True)
