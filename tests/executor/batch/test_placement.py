"""If these fail, an executor takes a place that its group, its experts or its buffers do not fit."""

from typing import Any

import numpy as np
import pytest

from executor.batch.placement import read_placement
from executor.errors import InvalidPlacement
from executor.parallel.layout import Capacity, Topology
from protos.executor.placement import place_evenly
from protos.executor.v1 import executor_pb2 as pb
from tests.executor.support.ranks.elastic import placement_of

CAPACITY = Capacity(attn_tp_rank=1, attn_tp_size=2, max_dp_size=3, min_dp_size=1)  # 4 slots of 8


def changed(**fields: Any) -> pb.Placement:
    """Returns the place of the last of four executors, with other coordinates or experts."""
    message = placement_of(place_evenly(8, 4), 3, attn_tp_size=2)
    for name, value in fields.items():
        if name == "experts":
            message.expert_of_slot = np.array(value, "<i4").tobytes()
        elif name == "expert_slots":
            message.expert_slots = value
        else:
            setattr(message.coordinates, name, value)
    return message


def test_slots_that_the_group_does_not_use_are_ghosts():
    placement = read_placement(changed(), CAPACITY, 8)
    assert placement.topology == Topology(dp_rank=1, dp_size=2, attn_tp_rank=1, attn_tp_size=2)
    assert placement.slots == (6, 7, -1, -1)
    assert placement.slot_map[0] == (0, 1, -1, -1)


def test_a_dense_model_has_no_slots():
    message = placement_of(((), ()), 1)
    placement = read_placement(message, Capacity(max_dp_size=2, min_dp_size=1), 0)
    assert placement.slots == ()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"attn_tp_rank": 0}, "attn_tp_rank=0: this executor has 1"),
        ({"attn_tp_size": 1}, "attn_tp_size=1: this executor has 2"),
        ({"dp_size": 0}, "dp_size=0: this executor is for 1 to 3"),
        ({"dp_size": 4}, "dp_size=4: this executor is for 1 to 3"),
        ({"dp_rank": 2}, "dp_rank=2: it is 0 to 1"),
        ({"ep_size": 2}, "ep_size=2: every executor of the group is an EP rank, so 4"),
        ({"ep_rank": 1}, "ep_rank=1: every executor of the group is an EP rank, so 3"),
        ({"expert_slots": 5}, "expert_slots=5: this executor has 4"),
        ({"experts": [*range(7)]}, "28 bytes: 4 executors with 2 slots each have 32"),
        ({"experts": [*range(7), 8]}, "has expert 8: there are 8, from 0"),
        ({"experts": [*range(7), -2]}, "has expert -2: there are 8, from 0"),
        ({"experts": [*range(7), -1]}, "has expert 7 in 0 slots: need it in one"),
        ({"experts": [*range(7), 0]}, "has expert 0 in 2 slots: need it in one"),
    ],
)
def test_what_an_executor_cannot_take_is_refused_by_name(fields: dict[str, Any], problem: str):
    with pytest.raises(InvalidPlacement, match=problem) as caught:
        read_placement(changed(**fields), CAPACITY, 8)
    assert str(caught.value).startswith(str(caught.value.field).removeprefix("placement."))
