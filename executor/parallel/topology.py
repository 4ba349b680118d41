"""Topology of a group: the share of the model that each executor holds. Pure, alike on every rank.

world rank   0          1          2          3
DP rank      0          0          1          1        own sequences, own KV cache
attn_tp_rank 0          1          0          1        shares of one DP rank's attention heads
ep_rank      0          0          1          1        runs of experts       (ep_size 2 of 4)
moe_tp_rank  0          1          0          1        shares of each of those experts
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """This executor's place in its group.

    Attributes:
        dp_rank: From 0 to ``dp_size - 1``.
        dp_size: Data-parallel ranks.
        attn_tp_rank: From 0 to ``attn_tp_size - 1``.
        attn_tp_size: Executors that share one DP rank's attention.
        ep_size: Parts that the experts fall into; None is one per executor. Executors that hold
            the same part share each of its experts.

    Raises:
        ValueError: There is no such place. Says which sizes there could be.
    """

    dp_rank: int = 0
    dp_size: int = 1
    attn_tp_rank: int = 0
    attn_tp_size: int = 1
    ep_size: int | None = None

    def __post_init__(self) -> None:
        for size in ("dp_size", "attn_tp_size"):
            if getattr(self, size) < 1:
                raise ValueError(f"{size}={getattr(self, size)}: need at least 1")
        for rank, size in (("dp_rank", "dp_size"), ("attn_tp_rank", "attn_tp_size")):
            given, count = getattr(self, rank), getattr(self, size)
            if not 0 <= given < count:
                raise ValueError(f"{rank}={given}: with {size}={count} it is 0 to {count - 1}")
        if self.ep_size is not None and (self.ep_size < 1 or self.world_size % self.ep_size):
            raise ValueError(
                f"ep_size={self.ep_size} does not divide dp_size * attn_tp_size = "
                f"{self.world_size} executors: {_fitting(divisors(self.world_size), self.ep_size)}"
            )

    @property
    def world_size(self) -> int:
        """Executors of the group."""
        return self.dp_size * self.attn_tp_size

    @property
    def world_rank(self) -> int:
        """This executor's number in the group."""
        return self.dp_rank * self.attn_tp_size + self.attn_tp_rank

    @property
    def num_expert_parts(self) -> int:
        """``ep_size``, resolved."""
        return self.world_size if self.ep_size is None else self.ep_size

    @property
    def moe_tp_size(self) -> int:
        """Executors that share each expert."""
        return self.world_size // self.num_expert_parts

    @property
    def ep_rank(self) -> int:
        """Which part of the experts this executor holds."""
        return self.world_rank // self.moe_tp_size

    @property
    def moe_tp_rank(self) -> int:
        """Which share of those experts it holds."""
        return self.world_rank % self.moe_tp_size

    def local_experts(self, num_experts: int) -> range:
        """Returns the experts of this executor, a contiguous run.

        Raises:
            ValueError: The experts do not divide among the parts.
        """
        parts = self.num_expert_parts
        if num_experts % parts:
            fitting = [size for size in divisors(self.world_size) if num_experts % size == 0]
            raise ValueError(
                f"ep_size={parts}: {num_experts} experts do not divide into as many parts; "
                f"{_fitting(fitting, parts)}"
            )
        return share_of("num_experts", num_experts, self.ep_rank, parts)


def require_attn_tp_gather(topology: Topology) -> bool:
    """Whether attention's input is gathered from the executors of its DP rank."""
    return topology.attn_tp_size > 1


def require_mlp_tp_gather(topology: Topology, *, gathers_experts: bool, splits_dense: bool) -> bool:
    """Whether some layer's input is gathered from every DP rank.

    Args:
        topology: Of any executor.
        gathers_experts: Whether routed experts get their rows by an all-gather, in any phase.
        splits_dense: Whether the model has dense MLPs that are split over the group.
    """
    return topology.dp_size > 1 and (gathers_experts or splits_dense)


def require_gathered_buffer(
    topology: Topology, *, gathers_experts: bool, splits_dense: bool
) -> bool:
    """Whether some layer's input is gathered at all, so that rows must divide by attention TP."""
    return require_attn_tp_gather(topology) or require_mlp_tp_gather(
        topology, gathers_experts=gathers_experts, splits_dense=splits_dense
    )


def share_of(name: str, size: int, rank: int, count: int) -> range:
    """Returns which of ``size`` things rank ``rank`` of ``count`` holds, a contiguous run.

    Args:
        name: What ``size`` is called in the model's configuration, for the error.

    Raises:
        ValueError: They do not divide evenly.
    """
    if size % count:
        raise ValueError(
            f"{name}={size} does not divide among {count} executors: "
            f"{_fitting(divisors(size), count)}"
        )
    each = size // count
    return range(rank * each, (rank + 1) * each)


def divisors(number: int) -> list[int]:
    """Returns every divisor, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _fitting(sizes: Iterable[int], given: int) -> str:
    """Says which sizes nearest to the one given would do."""
    sizes = list(sizes)
    below = [size for size in sizes if size < given][-1:]
    above = [size for size in sizes if size > given][:1]
    return "use " + " or ".join(str(size) for size in below + above)
