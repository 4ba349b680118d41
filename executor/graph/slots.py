"""Slots: the inputs of captured graphs, what shape each has and how its padding is treated.

buffer   |<- raw: copied ->|<- [raw:padded): by policy ->|<- never touched ->|
         0                raw                          padded              max

First the spec of any slot, then those of decodes, prefills, draft models and tree verification.
Nothing is allocated here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
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


# Padded rows of these are zero: most are followed as indices, and a padded row really runs, so what a
# draft model stores in the scratch block has to be finite.
per_sequence = partial(
    GraphSlot,
    shape_fn=lambda bs, _: (bs,),
    dtype=torch.int64,
    axis="bs",
    padding_policy=PaddingPolicy.ZERO,
)
per_token = partial(
    GraphSlot,
    shape_fn=lambda _, tokens: (tokens,),
    dtype=torch.int64,
    padding_policy=PaddingPolicy.ZERO,
)


def decode_slots(
    *,
    seq_len_fill_value: int,
    cache_loc_dtype: torch.dtype,
    seq_lens_dtype: torch.dtype = torch.int64,
    seq_lens_cpu_dtype: torch.dtype = torch.int64,
    has_window: bool = False,
) -> list[GraphSlot]:
    """Returns the inputs that every decode batch has.

    Padded rows of ``input_ids`` keep an earlier batch's ids, all of them valid. Padded positions
    are zero, because attention planning reads them.

    Source: sgl-project/sglang issue 24361 (padded positions).
    """
    return [
        per_token("input_ids", padding_policy=PaddingPolicy.FOREACH_COPY),
        per_token("positions"),
        *_cache_locs(cache_loc_dtype, has_window),
        per_sequence("req_pool_indices"),
        *_lens(per_sequence, seq_len_fill_value, seq_lens_dtype, seq_lens_cpu_dtype),
    ]


def prefill_slots(*, cache_loc_dtype: torch.dtype, has_window: bool = False) -> list[GraphSlot]:
    """Returns the inputs of an extend, all ZERO: every padded row really runs."""
    return [
        per_token("input_ids"),
        per_token("positions"),
        *_cache_locs(cache_loc_dtype, has_window),
    ]


def eagle_draft_slots(
    *, num_steps: int, topk: int, hidden_size: int, dtype: torch.dtype, drawn_vocab_size: int = 0
) -> list[GraphSlot]:
    """Returns the inputs of an EAGLE draft phase (``DraftBatch``), ``topk`` rows per sequence.

    Args:
        num_steps: Drafts on the longest path.
        topk: Drafts that each step goes on from.
        hidden_size: Width of hidden states.
        dtype: Their type.
        drawn_vocab_size: The draft's vocabulary if drafts are drawn from it, else 0.
    """
    passes = num_steps - 1
    of_tokens = partial(per_token, shape_fn=lambda _, tokens: (passes, tokens), slice_fn=lines)
    of_sequences = partial(per_sequence, shape_fn=lambda bs, _: (passes, bs), slice_fn=lines)
    slots = [
        per_token("input_ids"),
        of_tokens("positions"),
        of_tokens("out_cache_loc"),
        per_sequence("req_pool_indices"),
        # A padded sequence has slots for the last pass's drafts, so that no pass has a negative
        # prefix.
        *_lens(of_sequences, 1 + passes * topk),
        per_sequence("scores", shape_fn=lambda bs, _: (bs, topk), dtype=torch.float32),
        per_sequence("hidden_states", shape_fn=lambda bs, _: (bs, hidden_size), dtype=dtype),
    ]
    if drawn_vocab_size:
        probs = partial(per_sequence, shape_fn=lambda bs, _: (bs, drawn_vocab_size))
        slots += [probs("probs", dtype=torch.float32), *_draw_slots()]
    return slots


def frozen_kv_slots(
    *, num_steps: int, hidden_size: int, dtype: torch.dtype, is_drawn: bool = False
) -> list[GraphSlot]:
    """Returns the inputs of a frozen-KV draft phase (``DraftBatch``).

    To attention each row is a sequence, so what attention reads has an entry for each row.

    Args:
        num_steps: Drafts on the longest path.
        hidden_size: Width of hidden states.
        dtype: Their type.
        is_drawn: Whether drafts are drawn.
    """
    slots = [
        per_token("input_ids"),
        per_token("positions", shape_fn=lambda _, tokens: (num_steps, tokens), slice_fn=lines),
        per_token("req_pool_indices"),
        *_lens(per_token, 1),
        per_sequence("hidden_states", shape_fn=lambda bs, _: (bs, hidden_size), dtype=dtype),
    ]
    return slots + _draw_slots() if is_drawn else slots


def draft_extend_slots(
    *, width: int, hidden_size: int, dtype: torch.dtype, num_layers: int = 1, is_drawn: bool = False
) -> list[GraphSlot]:
    """Returns the inputs of a draft-extend (``ExtendBatch``), ``width`` rows per sequence.

    Args:
        width: Rows of each sequence, and the length of a padded one.
        hidden_size: Width of hidden states.
        dtype: Their type.
        num_layers: Draft layers that take one another's output.
        is_drawn: Whether drafts are drawn.
    """
    first_rows = _own_first_rows(width)
    rows = partial(per_sequence, padding_policy=PaddingPolicy.KEEP_PAD, post_fill=first_rows)
    slots = [
        per_token("input_ids"),
        per_token("positions"),
        per_token("out_cache_loc"),
        per_token("hidden_states", shape_fn=lambda _, tokens: (tokens, hidden_size), dtype=dtype),
        per_sequence("req_pool_indices"),
        *_lens(per_sequence, width),
        rows("starts"),
        rows("lasts"),
    ]
    if num_layers > 1:
        shape = (num_layers - 1, hidden_size)
        slots.append(per_sequence("carries", shape_fn=lambda bs, _: (bs, *shape), dtype=dtype))
    return slots + _draw_slots() if is_drawn else slots


def tree_mask_slot(num_nodes: int) -> GraphSlot:
    """Returns the slot of a verify graph that says who sees whom.

    A padded node sees all: seeing nothing, it would come out of attention as NaN.

    Args:
        num_nodes: Of each sequence's tree, the root included.
    """
    return per_sequence(
        "tree_mask",
        shape_fn=lambda bs, _: (bs, num_nodes, num_nodes),
        dtype=torch.bool,
        padding_policy=PaddingPolicy.FILL_SENTINEL,
        pad_value=1,
    )


def count_slots(
    *,
    enable_num_token_non_padded: bool = False,
    require_gathered_buffer: bool = False,
    require_mlp_tp_gather: bool = False,
    attn_tp_size: int = 1,
    attn_tp_rank: int = 0,
    num_dp_ranks: int = 1,
    register_global_num_tokens: bool = True,
) -> list[GraphSlot]:
    """Returns the slots that count rows: real ones of this rank, and those of all DP ranks.

    The first tells this rank's kernels how many of its rows are real. It is written at every fill,
    also by a rank without tokens; else the last count would survive.

    No layer of this executor reads the others, as ``DpLayout`` has the counts on the host: they are
    for kernels that gather by counts on the device. In a replay every rank runs the graph's size, so
    that is every entry. Without a gathered buffer nothing is written.

    The arguments are those of ``build_decode_registry``.
    """
    slots = []
    if enable_num_token_non_padded:
        if not 0 <= attn_tp_rank < attn_tp_size:
            raise ValueError(
                f"slot 'num_token_non_padded': attn_tp_rank={attn_tp_rank}, "
                f"attn_tp_size={attn_tp_size}: ranks run from 0 to attn_tp_size - 1"
            )
        size, rank = (attn_tp_size, attn_tp_rank) if require_gathered_buffer else (1, 0)

        def num_rows(context: FillContext) -> int:
            raw, padded = context.raw_num_tokens, context.padded_num_tokens
            return local_num_token_non_padded(raw, padded, size, rank)

        slots.append(_counts("num_token_non_padded", 1, SizesOnly(num_rows)))
    if register_global_num_tokens:
        length = num_dp_ranks if require_mlp_tp_gather else 1
        every_rank = SizesOnly(lambda context: context.padded_num_tokens)
        post_fill = every_rank if require_gathered_buffer else None
        names = ("global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu")
        slots += [_counts(name, length, post_fill) for name in names]
    return slots


def local_num_token_non_padded(
    num_tokens: int, padded_num_tokens: int, attn_tp_size: int, attn_tp_rank: int
) -> int:
    """Returns how many real rows an attention-TP rank holds once rows are split evenly.

    The split is of the padded rows, so the last ranks may hold no real row. 1018 real rows of 1024
    on 2 ranks are 512 and 506.

    Args:
        num_tokens: Real rows, the first ones.
        padded_num_tokens: All rows, a multiple of ``attn_tp_size``.
        attn_tp_size: Ranks that share the rows.
        attn_tp_rank: From 0 to ``attn_tp_size - 1``.

    Raises:
        ValueError: The rows do not divide among the ranks.
    """
    if padded_num_tokens % attn_tp_size:
        raise ValueError(
            f"slot 'num_token_non_padded': {padded_num_tokens} rows do not divide among "
            f"attn_tp_size={attn_tp_size} ranks: use a graph size that is a multiple of it"
        )
    chunk = padded_num_tokens // attn_tp_size
    return min(max(num_tokens - chunk * attn_tp_rank, 0), chunk)


def lines(buffer: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the first ``count`` rows of every line, such as of each pass: rows are the last axis."""
    return buffer[:, :count]


def _cache_locs(dtype: torch.dtype, has_window: bool) -> list[GraphSlot]:
    """Returns where tokens go in layers of each group of the KV pool."""
    names = ("out_cache_loc", "window_cache_loc")[: 1 + has_window]
    return [per_token(name, dtype=dtype) for name in names]


def _lens(
    kind: Callable[..., GraphSlot],
    pad_value: int,
    dtype: torch.dtype = torch.int64,
    cpu_dtype: torch.dtype = torch.int64,
) -> list[GraphSlot]:
    """Returns the lengths of sequences, on the device and on the host."""
    slot = partial(kind, padding_policy=PaddingPolicy.FILL_SENTINEL, pad_value=pad_value)
    return [slot("seq_lens", dtype=dtype), slot("seq_lens_cpu", dtype=cpu_dtype, device="cpu")]


def _own_first_rows(width: int) -> PostFill:
    """Returns a hook that lets a padded sequence begin and end with the first of its own rows.

    Else its drafts would be written into the rows of a real sequence.
    """

    def fill(buffer: torch.Tensor, _: Any, context: FillContext) -> None:
        raw, padded = context.raw_bs, context.padded_bs
        torch.arange(raw * width, padded * width, width, out=buffer[raw:padded])

    return fill


def _draw_slots() -> list[GraphSlot]:
    return [
        per_sequence("temperature", dtype=torch.float32),
        per_sequence("seeds"),
        per_sequence("draw_positions"),
    ]


def _counts(name: str, length: int, post_fill: SizesOnly | None) -> GraphSlot:
    return GraphSlot(
        name,
        lambda max_bs, max_num_tokens: (length,),
        torch.int32,
        axis="none",
        copy_from_fb=False,
        post_fill=post_fill,
    )
