"""What one fill of given sizes does: which tails to reset, which views to copy to, in what groups.

Made once per set of sizes, because making views costs more than all copies of a decode step. All
that follows from the sizes alone (sentinels, counts) becomes a constant tensor here, which a fill
copies along with the batch: on CUDA that is no kernel of its own.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class Copies:
    """What to copy where: each source is a constant or a position in a list.

    Attributes:
        grouped: For one ``_foreach_copy_`` each: destinations, the first ones' constant sources,
            and the other ones' sources as positions.
        single: Destinations that are copied one by one, and their sources' positions.
    """

    grouped: list[tuple[list[torch.Tensor], list[torch.Tensor], list[int]]]
    single: list[tuple[torch.Tensor, int]]

    def run(self, sources: Sequence[Any]) -> None:
        """Copies. The sources have the shapes that these copies were made for."""
        for destinations, constants, positions in self.grouped:
            torch._foreach_copy_(destinations, constants + [sources[i] for i in positions])
        for destination, position in self.single:
            destination.copy_(sources[position])


@dataclass(frozen=True, slots=True)
class _Recent:
    """The copies of the latest fill, and the little that tells whether the next one is alike.

    Types and element counts are read twice as fast as dtypes and shapes. A source of another
    dtype is copied right all the same, though not fused with its group; one of another shape with
    as many elements is copied right or not at all, as there is nothing to broadcast.
    """

    types: list[type]
    tensors: list[int]
    numels: list[int]
    copies: Copies

    def fit(self, sources: Sequence[Any]) -> bool:
        """Returns whether these sources can be copied the same way."""
        return self.types == list(map(type, sources)) and self.numels == [
            sources[i].numel() for i in self.tensors
        ]


@dataclass(slots=True)
class FillPlan:
    """All that a fill of given sizes needs.

    Attributes:
        context: The sizes.
        device: The registry's; a buffer elsewhere is a host mirror.
        zero_tails: Groups that one ``_foreach_zero_`` each resets.
        constants: Tails and counts on ``device``, and what they get.
        host_constants: Those elsewhere, and the one number they get.
        names: Attributes to copy.
        source_fns: Called for further sources, after the attributes.
        slots: The slots of ``names``, then of ``source_fns``.
        post_fills: Hooks and their buffers, in registration order.
    """

    context: FillContext
    device: torch.device
    zero_tails: list[list[torch.Tensor]]
    constants: list[Pair]
    host_constants: list[tuple[torch.Tensor, float]]
    names: list[str]
    source_fns: list[SourceFn]
    slots: list[GraphSlot]
    post_fills: list[tuple[PostFill, torch.Tensor]]
    _by_layout: dict[Layout, _Recent] = field(default_factory=dict, init=False)
    _recent: _Recent | None = field(default=None, init=False)

    def run(self, forward_batch: Any, context: FillContext) -> None:
        """Resets tails, copies what sources there are, then calls the hooks.

        Raises:
            ValueError: A source's shape is not that of its slot's head.
        """
        for tails in self.zero_tails:
            torch._foreach_zero_(tails)
        for buffer, value in self.host_constants:
            buffer.fill_(value)
        sources = [getattr(forward_batch, name, None) for name in self.names]
        if self.source_fns:
            sources += [source_fn(forward_batch, context) for source_fn in self.source_fns]
        recent = self._recent
        if recent is None or not recent.fit(sources):
            recent = self._recent = self._look_up(sources)
        try:
            recent.copies.run(sources)
        except RuntimeError:
            self._make_copies(sources)  # names the slot, if a shape is to blame
            raise
        for post_fill, buffer in self.post_fills:
            post_fill(buffer, forward_batch, context)

    def _look_up(self, sources: Sequence[Any]) -> _Recent:
        layout = tuple((s.dtype, s.shape) if isinstance(s, torch.Tensor) else None for s in sources)
        found = self._by_layout.get(layout)
        if found is None:
            tensors = [i for i, source in enumerate(sources) if isinstance(source, torch.Tensor)]
            found = _Recent(
                types=list(map(type, sources)),
                tensors=tensors,
                numels=[sources[i].numel() for i in tensors],
                copies=self._make_copies(sources),
            )
            if len(self._by_layout) < MAX_LAYOUTS:
                self._by_layout[layout] = found
        return found

    def _make_copies(self, sources: Sequence[Any]) -> Copies:
        context = self.context
        pairs: list[Pair | None] = []
        for slot, source in zip(self.slots, sources, strict=True):
            if not isinstance(source, torch.Tensor):
                pairs.append(None)
            elif slot.source_fn is not None:
                pairs.append((head_like(slot, source), source))
            else:
                head = slot.slice_for(context.raw_bs, context.raw_num_tokens)
                _check_shape(slot, source, head)
                pairs.append((head, source))
        return group_copies(pairs, self.device, self.constants)


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
    copied = [slot for slot in slots if slot.copy_from_fb]
    from_batch = [slot for slot in copied if slot.source_fn is None]
    from_function = [slot for slot in copied if slot.source_fn is not None]
    return FillPlan(
        context=context,
        device=device,
        zero_tails=list(zero_tails.values()),
        constants=[
            (buffer, torch.full_like(buffer, value))
            for buffer, value in values
            if buffer.device == device
        ],
        host_constants=[(buffer, value) for buffer, value in values if buffer.device != device],
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
        constants: Destinations on ``device`` and sources that do not change.
    """
    groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor], list[int]]] = {}
    single = []
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
    return Copies(list(groups.values()), single)


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


def _group_key(destination: torch.Tensor, source: torch.Tensor) -> object:
    """Returns what tensors of one _foreach_ call must have in common.

    The fused kernel wants one dtype and one device per side and dense tensors. A single exception
    sends the whole call through kernels one by one, so strided tensors go by themselves. The CPU
    has no fused kernel and does not care.

    Source: PyTorch, aten/src/ATen/native/cuda/ForeachBinaryOpList.cu,
        foreach_tensor_copy_list_kernel_cuda_; ForeachUtils.h, can_use_fast_route.
    """
    key = (destination.dtype, source.dtype, destination.device, source.device)
    is_dense = destination.is_contiguous() and source.is_contiguous()
    return key if is_dense or destination.device.type == "cpu" else (key, destination.data_ptr())


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
