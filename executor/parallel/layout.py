"""Layout of a group and of its steps: shares of the model, and every rank's tokens. Alike on every rank.

What an executor is built for, once, is its ``Capacity``. The share of the model that each executor holds
in a group (``Topology``), here of 2 x 2:

    world rank   0          1          2          3
    DP rank      0          0          1          1        own sequences, own KV cache
    attn_tp_rank 0          1          0          1        shares of one DP rank's attention heads
    ep_rank      0          0          1          1        slots of experts      (ep_size 2 of 4)
    moe_tp_rank  0          1          0          1        shares of each of those experts

One step's tokens across all ranks (``DpLayout``), the only source of every per-step length. The router
decides the counts, the padding mode and the graph; everything else here follows from them by
arithmetic that is the same on every rank. Layers get it as an argument.

Between attention calls, the executors of a DP rank (attention TP) hold its rows in equal shards:

    DP rank 0, 5 tokens        attn_tp 0: x0 x1 x2       attn_tp 1: x3 x4 --
    DP rank 1, 2 tokens        attn_tp 0: y0             attn_tp 1: y1

    gathered, MAX_LEN          x0 x1 x2 │ x3 x4 -- │ y0 -- -- │ y1 -- --
    gathered, SUM_LEN          x0 x1 x2 │ x3 x4 -- │ y0 │ y1
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property
from itertools import accumulate

from protos.executor.placement import GHOST, SlotMap, num_slots_for, place_evenly


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """What an executor is built for: its weights and its buffers fit every group of this capacity.

    Attributes:
        attn_tp_rank: Its share of a DP rank's heads, from 0 to ``attn_tp_size - 1``.
        attn_tp_size: Executors that share one DP rank's attention.
        max_dp_size: Data-parallel ranks of the largest group.
        min_dp_size: Of the smallest group that it can be placed in; None: it stands where its settings
            say, and is not elastic.
    """

    attn_tp_rank: int = 0
    attn_tp_size: int = 1
    max_dp_size: int = 1
    min_dp_size: int | None = None

    @property
    def max_world_size(self) -> int:
        """Executors of the largest group."""
        return self.max_dp_size * self.attn_tp_size

    @property
    def is_elastic(self) -> bool:
        """Whether each Join says where it stands."""
        return self.min_dp_size is not None

    def num_expert_slots(self, num_experts: int) -> int:
        """Returns the slots that it has if it is elastic: the smallest group holds all experts."""
        assert self.min_dp_size is not None, "slots follow from its place"
        return num_slots_for(num_experts, self.min_dp_size * self.attn_tp_size)

    def slots_at_start(self, topology: "Topology", num_experts: int) -> tuple[int, ...]:
        """Returns the experts in its slots before any Join, GHOST where there is none.

        Args:
            topology: Where its settings say that it stands.
            num_experts: E.
        """
        if self.is_elastic:
            return (GHOST,) * self.num_expert_slots(num_experts)
        return topology.expert_slots(num_experts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """This executor's place in the group of an epoch.

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
    def capacity(self) -> Capacity:
        """What it takes to be in groups of this size, and in no larger ones."""
        return Capacity(
            attn_tp_rank=self.attn_tp_rank,
            attn_tp_size=self.attn_tp_size,
            max_dp_size=self.dp_size,
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

    def slot_map(self, num_experts: int) -> SlotMap:
        """Returns the experts in the slots of each part: contiguous runs, some with one more."""
        return place_evenly(num_experts, self.num_expert_parts)

    def expert_slots(self, num_experts: int) -> tuple[int, ...]:
        """Returns the experts in this executor's slots, GHOST where there is none."""
        return self.slot_map(num_experts)[self.ep_rank]


@dataclass(slots=True, eq=False)
class Place:
    """Where this executor stands now. All that must know hold the same one.

    Attributes:
        topology: Of the epoch; before the first, and of an executor whose settings say where it stands,
            what it was built with.
    """

    topology: Topology = field(default_factory=Topology)


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


class DpPaddingMode(Enum):
    """How the ranks' rows lie in the gathered buffer.

    MAX_LEN: every rank has as many rows as the largest; an all-gather fills it.
    SUM_LEN: ranks lie end to end; over NCCL, an all-reduce over zeros fills it.
    """

    MAX_LEN = auto()
    SUM_LEN = auto()


@dataclass(frozen=True)
class DpLayout:
    """Every DP rank's token count in this step, alike on all ranks but for this one's place.

    Attributes:
        global_num_tokens_cpu: Real tokens of each DP rank.
        padding_mode: How the ranks lie in the gathered buffer.
        dp_rank: This rank's place in ``global_num_tokens_cpu``.
        graph_size: Rows that every DP rank runs when all replay one captured graph; None when
            the step runs eagerly. Only with MAX_LEN, because a captured collective has one size.
        has_extend: Whether any rank runs more than one token of a sequence.
        attn_tp_rank: This executor's place among those of its DP rank.
        attn_tp_size: Executors of each DP rank.
    """

    global_num_tokens_cpu: tuple[int, ...]
    padding_mode: DpPaddingMode
    dp_rank: int
    graph_size: int | None = None
    has_extend: bool = False
    attn_tp_rank: int = 0
    attn_tp_size: int = 1

    def __post_init__(self) -> None:
        counts = self.global_num_tokens_cpu
        if not 0 <= self.dp_rank < len(counts):
            raise ValueError(
                f"dp_rank={self.dp_rank} with {len(counts)} token counts: "
                f"need one count per DP rank, this one's included"
            )
        if min(counts) < 0:
            raise ValueError(f"global_num_tokens_cpu={counts}: a count cannot be negative")
        if not 0 <= self.attn_tp_rank < self.attn_tp_size:
            raise ValueError(
                f"attn_tp_rank={self.attn_tp_rank}: with attn_tp_size={self.attn_tp_size} it is "
                f"0 to {self.attn_tp_size - 1}"
            )
        if self.graph_size is None:
            return
        if self.padding_mode is not DpPaddingMode.MAX_LEN:
            raise ValueError(f"graph_size={self.graph_size} needs MAX_LEN, not SUM_LEN")
        if self.graph_size < max(counts):
            raise ValueError(
                f"graph_size={self.graph_size} is below the {max(counts)} tokens given"
            )
        if self.graph_size % self.attn_tp_size:
            raise ValueError(
                f"graph_size={self.graph_size} does not divide by attn_tp_size="
                f"{self.attn_tp_size}: attention-TP ranks share its rows evenly"
            )

    @classmethod
    def single(
        cls, num_tokens: int, graph_size: int | None = None, *, has_extend: bool = False
    ) -> "DpLayout":
        """Returns the layout of a rank that has no peers."""
        return cls((num_tokens,), DpPaddingMode.MAX_LEN, 0, graph_size, has_extend)

    @classmethod
    def captured(cls, num_rows: int, topology: Topology, *, has_extend: bool) -> "DpLayout":
        """Returns the layout that a graph is captured with: every rank runs all of its rows."""
        return cls(
            (num_rows,) * topology.dp_size,
            DpPaddingMode.MAX_LEN,
            topology.dp_rank,
            num_rows,
            has_extend,
            topology.attn_tp_rank,
            topology.attn_tp_size,
        )

    def of_requests(
        self, num_requests: Sequence[int], width: int, *, graph_requests: int | None = None
    ) -> "DpLayout":
        """Returns the layout of a pass of the same step in which every request has ``width`` rows.

        All phases of speculative decoding get their counts here, eager or replayed.

        Args:
            num_requests: Sequences of each DP rank.
            width: Rows of a sequence in this phase.
            graph_requests: Sequences that every rank's graph is for; None without one.
        """
        return replace(
            self,
            global_num_tokens_cpu=tuple(count * width for count in num_requests),
            graph_size=None if graph_requests is None else graph_requests * width,
            has_extend=False,
        )

    # This executor

    @property
    def dp_size(self) -> int:
        return len(self.global_num_tokens_cpu)

    @property
    def world_rank(self) -> int:
        return self.dp_rank * self.attn_tp_size + self.attn_tp_rank

    @property
    def num_tokens(self) -> int:
        """Real tokens of this DP rank."""
        return self.global_num_tokens_cpu[self.dp_rank]

    @property
    def num_rows(self) -> int:
        """Rows of this DP rank's tensors: its real tokens, or the graph's size."""
        return self.num_tokens if self.graph_size is None else self.graph_size

    @cached_property
    def shard_num_rows(self) -> int:
        """Rows that this executor holds between attention calls, padding included."""
        return -(-self.num_rows // self.attn_tp_size)

    @cached_property
    def shard_num_tokens(self) -> int:
        """Real tokens among them."""
        return self.global_shard_num_tokens[self.world_rank]

    # Every executor, in order of world rank

    @property
    def max_num_tokens(self) -> int:
        """Real tokens of the DP rank that has most."""
        return max(self.global_num_tokens_cpu)

    @cached_property
    def global_shard_num_tokens(self) -> tuple[int, ...]:
        """Real tokens of each executor's shard."""
        counts = []
        for num_tokens, rows in zip(self.global_num_tokens_cpu, self._shard_rows, strict=True):
            starts = range(0, rows * self.attn_tp_size, rows) if rows else (0,) * self.attn_tp_size
            counts += [min(max(num_tokens - start, 0), rows) for start in starts]
        return tuple(counts)

    @cached_property
    def global_shard_num_rows(self) -> tuple[int, ...]:
        """Rows of each executor in the gathered buffer, padding included."""
        rows = self._shard_rows
        if self.padding_mode is DpPaddingMode.MAX_LEN:
            rows = (max(rows),) * len(rows)
        return tuple(count for count in rows for _ in range(self.attn_tp_size))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First row of each executor in the gathered buffer."""
        return tuple(accumulate(self.global_shard_num_rows, initial=0))[:-1]

    @property
    def padded_num_tokens(self) -> int:
        """Rows of this executor in the gathered buffer, padding included."""
        return self.global_shard_num_rows[self.world_rank]

    @cached_property
    def runtime_max_tokens_per_rank(self) -> int:
        """Rows of the executor that holds most: the same on all of them."""
        return max(self._shard_rows)

    @cached_property
    def global_dp_buffer_len(self) -> int:
        """Rows of the gathered buffer."""
        return sum(self.global_shard_num_rows)

    @cached_property
    def _shard_rows(self) -> tuple[int, ...]:
        """Rows of a shard of each DP rank."""
        counts = self.global_num_tokens_cpu
        rows = counts if self.graph_size is None else (self.graph_size,) * len(counts)
        return tuple(-(-count // self.attn_tp_size) for count in rows)
