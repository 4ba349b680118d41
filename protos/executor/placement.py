"""Placement of experts: the slots of each EP rank, and the expert in each of them.

    8 experts, 3 ranks of 3 slots    rank 0  [0 1 2]    rank 1  [3 4 5]    rank 2  [6 7 -]

All ranks have as many slots, and those without an expert are ghosts: no row is ever routed there, and
their weights are never read. So any number of experts goes on any number of ranks.
"""

import struct
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar
from zlib import crc32

GHOST = -1  # in place of an expert

SlotMap: TypeAlias = tuple[tuple[int, ...], ...]  # the expert in each slot of each rank, or GHOST
Member = TypeVar("Member", bound=Hashable)


def places_of(slot_map: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Returns the EP rank and the slot of each expert, by its number."""
    places = {
        expert: (rank, slot)
        for rank, slots in enumerate(slot_map)
        for slot, expert in enumerate(slots)
        if expert != GHOST
    }
    return [places[expert] for expert in sorted(places)]


def places_crc32(places: Iterable[tuple[int, int]]) -> int:
    """Returns the checksum of experts' places (see JoinResponse).

    Args:
        places: As of `places_of`.
    """
    return crc32(b"".join(struct.pack("<ii", *place) for place in places))


def num_slots_for(num_experts: int, num_ranks: int) -> int:
    """Returns the slots that each of so many ranks needs."""
    return -(-num_experts // num_ranks)


def place_evenly(num_experts: int, num_ranks: int) -> SlotMap:
    """Returns the map of ranks that hold nothing yet: contiguous runs, the longer ones first."""
    slots = num_slots_for(num_experts, num_ranks)
    return place_experts({}, range(num_ranks), num_slots=slots, num_experts=num_experts)


def place_experts(
    held: Mapping[Member, Sequence[int]],
    members: Sequence[Member],
    *,
    num_slots: int,
    num_experts: int,
) -> SlotMap:
    """Returns where experts are to be, such that as few as possible are loaded.

    Every rank gets the floor or the ceiling of its share, the ceiling those that hold most. Up to that a
    member keeps what it holds, where it holds it; where several hold an expert, the first one with room.
    The others go to the members in order. The same arguments always give the same map.

    Args:
        held: The experts in each member's slots, or GHOST; members that hold nothing may be left out.
        members: In order of rank, each once.
        num_slots: Slots of each; what is held in later ones does not count.
        num_experts: They are 0 to this, exclusively.

    Raises:
        ValueError: They do not fit. Says how many slots it takes.
    """
    least = num_slots_for(num_experts, len(members))
    if num_slots < least:
        raise ValueError(
            f"num_slots={num_slots}: {num_experts} experts on {len(members)} ranks need {least} slots "
            f"each, or more ranks"
        )
    left = set(range(num_experts))
    ranks: list[dict[int, int]] = [{} for _ in members]  # expert by slot

    def keep(most: Sequence[int]) -> None:
        for member, own, room in zip(members, ranks, most, strict=True):
            for slot, expert in enumerate(held.get(member, ())[:num_slots]):
                if expert in left and slot not in own and len(own) < room:
                    left.remove(expert)
                    own[slot] = expert

    keep([num_slots] * len(ranks))
    floor, num_more = divmod(num_experts, len(ranks))
    by_held = sorted(range(len(ranks)), key=lambda rank: -len(ranks[rank]))
    quotas = [floor + (rank in by_held[:num_more]) for rank in range(len(ranks))]
    for own, quota in zip(ranks, quotas, strict=True):
        left.update(own.pop(slot) for slot in sorted(own)[quota:])
    keep(quotas)  # where several held one
    orphans = iter(sorted(left))
    for own, quota in zip(ranks, quotas, strict=True):
        free = [slot for slot in range(num_slots) if slot not in own]
        for slot in free[: quota - len(own)]:
            own[slot] = next(orphans)
    return tuple(tuple(own.get(slot, GHOST) for slot in range(num_slots)) for own in ranks)
