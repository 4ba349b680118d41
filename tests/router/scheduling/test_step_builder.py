"""If ranks derive different steps from one plan, a collective hangs and every client with it."""

import random

import pytest

from router.scheduling.step import CapturedSizes, GraphMiss, PaddingMode
from router.scheduling.step_builder import (
    Counts,
    agree,
    pick_extend_graph_size,
    pick_graph_size,
)

SIZES = (1, 2, 4, 8, 16)
NUM_CASES = 300  # for each seed of the random steps


def naive_padding_mode(num_tokens: list[int], has_extend: bool, attn_tp_size: int) -> PaddingMode:
    """The rule by rows that are really laid out: is more than half of a MAX_LEN gather padding?"""
    rows_of_ranks = [["real"] * count for count in num_tokens]
    for rows in rows_of_ranks:
        while len(rows) % attn_tp_size:
            rows.append("padding of a shard, which either way is gathered")
    if len(num_tokens) > 1 and has_extend:
        return PaddingMode.SUM_LEN
    longest = max(len(rows) for rows in rows_of_ranks)
    num_gathered = sum(longest for _ in rows_of_ranks)
    num_held = sum(len(rows) for rows in rows_of_ranks)
    return PaddingMode.MAX_LEN if num_held >= num_gathered / 2 else PaddingMode.SUM_LEN


def naive_graph_size(num_tokens: list[int], captured: tuple[int, ...]) -> int | None:
    """The smallest captured size into which every rank's tokens fit."""
    fitting = [size for size in captured if all(count <= size for count in num_tokens)]
    return min(fitting, default=None)


@pytest.mark.parametrize("seed", range(15))
def test_random_steps_are_planned_as_the_rules_say(seed: int) -> None:
    """Those with drafts too, whose graphs are known by their sequences."""
    rng = random.Random(500 + seed)
    for _ in range(NUM_CASES):
        attn_tp_size, has_extend = rng.randint(1, 5), rng.random() < 0.4
        width = 0 if has_extend else rng.choice([0, rng.randint(2, 9)])
        most = rng.choice([1, 4, 30])
        counts = [rng.choice([0, rng.randint(0, most)]) for _ in range(rng.randint(1, 6))]
        counts[rng.randrange(len(counts))] += 1
        num_tokens = [(width or 1) * count for count in counts]
        num_logits = num_tokens if width else [rng.randint(0, 9) for _ in counts]
        multiples = [attn_tp_size * size for size in range(1, 21)]
        captured = tuple(sorted(rng.sample(multiples, rng.choice([0, 3, 8]))))
        others = (max(num_tokens),)
        agreement = agree(
            Counts(counts, num_tokens, num_logits, [], []),
            has_extend=has_extend,
            attn_tp_size=attn_tp_size,
            graph_sizes=CapturedSizes(*(others, captured) if has_extend else (captured, others)),
            num_draft_tokens=width,
        )
        assert (agreement.has_extend, agreement.num_draft_tokens) == (has_extend, width)
        # What travels is what there is: neither count is rounded up.
        assert agreement.global_num_tokens == tuple(num_tokens)
        assert agreement.global_num_tokens_for_logprob == tuple(num_logits)
        size = naive_graph_size(counts, captured)
        if has_extend and size is not None and (0 in counts or size > 2 * max(counts)):
            size = None
        assert agreement.graph_size == size
        assert (agreement.graph_miss is None) == (size is not None)
        if size is not None:
            assert agreement.padding_mode is PaddingMode.MAX_LEN
        else:
            expected = naive_padding_mode(num_tokens, has_extend, attn_tp_size)
            assert agreement.padding_mode is expected, (num_tokens, attn_tp_size)


def test_a_step_without_tokens_is_never_planned() -> None:
    with pytest.raises(AssertionError, match="idle"):
        agree(Counts([0, 0], [0, 0], [0, 0], [], []), has_extend=False)


def test_the_smallest_captured_size_that_fits_is_replayed() -> None:
    assert [pick_graph_size(n, SIZES) for n in (1, 3, 8, 9)] == [1, 4, 8, 16]
    assert pick_graph_size(17, SIZES) is GraphMiss.TOO_LARGE
    assert pick_graph_size(1, ()) is GraphMiss.NOT_CAPTURED


def test_an_extend_graph_is_not_replayed_with_an_empty_rank_or_mostly_padding() -> None:
    assert pick_extend_graph_size([5, 8], (8, 64)) == 8
    assert pick_extend_graph_size([0, 8], (8, 64)) is GraphMiss.IDLE_RANK
    assert pick_extend_graph_size([9, 9], (8, 64)) is GraphMiss.MOSTLY_PADDING
    assert pick_extend_graph_size([32, 9], (8, 64)) == 64
