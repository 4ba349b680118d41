"""A step that is refused late has already corrupted a KV cache, so every check comes first.

Each bad step below differs from a good one in one thing, must be refused with the field at fault,
and must leave the executor as it was.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from executor.batch.read_step import RowProgress, StepLimits, read_step
from executor.budget.token_budget import TokenBudget
from executor.errors import InvalidStep
from executor.parallel.layout import DpPaddingMode
from protos.executor.v1 import executor_pb2 as pb
from tests.executor.support.steps import (
    BadStep,
    Change,
    bad_agreements,
    bad_columns,
    change_agreement,
    change_mode,
    change_sequences,
    decode_part,
    each_bad,
    idle_part,
    limits_of,
    prompt_part,
    refusal,
    row_starts,
    sequences,
    step,
)


def limits() -> StepLimits:
    budget = TokenBudget(max_num_batched_tokens=20, max_num_seqs=8, max_num_logits=8, dp_size=2)
    return limits_of(budget, num_kv_blocks=10, max_model_len=32)


def progress() -> RowProgress:
    """Rows 2 and 3 live: row 2 with 3 blocks and a token, row 3 with 1 block and none."""
    rows = RowProgress.empty(np.zeros(8, dtype=np.int64))
    rows.is_live[[2, 3]] = True
    rows.has_sampled[2] = True
    rows.num_blocks[[2, 3]] = [3, 1]
    return rows


def good_step() -> pb.StepRequest:
    """Row 5 starts with a prompt of 6, of which 2 are scored; row 2 decodes; row 3 is chunked."""
    part = pb.RankStep(
        dp_rank=1,
        forward_mode=pb.FORWARD_MODE_EXTEND,
        starts=row_starts(rows=[5], temperature=[0.5], seed=[2**64 - 1]),
        sequences=sequences(
            rows=[5, 2, 3],
            num_tokens=[6, 1, 3],
            num_computed_tokens=[0, 12, 4],
            token_ids=[1, 2, 3, 4, 5, 6, -1, 7, 8, 9],
            num_new_blocks=[2, 1, 1],
            new_block_ids=[4, 5, 6, 7],
            samples=[1, 1, 0],
            num_scored=[2, 0, 0],
            scored_ids=[2, 3],
        ),
    )
    return step(1, part, num_tokens=[0, 10], num_logits=[0, 4])


def test_a_good_step_reads_as_it_was_written():
    columns = read_step(good_step(), limits(), progress())

    assert columns.rows.tolist() == [5, 2, 3]
    assert columns.num_kept_blocks.tolist() == [0, 3, 1]
    assert columns.logits_indices.tolist() == [0, 1, 5, 6]
    assert columns.logits_sequence.tolist() == [0, 0, 0, 1]
    assert columns.is_sampled.tolist() == [False, False, True, True]
    assert columns.layout.padding_mode is DpPaddingMode.MAX_LEN
    assert columns.layout.num_tokens == 10
    assert columns.starts is not None
    assert columns.starts.parameters["seed"].tolist() == [2**64 - 1]
    assert columns.starts.parameters["top_p"].tolist() == [1.0]


def decoding(**columns: Sequence[int]) -> pb.RankStep:
    mode = pb.FORWARD_MODE_DECODE
    return pb.RankStep(dp_rank=1, forward_mode=mode, sequences=sequences(**columns))


def test_empty_columns_mean_one_sampled_token_each():
    part = decoding(rows=[2], num_computed_tokens=[11], token_ids=[-1])
    columns = read_step(step(1, part, num_tokens=[5, 1]), limits(), progress())
    assert columns.num_tokens.tolist() == [1]
    assert columns.is_sampled.tolist() == [True]
    assert columns.num_new_blocks.tolist() == [0]


def test_no_token_ids_stand_for_each_row_s_last_sampled_token():
    rows = progress()
    rows.has_sampled[3] = True
    part = decoding(rows=[3, 2], num_computed_tokens=[3, 11])
    columns = read_step(step(1, part, num_tokens=[5, 2]), limits(), rows)
    assert columns.token_ids.tolist() == [-1, -1]


def test_an_idle_part_reads_as_no_sequences():
    columns = read_step(
        step(1, idle_part(1), num_tokens=[5, 0], has_extend=True), limits(), progress()
    )
    assert columns.rows.size == columns.token_ids.size == columns.logits_indices.size == 0
    assert columns.layout.global_num_tokens_cpu == (5, 0)


@pytest.mark.parametrize(
    "columns",
    [
        {"num_tokens": [2], "token_ids": [7, -1]},
        {"num_tokens": [2], "token_ids": [-1, 7]},
        {"token_ids": [-1], "samples": [0]},
    ],
    ids=["behind another", "before another", "no sample"],
)
def test_a_last_sampled_token_that_is_not_all_that_its_sequence_runs_and_samples_after_is_refused(
    columns: dict[str, Sequence[int]],
):
    count = len(columns["token_ids"])
    part = decoding(rows=[2], num_computed_tokens=[12 - count], **columns)
    part.forward_mode = pb.FORWARD_MODE_EXTEND
    request = step(
        1, part, num_tokens=[0, count], num_logits=[0, 1 - (columns.get("samples") == [0])]
    )
    error = refusal(request, limits(), progress)
    assert error.field == f"{SEQUENCES}.token_ids"
    assert str(error) == "token_ids: -1 for row 2, which runs more than it, or does not sample"


def change_starts(**columns: list[float]) -> Change:
    return lambda request: request.ranks[0].starts.MergeFrom(row_starts(**columns))


SEQUENCES, STARTS, MODE = "ranks[0].sequences", "ranks[0].starts", "ranks[0].forward_mode"
NAN, INF = float("nan"), float("inf")

BAD_COLUMNS = [
    ("rows", [5, 2, 8], "has 8; it must be from 0 to 7"),
    ("rows", [5, 2, -1], "has -1"),
    ("rows", [5, 2, 2], "has 2 more than once"),
    ("rows", [5, 2, 1], "row 1 runs without having started"),
    ("rows", [4, 2, 3], "starts without a sequence"),
    ("num_tokens", [6, 0, 3], "has 0; it must be from 1 to"),
    ("num_tokens", [6, 1], "has 8 bytes"),
    ("num_tokens", [6, 1, 14], "max_num_batched_tokens"),
    ("num_tokens", [6, 1, 2**31 - 1], "20"),
    ("num_computed_tokens", [0, 12], "8 bytes"),
    ("num_computed_tokens", [0, -1, 4], "-1"),
    ("num_computed_tokens", [0, 32, 4], "comes to 33; max_model_len is 32"),
    ("token_ids", [1] * 9, "36 bytes"),
    ("token_ids", [1] * 9 + [100], "has 100"),
    ("token_ids", [1] * 9 + [-2], "has -2"),
    ("token_ids", [1] * 9 + [-1], "-1 for row 3"),
    ("token_ids", [-1] + [1] * 9, "-1 for row 5"),
    ("num_new_blocks", [2, 1, -1], "has -1"),
    ("num_new_blocks", [1, 1, 2], "row 5 holds 0 blocks and 1 came; it needs 2 in all"),
    ("num_new_blocks", [2, 2, 0], "row 2 holds 3"),
    ("num_new_blocks", [2, 0, 2], "row 2 holds 3"),
    ("new_block_ids", [4, 5, 6], "12 bytes"),
    ("new_block_ids", [4, 5, 6, 0], "has 0"),
    ("new_block_ids", [4, 5, 6, 10], "has 10"),
    ("samples", [1, 1, 2], "has 2; it must be from 0 to 1"),
    ("samples", [1, 1], "has 2 bytes"),
    ("scored_ids", [2], "4 bytes"),
    ("scored_ids", [2, 100], "has 100"),
]
BAD_STARTS: list[tuple[str, list[float], str]] = [
    ("rows", [8], "has 8"),
    ("rows", [5, 5], "has 5 more than once"),
    ("temperature", [-1.0], "has -1.0"),
    ("temperature", [NAN], "has nan"),
    ("temperature", [INF], "has inf"),
    ("temperature", [0.5, 0.5], "has 8 bytes"),
    ("top_k", [-1], "has -1"),
    ("top_p", [0.0], "must be above 0 and at most 1"),
    ("top_p", [1.1], "must be above 0 and at most 1"),
    ("min_p", [1.1], "must be from 0 to 1"),
    ("repetition_penalty", [0.0], "above 0 and at most 100"),
    ("presence_penalty", [NAN], "nan"),
    ("num_top_logprobs", [101], "must be from 0 to 100"),
    ("prompt_ids", [1], "4 bytes"),
]
BAD_AGREEMENTS: list[tuple[str, object, str]] = [
    ("global_num_tokens", [10], "dp_size is 2"),
    ("global_num_tokens", [0, 9], "says 9"),
    ("global_num_tokens", [21, 10], "global_num_tokens has 21; the budget is 20"),
    ("global_num_tokens", [0, 21], "global_num_tokens has 21; the budget is 20"),  # of its own part
    ("global_num_tokens_for_logprob", [0, 3], "says 3 for this executor's part, which has 4"),
    ("global_num_tokens_for_logprob", [], "has 0 entries"),
    ("has_extend", False, "is not set"),
    ("padding_mode", pb.DP_PADDING_MODE_UNSPECIFIED, "need MAX_LEN or SUM_LEN"),
    ("graph_size", 12, "is not captured: the extend graphs are [4, 8, 16]"),
    ("graph_size", 8, "is below the 10 tokens of a rank"),
    ("graph_size", 16, "a rank has no tokens: then every rank runs eagerly"),
]
BY_SUM = {"global_num_tokens": [3, 10], "padding_mode": pb.DP_PADDING_MODE_SUM_LEN}
NOTHING = pb.RankStep(dp_rank=1, forward_mode=pb.FORWARD_MODE_EXTEND)

BAD_STEPS: list[BadStep] = [
    *bad_columns(BAD_COLUMNS),
    *((change_starts(**{name: x}), f"{STARTS}.{name}", why) for name, x, why in BAD_STARTS),
    *bad_agreements(BAD_AGREEMENTS),
    (lambda r: r.ClearField("ranks"), "ranks", "0 parts"),
    (lambda r: r.ranks.append(r.ranks[0]), "ranks", "2 parts"),
    (lambda r: setattr(r.ranks[0], "dp_rank", 0), "ranks[0].dp_rank", "this executor is DP rank 1"),
    (change_sequences(rows=[5, 2]), f"{SEQUENCES}.num_tokens", "8"),
    (
        lambda r: setattr(r.ranks[0].sequences, "rows", r.ranks[0].sequences.rows + b"\0"),
        f"{SEQUENCES}.rows",
        "has 13 bytes; 3 entries of 4 bytes are 12",
    ),
    (
        lambda r: r.ranks[0].sequences.ClearField("token_ids"),
        f"{SEQUENCES}.token_ids",
        "-1 for row 5",
    ),
    (
        change_sequences(num_scored=[7, 0, 0], scored_ids=[2] * 7),
        f"{SEQUENCES}.num_scored",
        "fewer tokens",
    ),
    (
        change_sequences(num_scored=[6, 0, 2], scored_ids=[2] * 8),
        f"{SEQUENCES}.num_scored",
        "max_num_logits is 8",
    ),
    (change_starts(num_suppressed_ids=[1]), f"{STARTS}.suppressed_ids", "0 bytes"),
    (change_starts(num_biases=[1], bias_ids=[1]), f"{STARTS}.biases", "0 bytes"),
    (change_starts(num_allowed_ids=[1], allowed_ids=[100]), f"{STARTS}.allowed_ids", "has 100"),
    (change_starts(num_logprob_ids=[65]), f"{STARTS}.num_logprob_ids", "from 0 to 64"),
    (change_starts(banned_ids=[1]), f"{STARTS}.banned_ids", "4 bytes"),
    (change_starts(num_banned=[193]), f"{STARTS}.num_banned", "from 0 to 192"),
    (change_starts(num_banned=[1], banned_lens=[1]), f"{STARTS}.banned_lens", "from 2 to 8"),
    (change_starts(num_biases=[1], bias_ids=[100]), f"{STARTS}.bias_ids", "has 100"),
    (change_starts(num_biases=[1], bias_ids=[1], biases=[NAN]), f"{STARTS}.biases", "finite"),
    (change_starts(grammar_of=[1]), f"{STARTS}.grammar_of", "has 1; there are 0 grammars"),
    (
        lambda r: r.ranks[0].starts.grammars.append("root ::= 'a'"),
        f"{STARTS}.grammars",
        "this executor takes none",
    ),
    (change_mode(pb.FORWARD_MODE_DECODE), MODE, "every sequence runs 1 token"),
    (change_mode(pb.FORWARD_MODE_IDLE), MODE, "3 sequences"),
    (change_mode(pb.FORWARD_MODE_UNSPECIFIED), MODE, "need IDLE, DECODE or EXTEND"),
    (lambda r: r.ranks[0].CopyFrom(NOTHING), MODE, "0 sequences"),
    (
        change_agreement(graph_size=16, **BY_SUM),
        "agreement.graph_size",
        "needs padding_mode MAX_LEN",
    ),
]


@each_bad(BAD_STEPS)
def test_a_bad_step_is_refused_by_field_and_changes_nothing(
    spoil: Change, field: str, problem: str
):
    request = good_step()
    spoil(request)
    error = refusal(request, limits(), progress)
    assert error.field == field, str(error)
    assert problem in str(error)


def test_a_graph_size_counts_tokens_if_any_rank_extends_and_sequences_if_none_does():
    request = good_step()
    request.agreement.global_num_tokens[0] = 3
    request.agreement.graph_size = 16
    layout = read_step(request, limits(), progress()).layout
    assert (layout.graph_size, layout.has_extend, layout.num_rows) == (16, True, 16)

    request = step(1, decode_part(2, 11, dp_rank=1), num_tokens=[3, 1])
    request.agreement.graph_size = 4
    layout = read_step(request, limits(), progress()).layout
    assert (layout.graph_size, layout.has_extend, layout.num_rows) == (4, False, 4)

    request.agreement.global_num_tokens[0] = 0  # without prompts, idle ranks replay it too
    assert read_step(request, limits(), progress()).layout.graph_size == 4

    request.agreement.graph_size = 16
    with pytest.raises(InvalidStep, match=r"the decode graphs are \[1, 2, 4\]"):
        read_step(request, limits(), progress())


def test_a_row_that_starts_has_no_last_token_of_the_sequence_before_it():
    part = prompt_part(2, [-1], [1], dp_rank=1)
    with pytest.raises(InvalidStep, match="-1 for row 2"):
        read_step(step(1, part, num_tokens=[0, 1]), limits(), progress())


# ---- second lists

WINDOWED = replace(limits(), kv_window=5)


def windowed_step(window_ids: Sequence[int]) -> pb.StepRequest:
    """Returns the good step, in which row 5 begins with 12 tokens of a prefix."""
    request = good_step()
    columns = {"num_computed_tokens": [12, 12, 4], "num_new_blocks": [5, 1, 1]}
    change_sequences(**columns, new_block_ids=range(1, 8))(request)
    change_sequences(new_window_block_ids=window_ids)(request)
    return request


@pytest.mark.parametrize("prefix", [[0, 0], [8, 0], [8, 9]])
def test_a_second_list_may_lack_blocks_wholly_before_the_first_token_s_window(prefix: list[int]):
    ids = [*prefix, 1, 2, 3, 4, 5]
    columns = read_step(windowed_step(ids), WINDOWED, progress())
    assert columns.new_block_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, *ids]


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ([], "has 0 bytes; 7 entries of 4 bytes are 28"),
        ([1] * 6, "has 24 bytes; 7 entries of 4 bytes are 28"),
        ([1] * 6 + [10], "has 10; it must be from 0 to 9"),
        ([1] * 6 + [-1], "has -1"),
        ([0, 0, 0, 1, 2, 3, 4], "0 in column 2 of row 5, whose first token sees position 8"),
        ([0, 0, 1, 0, 2, 3, 4], "0 in column 3 of row 5"),
        ([0, 0, 1, 2, 3, 0, 4], "0 in column 3 of row 2, whose first token sees position 8"),
        ([0, 0, 1, 2, 3, 4, 0], "0 in column 1 of row 3, whose first token sees position 0"),
    ],
)
def test_a_second_list_that_does_not_match_the_first_is_refused(ids: list[int], problem: str):
    error = refusal(windowed_step(ids), WINDOWED, progress)
    assert error.field == f"{SEQUENCES}.new_window_block_ids"
    assert problem in str(error)


def test_a_second_list_for_a_model_with_one_is_refused():
    error = refusal(windowed_step([1] * 7), limits(), progress)
    assert error.field == f"{SEQUENCES}.new_window_block_ids"
    assert "must be empty: this executor's kv_window is 0" in str(error)
