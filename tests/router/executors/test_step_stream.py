"""A deadline that is too short loses a healthy group; one that is too long leaves callers waiting."""

from dataclasses import replace

from router.executors.step_stream import MIN_STEPS, DeadlineSettings, StepDeadline
from router.scheduling.step import Agreement, PaddingMode

MAX_S = 60.0


def agreement(num_tokens: int, *, has_extend: bool = False, graph: bool = False) -> Agreement:
    return Agreement(
        global_num_tokens=(num_tokens, 1),
        global_num_tokens_for_logprob=(1, 1),
        has_extend=has_extend,
        padding_mode=PaddingMode.MAX_LEN,
        graph_size=num_tokens if graph else None,
    )


def learnt(*steps: tuple[Agreement, float]) -> StepDeadline:
    deadline = StepDeadline(DeadlineSettings(step_timeout_s=MAX_S, min_step_deadline_s=2.0))
    for step, seconds in steps:
        deadline.add(step, seconds)
    return deadline


def test_the_longest_limit_alone_holds_until_enough_steps_of_a_kind_were_seen():
    decode = agreement(8)
    deadline = learnt(*[(decode, 0.2)] * (MIN_STEPS - 1))
    assert deadline.limit_s(decode) == MAX_S
    deadline.add(decode, 0.2)
    assert round(deadline.limit_s(decode), 6) == 4.0


def test_a_first_prefill_of_thirty_seconds_is_not_cut_though_decodes_are_quick():
    deadline = learnt(*[(agreement(8), 0.01)] * 1000)
    assert deadline.limit_s(agreement(8)) == 2.0
    for unseen in (
        agreement(8, has_extend=True),
        agreement(8192, has_extend=True),
        agreement(8192),
        agreement(8, graph=True),
    ):
        assert deadline.limit_s(unseen) == MAX_S


def test_the_limit_follows_slow_steps_soon_and_quick_ones_late():
    decode = agreement(8)
    deadline = learnt(*[(decode, 0.2)] * 100, *[(decode, 1.0)] * 20)
    slow = deadline.limit_s(decode)
    assert 19 < slow < 20
    deadline.add(decode, 0.2)
    assert 0.95 * slow < deadline.limit_s(decode) < slow


def test_one_hiccup_does_not_take_the_deadline_away():
    decode = agreement(8)
    deadline = learnt(*[(decode, 0.05)] * 100, (decode, 1.0))
    assert deadline.limit_s(decode) < 5.0


def test_no_limit_is_above_the_longest():
    slow = agreement(8192, has_extend=True)
    assert learnt(*[(slow, 30.0)] * 100).limit_s(slow) == MAX_S


def test_all_is_forgotten_when_executors_are_new():
    decode = agreement(8)
    deadline = learnt(*[(decode, 0.2)] * 100)
    deadline.forget()
    assert deadline.limit_s(decode) == MAX_S


def test_steps_with_drafts_are_told_apart_from_plain_ones_of_as_many_tokens():
    plain = agreement(8)
    deadline = learnt(*[(plain, 0.2)] * MIN_STEPS)
    drafting = replace(plain, num_draft_tokens=4)
    assert deadline.limit_s(drafting) == MAX_S
    for _ in range(MIN_STEPS):
        deadline.add(drafting, 0.5)
    assert round(deadline.limit_s(drafting), 6) == 10.0
    assert round(deadline.limit_s(plain), 6) == 4.0
