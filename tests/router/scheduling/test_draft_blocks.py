"""If these fail, a sequence pays for drafts with its place, or finds another's drafts in its KV."""

import pytest

from router.errors import Cancelled
from tests.router.support.stepper import (
    PROMPT,
    assert_right,
    draft_stepper,
    finish,
    limits,
    output_of,
    right_output,
    speculation,
    stop_at,
    widths,
)


def test_a_speculative_step_has_blocks_for_all_that_it_writes() -> None:
    world = draft_stepper(speculation=speculation(num_reserved_tokens=11))
    world.submit(PROMPT, 40)
    world.step()
    assert world.table.num_blocks[0] == 1
    world.plan()
    assert world.table.num_blocks[0] == -(-(3 + 11) // 4)
    world.plan()
    assert world.table.num_blocks[0] == -(-(7 + 11) // 4)  # by the upper bound


def test_blocks_for_drafts_end_where_the_sequence_must() -> None:
    world = draft_stepper(speculation=speculation(num_reserved_tokens=40))
    world.submit(PROMPT, 8)
    world.step()
    world.plan()
    assert world.table.num_blocks[0] == -(-(3 + 8) // 4)


@pytest.mark.parametrize(
    ("num_prompt", "lookahead", "num_slots"),
    [(8, 0, 8), (8, 1, 9), (8, 6, 14), (40, 6, 32)],  # the last is a chunk that does not sample
)
def test_a_plain_step_that_samples_has_blocks_as_far_as_the_draft_model_looks_ahead(
    num_prompt: int, lookahead: int, num_slots: int
) -> None:
    world = draft_stepper(speculation=speculation(kv_lookahead=lookahead))
    world.submit([1] * num_prompt, min(30, 48 - num_prompt))
    plan = world.step()
    assert plan.limits is None
    assert world.table.num_blocks[0] == -(-num_slots // 4)


def test_short_of_blocks_a_row_drafts_less_and_nobody_loses_a_place() -> None:
    """Two rows of 2 blocks each and 1 spare: neither may take it for drafts."""
    world = draft_stepper(num_blocks=1 + 5, max_model_len=20)
    requests = [world.submit([number] * 6, 6) for number in (1, 2)]
    world.step()
    plan = world.step()
    assert limits(plan) == [2, 2]  # up to the end of the blocks that they have
    assert world.table.num_blocks[:2].tolist() == [2, 2]
    assert sum(world.scheduler.num_preemptions) == 0
    finish(world, *requests)


def test_only_a_missing_block_for_a_first_token_preempts() -> None:
    world = draft_stepper(num_blocks=1 + 7, max_model_len=28)
    requests = [world.submit([number] * 8, 12) for number in (1, 2, 3)]
    plans = world.run(depth=2)
    assert 4 in widths(plans)
    assert sum(world.scheduler.num_preemptions) > 0
    assert_right(*requests)
    world.check_idle()


def test_the_last_blocks_are_left_for_the_next_tokens_of_all() -> None:
    """What one row could take for drafts, another needs before long."""
    world = draft_stepper(num_blocks=1 + 8, max_model_len=32, speculation=speculation())
    first, second = world.submit([1] * 7, 9), world.submit([2] * 7, 9)
    world.step()  # 2 blocks each, and 4 are left
    world.plan()
    assert world.table.num_blocks[:8].tolist() == [3, 3, 0, 0, 0, 0, 0, 0]
    finish(world, first, second)
    assert sum(world.scheduler.num_preemptions) == 0


def test_what_a_stop_left_behind_is_never_found_in_the_prefix_cache() -> None:
    """A run was computed past the stop: its blocks are full, but not of the sequence's tokens."""
    world = draft_stepper()
    place = 6
    request = world.submit(PROMPT, 30, stop_token_ids=(stop_at(place),))
    world.run(depth=2)
    kept = [*PROMPT, *output_of(request)[0]]
    assert len(kept) == 10
    for tail in ([], [11, 12, 13, 14, 15], [right_output(world.submit(PROMPT, 12))[0][7], 1, 1, 1]):
        follower = world.submit([*kept, *tail], 9)
        world.run(depth=2)
        assert follower.sequences[0].progress.num_cached_tokens == 8
        assert_right(follower)
    world.check_idle()


def test_blocks_that_a_row_may_have_filled_with_drafts_are_not_in_the_prefix_cache() -> None:
    """By the upper bound of its length they would be full, of tokens that nobody knows."""
    world = draft_stepper(0.0)
    request = world.submit(PROMPT, 30)
    world.step()
    world.plan()
    world.plan()
    assert world.table.num_computed[0] == 11
    known = [*PROMPT, *output_of(request)[0]]
    unknown = world.table.tokens._rows[0, 4:8].tolist()
    world.scheduler.fail(request.sequences[0], Cancelled("enough"))
    world.run(depth=2)
    follower = world.submit([*known, *unknown, 5, 6], 9)
    world.run(depth=2)
    assert follower.sequences[0].progress.num_cached_tokens == 4
    assert_right(follower)


def test_a_preempted_sequence_goes_on_from_what_it_really_gained() -> None:
    world = draft_stepper(acceptance=0.5, num_blocks=1 + 9, max_model_len=36)
    requests = [world.submit([number] * 5, 25, priority=number) for number in (1, 2, 3)]
    world.run(depth=2)
    assert sum(request.sequences[0].progress.num_preemptions for request in requests) > 0
    assert_right(*requests)
    for request in requests:
        progress = request.sequences[0].progress
        assert 0 < progress.num_accepted_drafts < progress.num_drafts
    world.check_idle()
