"""Groups of sequences with few new tokens, each attended at once. Planned on the host.

    B sequences    Q new tokens of each    G query heads per KV head    S keys    W tree's keys

All sequences of a group have Q new tokens and about equally many keys, and are padded to the longest:

    decode          Q = 1
    verify          Q = tokens verified, each of which sees those before it
    tree            each sees those that a mask names, which is read when the pass begins
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from executor.batch.columns import Int64Array
from executor.batch.kv_pool import KVPool

# Most new tokens of a sequence that goes into a group. A verify pass has 2 to 16. One by one, 32
# sequences of 4 take a fifth to a third longer, and of 16 about as long: with more queries a sequence
# fills a call by itself, and need not be padded (tests/bench/executor/bench_attention_widths.py).
MAX_GROUPED_WIDTH = 16

_FEW_BLOCKS = 8  # up to this, padding costs less than another group


@dataclass(frozen=True, slots=True)
class TreeWindow:
    """Where a group's mask takes what a tree says.

    Attributes:
        sources: int64 [B, Q, 1, W], places in the batch's tree mask laid flat.
        places: int64 [B, Q, G, W], places in the group's mask laid flat. Columns of a tree that is
            wider than its sequence repeat the last one.
    """

    sources: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that are attended at once.

    Attributes:
        start, stop: Their rows among the rows of all groups.
        width: Q.
        members: [B], which sequences of the batch, ascending.
        blocks: int64 [B * max_blocks], their blocks, each padded with its own first one.
        unwritten: int64, the places in those blocks that hold no token of theirs; None if there
            are none.
        mask: [B, 1, Q * G, max_blocks * block_size], 0 or -inf; None if each query sees all keys.
        window: What of the mask ``read_tree`` writes; None without a tree.
    """

    start: int
    stop: int
    width: int
    members: Int64Array
    blocks: torch.Tensor
    unwritten: torch.Tensor | None
    mask: torch.Tensor | None
    window: TreeWindow | None

    @property
    def num_sequences(self) -> int:
        """B."""
        return (self.stop - self.start) // self.width

    def read_tree(self, tree_mask: torch.Tensor) -> None:
        """Puts what the tree says into the mask.

        Args:
            tree_mask: bool [sequences of the batch, Q, W].
        """
        assert self.mask is not None, "planned for a tree"
        assert self.window is not None, "planned for a tree"
        hidden = ~tree_mask.reshape(-1).take(self.window.sources)
        bias = torch.zeros(hidden.shape, dtype=self.mask.dtype, device=self.mask.device)
        bias = bias.masked_fill_(hidden, -torch.inf).expand(self.window.places.shape)
        self.mask.view(-1).put_(self.window.places, bias.contiguous())


class GroupPlanner:
    """Puts sequences into groups.

    Args:
        kv_pool: Their keys and values.
        max_blocks: Blocks of a group, as far as that is more than one sequence.
        group_size: G.
        dtype: Type of masks.
    """

    def __init__(
        self, *, kv_pool: KVPool, max_blocks: int, group_size: int, dtype: torch.dtype
    ) -> None:
        self.kv_pool = kv_pool
        self.max_blocks = max_blocks
        self.group_size = group_size
        self._table = kv_pool.block_table_cpu.numpy()
        block_size, most = kv_pool.block_size, kv_pool.max_blocks_per_row
        # What depends on no batch: positions of a row's slots, and a line of which each mask's
        # lines are cut-outs: as many zeros as a row has slots, then as many -inf.
        self._columns = np.arange(most)
        self._positions = np.arange(most * block_size).reshape(most, block_size)
        self._step = torch.zeros(2 * most * block_size, dtype=dtype, device=kv_pool.device)
        self._step[most * block_size :] = -torch.inf

    def plan(
        self,
        sequences: Int64Array,
        new_lens: Int64Array | None,
        seq_lens: Int64Array,
        rows: Int64Array,
        tree_width: int | None,
    ) -> tuple[Group, ...]:
        """Returns the groups of some of a batch's sequences.

        Args:
            sequences: Those to attend, ascending.
            new_lens: [batch] new tokens of each; None if each has one.
            seq_lens: [batch] tokens of each, those of this pass included. A padded sequence may have
                fewer than new tokens: it then sees zeros.
            rows: [batch] rows of the block table.
            tree_width: W if the batch has a tree mask.
        """
        if not len(sequences):
            return ()
        by_width = [(1, sequences)]
        if new_lens is not None:
            widths = new_lens[sequences]
            by_width = [(int(widths[0]), sequences)]
            if (widths != widths[0]).any():
                by_width = [(w, sequences[widths == w]) for w in np.unique(widths).tolist()]
        groups: list[Group] = []
        start = 0
        for width, alike in by_width:
            # A sequence shows as many keys as it has queries, also if it is padding.
            shown_lens = np.maximum(seq_lens[alike], width)
            num_blocks = -(-shown_lens // self.kv_pool.block_size)
            for at in self._split(num_blocks):
                members = alike[at]
                groups.append(
                    self._group(
                        start,
                        width,
                        members,
                        rows[members],
                        seq_lens[members],
                        shown_lens[at],
                        num_blocks[at],
                        tree_width,
                    )
                )
                start = groups[-1].stop
        return tuple(groups)

    def _split(self, num_blocks: Int64Array) -> Iterator[Int64Array | slice]:
        """Splits sequences, the longest first, so that those of a group are about equally long.

        None pays for more than twice its own blocks. A group's sequences, padded to its longest,
        need at most ``max_blocks``.

        Args:
            num_blocks: [N] blocks of each.

        Returns:
            Which of the N each group has, ascending.
        """
        count, most = len(num_blocks), int(num_blocks.max())
        if count * most <= self.max_blocks and _least(most) <= int(num_blocks.min()):
            yield slice(None)
            return
        descending = np.argsort(-num_blocks, kind="stable")
        num_blocks = num_blocks[descending]
        first = 0
        while first < count:
            most = int(num_blocks[first])
            alike = int(np.searchsorted(-num_blocks, -_least(most), side="right"))
            stop = min(alike, first + max(self.max_blocks // most, 1))
            yield np.sort(descending[first:stop])
            first = stop

    def _group(
        self,
        start: int,
        width: int,
        members: Int64Array,
        rows: Int64Array,
        seq_lens: Int64Array,
        shown_lens: Int64Array,
        num_blocks: Int64Array,
        tree_width: int | None,
    ) -> Group:
        device, most = self.kv_pool.device, int(num_blocks.max())
        num_keys = most * self.kv_pool.block_size
        # A mask hides neither NaN nor infinity, and a slot without a token of the sequence holds
        # what another left there. Its first block is its own: in the padding it saves clearing.
        if int(num_blocks.min()) == most:
            blocks = self._table[rows, :most]
            positions = self._positions[:most].reshape(1, num_keys)
        else:
            columns = self._columns[:most]
            columns = np.where(columns < num_blocks[:, None], columns, 0)
            blocks = self._table[rows[:, None], columns]
            positions = self._positions[columns].reshape(-1, num_keys)
        unwritten = (positions >= seq_lens[:, None]).ravel().nonzero()[0]
        # One past the last key that each query sees: with a tree, that is up to the tree.
        ends, window = shown_lens[:, None], None
        if tree_width is not None:
            ends = np.repeat(ends, width, axis=1)
            window = self._window(members, shown_lens, width, tree_width, num_keys)
        elif width > 1:
            ends = ends + np.arange(1 - width, 1)
        is_masked = window is not None or width > 1 or int(ends.min()) < num_keys
        return Group(
            start=start,
            stop=start + len(members) * width,
            width=width,
            members=members,
            blocks=torch.from_numpy(blocks.astype(np.int64).ravel()).to(device),
            unwritten=torch.from_numpy(unwritten).to(device) if len(unwritten) else None,
            mask=self._mask(ends, num_keys) if is_masked else None,
            window=window,
        )

    def _mask(self, ends: Int64Array, num_keys: int) -> torch.Tensor:
        """Returns [B, 1, Q * G, S], which hides keys from ``ends`` [B, Q] on."""
        count, size = len(ends), len(self._step) // 2
        firsts = torch.from_numpy(np.repeat(size - ends, self.group_size)).to(self._step.device)
        lines = self._step.as_strided((size + 1, num_keys), (1, 1))
        return lines.index_select(0, firsts).view(count, 1, -1, num_keys)

    def _window(
        self, members: Int64Array, seq_lens: Int64Array, width: int, tree_width: int, num_keys: int
    ) -> TreeWindow:
        keys = seq_lens[:, None] - tree_width + np.arange(tree_width)
        columns = np.where(keys < 0, tree_width - 1, np.arange(tree_width))
        keys = np.where(keys < 0, seq_lens[:, None] - 1, keys)
        rows = members[:, None] * width + np.arange(width)
        sources = rows[:, :, None] * tree_width + columns[:, None]
        shape = (len(members), width, self.group_size, 1)
        places = np.arange(np.prod(shape)).reshape(shape) * num_keys + keys[:, None, None]
        device = self.kv_pool.device
        return TreeWindow(
            sources=torch.from_numpy(sources[:, :, None]).to(device),
            places=torch.from_numpy(places).to(device),
        )


def _least(most: int) -> int:
    """Returns the fewest blocks of a sequence in a group whose longest has ``most``."""
    return -(-most // 2) if most > _FEW_BLOCKS else 0
