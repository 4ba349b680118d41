"""If these fail, drafts never run where prompts never cease, or prompts wait longer for them than said."""

from collections.abc import Iterator

import pytest

from router.requests.request import Request, SamplingParams
from router.scheduling.sequence_table import RowStatus
from router.scheduling.speculation import PAUSE_STEPS, PROBE_STEPS, TURN_ROWS
from router.scheduling.step import BatchMode, StepPlan
from tests.router.support.stepper import (
    Stepper,
    assert_right,
    draft_stepper,
    drafting,
    finish,
    limits,
    speculation,
)

LONG = {"max_model_len": 4000, "num_blocks": 9000, "rows_per_rank": 16}


def under_prompts(world: Stepper, num_steps: int, num_new: int = 1) -> Iterator[StepPlan]:
    """Plans and commits steps, with new short prompts before each."""
    for number in range(num_steps):
        for place in range(num_new):
            world.submit([number % 40 + 1, place + 1, 7], 1)
        yield world.step()


def decoding(world: Stepper, max_tokens: int = 200, count: int = TURN_ROWS) -> list[Request]:
    """Brings sequences past their prompts: by default so many as one prompt would wait for."""
    requests = [world.submit([1 + number, 2, 3], max_tokens) for number in range(count)]
    while len(world.admission) or (world.table.status == RowStatus.EXTEND).any():
        world.step()
    return requests


def kinds(plans: list[StepPlan]) -> str:
    """A letter for each step: Prompts, Drafts, or neither."""
    return "".join(
        "P" if plan.agreement.has_extend else "D" if plan.agreement.num_draft_tokens else "-"
        for plan in plans
    )


# ---- whose turn it is


@pytest.mark.parametrize("between", [1, 2, 3])
def test_where_prompts_never_cease_every_so_many_steps_one_drafts(between: int) -> None:
    world = draft_stepper(drafts=drafting(between=between), **LONG)
    requests = decoding(world)
    world.step()
    plans = list(under_prompts(world, 12))
    assert kinds(plans) == (("P" * between + "D") * 12)[:12]
    finish(world, *requests)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_turns_go_by_the_order_in_which_steps_are_planned(depth: int) -> None:
    world = draft_stepper(0.5, drafting(between=1), max_num_batched_tokens=16, **LONG)
    decodes = decoding(world)
    prompt = world.submit([5] * 100, 9)
    plans = world.run(depth)
    num_prompt_steps = sum(plan.agreement.has_extend for plan in plans)
    assert num_prompt_steps > 5
    assert kinds(plans)[: 2 * num_prompt_steps] == "DP" * num_prompt_steps
    assert_right(*decodes, prompt)
    world.check_idle()


def test_a_step_without_prompts_begins_the_count_anew() -> None:
    world = draft_stepper(drafts=drafting(between=2), **LONG)
    decoding(world)
    assert kinds([world.step()]) == "D"  # nobody waits: no turn, but a step like it
    assert kinds(list(under_prompts(world, 1))) == "P"
    assert kinds([world.step()]) == "D"
    assert kinds(list(under_prompts(world, 6))) == "PPDPPD"


def test_in_a_turn_no_rank_runs_prompts_and_all_agree_on_drafts() -> None:
    world = draft_stepper(drafts=drafting(between=1), dp_size=2, max_num_batched_tokens=16, **LONG)
    decoding(world)
    world.submit([9] * 80, 1)
    plans = [world.step() for _ in range(8)]
    assert kinds(plans) == "DPDPDPDP"
    for plan in plans:
        modes = {batch.mode for batch in plan.batches}
        if plan.agreement.has_extend:
            assert modes == {BatchMode.DECODE, BatchMode.EXTEND}
        else:
            assert modes == {BatchMode.DECODE}
            assert plan.agreement.global_num_tokens == (8, 8)


def test_who_comes_in_a_turn_is_bound_at_once_and_runs_in_the_next_step() -> None:
    world = draft_stepper(drafts=drafting(between=1), **LONG)
    decoding(world)
    late = world.submit([8, 8, 8], 3)
    turn = world.step()
    assert kinds([turn]) == "D"
    assert len(world.admission) == 0
    [sequence] = late.sequences
    assert world.table.status[sequence.row] == RowStatus.EXTEND
    assert not turn.runs[sequence.row]
    after = world.step()
    assert kinds([after]) == "P"
    assert after.runs[sequence.row]


def test_a_great_number_lets_prompts_always_go_first() -> None:
    world = draft_stepper(drafts=drafting(between=10**6), **LONG)
    decoding(world)
    assert kinds(list(under_prompts(world, 20))) == "P" * 20


# ---- when none is taken


def test_no_turn_is_taken_for_rows_that_take_no_drafts() -> None:
    world = draft_stepper(drafts=drafting(between=1), **LONG)
    penalty = SamplingParams({"presence_penalty": 0.5})
    careful = [world.submit([number, 9], 200, sampling=penalty) for number in range(1, 9)]
    world.step()
    assert kinds(list(under_prompts(world, 6))) == "P" * 6
    finish(world, *careful)


def test_no_turn_is_taken_for_last_tokens() -> None:
    world = draft_stepper(drafts=drafting(between=1), **LONG)
    decoding(world, max_tokens=2, count=8)
    assert kinds(list(under_prompts(world, 3))) == "PPP"


def test_no_turn_is_taken_for_few_sequences_while_many_wait() -> None:
    world = draft_stepper(drafts=drafting(between=1), **LONG)
    decoding(world, count=2 * TURN_ROWS - 1)
    assert kinds(list(under_prompts(world, 4, num_new=2))) == "PPPP"
    world.step()  # nobody waits
    decoding(world, count=1)
    assert kinds(list(under_prompts(world, 4, num_new=2))) == "DPDP"


def test_no_turn_counts_on_a_sequence_that_has_just_lost_its_place() -> None:
    """Of two prompts that matter more, one gets the last row, and the other one of a sequence."""
    sizes = LONG | {"rows_per_rank": TURN_ROWS + 1, "block_size": 16}
    world = draft_stepper(drafts=drafting(between=1), **sizes)
    decodes = decoding(world)
    prompts = [world.submit([30 + number] * 3, 2, priority=9) for number in range(2)]
    assert kinds([world.step()]) == "P"
    assert sum(world.scheduler.num_preemptions) == 1
    finish(world, *decodes, *prompts)


def test_while_drafts_do_not_pay_prompts_run_and_the_pause_ends_all_the_same() -> None:
    world = draft_stepper(0.0, drafting(1.5, 1), **LONG)
    decoding(world, 3900)
    seen = kinds(list(under_prompts(world, 2 * PROBE_STEPS + PAUSE_STEPS + 4)))
    probe = "DP" * PROBE_STEPS
    assert seen == probe + "P" * PAUSE_STEPS + "DPDP"
    assert world.scheduler.gate.tokens_per_step == 1.0


# ---- KV

NUM_DECODES = 2 * TURN_ROWS  # so that turns are taken also with two prompts


def short_of_blocks(
    num_blocks: int, prompt_len: int, *later: int, dp_size: int = 1, num_more_rows: int = 4
) -> tuple[Stepper, list[Request]]:
    """Sequences that decode, for which a speculative step wants 8 slots; then others come.

    Args:
        num_blocks: Of 4 slots, of each rank.
        prompt_len: Tokens of the prompts of those that decode.
        later: Tokens of prompts that have come since.
        num_more_rows: Of each rank, beside those of its NUM_DECODES sequences.
    """
    world = draft_stepper(
        drafts=drafting(between=1),
        num_blocks=1 + num_blocks,
        max_model_len=60,
        rows_per_rank=NUM_DECODES + num_more_rows,
        max_num_batched_tokens=64,
        speculation=speculation(num_reserved_tokens=8),
        dp_size=dp_size,
    )
    for number in range(dp_size * (NUM_DECODES + num_more_rows)):  # every row has had blocks
        world.submit([100 + number, 1], 2)
    world.run()
    num_decodes = dp_size * NUM_DECODES
    requests = [world.submit([1 + number] * prompt_len, 8) for number in range(num_decodes)]
    world.step()
    requests += [world.submit([50 + place] * num, 2) for place, num in enumerate(later)]
    return world, requests


def blocks_of(world: Stepper, requests: list[Request]) -> list[int]:
    """How many blocks each request's sequence holds; -1: it waits in the line."""
    sequences = [request.sequences[0] for request in requests]
    return [-1 if s.table is None else int(world.table.num_blocks[s.row]) for s in sequences]


def finish_unharmed(world: Stepper, requests: list[Request]) -> None:
    """Runs what is left, and checks that nobody has paid for drafts."""
    finish(world, *requests)
    assert sum(world.scheduler.num_preemptions) == 0


NUM_SPARE = NUM_DECODES + 1  # one for each that is bound


@pytest.mark.parametrize(
    ("wanted", "num_more", "prompt_len", "later", "sizes", "held", "later_held"),
    [
        (2, 0, 6, [12], {}, 4, [0]),
        (1, 0, 4, [12], {}, 3, [0]),
        (1, -1, 4, [12], {}, 2, [0]),  # one is missing: rows draft as far as their own blocks go
        (1, 0, 4, [12, 44], {}, 2, [0, -1]),  # somebody in the line waits for 12 more
        (1, 12 + 1, 4, [12, 44], {}, 3, [0, 0]),
        (1, 0, 4, [12, 12], {"num_more_rows": 1}, 3, [0, -1]),  # somebody waits for a row
        (1, 0, 4, [12], {"dp_size": 2}, 3, [0]),  # on all ranks, or
        (1, -1, 4, [12], {"dp_size": 2}, 2, [0]),  # on none, though one has blocks to spare
    ],
)
def test_drafts_get_blocks_that_nobody_else_needs(
    wanted: int,
    num_more: int,
    prompt_len: int,
    later: list[int],
    sizes: dict[str, int],
    held: int,
    later_held: list[int],
) -> None:
    """Rows that decode hold 2 blocks each and want more for drafts; the first prompt is to get 4."""
    num_blocks = (2 + wanted) * NUM_DECODES + 4 + NUM_SPARE + num_more
    world, requests = short_of_blocks(num_blocks, prompt_len, *later, **sizes)
    num_decodes = len(requests) - len(later)
    assert limits(world.step()) == [4] * num_decodes
    assert blocks_of(world, requests) == [held] * num_decodes + later_held
    assert kinds([world.step()]) == "P"
    finish_unharmed(world, requests)


def test_no_turn_is_taken_where_most_rows_lack_the_blocks_for_it() -> None:
    """Those that decode hold 2 blocks each, and 2 slots of them are left, for runs of 4."""
    num_blocks = (2 + 2) * NUM_DECODES + 4 + NUM_SPARE
    world, requests = short_of_blocks(num_blocks - 1, 6, 12)
    assert kinds([world.step()]) == "P"
    assert blocks_of(world, requests) == [2] * NUM_DECODES + [3]
    finish_unharmed(world, requests)
