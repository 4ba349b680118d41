"""Tables of experts' places: which EP rank holds each expert, and in which of its slots.

    slots        rank 0  [0 1 2]    rank 1  [3 4 5]    rank 2  [6 7 -]

    by expert    0  1  2  3  4  5  6  7  8 = none
    rank         0  0  0  1  1  1  2  2  3
    route        0  1  2  3  4  5  6  7  3    rank * 3 + slot; a row without an expert stays on its rank
    slot         3  3  3  0  1  2  3  3  3    on rank 1; elsewhere is 3

Dispatchers read them by expert id, at addresses that stay, so that graphs find another map there.
"""

import torch

from executor.parallel.layout import Capacity, Topology
from protos.executor.placement import GHOST, SlotMap, places_crc32


class ExpertPlaces:
    """Places of E experts in the S slots of each EP rank, as seen from one of them.

    Args:
        slot_map: Of all ranks, each expert of 0 to E - 1 in one slot.
        ep_rank: This one.
        device: Where the tables live.
        num_experts: E, if the map does not have all yet.

    Attributes:
        num_experts: E.
        num_slots: S, of each rank.
        ep_size: W, EP ranks.
        rank_of_expert: int64 [E + 1], the rank that holds it; W for E, which is no expert.
        route_of_expert: int32 [E + 1], rank * S + slot; for E the first slot of this rank.
        slot_of_expert: int32 [E + 1], the slot of this rank that holds it; S for all others.
        is_in_order: Whether this rank has all experts, in order of their numbers, so that each is the
            number of its slot.
    """

    def __init__(
        self,
        slot_map: SlotMap,
        ep_rank: int,
        device: torch.device | str = "cpu",
        *,
        num_experts: int | None = None,
    ) -> None:
        self.num_slots = len(slot_map[0])
        if num_experts is None:
            num_experts = sum(expert != GHOST for slots in slot_map for expert in slots)
        self.num_experts = num_experts
        new = torch.empty(self.num_experts + 1, dtype=torch.int32, device=device)
        self.rank_of_expert = torch.empty_like(new, dtype=torch.int64)
        self.route_of_expert, self.slot_of_expert = new, torch.empty_like(new)
        self.write(slot_map, ep_rank)

    def write(self, slot_map: SlotMap, ep_rank: int) -> None:
        """Takes over another map of as many experts and slots, where the tables are.

        Graphs find it there, but where ``ep_size`` or ``is_in_order`` changes: then they have to be
        captured anew.

        Args:
            slot_map: Of any number of ranks.
            ep_rank: This one.
        """
        self.ep_size = len(slot_map)
        elsewhere, none = self.num_slots, self.num_experts
        ranks = [self.ep_size] * (none + 1)
        slots, routes = [elsewhere] * (none + 1), [ep_rank * self.num_slots] * (none + 1)
        for rank, held in enumerate(slot_map):
            for slot, expert in enumerate(held):
                if expert == GHOST:
                    continue
                ranks[expert], routes[expert] = rank, rank * self.num_slots + slot
                if rank == ep_rank:
                    slots[expert] = slot
        self.rank_of_expert.copy_(torch.tensor(ranks))
        self.route_of_expert.copy_(torch.tensor(routes))
        self.slot_of_expert.copy_(torch.tensor(slots))
        self.is_in_order = slot_map[ep_rank] == tuple(range(none))

    @property
    def crc32(self) -> int:
        """Checksum of where each expert is, as the tables have it."""
        ranks = self.rank_of_expert[: self.num_experts].tolist()
        routes = self.route_of_expert[: self.num_experts].tolist()
        slots = [route - rank * self.num_slots for route, rank in zip(routes, ranks, strict=True)]
        return places_crc32(zip(ranks, slots, strict=True))

    @classmethod
    def of(
        cls, topology: Topology, num_experts: int, device: torch.device | str = "cpu"
    ) -> "ExpertPlaces":
        """Returns the places in a group whose executors have held their share from the start."""
        return cls(topology.slot_map(num_experts), topology.ep_rank, device)


def places_at_start(
    topology: Topology, capacity: Capacity, num_experts: int, device: torch.device | str = "cpu"
) -> ExpertPlaces:
    """Returns the places before any Join; of an elastic executor no expert has one."""
    if not capacity.is_elastic:
        return ExpertPlaces.of(topology, num_experts, device)
    slot_map = (capacity.slots_at_start(topology, num_experts),) * topology.world_size
    return ExpertPlaces(slot_map, topology.ep_rank, device, num_experts=num_experts)


def look_up(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns ids, replaced by what the table says. One kernel.

    Args:
        table: [N].
        ids: int32 of any shape, 0 to N - 1.
    """
    return table.index_select(0, ids.flatten()).view_as(ids)
