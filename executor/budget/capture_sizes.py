"""Graph sizes to capture. Pure.

A decode size counts sequences, a prefill size counts token rows of one rank. These lists are captured,
and ``Describe`` carries them to the router, which picks from them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import structlog

from executor.budget.token_budget import check_least

log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """What is captured, ascending; empty where nothing is.

    Attributes:
        decode: In sequences, for steps in which no rank extends.
        extend: In token rows of one rank, for the other steps.
    """

    decode: tuple[int, ...] = ()
    extend: tuple[int, ...] = ()


# (last size, distance between sizes) up to it; finer where a batch is small, as padding costs
# most there.
_DECODE_STEPS = ((256, 8), (512, 16), (math.inf, 32))
_PREFILL_STEPS = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256), (math.inf, 512))


def default_decode_sizes(max_bs: int) -> tuple[int, ...]:
    """Returns 1, 2, 4, 8, then by 8 to 256, by 16 to 512, by 32 above; and ``max_bs``.

    Raises:
        ValueError: ``max_bs`` is below 1.
    """
    check_least(1, max_bs=max_bs)
    return _up_to(max_bs, [1, 2, 4, *_stepped(max_bs, _DECODE_STEPS)])


def default_prefill_sizes(max_num_tokens: int) -> tuple[int, ...]:
    """Returns token counts by 4 to 32, 16 to 256, 32 to 512, 64 to 1024, 256 to 4096, 512 above.

    Args:
        max_num_tokens: The chunk size; always included.

    Raises:
        ValueError: ``max_num_tokens`` is below 1.
    """
    check_least(1, max_num_tokens=max_num_tokens)
    return _up_to(max_num_tokens, _stepped(max_num_tokens, _PREFILL_STEPS))


def capture_alignment(attn_tp_size: int, attn_cp_size: int = 1, num_tokens_per_bs: int = 1) -> int:
    """Returns what sizes must be multiples of when layers scatter inside the attention-TP group.

    Then token counts divide by lcm(attn_tp_size, attn_cp_size); only ask if they do
    (``require_gathered_buffer``), and use 1 otherwise.

    Args:
        attn_tp_size: Ranks of the attention-TP group.
        attn_cp_size: Ranks of the attention context-parallel group.
        num_tokens_per_bs: Token rows per unit of a size: ``num_draft_tokens`` for a decode size in
            verify, else 1.

    Raises:
        ValueError: An argument is below 1.
    """
    check_least(
        1,
        attn_tp_size=attn_tp_size,
        attn_cp_size=attn_cp_size,
        num_tokens_per_bs=num_tokens_per_bs,
    )
    alignment = math.lcm(attn_tp_size, attn_cp_size)
    return alignment // math.gcd(alignment, num_tokens_per_bs)


def round_up_sizes(sizes: Iterable[int], alignment: int) -> tuple[int, ...]:
    """Rounds default sizes up to multiples of ``alignment``; ascending, each once.

    The largest may end above the maximum it was made from: size buffers by the result.
    """
    return tuple(sorted({-(-size // alignment) * alignment for size in sizes}))


def filter_sizes(sizes: Iterable[int], alignment: int) -> tuple[int, ...]:
    """Keeps those of an operator's sizes that are multiples of ``alignment``; ascending, each once.

    They are not rounded: an operator who lists a size means it. A warning (capture_sizes_dropped)
    names the dropped ones.

    Raises:
        ValueError: A size is below 1, or none is left.
    """
    listed = sorted(set(sizes))
    if listed and listed[0] < 1:
        raise ValueError(f"capture size {listed[0]}: a size is at least 1")
    kept = tuple(size for size in listed if size % alignment == 0)
    dropped = [size for size in listed if size % alignment]
    if not kept:
        raise ValueError(
            f"no capture size is a multiple of {alignment} in {listed}: "
            f"list multiples of {alignment}, or no sizes to use the defaults"
        )
    if dropped:
        log.warning(
            "capture_sizes_dropped", dropped=dropped, kept=list(kept), must_divide_by=alignment
        )
    return kept


def decode_capture_sizes(
    max_bs: int, *, alignment: int = 1, listed: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Returns the sequence counts to capture, ascending.

    Args:
        max_bs: Most sequences of a step; always included by default.
        alignment: From ``capture_alignment``.
        listed: What the operator listed; None for the default sizes.

    Raises:
        ValueError: The sizes or the alignment leave nothing to capture.
    """
    check_least(1, alignment=alignment)
    if listed is not None:
        return filter_sizes(listed, alignment)
    return round_up_sizes(default_decode_sizes(max_bs), alignment)


def prefill_capture_sizes(
    max_num_tokens: int, *, alignment: int = 1, listed: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Returns the token counts to capture, ascending.

    Args:
        max_num_tokens: The chunk size; always included by default.
        alignment: From ``capture_alignment``.
        listed: What the operator listed; None for the default sizes.

    Raises:
        ValueError: The sizes or the alignment leave nothing to capture.
    """
    check_least(1, alignment=alignment)
    if listed is not None:
        return filter_sizes(listed, alignment)
    return round_up_sizes(default_prefill_sizes(max_num_tokens), alignment)


def _stepped(maximum: int, steps: Iterable[tuple[float, int]]) -> list[int]:
    """Returns sizes from the first distance up, at each distance until its last size."""
    sizes: list[int] = []
    size = 0
    for last, distance in steps:
        while size + distance <= min(last, maximum):
            size += distance
            sizes.append(size)
    return sizes


def _up_to(maximum: int, sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({maximum, *(size for size in sizes if size < maximum)}))
