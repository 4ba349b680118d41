"""Input buffers of captured graphs: one per ForwardBatch attribute, all filled in one call.

A captured graph reads fixed addresses. The registry holds the buffers at those addresses, refreshes
all of them before each replay, and hands out a batch whose tensors are slices of them.

    registry = build_decode_registry(device=device, max_bs=256, max_num_token=256, ...)
    registry.fill_from(batch, raw_bs=5, padded_bs=8, raw_num_tokens=5, padded_num_tokens=8)
    view = registry.extract_buffer(
        padded_bs=8, padded_num_tokens=8, forward_batch_template=batch
    )

Slicing costs more than all copies of a decode step, so slices and the fill of each set of sizes are
planned once (tests/bench/executor/bench_registry.py). Not thread-safe; a forward pass has one thread.

What a slot is, and each slot's shape, type and padding, says ``slots.py``, and for kinds of models
that no runner serves yet ``unserved_slots.py``.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, TypeVar

import torch

from executor.graph.input_buffers import INDEX_SEMANTIC_BUFFERS, share_input_buffer
from executor.graph.slots import (
    FillContext,
    GraphSlot,
    PaddingPolicy,
    SizesOnly,
    count_slots,
    decode_slots,
    prefill_slots,
    tree_mask_slot,
)
from executor.graph.unserved_slots import (
    structured_slots,
    unserved_decode_slots,
    unserved_prefill_slots,
)

__all__ = [
    "CudaGraphBufferRegistry",
    "FillContext",
    "GraphSlot",
    "PaddingPolicy",
    "build_decode_registry",
    "build_draft_registry",
    "build_eager_registry",
    "build_prefill_registry",
]

MAX_CACHED_SIZES = 1024  # about 20 KB each; a decode registry of 512 sequences has 512

Batch = TypeVar("Batch")
Sources = tuple[Any, ...]

_numel = torch.Tensor.numel
_NO_SLOTS: frozenset[str] = frozenset()
_RESET_POLICIES = (PaddingPolicy.ZERO, PaddingPolicy.FILL_SENTINEL)
_INITIAL_VALUE_POLICIES = (PaddingPolicy.FILL_SENTINEL, PaddingPolicy.FILL_ONCE)


class CudaGraphBufferRegistry:
    """Owns or adopts the input buffers of one runner's graphs.

    Args:
        device: Where graphs run; a slot may name another one.
        max_bs: Sequences of the largest graph.
        max_num_tokens: Token rows of the largest graph.
        share_pool: Puts new buffers into the process-wide pool of ``share_input_buffer``.

    Raises:
        ValueError: A maximum is below 1.
    """

    def __init__(
        self,
        *,
        device: torch.device | str,
        max_bs: int,
        max_num_tokens: int,
        share_pool: bool = False,
    ) -> None:
        if max_bs < 1 or max_num_tokens < 1:
            raise ValueError(
                f"max_bs={max_bs}, max_num_tokens={max_num_tokens}: need at least 1 of each"
            )
        self.device = _with_index(device)
        self.max_bs = max_bs
        self.max_num_tokens = max_num_tokens
        self.share_pool = share_pool
        self._slots: dict[str, GraphSlot] = {}
        self._zeros: dict[torch.dtype, torch.Tensor] = {}  # of a device, by type
        self._poison: Mapping[str, float] | None = None
        self._plan = lru_cache(MAX_CACHED_SIZES)(self._make_plan)
        self._views = lru_cache(MAX_CACHED_SIZES)(self._make_views)

    def register_slot(self, slot: GraphSlot, bind: torch.Tensor | None = None) -> None:
        """Adds a slot and gives it a buffer, unless it is disabled.

        A new buffer is made of zeros, then put into the pool if the registry shares, then filled
        with ``pad_value`` if the policy says so. In the pool it may hold what another runner left:
        see ``reset_for_capture``.

        Args:
            slot: Not registered anywhere before.
            bind: A tensor to adopt as it is, instead of a new buffer.

        Raises:
            ValueError: The name is taken, also by a disabled slot; the slot has a buffer already;
                or ``bind`` differs in shape, dtype or device from what the slot says.
        """
        if slot.name in self._slots:
            raise ValueError(f"slot {slot.name!r} is registered already: names are unique")
        if slot.buffer is not None:
            raise ValueError(f"slot {slot.name!r} belongs to another registry: make a new one")
        if slot.enabled:
            slot.buffer = self._allocate(slot) if bind is None else self._adopt(slot, bind)
            self._keep_zeros(slot, slot.buffer)
        self._slots[slot.name] = slot
        self._plan.cache_clear()
        self._views.cache_clear()

    def has_slot(self, name: str) -> bool:
        """Returns whether a slot of that name is registered and enabled."""
        return name in self._slots and self._slots[name].enabled

    def get_slot(self, name: str) -> GraphSlot:
        """Returns a slot, also a disabled one.

        Raises:
            KeyError: No slot has that name.
        """
        if name not in self._slots:
            raise KeyError(f"slot {name!r} is not registered; there are {list(self._slots)}")
        return self._slots[name]

    def slot_names(self) -> list[str]:
        """Returns the enabled slots' names in registration order."""
        return [slot.name for slot in self._enabled()]

    def fill_from(
        self,
        forward_batch: Any,
        *,
        raw_bs: int,
        padded_bs: int,
        raw_num_tokens: int,
        padded_num_tokens: int,
        pp_proxy_tensors: Any = None,
        skip_slots: AbstractSet[str] = _NO_SLOTS,
    ) -> None:
        """Refreshes every slot from a batch: resets tails, copies heads, then runs ``post_fill``.

        A source that is None or no tensor is skipped, and its slot's head keeps what it had.
        Neither synchronises nor changes the batch.

        Args:
            forward_batch: Any object with the slots' names as attributes; missing ones are None.
            raw_bs: Real sequences.
            padded_bs: Sequences that the graph runs.
            raw_num_tokens: Real token rows.
            padded_num_tokens: Token rows that the graph runs.
            pp_proxy_tensors: For the slots of that name, see ``FillContext``.
            skip_slots: Slots to leave as they are: no reset, no copy, no hook.

        Raises:
            ValueError: The sizes do not fit one another or the buffers, or a source's shape is not
                that of its slot's head. Names the slot.
            RuntimeError: A FILL_SENTINEL slot must be padded and has no ``pad_value``.
        """
        skipped = frozenset(skip_slots) if skip_slots else _NO_SLOTS
        plan = self._plan(raw_bs, padded_bs, raw_num_tokens, padded_num_tokens, skipped)
        context = plan.context
        if pp_proxy_tensors is not None:
            context = dataclasses.replace(context, pp_proxy_tensors=pp_proxy_tensors)
        if self._poison is not None:
            self._write_poison(context, skipped)
        plan.run(forward_batch, context)

    def extract_buffer(
        self, *, padded_bs: int, padded_num_tokens: int, forward_batch_template: Batch
    ) -> Batch:
        """Returns the template with ``batch_size=padded_bs`` and slices of the buffers.

        Structured slots are left out. A slot that the template's attribute fills stays None where
        that is None, because the buffer then holds an older batch. Computed slots, and those with
        a ``source_fn``, are always put in, unless the template's class is a dataclass that has no
        such field. All else is the template's own. The template is not changed.

        Args:
            padded_bs: Sequences that the graph runs.
            padded_num_tokens: Token rows that the graph runs.
            forward_batch_template: A dataclass, such as ``ForwardBatch``, or any plain object.

        Raises:
            ValueError: A buffer has fewer rows. Names the slot.
        """
        changes: dict[str, Any] = {"batch_size": padded_bs}
        for name, view, is_computed in self._views(padded_bs, padded_num_tokens):
            if is_computed or getattr(forward_batch_template, name, None) is not None:
                changes[name] = view
        return _replace(forward_batch_template, changes)

    def copy_slots(self, sources: Mapping[str, torch.Tensor | None]) -> None:
        """Copies tensors into the first rows of some slots, without padding.

        A tensor that already is the slot's own view is skipped, and so is None.

        Args:
            sources: Tensors by slot name, each as many rows as should be copied.

        Raises:
            KeyError: No slot has that name.
            RuntimeError: The slot is disabled.
            ValueError: The tensor does not fit the slot.
        """
        heads, given = [], []
        for name, source in sources.items():
            if source is None:
                continue
            head = _head_like(self.get_slot(name), source)
            if not _is_same_view(head, source):
                heads.append(head)
                given.append(source)
        for group in _group_alike(heads, given):
            torch._foreach_copy_([heads[i] for i in group], [given[i] for i in group])

    def reset_for_capture(self) -> None:
        """Puts every buffer whose padding matters back to its initial value, all rows.

        Call it before the captures of a runner whose buffers are shared or bound: another runner has
        written there, and a warm-up run follows every index that it finds.
        """
        for slot in self._enabled():
            buffer = slot.allocated()
            if slot.padding_policy is PaddingPolicy.ZERO:
                buffer.zero_()
            elif slot.padding_policy in _INITIAL_VALUE_POLICIES and slot.pad_value is not None:
                buffer.fill_(slot.pad_value)

    def poison_tails(self, left_alone: Mapping[str, float] | None = None) -> None:
        """Turns on test mode: from now on, every fill first overwrites all tails with junk.

        So a test can see that no real output depends on padding. Where the policy resets the tail,
        the junk is fatal to follow (the largest integer, NaN, True), because the fill must remove
        it. Where the policy leaves the tail alone, the graph reads it, so the junk is what an
        earlier batch could have left there: 1, NaN in floats, True, or a given value.

        Args:
            left_alone: Values for slots whose tail the policy leaves alone.

        Raises:
            ValueError: One of those names is no such slot.
        """
        left_alone = dict(left_alone or {})
        for name in left_alone:
            if not self.has_slot(name) or self._slots[name].padding_policy in _RESET_POLICIES:
                raise ValueError(f"slot {name!r} is no enabled slot whose tail a fill leaves alone")
        self._poison = left_alone

    def _allocate(self, slot: GraphSlot) -> torch.Tensor:
        device = self.device if slot.device is None else _with_index(slot.device)
        shape = slot.shape_fn(self.max_bs, self.max_num_tokens)
        if slot.axis != "none" and not shape:
            raise ValueError(f"slot {slot.name!r}: axis={slot.axis!r} needs a shape with rows")
        # An inference tensor could not be written outside inference mode.
        with torch.inference_mode(False):
            buffer = torch.zeros(shape, dtype=slot.dtype, device=device)
        if self.share_pool:
            buffer = share_input_buffer(slot.name, buffer)
        if slot.padding_policy in _INITIAL_VALUE_POLICIES and slot.pad_value is not None:
            buffer.fill_(slot.pad_value)
        return buffer

    def _adopt(self, slot: GraphSlot, bind: torch.Tensor) -> torch.Tensor:
        device = self.device if slot.device is None else _with_index(slot.device)
        shape = tuple(slot.shape_fn(self.max_bs, self.max_num_tokens))
        for what, found, wanted in (
            ("shape", tuple(bind.shape), shape),
            ("dtype", bind.dtype, slot.dtype),
            ("device", bind.device, device),
        ):
            if found != wanted:
                raise ValueError(
                    f"slot {slot.name!r}: bound tensor has {what} {found}, the slot needs {wanted}"
                )
        return bind

    def _keep_zeros(self, slot: GraphSlot, buffer: torch.Tensor) -> None:
        """Makes room from which a GPU copies the tails of a column of indices along with the batch."""
        is_column = buffer.dim() == 1 and slot.padding_policy is PaddingPolicy.ZERO
        kept = self._zeros.get(buffer.dtype)
        if is_column and buffer.device.type == "cuda" and (kept is None or len(kept) < len(buffer)):
            self._zeros[buffer.dtype] = torch.zeros_like(buffer)

    def _enabled(self) -> list[GraphSlot]:
        return [slot for slot in self._slots.values() if slot.enabled]

    def _make_plan(
        self,
        raw_bs: int,
        padded_bs: int,
        raw_num_tokens: int,
        padded_num_tokens: int,
        skip_slots: frozenset[str],
    ) -> "_FillPlan":
        context = FillContext(raw_bs, padded_bs, raw_num_tokens, padded_num_tokens)
        slots = [slot for slot in self._enabled() if slot.name not in skip_slots]
        return _FillPlan(slots, context, self._zeros)

    def _make_views(
        self, padded_bs: int, padded_num_tokens: int
    ) -> list[tuple[str, torch.Tensor, bool]]:
        """Returns name, view and whether it is computed, of each slot that goes on a batch."""
        return [
            (slot.name, slot.slice_for(padded_bs, padded_num_tokens), slot.is_computed)
            for slot in self._enabled()
            if not slot.is_structured
        ]

    def _write_poison(self, context: FillContext, skip_slots: frozenset[str]) -> None:
        assert self._poison is not None
        for slot in self._enabled():
            tail = None if slot.name in skip_slots else slot.tail_for(context)
            if tail is not None:
                is_reset = slot.padding_policy in _RESET_POLICIES
                default = _junk(slot.dtype, is_fatal=is_reset)
                tail.fill_(self._poison.get(slot.name, default))


class _FillPlan:
    """What a registry resets, copies and calls for a batch of given sizes.

    What follows from the sizes only (sentinels, counts) is a constant: on the device copied along
    with the batch, in host memory written through NumPy. Copies are planned for the latest batch,
    and again for one with other fields or element counts. Given as many elements in another shape,
    ``copy_`` refuses.

    Args:
        slots: The slots to fill, all with buffers.
        context: The sizes.
        zeros: By type, what tails of one dimension on a GPU are copied from: a launch less than zeroing.

    Raises:
        ValueError: A buffer has too few rows. Names the slot.
        RuntimeError: A FILL_SENTINEL slot must be padded and has no ``pad_value``.
    """

    def __init__(
        self,
        slots: Sequence[GraphSlot],
        context: FillContext,
        zeros: Mapping[torch.dtype, torch.Tensor],
    ) -> None:
        self.context = context
        zeroed: list[torch.Tensor] = []
        self._constant_heads: list[torch.Tensor] = []
        self._constants: Sources = ()
        self._host_constants: list[Callable[[], None]] = []
        self._hooks: list[Callable[[Any, FillContext], None]] = []
        for slot in slots:
            tail = slot.tail_for(context)
            if tail is not None and slot.padding_policy is PaddingPolicy.ZERO:
                if tail.device.type == "cuda" and tail.dim() == 1:
                    self._constant_heads.append(tail)
                    self._constants += (zeros[tail.dtype][: len(tail)],)
                else:
                    zeroed.append(tail)
            elif tail is not None and slot.padding_policy is PaddingPolicy.FILL_SENTINEL:
                self._add_constant(tail, _sentinel(slot))
            if isinstance(slot.post_fill, SizesOnly):
                self._add_constant(slot.allocated(), slot.post_fill.value(context))
            elif slot.post_fill is not None:
                self._hooks.append(partial(slot.post_fill, slot.allocated()))
        self._zeroed = [[zeroed[i] for i in group] for group in _group_alike(zeroed, zeroed)]
        copied = [slot for slot in slots if slot.copy_from_fb]
        self._by_name = {slot.name: slot for slot in copied if slot.source_fn is None}
        self._by_function = [(slot, slot.source_fn) for slot in copied if slot.source_fn]
        # The copies of the latest batch. These fit none: None has no elements to count.
        self._read: Callable[[Any], Sources] = lambda batch: (None,)
        self._numels: list[int] = []
        self._absent: list[str] = []
        self._copies: list[tuple[list[torch.Tensor], list[int] | None]] = []

    def run(self, forward_batch: Any, context: FillContext) -> None:
        """Resets tails, copies what sources there are, then calls the hooks.

        Raises:
            ValueError: A source's shape is not that of its slot's head.
        """
        for tails in self._zeroed:
            torch._foreach_zero_(tails)
        for write in self._host_constants:
            write()
        more = self._constants
        if self._by_function:
            more += tuple(source_fn(forward_batch, context) for _, source_fn in self._by_function)
        try:
            sources = self._read(forward_batch) + more
            is_alike = [*map(_numel, sources)] == self._numels
        except (AttributeError, TypeError):  # a source has gone, or is no tensor any more
            is_alike = False
        if self._absent and is_alike:
            is_alike = all(getattr(forward_batch, name, None) is None for name in self._absent)
        if not is_alike:
            sources = self._plan_copies(forward_batch, more)
        try:
            for heads, places in self._copies:
                torch._foreach_copy_(
                    heads, sources if places is None else [sources[i] for i in places]
                )
        except RuntimeError:
            self._plan_copies(forward_batch, more)  # names the slot, if a shape is to blame
            raise
        for hook in self._hooks:
            hook(forward_batch, context)

    def _add_constant(self, buffer: torch.Tensor, value: float) -> None:
        if buffer.device.type == "cpu" and buffer.dtype is not torch.bfloat16:  # NumPy has none
            self._host_constants.append(partial(buffer.detach().numpy().fill, value))
        else:
            self._constant_heads.append(buffer)
            self._constants += (torch.full_like(buffer, value),)

    def _plan_copies(self, forward_batch: Any, more: Sources) -> Sources:
        """Plans the copies of such a batch, and returns their sources; no tensor: not copied."""
        found = {name: getattr(forward_batch, name, None) for name in self._by_name}
        names = [name for name, source in found.items() if isinstance(source, torch.Tensor)]
        sources = (*(found[name] for name in names), *more)
        heads = {}
        for place, name in enumerate(names):
            slot = self._by_name[name]
            heads[place] = slot.slice_for(self.context.raw_bs, self.context.raw_num_tokens)
            _check_shape(slot, sources[place], heads[place])
        heads |= dict(enumerate(self._constant_heads, start=len(heads)))
        for place, (slot, _) in enumerate(self._by_function, start=len(heads)):
            if isinstance(sources[place], torch.Tensor):
                heads[place] = _head_like(slot, sources[place])
        self._read = _reader(names)
        self._absent = [name for name in found if name not in names]
        self._numels = [s.numel() for s in sources if isinstance(s, torch.Tensor)]
        used = [place for place, head in heads.items() if head.numel()]
        groups = _group_alike([heads[i] for i in used], [sources[i] for i in used])
        self._copies = []
        for group in groups:
            places = [used[i] for i in group]
            is_all = len(places) == len(sources)
            self._copies.append(([heads[i] for i in places], None if is_all else places))
        return sources


def build_decode_registry(
    *,
    device: torch.device | str,
    max_bs: int,
    max_num_token: int,
    seq_len_fill_value: int,
    cache_loc_dtype: torch.dtype,
    enable_mamba_track: bool = False,
    is_encoder_decoder: bool = False,
    encoder_len_fill_value: int = 0,
    encoder_lens_dtype: torch.dtype = torch.int32,
    enable_num_token_non_padded: bool = False,
    require_gathered_buffer: bool = False,
    require_mlp_tp_gather: bool = False,
    attn_tp_size: int = 1,
    attn_tp_rank: int = 0,
    num_dp_ranks: int = 1,
    register_global_num_tokens: bool = True,
    num_tree_nodes: int = 0,
    has_window: bool = False,
    share_pool: bool = True,
    source: Any = None,
    structured_fields: Sequence[str] = (),
) -> CudaGraphBufferRegistry:
    """Returns the inputs of decode graphs: verify uses it with other sizes.

    Args:
        device: Where the graphs run.
        max_bs: Sequences of the largest graph.
        max_num_token: Token rows of the largest graph.
        seq_len_fill_value: Length of a padded sequence, from the attention backend; 1 where a
            kernel indexes by length - 1.
        cache_loc_dtype: Type of ``out_cache_loc``.
        enable_mamba_track: Whether the model tracks Mamba states.
        is_encoder_decoder: Whether the model has an encoder.
        encoder_len_fill_value: Length of a padded sequence's encoder input.
        encoder_lens_dtype: Type of ``encoder_lens``.
        enable_num_token_non_padded: Whether kernels skip padded rows.
        require_gathered_buffer: Whether layers scatter and gather rows over ranks.
        require_mlp_tp_gather: Whether they gather every DP rank's rows.
        attn_tp_size: Ranks of the attention-TP group.
        attn_tp_rank: This one.
        num_dp_ranks: Ranks that token counts are for.
        register_global_num_tokens: Whether the device needs the token counts.
        num_tree_nodes: Tokens of a sequence where these are verified as a tree, else 0.
        has_window: Whether the KV pool has a second group, with slots of its own.
        share_pool: Shares buffers with other runners; without effect on adopted ones.
        source: An object whose tensors are adopted as the slots' buffers, attribute by attribute.
        structured_fields: Dotted paths of further tensors to adopt from ``source``.

    Raises:
        ValueError: ``source`` lacks a tensor or has one that does not fit, or the attention-TP
            rank is none of the group's. Names the slot.
    """
    slots = decode_slots(
        seq_len_fill_value=seq_len_fill_value,
        cache_loc_dtype=cache_loc_dtype,
        seq_lens_dtype=_dtype_in(source, "seq_lens"),
        seq_lens_cpu_dtype=_dtype_in(source, "seq_lens_cpu"),
        has_window=has_window,
    )
    slots += unserved_decode_slots(
        enable_mamba_track=enable_mamba_track,
        is_encoder_decoder=is_encoder_decoder,
        encoder_len_fill_value=encoder_len_fill_value,
        encoder_lens_dtype=encoder_lens_dtype,
    )
    if num_tree_nodes:
        slots.append(tree_mask_slot(num_tree_nodes))
    slots += count_slots(
        enable_num_token_non_padded=enable_num_token_non_padded,
        require_gathered_buffer=require_gathered_buffer,
        require_mlp_tp_gather=require_mlp_tp_gather,
        attn_tp_size=attn_tp_size,
        attn_tp_rank=attn_tp_rank,
        num_dp_ranks=num_dp_ranks,
        register_global_num_tokens=register_global_num_tokens,
    )
    registry = CudaGraphBufferRegistry(
        device=device, max_bs=max_bs, max_num_tokens=max_num_token, share_pool=share_pool
    )
    return _with_slots(registry, slots, source, structured_fields)


def build_prefill_registry(
    *,
    device: torch.device | str,
    max_bs: int,
    max_num_token: int,
    cache_loc_dtype: torch.dtype,
    is_multimodal: bool = False,
    hidden_size: int = 0,
    embed_dtype: torch.dtype | None = None,
    register_input_embeds: bool = True,
    enable_mamba_track: bool = False,
    register_global_num_tokens: bool = False,
    has_window: bool = False,
    share_pool: bool = True,
    source: Any = None,
    structured_fields: Sequence[str] = (),
    **counts: Any,
) -> CudaGraphBufferRegistry:
    """Returns the inputs of extend graphs. Attention reads the other fields off the batch itself.

    Args:
        is_multimodal: Whether the model takes embeddings and three-fold positions.
        hidden_size: Width of ``input_embeds``.
        embed_dtype: Type of ``input_embeds``.
        register_input_embeds: False if a multimodal model reads them off the batch.
        counts: ``enable_num_token_non_padded`` to ``num_dp_ranks`` of ``build_decode_registry``.

    The other arguments and errors are those of ``build_decode_registry``.
    """
    slots = prefill_slots(cache_loc_dtype=cache_loc_dtype, has_window=has_window)
    slots += unserved_prefill_slots(
        is_multimodal=is_multimodal,
        hidden_size=hidden_size,
        embed_dtype=embed_dtype,
        register_input_embeds=register_input_embeds,
        enable_mamba_track=enable_mamba_track,
    )
    slots += count_slots(register_global_num_tokens=register_global_num_tokens, **counts)
    registry = CudaGraphBufferRegistry(
        device=device, max_bs=max_bs, max_num_tokens=max_num_token, share_pool=share_pool
    )
    return _with_slots(registry, slots, source, structured_fields)


def build_draft_registry(
    slots: Iterable[GraphSlot],
    *,
    device: torch.device | str,
    max_bs: int,
    width: int,
    share_pool: bool = True,
    **counts: Any,
) -> CudaGraphBufferRegistry:
    """Returns the inputs of a phase of the draft model.

    Args:
        slots: Those of the phase (``slots.py``).
        max_bs: Sequences of the largest graph.
        width: Token rows of each, in every pass of the phase.
        counts: ``require_gathered_buffer`` to ``register_global_num_tokens`` of
            ``build_decode_registry``.
    """
    registry = CudaGraphBufferRegistry(
        device=device, max_bs=max_bs, max_num_tokens=max_bs * width, share_pool=share_pool
    )
    return _with_slots(registry, [*slots, *count_slots(enable_num_token_non_padded=True, **counts)])


def build_eager_registry(
    *, device: torch.device | str, max_bs: int, max_num_token: int, **options: Any
) -> CudaGraphBufferRegistry:
    """Returns the inputs of eager runs: the decode set, for decodes and extends.

    No counts for ranks or padding: an eager run is not padded, and ranks differ, so ``DpLayout``
    says it.

    Args:
        max_num_token: Token rows of the largest extend.
        options: Others of ``build_decode_registry``.
    """
    return build_decode_registry(
        device=device,
        max_bs=max_bs,
        max_num_token=max_num_token,
        seq_len_fill_value=0,
        register_global_num_tokens=False,
        **options,
    )


def _with_slots(
    registry: CudaGraphBufferRegistry,
    slots: Iterable[GraphSlot],
    source: Any = None,
    structured_fields: Sequence[str] = (),
) -> CudaGraphBufferRegistry:
    """Registers a factory's slots and those that the source adds."""
    for slot in slots:
        bind = None
        if source is not None:
            bind = getattr(source, slot.name, None)
            if not isinstance(bind, torch.Tensor):
                raise ValueError(f"slot {slot.name!r}: source has no tensor of that name to adopt")
        registry.register_slot(slot, bind)
    for slot, tensor in structured_slots(source, structured_fields):
        registry.register_slot(slot, tensor)
    for name in INDEX_SEMANTIC_BUFFERS.intersection(registry.slot_names()):
        policy = registry.get_slot(name).padding_policy
        assert policy is PaddingPolicy.ZERO, f"padded rows of {name} are followed as indices"
    return registry


def _dtype_in(source: Any, name: str) -> torch.dtype:
    """Returns the type of the source's tensor, int64 if there is none."""
    tensor = getattr(source, name, None)
    return tensor.dtype if isinstance(tensor, torch.Tensor) else torch.int64


def _group_alike(
    destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> list[list[int]]:
    """Returns the indices of pairs that one ``_foreach_`` call takes at once, group by group.

    The fused kernel wants one dtype and one device per side and dense tensors. A single exception
    sends the whole call through kernels one by one, so strided tensors go by themselves. The CPU
    has no fused kernel, so there a call takes all and saves the cost of the others.

    Source: PyTorch, aten/src/ATen/native/cuda/ForeachBinaryOpList.cu,
        foreach_tensor_copy_list_kernel_cuda_; ForeachUtils.h, can_use_fast_route.
    """
    groups: dict[object, list[int]] = {}
    for index, (to, source) in enumerate(zip(destinations, sources, strict=True)):
        key: object = (to.dtype, source.dtype, to.device, source.device)
        if to.device.type == source.device.type == "cpu":
            key = "cpu"
        elif not (to.is_contiguous() and source.is_contiguous()):
            key = index
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _head_like(slot: GraphSlot, source: torch.Tensor) -> torch.Tensor:
    """Returns the view of the slot's buffer that has as many rows as the source.

    Raises:
        ValueError: No number of rows gives the source's shape. Names the slot.
    """
    head = slot.rows(0) if slot.axis != "none" else slot.allocated()
    if source.dim() == head.dim() > 0:
        head = slot.rows(source.shape[slot.row_axis()])
    _check_shape(slot, source, head)
    return head


def _reader(names: list[str]) -> Callable[[Any], Sources]:
    """Returns what takes an object to a tuple of attributes."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda batch: tuple(getattr(batch, name) for name in names)


def _check_shape(slot: GraphSlot, source: torch.Tensor, head: torch.Tensor) -> None:
    # Without this, copy_ would broadcast a single row over all of them.
    if source.shape != head.shape:
        raise ValueError(
            f"slot {slot.name!r}: the source has shape {tuple(source.shape)}, the rows to fill "
            f"have {tuple(head.shape)}: give the sizes that the source was made for"
        )


def _sentinel(slot: GraphSlot) -> float:
    if slot.pad_value is None:
        raise RuntimeError(
            f"slot {slot.name!r}: FILL_SENTINEL without a pad_value cannot be padded: "
            f"set pad_value, or fill without padding"
        )
    return slot.pad_value


def _with_index(device: torch.device | str) -> torch.device:
    """Returns the device as a tensor on it names it: "cuda" is "cuda:0", or what is current."""
    return torch.empty(0, device=device).device


def _is_same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.device == b.device


def _junk(dtype: torch.dtype, *, is_fatal: bool) -> float:
    if dtype is torch.bool:
        return True
    if dtype.is_floating_point:
        return float("nan")
    return torch.iinfo(dtype).max if is_fatal else 1


def _replace(template: Batch, changes: dict[str, Any]) -> Batch:
    """Returns a copy of an object with some attributes changed."""
    if dataclasses.is_dataclass(template) and not isinstance(template, type):
        fields = {field.name for field in dataclasses.fields(template) if field.init}
        known = {name: value for name, value in changes.items() if name in fields}
        return dataclasses.replace(template, **known)
    changed = copy.copy(template)
    for name, value in changes.items():
        setattr(changed, name, value)
    return changed
