"""If these fail, executors that do not fit together hang in their first collective call."""

from typing import Any

import pytest

from protos.executor.v1 import executor_pb2 as pb
from router.errors import GroupMismatch
from router.executors.formation import Member, check_group, describe_group
from router.scheduling.step import SpeculationShape
from tests.router.support.peers import description


def make_member(
    dp_rank: int,
    attn_tp_rank: int = 0,
    *,
    dp_size: int = 2,
    attn_tp_size: int = 1,
    agreement: dict[str, str] | None = None,
    **fields: Any,
) -> Member:
    agreement = {"block_size": "16", "dtype": "bfloat16", **(agreement or {})}
    defaults = {
        "model": pb.ModelInfo(max_model_len=256, eos_token_ids=[2, 3], block_size=16),
        "graph_sizes": pb.GraphSizes(decode=[1, 8], extend=[64]),
        "agreement_digest": repr(sorted(agreement.items())).encode(),
    }
    told = description(
        dp_rank, dp_size, attn_tp_rank, attn_tp_size, agreement=agreement, **{**defaults, **fields}
    )
    return Member(f"host{dp_rank}{attn_tp_rank}:9000", told)


def test_members_that_agree_and_fill_every_place_are_a_group() -> None:
    check_group([make_member(0), make_member(1)])
    check_group([make_member(d, t, attn_tp_size=2) for d in (0, 1) for t in (0, 1)])


def test_a_mismatch_names_two_members_the_field_and_both_values() -> None:
    members = [make_member(0), make_member(1, agreement={"dtype": "float32"})]
    with pytest.raises(GroupMismatch) as error:
        check_group(members)
    message = str(error.value)
    for part in ("host00:9000", "dp_rank 0", "host10:9000", "dp_rank 1"):
        assert part in message
    assert "dtype=bfloat16" in message
    assert "dtype=float32" in message


def test_a_field_that_one_member_lacks_is_a_mismatch() -> None:
    with pytest.raises(GroupMismatch, match=r"new_field=\(nothing\).*new_field=1"):
        check_group([make_member(0), make_member(1, agreement={"new_field": "1"})])
    with pytest.raises(GroupMismatch, match=r"new_field=1.*new_field=\(nothing\)"):
        check_group([make_member(0, agreement={"new_field": "1"}), make_member(1)])


def test_digests_that_differ_alone_are_a_mismatch() -> None:
    with pytest.raises(GroupMismatch, match="not of one release"):
        check_group([make_member(0), make_member(1, agreement_digest=b"other")])


def test_members_with_other_windows_are_a_mismatch() -> None:
    with pytest.raises(GroupMismatch, match=r"host00.*kv_window=128.*host10.*kv_window=0"):
        check_group([make_member(0, kv_window=128), make_member(1)])


@pytest.mark.parametrize("ranks", [(0, 0), (0,), (0, 1, 1), (0, 2), (1, 2)])
def test_each_place_must_be_taken_once(ranks: tuple[int, ...]) -> None:
    with pytest.raises(GroupMismatch, match="dp_size=2 and attn_tp_size=1") as error:
        check_group([make_member(rank) for rank in ranks])
    assert str([(rank, 0) for rank in ranks]) in str(error.value)


def test_a_missing_attention_tp_peer_is_noticed() -> None:
    places = [(0, 0), (0, 1), (1, 0)]
    with pytest.raises(GroupMismatch, match="start each place once"):
        check_group([make_member(*place, attn_tp_size=2) for place in places])


def test_a_group_is_as_large_as_its_smallest_members_allow() -> None:
    members = [
        make_member(0, 0, attn_tp_size=2, num_kv_blocks=64),
        make_member(0, 1, attn_tp_size=2, num_kv_blocks=40),
        make_member(1, 0, attn_tp_size=2, num_kv_blocks=11),
        make_member(1, 1, attn_tp_size=2, num_kv_blocks=33, num_rows=5),
    ]
    info = describe_group(members, epoch=7, model_name="moe")
    assert info.epoch == 7
    assert info.addresses == ("host00:9000", "host10:9000")
    assert (info.shape.dp_size, info.shape.attn_tp_size) == (2, 2)
    assert info.shape.num_blocks == (40, 11)
    assert info.shape.rows_per_rank == 5
    assert info.shape.max_model_len == info.model.max_model_len == 160  # 10 blocks of 16
    assert (info.shape.graph_sizes.decode, info.shape.graph_sizes.extend) == ((1, 8), (64,))
    assert info.model.name == "moe"
    assert info.model.eos_token_ids == (2, 3)


def test_a_group_with_windows_takes_sequences_that_fit_with_both_lists_of_blocks() -> None:
    member = make_member(0, dp_size=1, kv_window=33, num_kv_blocks=12)
    info = describe_group([member], epoch=1, model_name="moe")
    assert info.shape.kv_window == 33
    assert info.shape.max_model_len == 8 * 16  # of 11 blocks, 3 are for a window
    member.description.num_kv_blocks = 2
    with pytest.raises(GroupMismatch, match=r"host00:9000.*the smallest KV pool holds 0 tokens"):
        describe_group([member], epoch=1, model_name="moe")


def test_a_budget_below_one_step_of_decodes_is_refused_with_the_executor_s_name() -> None:
    member = make_member(0, dp_size=1)
    member.description.budget.max_num_batched_tokens = 7
    with pytest.raises(GroupMismatch, match=r"host00:9000.*max_num_batched_tokens=7"):
        describe_group([member], epoch=1, model_name="moe")


# ---- drafts


DRAFTS: dict[str, Any] = {
    "algorithm": "eagle",
    "num_draft_tokens": 4,
    "num_draft_steps": 3,
    "topk": 1,
    "num_reserved_tokens": 5,
    "kv_lookahead": 1,
    "extends": True,
}


def drafting_member(**fields: Any) -> Member:
    return make_member(0, dp_size=1, speculation=pb.Speculation(**{**DRAFTS, **fields}))


def test_a_group_without_a_draft_model_has_no_speculation() -> None:
    info = describe_group([make_member(0, dp_size=1)], epoch=1, model_name="moe")
    assert info.shape.speculation is None


def test_a_group_drafts_as_its_executors_say() -> None:
    info = describe_group([drafting_member()], epoch=1, model_name="moe")
    assert info.shape.speculation == SpeculationShape(**DRAFTS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_draft_tokens": 0}, "host00:9000.*num_draft_tokens=0.*need 2 or more"),
        ({"num_draft_steps": 7}, "host00:9000.*num_draft_steps=7.*need 1 to 3"),
        ({"num_reserved_tokens": 0}, "host00:9000.*num_reserved_tokens=0"),
    ],
)
def test_drafts_that_cannot_be_planned_are_refused_with_the_executor_s_name(
    fields: dict[str, int], message: str
) -> None:
    with pytest.raises(GroupMismatch, match=message):
        describe_group([drafting_member(**fields)], epoch=1, model_name="moe")
