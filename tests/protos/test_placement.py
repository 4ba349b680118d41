"""If this fails, experts are lost, held twice, or loaded without need when a group changes its shape."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from protos.executor.placement import GHOST, SlotMap, num_slots_for, place_evenly, place_experts

MOST = 64
ALL = range(1, MOST + 1)


def experts_in(slots: tuple[int, ...]) -> list[int]:
    return [expert for expert in slots if expert != GHOST]


def assert_even(placed: SlotMap, num_experts: int) -> None:
    """Checks that every expert has one slot, and every rank its share."""
    counts = [len(experts_in(slots)) for slots in placed]
    assert sorted(x for slots in placed for x in experts_in(slots)) == list(range(num_experts))
    assert {*counts} <= {num_experts // len(placed), -(-num_experts // len(placed))}


def num_loaded(held: dict[int, tuple[int, ...]], members: list[int], placed: SlotMap) -> int:
    """Returns the experts that come into slots in which they are not."""
    return sum(
        expert != GHOST and old != expert
        for member, new in zip(members, placed, strict=True)
        for old, expert in zip(held.get(member, (GHOST,) * len(new)), new, strict=True)
    )


def changes(world_size: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yields members before and after: one lost, one new, half lost, twice as many, one replaced."""
    before, rng = list(range(world_size)), random.Random(world_size)
    lost = rng.choice(before)
    without = [member for member in before if member != lost]
    if without:
        yield before, without
        yield before, sorted(rng.sample(before, -(-world_size // 2)))
    yield before, [*before, world_size]
    yield before, [*before, *range(world_size, 2 * world_size)]
    yield before, [*without, world_size]


def test_new_groups_hold_contiguous_runs_of_even_lengths():
    assert place_evenly(8, 3) == ((0, 1, 2), (3, 4, 5), (6, 7, GHOST))
    assert place_evenly(8, 4) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert place_evenly(2, 3) == ((0,), (1,), (GHOST,))
    assert place_evenly(0, 2) == ((), ())
    for world_size in ALL:
        for num_experts in ALL:
            placed = place_evenly(num_experts, world_size)
            assert_even(placed, num_experts)
            assert {len(slots) for slots in placed} == {num_slots_for(num_experts, world_size)}
            in_order = [expert for slots in placed for expert in experts_in(slots)]
            assert in_order == list(range(num_experts))
            assert all(GHOST not in slots[: len(experts_in(slots))] for slots in placed)


@pytest.mark.parametrize("world_size", ALL)
def test_a_change_of_members_loads_exactly_the_difference(world_size: int):
    for num_experts in ALL:
        for before, after in changes(world_size):
            num_slots = num_slots_for(num_experts, min(len(before), len(after)))
            sizes = {"num_slots": num_slots, "num_experts": num_experts}
            held = dict(zip(before, place_experts({}, before, **sizes), strict=True))
            placed = place_experts(held, after, **sizes)
            assert_even(placed, num_experts)
            assert placed == place_experts(held, after, **sizes)
            # No even map keeps more: a member keeps its floor at most, some one more.
            floor, num_more = divmod(num_experts, len(after))
            counts = [len(experts_in(held.get(member, ()))) for member in after]
            most = sum(min(count, floor) for count in counts)
            most += min(num_more, sum(count > floor for count in counts))
            assert num_loaded(held, after, placed) == num_experts - most


def test_a_group_that_shrinks_and_grows_again_keeps_what_it_can():
    sizes = {"num_slots": 4, "num_experts": 8}
    three = place_experts({}, "abc", **sizes)
    assert three == ((0, 1, 2, GHOST), (3, 4, 5, GHOST), (6, 7, GHOST, GHOST))
    held = dict(zip("abc", three, strict=True))
    two = place_experts(held, "ab", **sizes)
    assert two == ((0, 1, 2, 6), (3, 4, 5, 7))
    held |= dict(zip("ab", two, strict=True), c=(GHOST, 7, GHOST, 6))  # as it is staged
    assert place_experts(held, "abc", **sizes) == (*three[:2], (GHOST, 7, GHOST, 6))
    del held["c"]
    assert place_experts(held, "abd", **sizes) == three


def test_whatever_members_hold_every_expert_gets_a_slot():
    rng = random.Random(0)
    for _ in range(200):
        assert_placed(rng)


def assert_placed(rng: random.Random) -> None:
    num_experts, world_size = rng.randint(1, MOST), rng.randint(1, MOST)
    num_slots = num_slots_for(num_experts, world_size) + rng.randint(0, 3)
    members = rng.sample(range(2 * world_size), world_size)
    held = {  # too many, twice the same, and some of a model with more
        member: tuple(rng.randint(GHOST, num_experts + 2) for _ in range(num_slots + 1))
        for member in rng.sample(members, rng.randint(0, world_size))
    }
    placed = place_experts(held, members, num_slots=num_slots, num_experts=num_experts)
    assert_even(placed, num_experts)
    assert Counter(map(len, placed)) == {num_slots: world_size}


def test_too_few_slots_are_refused():
    with pytest.raises(ValueError, match=r"num_slots=2: 8 experts on 3 ranks need 3 slots each"):
        place_experts({}, "abc", num_slots=2, num_experts=8)
