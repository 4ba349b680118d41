"""Placement of an elastic executor: where a Join has it stand, and which experts in which slots."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from executor.errors import InvalidPlacement
from executor.parallel.layout import Capacity, Topology
from protos.executor.placement import GHOST, SlotMap
from protos.executor.v1 import executor_pb2 as pb


@dataclass(frozen=True, slots=True)
class Placement:
    """A place that this executor can take.

    Attributes:
        topology: Its coordinates.
        slot_map: The expert in each slot of each executor, or GHOST; all slots that it has, also those
            that the group does not use.
    """

    topology: Topology
    slot_map: SlotMap

    @property
    def slots(self) -> tuple[int, ...]:
        """The experts in this executor's slots."""
        return self.slot_map[self.topology.ep_rank]


class Loaded(NamedTuple):
    """What an executor had to read for a place.

    Attributes:
        num_bytes: Of experts, in its memory.
        ns: How long that took, in nanoseconds.
    """

    num_bytes: int = 0
    ns: int = 0


def read_placement(message: pb.Placement, capacity: Capacity, num_experts: int) -> Placement:
    """Returns what a message asks for.

    Args:
        message: From a router.
        capacity: What the executor is built for; it is elastic.
        num_experts: E, of the model.

    Raises:
        InvalidPlacement: The executor cannot stand there, or the map of experts contradicts itself.
            Says what was given, and what fits.
    """
    topology = _read_topology(message.coordinates, capacity)
    most, used = capacity.num_expert_slots(num_experts), message.expert_slots
    if used > most:
        raise _invalid("expert_slots", f"{used}: this executor has {most}")
    num_bytes = 4 * topology.world_size * used
    if len(message.expert_of_slot) != num_bytes:
        raise _invalid(
            "expert_of_slot",
            f"{len(message.expert_of_slot)} bytes: {topology.world_size} executors with {used} slots each "
            f"have {num_bytes}",
        )
    experts = np.frombuffer(message.expert_of_slot, "<i4").reshape(topology.world_size, used)
    counts = Counter(experts.flatten().tolist())
    counts.pop(GHOST, None)
    wrong = [expert for expert in counts if not 0 <= expert < num_experts]
    if wrong:
        raise _invalid("expert_of_slot", f"has expert {wrong[0]}: there are {num_experts}, from 0")
    for expert in range(num_experts):
        if counts[expert] != 1:
            raise _invalid(
                "expert_of_slot", f"has expert {expert} in {counts[expert]} slots: need it in one"
            )
    unused = (GHOST,) * (most - used)
    return Placement(topology, tuple((*slots, *unused) for slots in experts.tolist()))


def _read_topology(message: pb.Coordinates, capacity: Capacity) -> Topology:
    least, most = capacity.min_dp_size, capacity.max_dp_size
    assert least is not None, "an executor that is not elastic takes no placement"
    for name in ("attn_tp_rank", "attn_tp_size"):
        given, own = getattr(message, name), getattr(capacity, name)
        if given != own:
            raise _invalid(f"coordinates.{name}", f"{given}: this executor has {own}")
    if not least <= message.dp_size <= most:
        raise _invalid(
            "coordinates.dp_size", f"{message.dp_size}: this executor is for {least} to {most}"
        )
    if message.dp_rank >= message.dp_size:
        raise _invalid(
            "coordinates.dp_rank", f"{message.dp_rank}: it is 0 to {message.dp_size - 1}"
        )
    topology = Topology(
        dp_rank=message.dp_rank,
        dp_size=message.dp_size,
        attn_tp_rank=message.attn_tp_rank,
        attn_tp_size=message.attn_tp_size,
    )
    for name, want in (("ep_rank", topology.world_rank), ("ep_size", topology.world_size)):
        if getattr(message, name) != want:
            raise _invalid(
                f"coordinates.{name}",
                f"{getattr(message, name)}: every executor of the group is an EP rank, so {want}",
            )
    return topology


def _invalid(field: str, problem: str) -> InvalidPlacement:
    return InvalidPlacement(f"{field}={problem}", field=f"placement.{field}")
