"""Fill plan: what a registry resets, copies and calls for a batch of given sizes.

Made once per set of sizes, because making views costs more than all copies of a decode step. What
follows from the sizes only (sentinels, counts) is a constant: on the device copied along with the
batch, in host memory written through NumPy (tests/bench/executor/bench_registry.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from executor.graph.graph_slot import FillContext, GraphSlot, PaddingPolicy, SizesOnly

Sources = tuple[Any, ...]

_numel = torch.Tensor.numel


class FillPlan:
    """All that a fill of given sizes needs.

    Copies are planned for the latest batch, and again for one with other fields or element counts.
    Given as many elements in another shape, ``copy_`` refuses.

    Args:
        slots: The slots to fill, all with buffers.
        context: The sizes.

    Raises:
        ValueError: A buffer has too few rows. Names the slot.
        RuntimeError: A FILL_SENTINEL slot must be padded and has no ``pad_value``.
    """

    def __init__(self, slots: Sequence[GraphSlot], context: FillContext) -> None:
        self.context = context
        zeroed: list[torch.Tensor] = []
        self._constant_heads: list[torch.Tensor] = []
        self._constants: Sources = ()
        self._host_constants: list[Callable[[], None]] = []
        self._hooks: list[Callable[[Any, FillContext], None]] = []
        for slot in slots:
            tail = slot.tail_for(context)
            if tail is not None and slot.padding_policy is PaddingPolicy.ZERO:
                zeroed.append(tail)
            elif tail is not None and slot.padding_policy is PaddingPolicy.FILL_SENTINEL:
                self._add_constant(tail, _sentinel(slot))
            if isinstance(slot.post_fill, SizesOnly):
                self._add_constant(slot.allocated(), slot.post_fill.value(context))
            elif slot.post_fill is not None:
                self._hooks.append(partial(slot.post_fill, slot.allocated()))
        self._zeroed = [[zeroed[i] for i in group] for group in group_alike(zeroed, zeroed)]
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
                heads[place] = head_like(slot, sources[place])
        self._read = _reader(names)
        self._absent = [name for name in found if name not in names]
        self._numels = [s.numel() for s in sources if isinstance(s, torch.Tensor)]
        used = [place for place, head in heads.items() if head.numel()]
        groups = group_alike([heads[i] for i in used], [sources[i] for i in used])
        self._copies = []
        for group in groups:
            places = [used[i] for i in group]
            is_all = len(places) == len(sources)
            self._copies.append(([heads[i] for i in places], None if is_all else places))
        return sources


def group_alike(
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
