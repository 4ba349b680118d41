"""Plans of speculative decoding: sizes that fit, their widths, and errors for the others."""

import re
from dataclasses import FrozenInstanceError

import pytest

from executor.budget.speculation import MAX_DRAFT_TOKENS, SpeculationPlan


@pytest.mark.parametrize("algorithm", ["eagle", "multi_layer_eagle", "frozen_kv_mtp"])
def test_a_chain_verifies_its_drafts_and_the_last_token(algorithm: str):
    plan = SpeculationPlan(algorithm=algorithm, num_draft_steps=3)
    assert plan.num_draft_tokens == 4
    assert not plan.is_tree


@pytest.mark.parametrize("topk", [2, 4])
def test_a_tree_verifies_as_many_drafts_as_its_steps_run_unless_told_otherwise(topk: int):
    assert SpeculationPlan(algorithm="eagle", num_draft_steps=3, topk=topk).num_draft_tokens == (
        3 * topk + 1
    )
    plan = SpeculationPlan(algorithm="eagle", num_draft_steps=3, topk=topk, num_draft_tokens=6)
    assert plan.num_draft_tokens == 6
    assert plan.is_tree


FIELDS = ("algorithm", "num_draft_steps", "topk", "num_draft_tokens")
# Written out by hand. Rows: of draft-extend, of the widest phase; slots: beyond any other step's
# tokens, from the last token on in a speculative step.
EXPECTED = [
    (SpeculationPlan(**dict(zip(FIELDS, plan, strict=True))), rows, slots)
    for *plan, rows, slots in [
        ("eagle", 3, 1, 4, (4, 4), (1, 5)),
        ("eagle", 1, 1, 2, (2, 2), (1, 3)),
        ("eagle", 3, 4, 13, (13, 13), (1, 14)),
        ("eagle", 3, 4, 4, (4, 4), (1, 9)),  # drafting writes 1 + 2 * 4
        ("eagle", 1, 6, 3, (3, 6), (1, 4)),
        ("multi_layer_eagle", 3, 1, 4, (6, 6), (3, 7)),
        ("frozen_kv_mtp", 3, 1, 4, (0, 4), (0, 4)),
        ("frozen_kv_mtp", 2, 4, 9, (0, 9), (0, 9)),
        ("frozen_kv_mtp", 1, 8, 2, (0, 8), (0, 2)),
    ]
]


@pytest.mark.parametrize(("plan", "rows", "slots"), EXPECTED)
def test_rows_and_slots_follow_from_the_plan(
    plan: SpeculationPlan, rows: tuple[int, int], slots: tuple[int, int]
):
    assert (plan.num_extend_rows, plan.num_rows_per_sequence) == rows
    assert (plan.kv_lookahead, plan.num_reserved_tokens) == slots
    assert plan.extends is (plan.algorithm != "frozen_kv_mtp")
    layers = plan.num_draft_steps if plan.algorithm == "multi_layer_eagle" else 1
    assert plan.num_layers == layers


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"num_draft_steps": 0}, "num_draft_steps=0, draft_topk=1: need at least 1"),
        ({"num_draft_steps": 3, "topk": 0}, "num_draft_steps=3, draft_topk=0: need at least 1"),
        ({"num_draft_steps": -1}, "need at least 1"),
        ({"num_draft_steps": 3, "num_draft_tokens": 3}, "need 4 to 4, the last token included"),
        ({"num_draft_steps": 3, "num_draft_tokens": 5}, "need 4 to 4, the last token included"),
        # Less than a path: its last drafts could never be accepted.
        ({"num_draft_steps": 3, "topk": 2, "num_draft_tokens": 3}, "need 4 to 11"),
        ({"num_draft_steps": 3, "topk": 2, "num_draft_tokens": 12}, "need 4 to 11"),
        ({"num_draft_steps": 1, "topk": 2, "num_draft_tokens": 4}, "need 2 to 3"),
        ({"num_draft_steps": 3, "topk": 2, "num_draft_tokens": -1}, "num_draft_tokens=-1"),
        ({"num_draft_steps": 64}, "num_draft_tokens=65 with num_draft_steps=64 and draft_topk=1"),
        ({"num_draft_steps": 16, "topk": 4}, f"need 17 to {MAX_DRAFT_TOKENS}"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(given: dict[str, int], problem: str):
    with pytest.raises(ValueError, match=re.escape(problem)):
        SpeculationPlan(algorithm="eagle", **given)


def test_a_draft_model_with_a_layer_for_each_step_drafts_chains_only():
    with pytest.raises(ValueError, match=r"draft_topk=2: .* drafts a chain; set 1"):
        SpeculationPlan(algorithm="multi_layer_eagle", num_draft_steps=3, topk=2)


def test_the_longest_chain_that_fits_is_taken():
    steps = MAX_DRAFT_TOKENS - 1
    plan = SpeculationPlan(algorithm="eagle", num_draft_steps=steps)
    assert plan.num_draft_tokens == MAX_DRAFT_TOKENS


def test_a_plan_does_not_change():
    plan = SpeculationPlan(algorithm="eagle", num_draft_steps=3)
    with pytest.raises(FrozenInstanceError):
        plan.topk = 2  # type: ignore[misc]


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize(("plan", "rows", "slots"), EXPECTED)
def test_spilled_tokens_are_all_that_a_step_writes_where_a_row_has_no_block(
    plan: SpeculationPlan, rows: tuple[int, int], slots: tuple[int, int], block_size: int
):
    """Every phase written out, at every place in a block that a row's last token can have."""
    most = 0
    for length in range(1, 2 * block_size + 1):  # its last token is still to run
        ends = [length - 1 + plan.num_draft_tokens]  # verify
        if plan.algorithm == "eagle":
            ends.append(length + (plan.num_draft_steps - 1) * plan.topk)  # draft
        if plan.algorithm != "frozen_kv_mtp":
            ends.append(length + rows[0])  # draft-extend
            ends.append(length + plan.num_layers)  # of a step that is not speculative
        held = -(-length // block_size)
        most = max(most, -(-max(ends) // block_size) - held)
    assert most == -(-plan.num_spilled_tokens // block_size)
