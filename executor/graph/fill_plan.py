"""What one fill of given sizes does: which tails to reset, which views to copy to, in what groups.

Made once per set of sizes, because making views costs more than all copies of a decode step. All
that follows from the sizes alone (sentinels, counts) becomes a constant here. On CUDA that is a
tensor, which a fill copies along with the batch: no kernel of its own. In host memory it is bytes,
which are written without PyTorch: 0.1 us instead of a copy's 0.3 (tests/bench/executor/bench_registry.py).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter, itemgetter
from typing import Any

import torch

from executor.graph.graph_slot import (
    FillContext,
    GraphSlot,
    PaddingPolicy,
    PostFill,
    SizesOnly,
    SourceFn,
)

MAX_LAYOUTS = 64  # a batch's fields hardly vary; the layouts beyond are made again each time

Pair = tuple[torch.Tensor, torch.Tensor]  # destination and source of one shape
Layout = tuple[tuple[torch.dtype, torch.Size] | None, ...]
Sources = tuple[Any, ...]

_numel = torch.Tensor.numel


@dataclass(frozen=True, slots=True)
class Copies:
    """What to copy where: each source is a constant or a position in a tuple.

    Attributes:
        grouped: For one ``_foreach_copy_`` each: destinations, the first ones' constant sources,
            and what picks the other ones' sources; None if these are all sources, in order.
        single: Destinations that are copied one by one, and their sources' positions.
    """

    grouped: list[tuple[list[torch.Tensor], Sources, Callable[[Sources], Sources] | None]]
    single: list[tuple[torch.Tensor, int]]

    def run(self, sources: Sources) -> None:
        """Copies. The sources have the shapes that these copies were made for."""
        for destinations, constants, pick in self.grouped:
            picked = sources if pick is None else pick(sources)
            torch._foreach_copy_(destinations, constants + picked)
        if self.single:
            for destination, position in self.single:
                destination.copy_(sources[position])


@dataclass(frozen=True, slots=True)
class _Recent:
    """The copies of the latest fill, and the little that tells whether the next one is alike.

    Element counts are read twice as fast as shapes. A source of another dtype is copied right all
    the same, though not fused with its group; one of another shape with as many elements is copied
    right or not at all, as there is nothing to broadcast.

    Attributes:
        read: Takes a batch to the attributes that were tensors.
        absent: The attributes that were none.
        numels: Element counts of the tensors that ``read`` gives.
        extra_numels: The same of the further sources, None for what is no tensor.
        copies: From the tensors that ``read`` gives, then the further sources.
        views: Of the destinations; only held, see ``_with_view``.
    """

    read: Callable[[Any], Sources]
    absent: list[str]
    numels: list[int]
    extra_numels: list[int | None]
    copies: Copies
    views: list[torch.Tensor]


# Fits no batch: None has no elements to count.
_NOTHING = _Recent(lambda _: (None,), [], [], [], Copies([], []), [])


@dataclass(slots=True)
class FillPlan:
    """All that a fill of given sizes needs.

    Attributes:
        context: The sizes.
        device: The registry's; a buffer elsewhere is a host mirror.
        zero_tails: Groups that one ``_foreach_zero_`` each resets.
        constants: Tails and counts, and what they get.
        host_constants: The same for those in host memory, as bytes.
        names: Attributes to copy.
        source_fns: Called for further sources, after the attributes.
        slots: The slots of ``names``, then of ``source_fns``.
        post_fills: Hooks and their buffers, in registration order.
    """

    context: FillContext
    device: torch.device
    zero_tails: list[list[torch.Tensor]]
    constants: list[Pair]
    host_constants: list[tuple[memoryview, bytes]]
    names: list[str]
    source_fns: list[SourceFn]
    slots: list[GraphSlot]
    post_fills: list[tuple[PostFill, torch.Tensor]]
    _by_layout: dict[Layout, _Recent] = field(default_factory=dict, init=False)
    _recent: _Recent = field(default=_NOTHING, init=False)

    def run(self, forward_batch: Any, context: FillContext) -> None:
        """Resets tails, copies what sources there are, then calls the hooks.

        Raises:
            ValueError: A source's shape is not that of its slot's head.
        """
        if self.zero_tails:
            for tails in self.zero_tails:
                torch._foreach_zero_(tails)
        if self.host_constants:
            for memory, value in self.host_constants:
                memory[:] = value
        extra: Sources = ()
        if self.source_fns:
            extra = tuple(fn(forward_batch, context) for fn in self.source_fns)
        recent = self._recent
        sources: Sources = ()
        try:
            sources = recent.read(forward_batch)
            is_alike = [*map(_numel, sources)] == recent.numels
        except (AttributeError, TypeError):  # an attribute has gone, or is no tensor any more
            is_alike = False
        if recent.absent and is_alike:
            is_alike = all(getattr(forward_batch, name, None) is None for name in recent.absent)
        if extra:
            sources += extra
            is_alike = is_alike and _numels(extra) == recent.extra_numels
        if not is_alike:
            recent, sources = self._look_up(forward_batch, extra)
            self._recent = recent
        try:
            recent.copies.run(sources)
        except RuntimeError:
            self._look_up(forward_batch, extra)  # names the slot, if a shape is to blame
            raise
        if self.post_fills:
            for post_fill, buffer in self.post_fills:
                post_fill(buffer, forward_batch, context)

    def _look_up(self, forward_batch: Any, extra: Sources) -> tuple[_Recent, Sources]:
        """Returns the copies for such a batch, and what they start from."""
        every: list[Any] = [getattr(forward_batch, name, None) for name in self.names]
        is_there = [isinstance(source, torch.Tensor) for source in every]
        sources = (*compress(every, is_there), *extra)
        layout = tuple(
            (s.dtype, s.shape) if isinstance(s, torch.Tensor) else None for s in (*every, *extra)
        )
        found = self._by_layout.get(layout)
        if found is None:
            slots = [*compress(self.slots, is_there), *self.slots[len(every) :]]
            names = list(compress(self.names, is_there))
            copies, views = self._make_copies(slots, sources)
            found = _Recent(
                read=_reader(names),
                absent=[name for name in self.names if name not in names],
                numels=[*map(_numel, compress(every, is_there))],
                extra_numels=_numels(extra),
                copies=copies,
                views=views,
            )
            if len(self._by_layout) < MAX_LAYOUTS:
                self._by_layout[layout] = found
        return found, sources

    def _make_copies(
        self, slots: Sequence[GraphSlot], sources: Sources
    ) -> tuple[Copies, list[torch.Tensor]]:
        """Returns the copies into some slots, and views of the destinations, to be held."""
        context = self.context
        pairs: list[Pair | None] = []
        views = []
        for slot, source in zip(slots, sources, strict=True):
            if not isinstance(source, torch.Tensor):
                pairs.append(None)
                continue
            if slot.source_fn is not None:
                head = head_like(slot, source)
            else:
                head = slot.slice_for(context.raw_bs, context.raw_num_tokens)
                _check_shape(slot, source, head)
            head, view = _with_view(head)
            pairs.append((head, source))
            views.append(view)
        return group_copies(pairs, self.device, self.constants), views


def make_fill_plan(
    slots: Sequence[GraphSlot], context: FillContext, device: torch.device
) -> FillPlan:
    """Returns the plan that fills some slots.

    Args:
        slots: Those to fill, all with buffers.
        context: The sizes.
        device: The registry's.

    Raises:
        ValueError: A buffer has too few rows. Names the slot.
        RuntimeError: A FILL_SENTINEL slot must be padded and has no ``pad_value``.
    """
    zero_tails: dict[Any, list[torch.Tensor]] = defaultdict(list)
    values: list[tuple[torch.Tensor, float]] = []
    post_fills = []
    for slot in slots:
        tail = slot.tail_for(context)
        if tail is not None and slot.padding_policy is PaddingPolicy.ZERO:
            zero_tails[_group_key(tail, tail)].append(tail)
        elif tail is not None and slot.padding_policy is PaddingPolicy.FILL_SENTINEL:
            values.append((tail, _sentinel(slot)))
        if isinstance(slot.post_fill, SizesOnly):
            values.append((slot.allocated(), slot.post_fill.value(context)))
        elif slot.post_fill is not None:
            post_fills.append((slot.post_fill, slot.allocated()))
    constants = _join_neighbours(values)
    copied = [slot for slot in slots if slot.copy_from_fb]
    from_batch = [slot for slot in copied if slot.source_fn is None]
    from_function = [slot for slot in copied if slot.source_fn is not None]
    return FillPlan(
        context=context,
        device=device,
        zero_tails=list(zero_tails.values()),
        constants=[pair for pair in constants if not _is_host_memory(pair[0])],
        host_constants=[
            (_memory(buffer), bytes(_memory(constant)))
            for buffer, constant in constants
            if _is_host_memory(buffer)
        ],
        names=[slot.name for slot in from_batch],
        source_fns=[slot.source_fn for slot in from_function if slot.source_fn is not None],
        slots=from_batch + from_function,
        post_fills=post_fills,
    )


def group_copies(
    pairs: Iterable[Pair | None], device: torch.device, constants: Iterable[Pair] = ()
) -> Copies:
    """Puts device copies into one ``_foreach_copy_`` per (destination dtype, source dtype).

    Host mirrors are copied one by one.

    Args:
        pairs: None skips a position.
        device: A destination elsewhere is a host mirror.
        constants: Destinations and sources that do not change.
    """
    groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor], list[int]]] = {}
    single = []
    pairs = list(pairs)
    for head, source in constants:
        heads, sources, _ = groups.setdefault(_group_key(head, source), ([], [], []))
        heads.append(head)
        sources.append(source)
    for position, pair in enumerate(pairs):
        if pair is None or not pair[0].numel():
            continue
        head, source = pair
        if head.device != device:
            single.append((head, position))
            continue
        heads, _, positions = groups.setdefault(_group_key(head, source), ([], [], []))
        heads.append(head)
        positions.append(position)
    grouped = [
        (heads, tuple(sources), _picker(positions, len(pairs)))
        for heads, sources, positions in groups.values()
    ]
    return Copies(grouped, single)


def head_like(slot: GraphSlot, source: torch.Tensor) -> torch.Tensor:
    """Returns the view of the slot's buffer that has as many rows as the source.

    Raises:
        ValueError: No number of rows gives the source's shape. Names the slot.
    """
    head = slot.rows(0) if slot.axis != "none" else slot.allocated()
    if source.dim() == head.dim() > 0:
        head = slot.rows(source.shape[slot.row_axis()])
    _check_shape(slot, source, head)
    return head


def _join_neighbours(values: Iterable[tuple[torch.Tensor, float]]) -> list[Pair]:
    """Returns buffers and what they get, as one pair where they touch in memory."""
    runs: list[list[tuple[torch.Tensor, float]]] = []
    end = None
    for buffer, value in sorted(values, key=lambda pair: pair[0].data_ptr()):
        storage = buffer.untyped_storage().data_ptr()
        place = (buffer.device, buffer.dtype, storage, buffer.data_ptr())
        if place == end and buffer.is_contiguous():
            runs[-1].append((buffer, value))
        else:
            runs.append([(buffer, value)])
        end = (*place[:3], place[3] + buffer.nbytes) if buffer.is_contiguous() else None
    pairs = []
    for run in runs:
        first, value = run[0]
        constant = torch.full_like(first, value)
        if len(run) > 1:
            constant = torch.cat([torch.full_like(buffer, v).flatten() for buffer, v in run])
            first = first.as_strided(constant.shape, (1,))
        pairs.append((first, constant))
    return pairs


def _with_view(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tensor's memory as a tensor that is no view, and a view of that one.

    Each call into PyTorch takes a tensor faster while a view of it is alive: by 26 ns of a copy's
    290 (PyTorch 2.13). Presumably because C++ owns it too then, and need not borrow it from Python.
    Only what is no view itself is owned by its views, hence ``data``.
    """
    base = tensor.data
    return base, base.view(base.shape)


def _is_host_memory(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is one run of the host's memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _memory(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor for which ``_is_host_memory``. Whoever has them keeps it."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _reader(names: list[str]) -> Callable[[Any], Sources]:
    """Returns what takes an object to a tuple of attributes."""
    if not names:
        return lambda _: ()
    if len(names) == 1:
        return lambda batch: (getattr(batch, names[0]),)
    return attrgetter(*names)


def _picker(positions: list[int], length: int) -> Callable[[Sources], Sources] | None:
    """Returns what takes a tuple of some length to its items at some positions, ascending.

    None if these are all its items.
    """
    if len(positions) == length:
        return None
    start = positions[0] if positions else 0
    stop = start + len(positions)
    if positions == list(range(start, stop)):
        return itemgetter(slice(start, stop))
    return itemgetter(*positions)


def _numels(sources: Iterable[Any]) -> list[int | None]:
    return [s.numel() if isinstance(s, torch.Tensor) else None for s in sources]


def _group_key(destination: torch.Tensor, source: torch.Tensor) -> object:
    """Returns what tensors of one _foreach_ call must have in common.

    The fused kernel wants one dtype and one device per side and dense tensors. A single exception
    sends the whole call through kernels one by one, so strided tensors go by themselves. The CPU
    has no fused kernel, so there a call takes all and saves the cost of the others.

    Source: PyTorch, aten/src/ATen/native/cuda/ForeachBinaryOpList.cu,
        foreach_tensor_copy_list_kernel_cuda_; ForeachUtils.h, can_use_fast_route.
    """
    if destination.device.type == source.device.type == "cpu":
        return "cpu"
    key = (destination.dtype, source.dtype, destination.device, source.device)
    is_dense = destination.is_contiguous() and source.is_contiguous()
    return key if is_dense else (key, destination.data_ptr())


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
