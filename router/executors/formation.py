"""Formation: whether executors can be one group, and which. Pure, but for the wire's types."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from protos import __version__
from protos.executor.v1 import executor_pb2 as pb
from router.errors import GroupMismatch
from router.scheduling.step import (
    CapturedSizes,
    GroupInfo,
    GroupShape,
    ServedModel,
    SpeculationShape,
    sequence_capacity,
)

MAX_SHOWN = 64  # places, in an error


@dataclass(frozen=True, slots=True)
class Member:
    """One executor, as it described itself.

    Attributes:
        placement: What its Join says of its place; None: it stands where its settings say.
    """

    address: str
    description: pb.DescribeResponse
    placement: pb.Placement | None = None

    @property
    def dp_rank(self) -> int:
        return self.description.coordinates.dp_rank

    @property
    def attn_tp_rank(self) -> int:
        return self.description.coordinates.attn_tp_rank

    @property
    def coordinates(self) -> tuple[int, int]:
        """DP rank and attention-TP rank."""
        return self.dp_rank, self.attn_tp_rank

    def __str__(self) -> str:
        return f"executor {self.address} (dp_rank {self.dp_rank}, attn_tp_rank {self.attn_tp_rank})"


def check_group(members: Sequence[Member]) -> None:
    """Checks that the members agree and that each rank of the group is taken once.

    Raises:
        GroupMismatch: Names two members, the field and both values.
    """
    first = members[0]
    for member in members[1:]:
        if member.description.agreement_digest != first.description.agreement_digest:
            _raise_first_difference(first, member)
        if member.description.kv_window != first.description.kv_window:
            raise GroupMismatch(
                f"{first} has kv_window={first.description.kv_window} but {member} has kv_window="
                f"{member.description.kv_window}: start them with the same"
            )
    sizes = first.description.coordinates
    num_places = sizes.dp_size * sizes.attn_tp_size
    given = sorted(member.coordinates for member in members)
    if num_places != len(members) or given != _places(sizes):
        shown = _places(sizes) if num_places <= MAX_SHOWN else f"of {num_places} executors"
        raise GroupMismatch(
            f"the group's executors say that it has dp_size={sizes.dp_size} and "
            f"attn_tp_size={sizes.attn_tp_size}, which takes the (dp_rank, attn_tp_rank) "
            f"{shown}; the {len(members)} addresses given are {given}: start each place once and "
            f"give each address once"
        )


def _places(sizes: pb.Coordinates) -> list[tuple[int, int]]:
    return list(product(range(sizes.dp_size), range(sizes.attn_tp_size)))


def _raise_first_difference(one: Member, other: Member) -> None:
    ours, theirs = one.description.agreement, other.description.agreement
    for name in sorted(set(ours) | set(theirs)):
        if ours.get(name) != theirs.get(name):
            raise GroupMismatch(
                f"{one} has {name}={ours.get(name, '(nothing)')} but {other} has "
                f"{name}={theirs.get(name, '(nothing)')}: start them with the same"
            )
    raise GroupMismatch(
        f"{one} and {other} describe the same agreement but with different digests: "
        f"they are not of one release"
    )


def describe_group(
    members: Sequence[Member], epoch: int, model_name: str, max_len: int = 0
) -> GroupInfo:
    """Returns what a checked group is.

    Args:
        members: Sorted by DP rank, then attention-TP rank.
        epoch: Its.
        model_name: As clients know it.
        max_len: The most tokens that a sequence may have, whatever there is room for; 0: no bound.

    Raises:
        GroupMismatch: Its sizes cannot be scheduled.
    """
    leaders = [member for member in members if member.attn_tp_rank == 0]
    descriptions = [leader.description for leader in leaders]
    model, budget = descriptions[0].model, descriptions[0].budget
    graph_sizes = descriptions[0].graph_sizes
    num_blocks = tuple(  # executors of one DP rank get the same block ids
        min(m.description.num_kv_blocks for m in members if m.dp_rank == leader.dp_rank)
        for leader in leaders
    )
    kv_window = descriptions[0].kv_window
    max_model_len = min(map(max_len_of, members))
    if max_len:
        max_model_len = min(max_model_len, max_len)
    rows_per_rank = min(budget.max_num_seqs, *(member.description.num_rows for member in members))
    try:
        shape = GroupShape(
            dp_size=len(leaders),
            num_blocks=num_blocks,
            block_size=model.block_size,
            rows_per_rank=rows_per_rank,
            max_num_batched_tokens=budget.max_num_batched_tokens,
            max_num_logits=budget.max_num_logits,
            max_model_len=max_model_len,
            attn_tp_size=descriptions[0].coordinates.attn_tp_size,
            graph_sizes=CapturedSizes(
                tuple(graph_sizes.decode), tuple(graph_sizes.extend), graph_sizes.extend_runner
            ),
            speculation=_speculation(descriptions[0]),
            kv_window=kv_window,
        )
    except ValueError as error:
        raise GroupMismatch(f"{leaders[0]}: {error}") from error
    return GroupInfo(
        epoch=epoch,
        model=ServedModel(
            name=model_name,
            architecture=model.architecture,
            fingerprint=model.fingerprint,
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=tuple(model.eos_token_ids),
            supports_constraints=all(each.model.takes_grammars for each in descriptions),
            engine=_engine(shape, descriptions[0].agreement_digest),
            draws_drafts=descriptions[0].agreement.get("draft_sampling") == "rejection",
        ),
        shape=shape,
        addresses=tuple(leader.address for leader in leaders),
    )


def max_len_of(member: Member) -> int:
    """Returns the tokens of the longest sequence that an executor's KV has room for."""
    told = member.description
    capacity = sequence_capacity(told.num_kv_blocks, told.model.block_size, told.kv_window)
    return min(told.model.max_model_len, capacity)


def _engine(shape: GroupShape, agreement_digest: bytes) -> str:
    """Returns what tells groups apart whose sums are rounded otherwise."""
    return f"{__version__} {shape.dp_size}x{shape.attn_tp_size} {agreement_digest.hex()[:16]}"


def _speculation(description: pb.DescribeResponse) -> SpeculationShape | None:
    """Returns what an executor can draft. Raises ValueError where that makes no sense."""
    if not description.HasField("speculation"):
        return None
    given = description.speculation
    return SpeculationShape(
        algorithm=given.algorithm,
        num_draft_tokens=given.num_draft_tokens,
        num_draft_steps=given.num_draft_steps,
        topk=given.topk,
        num_reserved_tokens=given.num_reserved_tokens,
        kv_lookahead=given.kv_lookahead,
        extends=given.extends,
    )
