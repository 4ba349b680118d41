"""Steps of an executor with a draft model: how they read, and every way in which one is refused."""

import numpy as np
import pytest

from executor.batch.read_step import LAST_SAMPLED, RowProgress, read_step
from executor.errors import InvalidStep
from protos.executor.v1 import executor_pb2 as pb
from tests.executor.support.drafts.speculative_steps import (
    CHAIN,
    FROZEN,
    LAYERS,
    Run,
    limits,
    mixed_step,
    progress,
    speculative_step,
)
from tests.executor.support.steps import (
    BadStep,
    Change,
    bad_agreements,
    bad_columns,
    change_agreement,
    change_mode,
    change_sequences,
    each_bad,
    refusal,
    row_starts,
    sequences,
)

SEQUENCES, AGREEMENT = "ranks[0].sequences", "agreement"


def rows() -> RowProgress:
    """Row 2 has 9 tokens and 4 blocks of 4, row 5 has 14 tokens and 4 blocks."""
    return progress({2: 9, 5: 14}, {2: 4, 5: 4})


def good_step() -> pb.StepRequest:
    """The router does not know yet how many drafts row 2 accepted last: 3 more than it thinks."""
    return speculative_step([2, 5], [11, 13], [4, 3], num_new_blocks=[0, 2])


def test_a_speculative_step_reads_as_so_many_rows_of_each_sequence_from_its_true_length_on():
    columns = read_step(good_step(), limits(CHAIN), rows())

    assert columns.num_draft_tokens == 4
    assert columns.num_computed_tokens.tolist() == [8, 13]
    assert columns.num_tokens.tolist() == [4, 3]
    assert columns.num_query_tokens.tolist() == [4, 4]
    assert columns.token_ids.tolist() == [LAST_SAMPLED] * 8
    assert columns.num_kept_blocks.tolist() == [4, 4]
    assert columns.num_new_blocks.tolist() == [0, 2]
    assert columns.logits_indices.tolist() == list(range(8))
    assert columns.logits_sequence.tolist() == [0] * 4 + [1] * 4
    assert columns.layout.global_num_tokens_cpu == (8, 8)
    assert columns.draft_counts == columns.num_sampled == ()


def test_a_sequence_may_gain_as_many_tokens_as_it_verifies_unless_told_otherwise():
    columns = read_step(speculative_step([5], [13], num_new_blocks=[1]), limits(CHAIN), rows())
    assert columns.num_tokens.tolist() == [4]


def test_an_idle_part_of_a_speculative_step_reads_as_no_sequences():
    columns = read_step(speculative_step([], []), limits(CHAIN), rows())
    assert columns.num_draft_tokens == 4
    assert columns.rows.size == columns.token_ids.size == columns.logits_indices.size == 0
    assert columns.layout.global_num_tokens_cpu == (8, 0)


def test_the_graph_of_a_speculative_step_counts_sequences():
    request = good_step()
    request.agreement.graph_size = 2
    layout = read_step(request, limits(CHAIN), rows()).layout
    assert (layout.graph_size, layout.num_rows) == (8, 8)
    request.agreement.graph_size = 1
    with pytest.raises(InvalidStep, match="graph_size=1 is below the 2 tokens of a rank"):
        read_step(request, limits(CHAIN), rows())


def test_a_graph_for_a_rank_with_part_of_a_sequence_is_refused():
    request = good_step()
    change_agreement(global_num_tokens=[9, 8], graph_size=2)(request)
    assert refused(request, "has 9; each sequence has 4") == f"{AGREEMENT}.global_num_tokens"


def test_a_plain_step_resolves_the_lengths_of_what_decodes_and_of_nothing_else():
    request = mixed_step([Run(2, 11), Run(3, 4, [7, 8, 9]), Run(5, 13)])
    columns = read_step(request, limits(CHAIN), rows())
    assert columns.num_draft_tokens == 0
    assert columns.num_computed_tokens.tolist() == [8, 4, 13]
    assert columns.num_query_tokens.tolist() == columns.num_tokens.tolist() == [1, 3, 1]
    assert columns.draft_counts == (10, 6)
    assert columns.num_sampled == (2, 3)


def test_a_row_that_starts_keeps_none_of_the_blocks_of_the_one_before_it():
    columns = read_step(mixed_step([Run(2, 4, [7, 8, 9])]), limits(CHAIN), rows())
    assert columns.num_kept_blocks.tolist() == [0]
    assert columns.num_new_blocks.tolist() == [2]


def test_without_a_draft_model_lengths_are_the_router_s():
    request = mixed_step([Run(2, 11)], extends=False)
    assert read_step(request, limits(None), rows()).num_computed_tokens.tolist() == [11]


@pytest.mark.parametrize("plan", [FROZEN, None], ids=["frozen", "none"])
def test_a_draft_model_without_kv_has_no_counts_of_its_own(plan):
    columns = read_step(mixed_step([Run(2, 8)], extends=False), limits(plan), rows())
    assert columns.draft_counts == columns.num_sampled == ()


NONE = "a speculative step has none"
ONLY_PLAIN = "is set: only a step that is not speculative has it"

BAD_COLUMNS = [
    ("samples", [1, 1], NONE),
    ("num_scored", [0, 0], NONE),
    ("token_ids", [-1] * 8, "goes on from its last token"),
    ("token_ids", [-1] * 2, NONE),
    ("scored_ids", [1], NONE),
    ("num_tokens", [5, 3], "has 5; it must be from 1 to 4"),
    ("num_tokens", [4, 0], "has 0; it must be from 1 to 4"),
    ("num_computed_tokens", [7, 13], "7 for row 2, which has computed 8"),
    ("num_computed_tokens", [11, 38], "comes to 41; max_model_len is 40"),
    ("rows", [2, 3], "row 3 runs without having started"),
]
BAD_AGREEMENTS: list[tuple[str, object, str]] = [
    ("num_draft_tokens", 3, "num_draft_tokens=3: need 4, or 0 for a step that is not speculative"),
    ("global_num_tokens", [8, 4], "says 4 for this executor's part, which has 8"),
    ("global_num_tokens_for_logprob", [8, 4], "says 4 for this executor's part, which has 8"),
    ("global_num_tokens", [28, 8], "28; the budget is 24"),
    ("global_num_tokens_for_logprob", [8, 7], "for_logprob has 7; each sequence has 4"),
    ("global_num_tokens_for_logprob", [28, 8], "28; the budget is 24"),
    ("global_num_tokens_for_draft", [2, 2], f"global_num_tokens_for_draft {ONLY_PLAIN}"),
    ("global_num_sampled", [2, 2], f"global_num_sampled {ONLY_PLAIN}"),
    ("graph_size", 3, "the decode graphs are [1, 2, 4]"),
]
BAD_STEPS: list[BadStep] = [
    *bad_columns(BAD_COLUMNS),
    *bad_agreements(BAD_AGREEMENTS),
    (
        change_agreement(has_extend=True),
        f"{AGREEMENT}.num_draft_tokens",
        "num_draft_tokens=4: with has_extend: a step that runs prompts is not speculative",
    ),
    (
        change_mode(pb.FORWARD_MODE_EXTEND),
        f"{AGREEMENT}.has_extend",
        "has_extend is not set, but this part's forward_mode is EXTEND",
    ),
    (change_mode(pb.FORWARD_MODE_IDLE), "ranks[0].forward_mode", "IDLE with 2 sequences"),
    (
        change_sequences(num_new_blocks=[0, 7], new_block_ids=list(range(1, 8))),
        f"{SEQUENCES}.num_new_blocks",
        "comes to 11; max_blocks_per_row is 10",
    ),
    (
        lambda request: request.ranks[0].starts.CopyFrom(row_starts(rows=[2])),
        f"{SEQUENCES}.token_ids",
        "-1 for row 2, which has not sampled a token",
    ),
]


def refused(request: pb.StepRequest, problem: str, plan=CHAIN) -> str:
    """Returns the field for which a step is refused, for this problem and without a change."""
    error = refusal(request, limits(plan), rows)
    assert problem in str(error)
    return error.field


@each_bad(BAD_STEPS)
def test_a_bad_speculative_step_is_refused_by_field_and_changes_nothing(
    spoil: Change, field: str, problem: str
):
    request = good_step()
    spoil(request)
    assert refused(request, problem) == field


def test_a_row_with_too_few_blocks_for_what_it_may_gain_is_refused():
    request = speculative_step([5], [13], [4])
    problem = "row 5 holds 4 blocks and 0 came; it needs 5"
    assert refused(request, problem) == f"{SEQUENCES}.num_new_blocks"
    # What it may gain decides, not what it verifies, and not the router's bound.
    read_step(speculative_step([5], [15], [3]), limits(CHAIN), rows())


def test_a_plain_step_that_brings_a_row_too_few_blocks_is_refused():
    request = mixed_step([Run(3, 4, [7, 8, 9])])
    request.ranks[0].sequences.MergeFrom(sequences(num_new_blocks=[1], new_block_ids=[1]))
    problem = "row 3 holds 0 blocks and 1 came; it needs 2"
    assert refused(request, problem) == f"{SEQUENCES}.num_new_blocks"


def test_a_plain_step_may_bring_blocks_ahead_of_its_tokens():
    request = mixed_step([Run(3, 4, [7, 8, 9])])
    request.ranks[0].sequences.MergeFrom(sequences(num_new_blocks=[3], new_block_ids=[1, 2, 3]))
    assert read_step(request, limits(CHAIN), rows()).num_new_blocks.tolist() == [3]


def test_a_step_may_leave_the_draft_model_out():
    """Its router plans no drafts: the columns read as they are, and what is to follow is nothing."""
    request = mixed_step([Run(2, 8), Run(3, 4, [7, 8, 9])], extends=False)
    for plan in (CHAIN, LAYERS):
        columns = read_step(request, limits(plan), rows())
        assert columns.draft_counts == columns.num_sampled == ()
        assert columns.num_computed_tokens.tolist() == [8, 4]


def test_a_row_cannot_draft_of_which_the_draft_model_was_left_out():
    known = rows()
    known.is_followed[5] = False
    with pytest.raises(InvalidStep, match="row 5 cannot draft: the draft model ran nothing behind"):
        read_step(good_step(), limits(CHAIN), known)
    read_step(mixed_step([Run(2, 8), Run(5, 13)], extends=False), limits(CHAIN), known)
    known.start(np.array([5]))
    assert known.is_followed.all()


def test_no_step_is_speculative_without_a_draft_model():
    problem = "this executor has no draft model: start it with --draft-model"
    assert refused(good_step(), problem, None) == f"{AGREEMENT}.num_draft_tokens"


@pytest.mark.parametrize("field", ["global_num_tokens_for_draft", "global_num_sampled"])
@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        ([], "has 0 entries; dp_size is 2"),
        ([3], "has 1 entries; dp_size is 2"),
        ([3, 4], "says 4 for this executor's part, which has {mine}"),
        ([99, 0], "has 99; the budget is {most}"),
    ],
    ids=["missing", "short", "wrong", "above the budget"],
)
def test_wrong_counts_of_the_draft_model_s_rows_are_refused(
    field: str, counts: list[int], problem: str
):
    mine, most = {"global_num_tokens_for_draft": (5, 64), "global_num_sampled": (2, 6)}[field]
    request = mixed_step([Run(2, 8), Run(3, 4, [7, 8, 9])])
    change_agreement(**{field: counts})(request)
    for plan in (CHAIN, LAYERS):
        told = f"{field} {problem.format(mine=mine, most=most)}"
        assert refused(request, told, plan) == f"{AGREEMENT}.{field}"


@pytest.mark.parametrize("field", ["global_num_tokens_for_draft", "global_num_sampled"])
@pytest.mark.parametrize("plan", [FROZEN, None], ids=["frozen", "none"])
def test_counts_of_rows_that_nobody_runs_are_refused(plan, field: str):
    request = mixed_step([Run(2, 8)], extends=False)
    change_agreement(**{field: [1, 1]})(request)
    problem = f"{field} {ONLY_PLAIN}, and only where the draft"
    assert refused(request, problem, plan) == f"{AGREEMENT}.{field}"
