"""Places in elastic groups: what executors say of themselves, and what Join and Stage tell them."""

from collections.abc import Sequence

import numpy as np

from protos.executor.placement import places_crc32, places_of
from protos.executor.v1 import executor_pb2 as pb
from router.errors import GroupMismatch
from router.executors.elastic import Candidate, Formation
from router.executors.formation import Member, max_len_of


def is_elastic(member: Member) -> bool:
    """Whether an executor takes the place that a Join gives it."""
    return member.description.HasField("capability")


def require_elastic(members: Sequence[Member]) -> None:
    """Does nothing if all are elastic.

    Raises:
        GroupMismatch: One is not.
    """
    for member in members:
        if not is_elastic(member):
            raise GroupMismatch(
                f"{member} is not elastic, and its group has min=: start it with --max-dp-size, or leave "
                f"min= out"
            )


def candidate_of(member: Member) -> Candidate:
    """Returns an elastic executor as the policy sees it."""
    told = member.description
    return Candidate(
        address=member.address,
        instance_id=told.instance_id,
        attn_tp_rank=told.coordinates.attn_tp_rank,
        attn_tp_size=told.coordinates.attn_tp_size,
        dp_sizes=range(told.capability.min_dp_size, told.capability.max_dp_size + 1),
        num_experts=told.model.num_experts,
        max_slots=told.capability.max_expert_slots,
        held=tuple(np.frombuffer(told.resident_experts, "<i4").tolist()),
        expert_bytes=told.model.bytes_per_expert,
        max_len=max_len_of(member),
        agreement=told.agreement_digest,
        fingerprint=told.model.fingerprint,
        num_placed=told.coordinates.dp_size * told.coordinates.attn_tp_size,
    )


def placement_of(formation: Formation, member: Candidate) -> pb.Placement:
    """Returns what a member of a formation is told."""
    rank, num_members = formation.members.index(member), len(formation.members)
    dp_rank, attn_tp_rank = divmod(rank, member.attn_tp_size)
    return pb.Placement(
        coordinates=pb.Coordinates(
            dp_rank=dp_rank,
            dp_size=len(formation.teams),
            attn_tp_rank=attn_tp_rank,
            attn_tp_size=member.attn_tp_size,
            ep_rank=rank,
            ep_size=num_members,
        ),
        expert_slots=len(formation.slots[0]),
        expert_of_slot=np.array(formation.slots, dtype="<i4").tobytes(),
    )


def places_crc32_of(member: Member) -> int:
    """Returns the checksum of experts' places that a member's Join should answer; 0: it has no placement."""
    if member.placement is None or not member.placement.expert_slots:
        return 0
    experts = np.frombuffer(member.placement.expert_of_slot, "<i4")
    return places_crc32(places_of(experts.reshape(-1, member.placement.expert_slots).tolist()))


def placed(formation: Formation, members: Sequence[Member]) -> list[Member]:
    """Returns a formation's members, each described with its place, in the order of ranks."""
    by_address = {member.address: member for member in members}
    result = []
    for candidate in formation.members:
        placement = placement_of(formation, candidate)
        description = pb.DescribeResponse()
        description.CopyFrom(by_address[candidate.address].description)
        description.coordinates.CopyFrom(placement.coordinates)
        result.append(Member(candidate.address, description, placement))
    return result


def as_formed(member: Member, epoch: int, router_id: bytes) -> Member:
    """Returns how a member of an epoch that this router has formed would describe itself."""
    description = pb.DescribeResponse()
    description.CopyFrom(member.description)
    description.epoch = epoch
    description.driver.CopyFrom(pb.Driver(router_id=router_id))
    if member.placement is not None and member.placement.expert_slots:
        num_slots = member.placement.expert_slots
        slots = np.frombuffer(member.placement.expert_of_slot, "<i4").reshape(-1, num_slots)
        held = np.frombuffer(description.resident_experts, "<i4").copy()
        held[:num_slots] = slots[member.placement.coordinates.ep_rank]
        description.resident_experts = held.tobytes()
    return Member(member.address, description)
