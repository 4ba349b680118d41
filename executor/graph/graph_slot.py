"""Graph slot: the spec of one input of a captured graph, and how its padding is treated.

buffer   |<- raw: copied ->|<- [raw:padded): by policy ->|<- never touched ->|
         0                raw                          padded              max
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Literal

import torch

# Any object with the slots' names as attributes will do; most often a ForwardBatch.
PostFill = Callable[[torch.Tensor, Any, "FillContext"], None]
SourceFn = Callable[[Any, "FillContext"], torch.Tensor | None]

AXES = ("bs", "tokens", "none")


class PaddingPolicy(Enum):
    """What happens to rows [raw:padded) at each fill, and to a new buffer.

    KEEP_PAD: The tail is left alone; the caller proves that nobody reads it. Starts as zeros.
    FOREACH_COPY: The same, for a head that is copied at every fill. Starts as zeros.
    FILL_SENTINEL: The tail gets ``pad_value`` at each fill, and the new buffer everywhere.
    ZERO: The tail is zeroed at each fill. Starts as zeros. For all that is used as an index.
    FILL_ONCE: The tail is left alone. Starts as ``pad_value``.
    """

    KEEP_PAD = auto()
    FOREACH_COPY = auto()
    FILL_SENTINEL = auto()
    ZERO = auto()
    FILL_ONCE = auto()


@dataclass(frozen=True, slots=True)
class FillContext:
    """The sizes of one fill.

    Attributes:
        raw_bs: Real sequences.
        padded_bs: Sequences that the graph runs.
        raw_num_tokens: Real token rows of this rank.
        padded_num_tokens: Token rows that the graph runs.
        pp_proxy_tensors: What the previous pipeline stage sent: a mapping from names to tensors,
            or an object whose ``tensors`` is one.
    """

    raw_bs: int
    padded_bs: int
    raw_num_tokens: int
    padded_num_tokens: int
    pp_proxy_tensors: Any = None

    def __post_init__(self) -> None:
        for axis, raw, padded in (
            ("bs", self.raw_bs, self.padded_bs),
            ("num_tokens", self.raw_num_tokens, self.padded_num_tokens),
        ):
            if not 0 <= raw <= padded:
                raise ValueError(
                    f"raw_{axis}={raw}, padded_{axis}={padded}: need 0 <= raw <= padded, "
                    f"so choose a graph size that holds the batch"
                )


@dataclass(frozen=True, slots=True)
class SizesOnly:
    """A ``post_fill`` that sets the whole buffer to a number which follows from the sizes.

    A registry copies such a number along with the batch instead of calling this.

    Attributes:
        value: Takes the sizes to the number.
    """

    value: Callable[[FillContext], float]

    def __call__(self, buffer: torch.Tensor, _: Any, context: FillContext) -> None:
        buffer.fill_(self.value(context))


@dataclass(slots=True, eq=False)
class GraphSlot:
    """One input of a captured graph. Belongs to the registry that it is registered with.

    Attributes:
        name: The ``ForwardBatch`` attribute that it mirrors. With a dot, a structured slot: filled
            like any other but never put back on a batch.
        shape_fn: Takes (max_bs, max_num_tokens) to the buffer's shape.
        dtype: The buffer's type; a source of another type is converted.
        axis: What its rows count: "bs", "tokens", or "none" for a size that never changes.
        device: Where the buffer lives; the registry's device if None, "cpu" for a host mirror.
        padding_policy: What happens to rows that the batch does not fill.
        pad_value: For FILL_SENTINEL and FILL_ONCE.
        enabled: False keeps the spec, allocates nothing and skips the slot everywhere.
        copy_from_fb: False for a computed slot, which no batch attribute fills.
        post_fill: Called with (buffer, forward_batch, context) after all copies of a fill.
        slice_fn: Takes (buffer, n) to a view of n rows, where rows are not the first axis.
        source_fn: Takes (forward_batch, context) to the tensor to copy instead of the attribute,
            into as many leading rows as it has; None skips the slot in this fill.
        buffer: The storage that graphs read, once registered. Its address never changes.

    Raises:
        ValueError: The axis is unknown, or a slice_fn has no axis to slice.
    """

    name: str
    shape_fn: Callable[[int, int], tuple[int, ...]]
    dtype: torch.dtype
    axis: Literal["bs", "tokens", "none"] = "tokens"
    device: torch.device | str | None = None
    padding_policy: PaddingPolicy = PaddingPolicy.FOREACH_COPY
    pad_value: float | None = None
    enabled: bool = True
    copy_from_fb: bool = True
    post_fill: PostFill | None = None
    slice_fn: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    source_fn: SourceFn | None = None
    buffer: torch.Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.axis not in AXES:
            raise ValueError(f"slot {self.name!r}: axis={self.axis!r} is none of {AXES}")
        if self.axis == "none" and self.slice_fn is not None:
            raise ValueError(f"slot {self.name!r}: a slice_fn needs axis 'bs' or 'tokens'")

    @property
    def is_structured(self) -> bool:
        """Part of a batch's attribute, not an attribute."""
        return "." in self.name

    @property
    def is_computed(self) -> bool:
        """Gets its content from something other than the attribute of its name."""
        return self.post_fill is not None or not self.copy_from_fb or self.source_fn is not None

    def allocated(self) -> torch.Tensor:
        """Returns the whole buffer.

        Raises:
            RuntimeError: The slot has none, as it is not registered or disabled.
        """
        if self.buffer is None:
            why = "is not registered yet" if self.enabled else "is disabled"
            raise RuntimeError(f"slot {self.name!r} has no buffer: it {why}")
        return self.buffer

    def slice_for(self, padded_bs: int, padded_num_tokens: int) -> torch.Tensor:
        """Returns the part of the buffer that a graph of that size reads, a view.

        Raises:
            RuntimeError: The slot has no buffer.
            ValueError: The buffer has fewer rows.
        """
        buffer = self.allocated()
        if self.axis == "none":
            return buffer
        return self.rows(padded_bs if self.axis == "bs" else padded_num_tokens)

    def rows(self, count: int) -> torch.Tensor:
        """Returns the buffer's first ``count`` rows along the slot's axis, a view.

        Raises:
            RuntimeError: The slot has no buffer.
            ValueError: The buffer has fewer rows.
        """
        buffer = self.allocated()
        if self.slice_fn is not None:
            return self.slice_fn(buffer, count)
        if count > len(buffer):
            raise ValueError(
                f"slot {self.name!r}: {count} rows asked for, but its buffer of shape "
                f"{tuple(buffer.shape)} has {len(buffer)}: size the registry for the largest batch"
            )
        return buffer[:count]

    def tail_for(self, context: FillContext) -> torch.Tensor | None:
        """Returns rows [raw:padded), a view, or None if nothing is padded."""
        if self.axis == "none":
            return None
        if self.axis == "bs":
            raw, padded = context.raw_bs, context.padded_bs
        else:
            raw, padded = context.raw_num_tokens, context.padded_num_tokens
        if raw == padded:
            return None
        axis = self.row_axis()
        head, whole = self.rows(raw), self.rows(padded)
        # A slice_fn may give several rows per count, so the views tell where the tail is.
        start = head.shape[axis]
        return whole.narrow(axis, start, whole.shape[axis] - start)

    def row_axis(self) -> int:
        """Returns the dimension of a view along which its rows lie.

        Raises:
            ValueError: The slice_fn changes no dimension, or more than one, from 0 rows to 1.
        """
        if self.slice_fn is None:
            return 0
        none, one = self.rows(0).shape, self.rows(1).shape
        moving = [axis for axis, (a, b) in enumerate(zip(none, one, strict=False)) if a != b]
        if len(none) != len(one) or len(moving) != 1:
            raise ValueError(
                f"slot {self.name!r}: its slice_fn gives {tuple(none)} for 0 rows and "
                f"{tuple(one)} for 1: exactly one dimension must grow"
            )
        return moving[0]
