"""A size that only one rank captured, or one that does not divide, crashes a step."""

import math
import random

import pytest
from structlog.testing import capture_logs

from executor.budget.capture_sizes import (
    capture_alignment,
    decode_capture_sizes,
    default_decode_sizes,
    default_prefill_sizes,
    filter_sizes,
    prefill_capture_sizes,
    round_up_sizes,
)


def test_default_decode_sizes_are_dense_where_batches_are_small():
    assert default_decode_sizes(600) == (
        *(1, 2, 4, 8),
        *range(16, 257, 8),
        *range(272, 513, 16),
        *(544, 576, 600),
    )


def test_default_prefill_sizes_are_dense_where_chunks_are_small():
    assert default_prefill_sizes(5632) == (
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *(4608, 5120, 5632),
    )


@pytest.mark.parametrize(
    ("maximum", "decode", "prefill"),
    [
        (1, (1,), (1,)),
        (3, (1, 2, 3), (3,)),
        (8, (1, 2, 4, 8), (4, 8)),
        (13, (1, 2, 4, 8, 13), (4, 8, 12, 13)),
    ],
)
def test_the_maximum_itself_is_always_a_size(
    maximum: int, decode: tuple[int, ...], prefill: tuple[int, ...]
):
    assert default_decode_sizes(maximum) == decode
    assert default_prefill_sizes(maximum) == prefill


@pytest.mark.parametrize("build", [default_decode_sizes, default_prefill_sizes])
def test_a_maximum_below_one_is_refused(build):
    with pytest.raises(ValueError, match="=0: need at least 1"):
        build(0)


@pytest.mark.parametrize(
    ("attn_tp_size", "attn_cp_size", "width", "expected"),
    [(1, 1, 1, 1), (2, 1, 1, 2), (4, 6, 1, 12), (4, 2, 1, 4), (4, 1, 4, 1), (4, 1, 6, 2)],
)
def test_sizes_align_so_that_their_tokens_divide(
    attn_tp_size: int, attn_cp_size: int, width: int, expected: int
):
    assert capture_alignment(attn_tp_size, attn_cp_size, width) == expected


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_group_without_ranks_is_refused(sizes: tuple[int, int, int]):
    with pytest.raises(ValueError, match="=0: need at least 1"):
        capture_alignment(*sizes)


def test_default_sizes_are_rounded_up_and_each_kept_once():
    assert round_up_sizes((1, 2, 4, 8, 13), 4) == (4, 8, 16)


def test_sizes_that_an_operator_listed_are_filtered_and_the_dropped_ones_named():
    with capture_logs() as logs:
        assert filter_sizes([8, 1, 6, 8, 2], 4) == (8,)
    [entry] = logs
    assert entry["log_level"] == "warning"
    assert (entry["dropped"], entry["must_divide_by"]) == ([1, 2, 6], 4)


@pytest.mark.parametrize("listed", [[1, 2, 6], []])
def test_no_size_left_stops_the_start_and_names_what_was_listed(listed: list[int]):
    with pytest.raises(ValueError, match="no capture size is a multiple of 4") as error:
        filter_sizes(listed, 4)
    assert str(listed) in str(error.value)


def test_a_listed_size_below_one_is_refused():
    with pytest.raises(ValueError, match="capture size 0"):
        filter_sizes([0, 4], 4)


@pytest.mark.parametrize("build", [decode_capture_sizes, prefill_capture_sizes])
def test_an_alignment_below_one_is_refused(build):
    with pytest.raises(ValueError, match="alignment=0"):
        build(8, alignment=0)


@pytest.mark.parametrize("build", [decode_capture_sizes, prefill_capture_sizes])
def test_an_operators_list_replaces_the_defaults(build):
    assert build(64, alignment=2, listed=[2, 64]) == (2, 64)


@pytest.mark.parametrize("seed", range(200))
def test_default_sizes_of_any_configuration_divide_ascend_and_hold_every_batch(seed: int):
    rng = random.Random(seed)
    attn_tp_size, attn_cp_size = rng.randint(1, 16), rng.choice([1, 2, 3, 4, 8])
    width = rng.randint(1, 8)
    maximum = rng.randint(1, 20_000)
    group = math.lcm(attn_tp_size, attn_cp_size)
    for build, tokens_per_size in ((decode_capture_sizes, width), (prefill_capture_sizes, 1)):
        alignment = capture_alignment(attn_tp_size, attn_cp_size, tokens_per_size)
        sizes = build(maximum, alignment=alignment)
        assert list(sizes) == sorted(set(sizes))
        assert all(size * tokens_per_size % group == 0 for size in sizes)
        assert maximum <= sizes[-1] < maximum + alignment


@pytest.mark.parametrize("seed", range(50))
def test_an_operators_sizes_are_never_changed_only_dropped(seed: int):
    rng = random.Random(seed)
    alignment = rng.randint(1, 6)
    listed = [rng.randint(1, 100) for _ in range(rng.randint(1, 10))] + [alignment]
    with capture_logs() as logs:
        kept = filter_sizes(listed, alignment)
    assert len(logs) == any(size % alignment for size in listed)
    dropped = logs[0]["dropped"] if logs else []
    assert sorted([*kept, *dropped]) == sorted(set(listed))
    assert not any(size % alignment for size in kept)
    assert all(size % alignment for size in dropped)


def test_a_size_without_the_gathered_group_needs_no_alignment():
    assert decode_capture_sizes(13) == default_decode_sizes(13)
    assert prefill_capture_sizes(13) == default_prefill_sizes(13)
