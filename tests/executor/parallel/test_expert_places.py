"""If this fails, rows go to other ranks or slots than those that hold their experts."""

import torch

from executor.parallel.expert_places import ExpertPlaces, look_up
from executor.parallel.layout import Topology
from protos.executor.placement import GHOST, place_experts, places_crc32, places_of

TABLES = ("rank_of_expert", "route_of_expert", "slot_of_expert")


def tables(places: ExpertPlaces) -> list[list[int]]:
    return [getattr(places, name).tolist() for name in TABLES]


def test_tables_of_an_uneven_group_are_as_documented():
    places = ExpertPlaces.of(Topology(dp_rank=1, dp_size=3), 8)
    assert (places.num_experts, places.num_slots, places.ep_size) == (8, 3, 3)
    assert tables(places) == [
        [0, 0, 0, 1, 1, 1, 2, 2, 3],
        [0, 1, 2, 3, 4, 5, 6, 7, 3],
        [3, 3, 3, 0, 1, 2, 3, 3, 3],
    ]
    ids = torch.tensor([[0, 3], [8, 5]], dtype=torch.int32)
    assert look_up(places.slot_of_expert, ids).tolist() == [[3, 0], [3, 2]]
    assert not places.is_in_order


def test_another_map_is_written_where_the_first_one_was():
    sizes = {"num_slots": 3, "num_experts": 8}
    before = place_experts({}, "abc", **sizes)
    held = dict(zip("abc", before, strict=True))
    after = place_experts(held, "adc", **sizes)
    shuffled = (after[2], after[0], after[1])
    places = ExpertPlaces(before, 1)
    at = [getattr(places, name).data_ptr() for name in TABLES]
    places.write(shuffled, 1)
    assert tables(places) == tables(ExpertPlaces(shuffled, 1))
    assert at == [getattr(places, name).data_ptr() for name in TABLES]


def test_ranks_that_share_all_experts_need_no_table():
    assert ExpertPlaces.of(Topology(dp_rank=1, dp_size=2, ep_size=1), 8).is_in_order
    places = ExpertPlaces(((1, 0),), 0)
    assert not places.is_in_order, "slots may be in any order"
    assert places.slot_of_expert.tolist() == [1, 0, 2]


def test_members_of_a_group_have_one_checksum_and_of_another_map_another():
    slot_map = place_experts({}, "abc", num_slots=3, num_experts=8)
    with_more_slots = tuple((*slots, GHOST) for slots in slot_map)
    expected = places_crc32(places_of(slot_map))
    assert {ExpertPlaces(slot_map, rank).crc32 for rank in range(3)} == {expected}
    assert ExpertPlaces(with_more_slots, 1).crc32 == expected
    assert ExpertPlaces((slot_map[1], slot_map[0], slot_map[2]), 1).crc32 != expected
