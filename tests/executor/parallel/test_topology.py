"""If this fails, an expert or a share of one is on two executors or on none."""

from dataclasses import replace

import pytest

from executor.parallel.layout import (
    Topology,
    require_attn_tp_gather,
    require_gathered_buffer,
    require_mlp_tp_gather,
    share_of,
)
from protos.executor.placement import GHOST
from tests.executor.support.ranks.rank_threads import topologies


def places(dp_size: int, attn_tp_size: int, ep_size: int | None = None) -> list[Topology]:
    """Every place of a group, by world rank."""
    return [replace(place, ep_size=ep_size) for place in topologies(dp_size, attn_tp_size)]


def test_world_ranks_count_up_through_attention_tp_first():
    assert [place.world_rank for place in places(3, 2)] == list(range(6))


@pytest.mark.parametrize("num_experts", [24, 8, 13, 5])
@pytest.mark.parametrize("ep_size", [1, 2, 3, 4, 6, 12, None])
def test_every_share_of_every_expert_is_on_exactly_one_executor(
    ep_size: int | None, num_experts: int
):
    group = places(4, 3, ep_size)
    slots = [(place, place.expert_slots(num_experts)) for place in group]
    held = [(expert, place.moe_tp_rank) for place, own in slots for expert in own]
    assert sorted(pair for pair in held if pair[0] != GHOST) == [
        (expert, share) for expert in range(num_experts) for share in range(group[0].moe_tp_size)
    ]
    assert len({len(own) for _, own in slots}) == 1


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"dp_size": 0}, "dp_size=0: need at least 1"),
        ({"attn_tp_size": 0}, "attn_tp_size=0: need at least 1"),
        ({"dp_rank": 4, "dp_size": 4}, "dp_rank=4: with dp_size=4 it is 0 to 3"),
        ({"attn_tp_rank": -1, "attn_tp_size": 2}, "attn_tp_rank=-1: with attn_tp_size=2"),
        ({"dp_size": 6, "ep_size": 4}, "ep_size=4 .* = 6 executors: use 3 or 6"),
        ({"dp_size": 6, "ep_size": 0}, "ep_size=0 .* use 1$"),
        ({"dp_size": 6, "ep_size": 9}, "ep_size=9 .* use 6$"),
    ],
)
def test_a_place_that_cannot_be_is_refused_with_what_could(sizes: dict[str, int], problem: str):
    with pytest.raises(ValueError, match=problem):
        Topology(**sizes)


def test_shares_are_equal_runs_and_an_uneven_size_is_named():
    assert [share_of("heads", 6, rank, 3) for rank in range(3)] == [
        range(2),
        range(2, 4),
        range(4, 6),
    ]
    with pytest.raises(ValueError, match=r"num_attention_heads=6 .* 4 executors: use 3 or 6"):
        share_of("num_attention_heads", 6, 0, 4)


@pytest.mark.parametrize(
    ("dp_size", "attn_tp_size", "gathers_experts", "splits_dense", "mlp", "attention"),
    [
        (1, 1, False, False, False, False),
        (1, 1, True, True, False, False),
        (2, 1, False, False, False, False),
        (2, 1, True, False, True, False),
        (2, 1, False, True, True, False),
        (2, 1, True, True, True, False),
        (1, 2, False, False, False, True),
        (1, 2, True, True, False, True),
        (2, 2, False, False, False, True),
        (2, 2, True, False, True, True),
        (2, 2, False, True, True, True),
        (2, 2, True, True, True, True),
    ],
)
def test_rows_are_gathered_from_dp_ranks_for_mlps_and_from_attention_tp_for_attention(
    dp_size: int,
    attn_tp_size: int,
    gathers_experts: bool,
    splits_dense: bool,
    mlp: bool,
    attention: bool,
):
    layers = {"gathers_experts": gathers_experts, "splits_dense": splits_dense}
    for place in places(dp_size, attn_tp_size):
        assert require_mlp_tp_gather(place, **layers) is mlp
        assert require_attn_tp_gather(place) is attention
        assert require_gathered_buffer(place, **layers) is (mlp or attention)
