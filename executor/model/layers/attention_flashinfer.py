"""Attention by FlashInfer, grouped-query or latent: on CUDA, whole in a captured graph.

    planning   host: offsets (attention_tables.py), pages looked up on the device, FlashInfer's schedule
    in graph   slots of this pass's keys, as int32; the tree mask, as bits (attention_tables.py); with
               Triton, pages
    forward    keys and values to their slots, normalised and turned if the model left that, then
               attention over pages

A batch of a decode graph goes to the wrapper of its size, which was made before the capture and reads
its page table and mask where the graph reads them. Every other batch goes to one of three wrappers
for any size: one query row per sequence, several, or several with a tree mask. Latents have wrappers of
one kind for any number of query rows, and none for trees.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from executor.batch.forward_batch import ForwardBatch
from executor.batch.kv_pool import KVPool
from executor.model.flashinfer.latent import LatentShape, PagedLatent
from executor.model.flashinfer.operators import FlashInferOps, KVPages
from executor.model.flashinfer.paged import (
    MaskBuffers,
    PagedAttention,
    PagedShape,
    PageTable,
    PageTableBuffers,
    paged_decode,
    paged_prefill,
)
from executor.model.layers.attention import LayerOptions
from executor.model.layers.attention_tables import (
    Int32Array,
    PagePlan,
    TreeBits,
    look_up_pages,
    plan_pages,
)
from executor.model.layers.attention_workspace import AttentionWorkspace
from executor.model.triton.operators import HeadTurn, LatentTurn, TritonOps

_TENSOR_CORE_GROUP = 4  # query heads per KV head from which tensor cores pay

_Paged: TypeAlias = PagedAttention | PagedLatent
_GraphKey = tuple[int, int, bool]  # sequences, rows of each, and whether there is a tree mask


@dataclass(frozen=True, slots=True)
class _Metadata:
    """What ``forward`` needs of a batch.

    Attributes:
        out_cache_loc: int64 [T], as the batch has it for the layers.
        slots: int32 [T], the same; filled on the device before the first layer.
        num_rows: Rows that belong to sequences; the rest is padding.
        attention: Has planned this batch; None if it has no sequences.
        begin: What reads the tree mask, or pages, when the pass begins.
    """

    out_cache_loc: torch.Tensor
    slots: torch.Tensor
    num_rows: int
    attention: _Paged | None
    begin: tuple[Callable[[], None], ...] = ()


class FlashInferAttention:
    """The attention backend of CUDA.

    Keys and values are stored by one kernel for both. It is told that the whole pool is the pages of
    one sequence, in order, so that a token's slot is its place in that sequence: padded tokens then
    need no page table of their own, and go to the scratch block like everywhere else.

    Wrappers share one workspace, with those of the executor's other attention, and in graphs one page
    table: planning and replays must be enqueued on one stream, planning before each replay.

    Args:
        ops: The library.
        kv_pool: Keys, values and block table.
        num_heads: H, query heads.
        workspace: The executor's, which other attention on the same stream shares.
        max_num_tokens: Token rows of the largest pass.
        scale: What scores are multiplied by; 1 / sqrt(width of a key) if None.
        layers: What layers do that others do not, by their number; those behind them are plain.
        window: Of the layers that it is for.
        triton: Kernels of ours; None without.
        extend_backend: FlashInfer's kernels for batches with several query rows per sequence, outside
            graphs: ``auto`` is ``fa3`` on Hopper, else ``fa2``.
    """

    is_capturable = True

    def __init__(
        self,
        ops: FlashInferOps,
        kv_pool: KVPool,
        num_heads: int,
        workspace: AttentionWorkspace,
        *,
        max_num_tokens: int,
        scale: float | None = None,
        layers: Sequence[LayerOptions] = (),
        window: int | None = None,
        triton: TritonOps | None = None,
        extend_backend: str = "auto",
    ) -> None:
        self._ops = ops
        self._triton = triton
        self._workspace = workspace
        self._kv_pool = kv_pool
        self._num_heads = num_heads
        keys, self._value_width = kv_pool.shape.parts[0], kv_pool.shape.value_width
        self._group = kv_pool.shape.group_of(window)
        self._latent: LatentShape | None = None
        scale = keys.width**-0.5 if scale is None else scale
        if kv_pool.shape.latent_dim is not None:
            self._latent = _latent_shape(kv_pool, num_heads, scale, max_num_tokens)
        self._shape = PagedShape(
            num_heads=num_heads,
            num_kv_heads=keys.num_heads,
            head_dim=keys.width,
            block_size=kv_pool.block_size,
            dtype=keys.dtype,
            sm_scale=scale,
            window=window,
        )
        self._layers = tuple(layers)
        self._use_tensor_cores = num_heads // keys.num_heads >= _TENSOR_CORE_GROUP
        most_pages = kv_pool.num_rows * kv_pool.max_blocks_per_row
        workspace.counting(max(most_pages, kv_pool.num_physical_blocks))  # now, not in a step
        self._slots = _WholePool(kv_pool, workspace, max_num_tokens)
        self._decode, self._extend = self._for_any_batch(extend_backend)
        self._by_tree: tuple[PagedAttention, TreeBits] | None = None  # made when first needed
        self._by_graph: dict[_GraphKey, tuple[_Paged, TreeBits | None]] = {}
        self._metadata: _Metadata | None = None

    def _for_any_batch(self, extend_backend: str) -> tuple[_Paged, _Paged]:
        """Returns what runs batches outside graphs: of one row per sequence, and of several."""
        ops, workspace = self._ops, self._workspace
        if self._latent is not None:
            latent = PagedLatent(ops, self._latent, workspace.float, backend=extend_backend)
            return (workspace.adopt(latent, 0),) * 2
        decode = paged_decode(
            ops, self._shape, workspace.float, use_tensor_cores=self._use_tensor_cores
        )
        extend = paged_prefill(ops, self._shape, workspace.float, backend=extend_backend)
        return workspace.adopt(decode), workspace.adopt(extend)

    def load(self) -> None:
        """Plans a batch outside graphs, so that kernels are loaded, or built for minutes, now."""
        pages = self._workspace.counting(self._kv_pool.max_blocks_per_row)
        for attention in (self._decode, self._extend):
            attention.plan(self._longest(1, 1, pages))

    def init_cuda_graph_state(
        self, sizes: Sequence[int], num_tokens_per_bs: int = 1, *, has_tree: bool = False
    ) -> None:
        """Makes a wrapper for each size that will be captured. Before the first capture.

        What an earlier call made stays, and graphs captured with it stay valid.

        Args:
            sizes: Sequences.
            num_tokens_per_bs: Query rows of each sequence.
            has_tree: Whether batches have a tree mask.
        """
        assert not has_tree or self._latent is None, "refused at start: no trees over latents"
        assert not has_tree or self._shape.window is None, "refused at start: no trees over windows"
        width = num_tokens_per_bs
        sizes = [size for size in sizes if (size, width, has_tree) not in self._by_graph]
        if not sizes:
            return
        most = max(sizes)
        columns, num_offsets = self._kv_pool.max_blocks_per_row, PageTableBuffers.num_offsets(most)
        room = PageTableBuffers(
            self._workspace.new_table(num_offsets, torch.int32),
            self._workspace.new_table(most * columns, torch.int32),
        )
        trees = self._tree_bits(sizes, width) if has_tree else {}
        most_float = 0
        for size in sizes:
            attention = self._for_graph(size, width, room, trees.get(size))
            num_float, num_int = attention.workspace_size(
                self._longest(size, width, room.kv_indices)
            )
            most_float = max(most_float, num_float)
            # At once: a wrapper begins with 8 MB here and 8 MB on the host.
            self._workspace.adopt(attention, num_int)
            self._by_graph[size, width, has_tree] = (attention, trees.get(size))
        self._workspace.reserve(most_float)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, kv_pool: KVPool) -> None:
        """Plans on the host. Copies little to the device and waits for nothing."""
        assert kv_pool is self._kv_pool, "made for another KV pool"
        slots, out_cache_loc = self._slots.of(len(batch.input_ids)), batch.slots_of(self._group)
        if batch.batch_size == 0:
            self._metadata = _Metadata(out_cache_loc, slots, 0, None)
            return
        plan = plan_pages(
            batch.seq_lens_cpu.numpy(),
            batch.extend_seq_lens_cpu,
            self._shape.block_size,
            self._shape.window,
        )
        attention, bits = self._choose(batch, plan)
        begin = self._plan(attention, plan, batch.req_pool_indices)
        if batch.tree_mask is not None and bits is not None:
            bits.plan(plan.num_keys)  # after the attention's own planning
            begin += (partial(bits.write, batch.tree_mask),)
        self._metadata = _Metadata(out_cache_loc, slots, plan.num_rows, attention, begin)

    def init_forward_metadata_in_graph(self) -> None:
        metadata = self._planned()
        metadata.slots.copy_(metadata.out_cache_loc)
        for begin in metadata.begin:
            begin()

    def on_after_cuda_graph_warmup(self) -> None:
        """Metadata stays as planned. The workspace stays where it is from now on."""
        self._workspace.fix()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer_id: int,
        turn: HeadTurn | LatentTurn | None = None,
    ) -> torch.Tensor:
        """As of ``Attention``.

        Args:
            turn: What q and k are still to be normalised and turned by. Heads lie side by side: q, k, v.
        """
        metadata = self._planned()
        pages: Any = self._slots.pages(layer_id)
        if turn is not None:
            assert self._triton is not None, "the model has kernels that attention lacks"
            assert k is not None, "queries without keys are turned by the model"
            caches, slots_of_keys = self._kv_pool.caches[layer_id], metadata.out_cache_loc
            if isinstance(turn, LatentTurn):
                self._triton.store_latents_(q, k, turn, caches[0], slots_of_keys)
            else:
                q = self._triton.store_heads(q, k, turn, caches[0], caches[1], slots_of_keys)
        elif self._latent is not None and k is not None:
            self._kv_pool.caches[layer_id][0].index_copy_(0, metadata.out_cache_loc, k)
        elif k is not None and v is not None:
            self._slots.store(self._ops, k, v, pages, metadata.slots)
        num_rows = metadata.num_rows
        shape = (len(q), self._num_heads, self._value_width)
        out = q.new_empty(shape) if num_rows == len(q) else q.new_zeros(shape)
        sinks = self._layers[layer_id].sinks if layer_id < len(self._layers) else None
        if isinstance(metadata.attention, PagedAttention) and sinks is not None:
            lse = q.new_empty(num_rows, self._num_heads, dtype=torch.float32)
            metadata.attention.run(q[:num_rows], pages, out[:num_rows], lse)
            if self._triton is not None:
                self._triton.add_sinks_(out[:num_rows], lse, sinks)
                return out.flatten(1)
            # A sink takes exp(sink) of the softmax's sum, and adds no value.
            out[:num_rows].mul_(lse.mul_(math.log(2)).sub_(sinks).sigmoid_().unsqueeze(-1))
        elif metadata.attention is not None:
            metadata.attention.run(q[:num_rows], pages, out[:num_rows])
        return out.flatten(1)

    def _planned(self) -> _Metadata:
        assert self._metadata is not None, "init_forward_metadata_out_graph runs before each pass"
        return self._metadata

    def _choose(self, batch: ForwardBatch, plan: PagePlan) -> tuple[_Paged, TreeBits | None]:
        """Returns the wrapper of a batch, and in a graph the bits of its tree mask."""
        layout, has_tree = batch.layout, batch.tree_mask is not None
        if layout.graph_size is not None and not layout.has_extend:
            key = (batch.batch_size, plan.num_rows // batch.batch_size, has_tree)
            assert key in self._by_graph, f"no init_cuda_graph_state for (size, width, tree) {key}"
            return self._by_graph[key]
        if has_tree:
            return self._for_any_tree(batch.batch_size, plan.num_rows // batch.batch_size)
        return (self._decode if batch.extend_seq_lens_cpu is None else self._extend), None

    def init_trees(self, width: int) -> None:
        """Makes the wrapper for trees outside graphs, which else the first such batch makes.

        Args:
            width: Query rows of each sequence.
        """
        self._for_any_tree(self._kv_pool.num_rows, width)

    def _for_any_tree(self, size: int, width: int) -> tuple[PagedAttention, TreeBits]:
        """Returns what runs trees outside graphs, and the bits of a batch of so many sequences."""
        if self._by_tree is None or not self._by_tree[1].has_room(size, width):
            bits = self._tree_bits([size], width)[size]
            wrapper = paged_prefill(
                self._ops,
                self._shape,
                self._workspace.float,
                backend="fa2",
                is_causal=False,
                mask=MaskBuffers(bits=bits.bits, indptr=bits.indptr),
            )
            self._by_tree = self._workspace.adopt(wrapper), bits
        attention, bits = self._by_tree
        return attention, bits.first(size, width)

    def _tree_bits(self, sizes: Sequence[int], width: int) -> dict[int, TreeBits]:
        """Returns room for the bits of each size. All share their memory."""
        most, pool = max(sizes), self._kv_pool
        max_len = pool.max_blocks_per_row * pool.block_size
        bits = self._workspace.new_table(TreeBits.num_bytes(most, width, max_len), torch.uint8)
        indptr = self._workspace.new_table(most + 1, torch.int32)
        num_keys = self._workspace.new_table(most, torch.int32)
        return {
            size: TreeBits(
                bits[: TreeBits.num_bytes(size, width, max_len)],
                indptr[: size + 1],
                num_keys[:size],
                width,
            )
            for size in sizes
        }

    def _plan(
        self, attention: _Paged, plan: PagePlan, rows: torch.Tensor
    ) -> tuple[Callable[[], None], ...]:
        """Has a batch scheduled, and its pages looked up. Returns what is left for the device to do.

        In a graph they are looked up where it reads them, by offsets that one copy brings there.
        Planning reads no page; its copy of the pages to where they are is none.
        """
        kv_indptr, device, firsts = self._on_host(plan.kv_indptr), self._kv_pool.device, None
        buffers, table = attention.buffers, self._kv_pool.tables[self._group]
        if buffers is not None:
            ends = plan.last_page_len if self._latent is None else plan.num_keys
            columns = np.zeros_like(ends) if plan.firsts is None else plan.firsts
            offsets = np.concatenate((plan.qo_indptr, plan.kv_indptr, ends, columns))
            buffers.offsets.copy_(self._on_host(offsets), non_blocking=True)
            firsts = None if plan.firsts is None else buffers.firsts
        elif plan.firsts is not None:
            firsts = self._on_host(plan.firsts).to(device, non_blocking=True)
        places = self._workspace.counting(plan.num_pages)
        look_up = partial(look_up_pages, table, rows, places=places, firsts=firsts)
        if buffers is None:
            pages = look_up(kv_indptr.to(device, non_blocking=True))
        else:
            pages = buffers.kv_indices[: plan.num_pages]
        attention.plan(
            PageTable(
                qo_indptr=self._on_host(plan.qo_indptr),
                kv_indptr=kv_indptr,
                last_page_len=self._on_host(plan.last_page_len),
                kv_indices=pages,
            )
        )
        if buffers is None:
            return ()
        if self._triton is None:
            look_up(buffers.kv_indptr, out=pages)
            return ()
        look_up_all = partial(self._triton.look_up_pages, most=table.shape[1], firsts=firsts)
        return (partial(look_up_all, table, rows, buffers.kv_indptr, buffers.kv_indices),)

    def _for_graph(
        self, size: int, width: int, room: PageTableBuffers, tree: TreeBits | None
    ) -> _Paged:
        buffers = PageTableBuffers(
            room.offsets[: PageTableBuffers.num_offsets(size)],
            room.kv_indices[: size * self._kv_pool.max_blocks_per_row],
        )
        if self._latent is not None:
            return PagedLatent(self._ops, self._latent, self._workspace.float, buffers=buffers)
        if width == 1 and tree is None:
            return paged_decode(
                self._ops,
                self._shape,
                self._workspace.float,
                use_tensor_cores=self._use_tensor_cores,
                buffers=buffers,
            )
        return paged_prefill(
            self._ops,
            self._shape,
            self._workspace.float,
            backend="fa2",
            buffers=buffers,
            uniform_len=width,
            is_causal=tree is None,
            mask=None if tree is None else MaskBuffers(bits=tree.bits, indptr=tree.indptr),
        )

    def _longest(self, size: int, width: int, pages: torch.Tensor) -> PageTable:
        """Returns the page table of ``size`` sequences as long as a row allows, in any pages."""
        pool = self._kv_pool
        seq_lens = np.full(size, pool.max_blocks_per_row * pool.block_size)
        plan = plan_pages(seq_lens, np.full(size, width), pool.block_size)
        return PageTable(
            qo_indptr=self._on_host(plan.qo_indptr),
            kv_indptr=self._on_host(plan.kv_indptr),
            last_page_len=self._on_host(plan.last_page_len),
            kv_indices=pages[: plan.num_pages],
        )

    def _on_host(self, array: Int32Array) -> torch.Tensor:
        """Returns a tensor that is copied to the device without waiting."""
        tensor = torch.from_numpy(array)
        return tensor if self._kv_pool.device.type == "cpu" else tensor.pin_memory()


class LayeredAttention:
    """Attention whose layers see windows: a backend for each, all planned for every batch.

    Args:
        by_window: The backends.
        layers: What each layer does; those behind them see all keys.
    """

    is_capturable = True

    def __init__(
        self, by_window: Mapping[int | None, FlashInferAttention], layers: Sequence[LayerOptions]
    ) -> None:
        self._by_window = by_window
        self._layers = tuple(layers)

    def load(self) -> None:
        """As that of each."""
        for backend in self._by_window.values():
            backend.load()

    def init_cuda_graph_state(
        self, sizes: Sequence[int], num_tokens_per_bs: int = 1, *, has_tree: bool = False
    ) -> None:
        """As that of each."""
        for backend in self._by_window.values():
            backend.init_cuda_graph_state(sizes, num_tokens_per_bs, has_tree=has_tree)

    def init_forward_metadata_out_graph(self, batch: ForwardBatch, kv_pool: KVPool) -> None:
        for backend in self._by_window.values():
            backend.init_forward_metadata_out_graph(batch, kv_pool)

    def init_forward_metadata_in_graph(self) -> None:
        for backend in self._by_window.values():
            backend.init_forward_metadata_in_graph()

    def on_after_cuda_graph_warmup(self) -> None:
        for backend in self._by_window.values():
            backend.on_after_cuda_graph_warmup()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer_id: int,
        turn: HeadTurn | LatentTurn | None = None,
    ) -> torch.Tensor:
        window = self._layers[layer_id].window if layer_id < len(self._layers) else None
        return self._by_window[window].forward(q, k, v, layer_id, turn)


def flashinfer_attention(
    new: Callable[..., FlashInferAttention], layers: Sequence[LayerOptions]
) -> FlashInferAttention | LayeredAttention:
    """Returns what attends in layers like these.

    Args:
        new: Makes the backend, given ``layers`` and ``window``.
        layers: What each does.
    """
    windows = {layer.window for layer in layers} or {None}
    by_window = {window: new(layers=layers, window=window) for window in windows}
    return by_window[None] if windows == {None} else LayeredAttention(by_window, layers)


def _latent_shape(
    kv_pool: KVPool, num_heads: int, scale: float, max_num_tokens: int
) -> LatentShape:
    """Returns the sizes of latent attention, once passes of so many rows are seen to fit."""
    latent_dim, [latents] = kv_pool.shape.value_width, kv_pool.shape.parts
    shape = LatentShape(
        num_heads=num_heads,
        latent_dim=latent_dim,
        rope_dim=latents.width - latent_dim,
        block_size=kv_pool.block_size,
        dtype=latents.dtype,
        sm_scale=scale,
    )
    num_processors = 0
    if kv_pool.device.type == "cuda":
        shape.check_widths()
        num_processors = torch.cuda.get_device_properties(kv_pool.device).multi_processor_count
    shape.check_rows(max_num_tokens, kv_pool.num_rows, num_processors)
    return shape


class _WholePool:
    """The KV pool as the pages of one sequence, in which place and slot are the same."""

    def __init__(self, kv_pool: KVPool, workspace: AttentionWorkspace, max_num_tokens: int) -> None:
        self._kv_pool = kv_pool
        self._max_num_tokens = max_num_tokens
        self._workspace = workspace
        self._slots = workspace.new_table(max_num_tokens, torch.int32)
        self._sequence = workspace.new_table(max_num_tokens, torch.int32)
        kv_pool.per_block(4, self._count_blocks)

    def _count_blocks(self) -> None:
        blocks, size = self._kv_pool.num_physical_blocks, self._kv_pool.block_size
        table = partial(torch.tensor, dtype=torch.int32, device=self._kv_pool.device)
        self._kv_indices = self._workspace.counting(blocks)
        self._kv_indptr = table([0, blocks])
        self._last_page_len = table([size])

    def of(self, num_tokens: int) -> torch.Tensor:
        """Returns room for the slots of a pass, int32 [num_tokens], always at the same address."""
        assert num_tokens <= self._max_num_tokens, (
            f"{num_tokens} token rows; made for {self._max_num_tokens}"
        )
        return self._slots[:num_tokens]

    def pages(self, layer_id: int) -> KVPages | torch.Tensor:
        """Returns a layer's keys and values, each [num_physical_blocks, block_size, N, D].

        Latents are one tensor [num_physical_blocks, block_size, D].
        """
        pool = self._kv_pool
        keys, *values = pool.caches[layer_id]
        if not values:
            return keys.view(pool.num_physical_blocks, pool.block_size, -1)
        shape = (pool.num_physical_blocks, pool.block_size, *keys.shape[1:])
        return keys.view(shape), values[0].view(shape)

    def store(
        self,
        ops: FlashInferOps,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: KVPages,
        slots: torch.Tensor,
    ) -> None:
        """Puts keys and values [T, N, D] where ``slots`` says."""
        ops.append_to_pages(
            k,
            v,
            pages,
            batch_indices=self._sequence[: len(slots)],
            positions=slots,
            kv_indices=self._kv_indices,
            kv_indptr=self._kv_indptr,
            last_page_len=self._last_page_len,
        )
