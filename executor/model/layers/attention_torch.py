"""Grouped-query and latent attention over the paged KV pool, in plain PyTorch.

    B sequences    Q new tokens of each    T token rows    H query heads    N KV heads
    G = H / N query heads per KV head      D head width    S keys           W tree's keys

Sequences with one new token, or a few as verified drafts have, are attended in groups: of about equal
length, so that a long one does not make short ones pay for its padding, and as many as the workspace
holds. All sequences of a group have Q new tokens and are padded to the longest:

    decode          Q = 1
    verify          Q = tokens verified, each of which sees those before it
    tree            each sees those that a mask names, which is read when the pass begins

A sequence with more new tokens is attended by itself, in tiles of queries.

Keys and values are copied from their blocks into a workspace that stays in the cache of a core.
It is sized by the pool's longest row, never by a batch.

Query heads of one KV head are laid along the query dimension (groups) or the head dimension
(extend) with the KV head as batch dimension, so keys and values are never repeated: repeating them,
as ``enable_gqa`` does, costs a copy of the context per layer.

Latent attention (MLA) has one KV head, whose first columns are the values. It is two products with a
softmax between: ``scaled_dot_product_attention`` takes four times as long where widths differ.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from executor.batch.columns import Int64Array
from executor.batch.forward_batch import ForwardBatch
from executor.batch.kv_pool import KVPool
from executor.model.layers.attention import PLAIN, LayerOptions
from executor.model.layers.linear import WorkerPool

# Most new tokens of a sequence that goes into a group. A verify pass has 2 to 16. One by one, 32
# sequences of 4 take a fifth to a third longer, and of 16 about as long: with more queries a sequence
# fills a call by itself, and need not be padded (tests/bench/executor/bench_attention_widths.py).
MAX_GROUPED_WIDTH = 16

_FEW_BLOCKS = 8  # up to this, padding costs less than another group
_WORKSPACE_TOKENS = 2048  # 1 MiB of keys for 4 heads of 64 in bfloat16; more if a row is longer
_QUERY_TILE = 128  # queries per tile: each tile leaves out the keys in its future
_LATENT_TILE_ROWS = (
    2048  # queries * heads per tile of latent attention, whose scores are kept whole
)
_MAX_CACHED_VIEWS = 1024


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
        sliding: Keys that a query sees, with its own; None for all. Blocks before them are left out.
    """

    def __init__(
        self,
        *,
        kv_pool: KVPool,
        max_blocks: int,
        group_size: int,
        dtype: torch.dtype,
        sliding: int | None = None,
    ) -> None:
        self.kv_pool = kv_pool
        self.max_blocks = max_blocks
        self.group_size = group_size
        self.sliding = sliding
        self.table_cpu = kv_pool.tables_cpu[kv_pool.shape.group_of(sliding)]
        self._table = self.table_cpu.numpy()
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
        firsts = np.zeros_like(seq_lens)  # the first block of each that is taken
        if self.sliding is not None:
            assert tree_width is None, "refused at start: no trees over sliding windows"
            unseen = seq_lens + 1 - self.sliding - (1 if new_lens is None else new_lens)
            firsts = np.maximum(unseen, 0) // self.kv_pool.block_size
            seq_lens = seq_lens - firsts * self.kv_pool.block_size
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
                        firsts[members],
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
        firsts: Int64Array,
        tree_width: int | None,
    ) -> Group:
        device, most = self.kv_pool.device, int(num_blocks.max())
        num_keys = most * self.kv_pool.block_size
        # A mask hides neither NaN nor infinity, and a slot without a token of the sequence holds
        # what another left there. Its first block is its own: in the padding it saves clearing.
        if int(num_blocks.min()) == most and not firsts.any():
            blocks = self._table[rows, :most]
            positions = self._positions[:most].reshape(1, num_keys)
        else:
            columns = self._columns[:most]
            columns = np.where(columns < num_blocks[:, None], columns, 0)
            blocks = self._table[rows[:, None], firsts[:, None] + columns]
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
        is_masked |= self.sliding is not None and int(ends.max()) > self.sliding
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
        """Returns [B, 1, Q * G, S], which hides keys from ``ends`` [B, Q] on, and before windows."""
        count, size = len(ends), len(self._step) // 2
        firsts = torch.from_numpy(np.repeat(size - ends, self.group_size)).to(self._step.device)
        lines = self._step.as_strided((size + 1, num_keys), (1, 1))
        mask = lines.index_select(0, firsts).view(count, 1, -1, num_keys)
        if self.sliding is not None:
            first_seen = torch.from_numpy(np.repeat(ends - self.sliding, self.group_size))
            keys = torch.arange(num_keys, device=mask.device)
            is_before = keys < first_seen.to(mask.device).view(count, 1, -1, 1)
            mask.masked_fill_(is_before, -torch.inf)
        return mask

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


@dataclass(frozen=True, slots=True)
class _ExtendTile:
    """Up to _QUERY_TILE queries of one sequence, against the keys that they may see.

    Attributes:
        start, stop: Rows in q.
        first_key: The first that any of them sees, among those taken.
        num_keys: Keys up to the last query's own, with those before the first.
        mask: [stop - start, num_keys - first_key], 0 or -inf; None if causal from the sequence's
            start.
    """

    start: int
    stop: int
    first_key: int
    num_keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _ExtendSequence:
    """One sequence with several new tokens.

    Attributes:
        start, stop: Its rows in q, k and v.
        blocks: int64, its blocks, from the first that any query sees; None if all its keys and values are in this very pass.
        tiles: Its queries.
    """

    start: int
    stop: int
    blocks: torch.Tensor | None
    tiles: tuple[_ExtendTile, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What layers with one window need of a batch.

    Attributes:
        out_cache_loc: int64 [T], where they keep this pass's keys and values.
        grouped_rows: int64, the rows in q of sequences in groups, group after group; None if these
            are all rows, in order.
    """

    out_cache_loc: torch.Tensor
    grouped_rows: torch.Tensor | None
    groups: tuple[Group, ...]
    extend_sequences: tuple[_ExtendSequence, ...]


@dataclass(frozen=True, slots=True)
class _Metadata:
    """What ``forward`` needs of a batch.

    Attributes:
        plans: By the window of layers.
        tree_mask: The batch's.
    """

    kv_pool: KVPool
    workspaces: "tuple[_Workspace, ...]"
    plans: Mapping[int | None, _Plan]
    tree_mask: torch.Tensor | None


class _Workspace:
    """Room for the keys and values of a few sequences, taken out of their blocks.

    Holds what it last took: the next ``take`` overwrites it.
    """

    def __init__(self, kv_pool: KVPool) -> None:
        row_tokens = kv_pool.max_blocks_per_row * kv_pool.block_size
        self.kv_pool = kv_pool
        self.num_blocks = max(_WORKSPACE_TOKENS, row_tokens) // kv_pool.block_size
        parts, self._value_width = kv_pool.shape.parts, kv_pool.shape.value_width
        self._part = parts[0]
        width = kv_pool.block_size * self._part.num_heads * self._part.width
        size = (len(parts), self.num_blocks, width)  # keys, values
        room = torch.zeros(size, dtype=self._part.dtype, device=kv_pool.device)
        self._room = room
        # A fill writes element by element: of eight bytes, it takes half as long as of two.
        num_tokens = self.num_blocks * kv_pool.block_size
        self._words = room.view(torch.int64).view(len(room), num_tokens, -1)
        # By blocks, for each layer.
        num_blocks = kv_pool.num_physical_blocks
        self._caches = [[cache.view(num_blocks, -1) for cache in parts] for parts in kv_pool.caches]
        # Room for so many sequences of so many blocks: making views costs more than small copies.
        self._views = lru_cache(_MAX_CACHED_VIEWS)(self._make_views)

    def take(
        self, blocks: torch.Tensor, layer_id: int, num_sequences: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of the blocks, each [num_sequences, N, S, D]."""
        rooms, keys, values = self._views(blocks.shape[0], num_sequences)
        for cache, room in zip(self._caches[layer_id], rooms, strict=True):
            torch.index_select(cache, 0, blocks, out=room)
        return keys, values

    def clear(self, places: torch.Tensor) -> None:
        """Zeroes keys and values at these places of what ``take`` returned: sequence * S + key."""
        self._words.index_fill_(1, places, 0)

    def _make_views(
        self, num_blocks: int, num_sequences: int
    ) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Returns room for each part by block, then keys and values as ``take`` gives them."""
        by_token = (num_sequences, -1, self._part.num_heads, self._part.width)
        rooms = [room[:num_blocks] for room in self._room]
        views = [room.view(by_token).transpose(1, 2) for room in rooms]
        return rooms, views[0], views[-1][..., : self._value_width]


class TorchAttention:
    """The attention backend of the CPU, and what other backends must match.

    Not capturable: sequences are grouped by length on the host.

    Args:
        num_heads: H.
        num_kv_heads: N, a divisor of H.
        head_dim: D.
        dtype: Type of q, k, v and the KV pool.
        num_workers: Threads of its worker pool; as many as OpenMP has if None.
        scale: What scores are multiplied by; 1 / sqrt(D) if None.
        latent_dim: Columns of the one KV head that are its values; None: these are tensors of their
            own, as wide as keys.
        layers: What layers do that others do not, by their number; those behind them are plain.
    """

    is_capturable = False

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        num_workers: int | None = None,
        scale: float | None = None,
        latent_dim: int | None = None,
        layers: Sequence[LayerOptions] = (),
    ) -> None:
        assert latent_dim is None or num_kv_heads == 1, "all heads share one latent"
        self.num_kv_heads = num_kv_heads
        self.group_size = num_heads // num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.scale = head_dim**-0.5 if scale is None else scale
        self.latent_dim = latent_dim
        self.value_width = latent_dim or head_dim
        self._query_tile = _QUERY_TILE
        if latent_dim is not None:
            self._query_tile = min(_QUERY_TILE, max(1, _LATENT_TILE_ROWS // num_heads))
        self._metadata: _Metadata | None = None
        self._layers = tuple(layers)
        self._windows = {layer.window for layer in layers} or {None}
        self._needs_masks = latent_dim is not None or any(x.sinks is not None for x in layers)
        self._is_tree_read = False
        self._workers = WorkerPool(num_workers)
        self._workspaces: tuple[_Workspace, ...] = ()  # one per worker
        self._planners: tuple[GroupPlanner, ...] = ()  # one per window

    def init_forward_metadata_in_graph(self) -> None:
        """Has the next ``forward`` read the tree mask: nothing is recorded."""
        self._is_tree_read = False

    def on_after_cuda_graph_warmup(self) -> None:
        """Nothing: metadata stays as planned."""

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, kv_pool: KVPool) -> None:
        planners = self._use(kv_pool)
        self._is_tree_read = False
        self._metadata = _Metadata(
            kv_pool=kv_pool,
            workspaces=self._workspaces,
            plans={planner.sliding: self._plan(batch, planner) for planner in planners},
            tree_mask=batch.tree_mask,
        )

    def _plan(self, batch: ForwardBatch, planner: GroupPlanner) -> _Plan:
        kv_pool = planner.kv_pool
        seq_lens, rows = batch.seq_lens_cpu.numpy(), batch.req_pool_indices.cpu().numpy()
        new_lens, tree_width = batch.extend_seq_lens_cpu, None
        grouped = np.arange(batch.batch_size)
        extended: tuple[_ExtendSequence, ...] = ()
        if batch.tree_mask is not None:
            assert self.latent_dim is None, "refused at start: no trees over latents"
            num_sequences, num_queries, tree_width = batch.tree_mask.shape
            given = [1] * batch.batch_size if new_lens is None else new_lens.tolist()
            assert given == [num_queries] * num_sequences, (
                f"tree_mask is for {num_sequences} sequences of {num_queries} tokens; the batch has "
                f"{batch.batch_size}, of {np.unique(given)}"
            )
        elif new_lens is not None and new_lens.max(initial=0) > MAX_GROUPED_WIDTH:
            is_grouped = new_lens <= MAX_GROUPED_WIDTH
            grouped = np.flatnonzero(is_grouped)
            starts = np.cumsum(new_lens) - new_lens
            extended = tuple(
                self._plan_extend(
                    int(starts[i]), int(new_lens[i]), int(seq_lens[i]), int(rows[i]), planner
                )
                for i in np.flatnonzero(~is_grouped)
            )
        groups = planner.plan(grouped, new_lens, seq_lens, rows, tree_width)
        grouped_rows = _rows_of(groups, new_lens, batch.input_ids.shape[0])
        return _Plan(
            out_cache_loc=batch.slots_of(kv_pool.shape.group_of(planner.sliding)),
            grouped_rows=(
                None if grouped_rows is None else torch.from_numpy(grouped_rows).to(kv_pool.device)
            ),
            groups=groups,
            extend_sequences=extended,
        )

    def _use(self, kv_pool: KVPool) -> tuple[GroupPlanner, ...]:
        """Returns what plans for a pool, after making what depends on it, if it is another one."""
        if not self._planners or self._planners[0].kv_pool is not kv_pool:
            self._workspaces = tuple(_Workspace(kv_pool) for _ in range(self._workers.size))
            self._planners = tuple(
                GroupPlanner(
                    kv_pool=kv_pool,
                    max_blocks=self._workspaces[0].num_blocks,
                    group_size=self.group_size if self.latent_dim is None else 1,  # broadcast
                    dtype=self.dtype,
                    sliding=window,
                )
                for window in self._windows
            )
        return self._planners

    def _plan_extend(
        self,
        start: int,
        new_len: int,
        seq_len: int,
        row: int,
        planner: GroupPlanner,
    ) -> _ExtendSequence:
        kv_pool, window, before = planner.kv_pool, planner.sliding, seq_len - new_len
        first_block = 0 if window is None else max(before + 1 - window, 0) // kv_pool.block_size
        prefix_len = before - first_block * kv_pool.block_size  # of what is taken
        tiles = []
        for first in range(0, new_len, self._query_tile):
            last = min(first + self._query_tile, new_len)
            num_keys, position = prefix_len + last, prefix_len + first
            first_key, mask = 0, None
            if position > 0 or self._needs_masks or (window is not None and num_keys > window):
                seen = torch.ones(last - first, num_keys, dtype=torch.bool).tril_(position)
                if window is not None:
                    first_key = max(position + 1 - window, 0)
                    seen.triu_(position + 1 - window)
                mask = torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(~seen, -torch.inf)
                mask = mask[:, first_key:].contiguous().to(kv_pool.device)
            tiles.append(_ExtendTile(start + first, start + last, first_key, num_keys, mask))
        blocks = None
        if before:
            num_blocks = -(-seq_len // kv_pool.block_size)
            table_row = planner.table_cpu[row, first_block:num_blocks]
            blocks = table_row.to(kv_pool.device, torch.int64)
        return _ExtendSequence(start, start + new_len, blocks, tuple(tiles))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer_id: int
    ) -> torch.Tensor:
        metadata = self._metadata
        assert metadata is not None, "init_forward_metadata_out_graph runs before each pass"
        if metadata.tree_mask is not None and not self._is_tree_read:
            for plan in metadata.plans.values():
                for group in plan.groups:
                    group.read_tree(metadata.tree_mask)
            self._is_tree_read = True
        with self._workers.sharing(q.shape[0]):
            return self._attend(q, k, v, metadata, layer_id)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        metadata: _Metadata,
        layer_id: int,
    ) -> torch.Tensor:
        options = self._layers[layer_id] if layer_id < len(self._layers) else PLAIN
        plan, sinks = metadata.plans[options.window], self._by_head(options.sinks)
        kept = [x for x in (k, v) if x is not None]
        for cache, x in zip(metadata.kv_pool.caches[layer_id], kept, strict=bool(kept)):
            cache.index_copy_(0, plan.out_cache_loc, x)
        if plan.grouped_rows is None:
            return self._attend_groups(q, metadata, plan, layer_id, sinks)
        out = q.new_zeros(q.shape[0], q.shape[1] * self.value_width)
        if plan.groups:
            attended = self._attend_groups(q[plan.grouped_rows], metadata, plan, layer_id, sinks)
            out.index_copy_(0, plan.grouped_rows, attended)
        for sequence in plan.extend_sequences:
            assert k is not None, "without keys each sequence has one query"
            values = k[..., : self.latent_dim] if v is None else v
            self._extend(q, k, values, sequence, metadata.workspaces[0], layer_id, out, sinks)
        return out

    def _by_head(self, sinks: torch.Tensor | None) -> torch.Tensor | None:
        """Returns sinks as float32 [N, G, 1, 1]."""
        if sinks is None:
            return None
        return sinks.float().view(self.num_kv_heads, self.group_size, 1, 1)

    def _attend_groups(
        self,
        q: torch.Tensor,
        metadata: _Metadata,
        plan: _Plan,
        layer_id: int,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns [T, H * V] for q [T, H, D], group after group. Workers share the groups."""
        groups = plan.groups
        if len(groups) == 1:
            return self._run_groups(q, groups, metadata.workspaces[0], layer_id, sinks)[0]
        shares = self._workers.shares([len(group.blocks) for group in groups])
        pieces = [
            partial(self._run_groups, q, groups[share], workspace, layer_id, sinks)
            for share, workspace in zip(shares, metadata.workspaces, strict=False)
        ]
        attended = [x for piece in self._workers.run(pieces) for x in piece]
        return attended[0] if len(attended) == 1 else torch.cat(attended)

    def _run_groups(
        self,
        q: torch.Tensor,
        groups: tuple[Group, ...],
        workspace: _Workspace,
        layer_id: int,
        sinks: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """Returns [B * Q, H * V] of each group."""
        attended = []
        for group in groups:
            count, width = group.num_sequences, group.width
            k, v = workspace.take(group.blocks, layer_id, count)
            if group.unwritten is not None:
                workspace.clear(group.unwritten)
            if self.latent_dim is not None:
                queries = q[group.start : group.stop].view(count, width, *q.shape[1:])
                out = self._attend_latents(queries, k, v, group.mask)
                attended.append(out.flatten(0, 1).flatten(1))
                continue
            by_token = (count, width, self.num_kv_heads, self.group_size, self.head_dim)
            by_head = (count, self.num_kv_heads, width, self.group_size, self.head_dim)
            queries = q[group.start : group.stop].reshape(by_token).transpose(1, 2)
            if sinks is None:
                out = F.scaled_dot_product_attention(
                    queries.flatten(2, 3), k, v, attn_mask=group.mask, scale=self.scale
                )
            else:
                mask = (
                    None
                    if group.mask is None
                    else group.mask.view(count, 1, width, self.group_size, -1)
                )
                out = _attend_with_sinks(
                    queries, k, v, sinks.view(-1, 1, self.group_size, 1), mask, self.scale
                )
            out = out.view(by_head).transpose(1, 2)
            attended.append(out.reshape(group.stop - group.start, -1))
        return attended

    def _extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sequence: _ExtendSequence,
        workspace: _Workspace,
        layer_id: int,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        """Writes the sequence's rows of ``out`` [T, H * V]. Workers share the tiles."""
        if sequence.blocks is None:
            keys, values = (x[sequence.start : sequence.stop].transpose(0, 1) for x in (k, v))
        else:
            keys, values = (x[0] for x in workspace.take(sequence.blocks, layer_id))
        run: Callable[..., None] = self._run_latent_tiles
        if self.latent_dim is None:
            run = partial(self._run_tiles, sinks)
            shape = (-1, self.num_kv_heads, self.group_size, self.head_dim)
            q = q.view(shape).permute(1, 2, 0, 3)  # N, G, T, D
            out = out.view(shape).permute(1, 2, 0, 3)
            keys, values = self._per_group(keys), self._per_group(values)
        tiles = sequence.tiles
        shares = self._workers.shares([(tile.stop - tile.start) * tile.num_keys for tile in tiles])
        self._workers.run([partial(run, q, keys, values, out, tiles[s]) for s in shares])

    def _per_group(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x [N, S, D] as [N, G, S, D] without copying."""
        return x[:, None].expand(-1, self.group_size, -1, -1)

    def _run_tiles(
        self,
        sinks: torch.Tensor | None,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        tiles: tuple[_ExtendTile, ...],
    ) -> None:
        """Writes the tiles' part of ``out``. Everything is [N, G, rows, D]."""
        for tile in tiles:
            queries = q[:, :, tile.start : tile.stop]
            k, v = (x[:, :, tile.first_key : tile.num_keys] for x in (keys, values))
            if sinks is None:
                attended = F.scaled_dot_product_attention(
                    queries,
                    k,
                    v,
                    attn_mask=tile.mask,
                    is_causal=tile.mask is None,
                    scale=self.scale,
                )
            else:  # one KV head's keys are the same for its group
                attended = _attend_with_sinks(
                    queries, k[:, 0], v[:, 0], sinks, tile.mask, self.scale
                )
            out[:, :, tile.start : tile.stop] = attended

    def _run_latent_tiles(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        tiles: tuple[_ExtendTile, ...],
    ) -> None:
        """Writes the tiles' part of ``out`` [T, H * V], for q [T, H, D] and keys [1, S, D]."""
        for tile in tiles:
            attended = self._attend_latents(
                q[None, tile.start : tile.stop],
                keys[:, None, : tile.num_keys],
                values[:, None, : tile.num_keys],
                tile.mask,
            )
            out[tile.start : tile.stop] = attended[0].flatten(1)

    def _attend_latents(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns [B, Q, H, V] for q [B, Q, H, D], keys [B, 1, S, D] and values [B, 1, S, V].

        Args:
            mask: What is added to the scores of each query, whatever its head: [B, 1, Q, S], or
                [Q, S].
        """
        count, width, num_heads, _ = q.shape
        scores = torch.bmm(q.flatten(1, 2), keys[:, 0].transpose(1, 2))
        scores = scores.view(count, width, num_heads, -1).float().mul_(self.scale)
        if mask is not None:
            scores.add_(mask.view(-1, width, 1, mask.shape[-1]))
        weights = scores.softmax(-1).to(q.dtype).flatten(1, 2)
        return torch.bmm(weights, values[:, 0]).view(count, width, num_heads, -1)


def _attend_with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Softmax attention with one more logit per head, which has no value.

    Args:
        q: [.., A, R, D], of one KV head.
        k, v: [.., S, D].
        sinks: Fits [.., A, R, 1].
        mask: Fits [.., A, R, S], 0 or -inf; None hides nothing.
    """
    scores = (q.flatten(-3, -2) @ k.transpose(-2, -1)).float().mul_(scale)
    scores = scores.view(*q.shape[:-1], -1)
    if mask is not None:
        scores.add_(mask)
    total = torch.logaddexp(scores.logsumexp(-1, keepdim=True), sinks)
    weights = scores.sub_(total).exp_().to(v.dtype)
    return (weights.flatten(-3, -2) @ v).view(q.shape)


def _rows_of(
    groups: tuple[Group, ...], new_lens: npt.NDArray[np.int64] | None, num_rows: int
) -> npt.NDArray[np.int64] | None:
    """Returns the rows of sequences in groups, group after group; None if these are all, in order.

    Args:
        groups: At least one if there are rows that are attended in groups.
        new_lens: [B] rows of each sequence; None if each has one.
        num_rows: Of the batch.
    """
    if len(groups) == 1 and groups[0].stop == num_rows:
        return None
    ends = None if new_lens is None else np.cumsum(new_lens)
    rows = [np.zeros(0, dtype=np.int64)]
    for group in groups:
        firsts = group.members
        if ends is not None and new_lens is not None:
            firsts = ends[firsts] - new_lens[firsts]
        rows.append((firsts[:, None] + np.arange(group.width)).ravel())
    joined = np.concatenate(rows)
    is_whole = len(joined) == num_rows and bool((joined == np.arange(num_rows)).all())
    return None if groups and is_whole else joined


def _least(most: int) -> int:
    """Returns the fewest blocks of a sequence in a group whose longest has ``most``."""
    return -(-most // 2) if most > _FEW_BLOCKS else 0
