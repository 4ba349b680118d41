"""Communicators: collectives over one row per token, among all executors and inside a DP rank.

Every executor's rows are gathered before the experts, and summed back after (`DpCommunicator`):

    executor 0  x0 [3]  ─┐  MAX_LEN   x0 x0 x0 │ x1 x1 -- │ -- -- --    all-gather; padded
    executor 1  x1 [2]  ─┼▶
    executor 2  (idle)  ─┘  SUM_LEN   x0 x0 x0 x1 x1                    all-gather of rows

and back: both reduce-scatter, parts of equal sizes or of unequal ones. The executors that share a DP rank's
attention hold a shard of its rows between attention calls (`AttnTpCommunicator`):

    5 tokens, attn_tp_size 2       attn_tp 0     attn_tp 1
    between attention calls        x0 x1 x2      x3 x4 --        shards; -- is padding
    attention's input              x0 x1 x2 x3 x4, on both       gather
    attention's output             partial sums of all 5 rows
    between attention calls        y0 y1 y2      y3 y4 --        scatter_sum

Padding rows are this module's own: tensors of whole sequences never have them. Buffers are made
once, for the longest step, so that a captured graph finds them where they were; groups come and go
with epochs.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from executor.errors import PeerLost
from executor.parallel.layout import Capacity, DpLayout, DpPaddingMode, Place, Topology
from executor.parallel.process_groups import EpochGroups, RankGroup, add_up

WORD = torch.int32  # as wide as ids and weights; a row of hidden states is some of them


class _Communicator:
    """What both have in common: a group, joined and left with its epoch."""

    _group: RankGroup | None = None

    def leave(self) -> None:
        """Forgets the group. A collective before the next ``join`` is a bug."""
        self._group = None

    @property
    def group(self) -> RankGroup:
        """The group joined.

        Raises:
            PeerLost: There is none, or another thread has left it.
        """
        if self._group is None:
            raise PeerLost("this executor is in no group")
        return self._group

    def _use(self, name: str, group: RankGroup | None, rank: int, size: int) -> None:
        """Takes a group, if this executor stands in it where it should."""
        if group is None or (group.rank, group.world_size) != (rank, size):
            found = "none" if group is None else f"rank {group.rank} of {group.world_size}"
            raise ValueError(
                f"the {name} group has {found}, but this executor was placed as rank {rank} of {size}"
            )
        self._group = group


class HostBarrier:
    """Waits, on the hosts, until every executor has come as far. Nothing to wait for in no group."""

    _group: RankGroup | None = None

    def join(self, groups: EpochGroups) -> None:
        """Uses the group of the hosts from now on."""
        self._group = groups.host

    def leave(self) -> None:
        """Forgets it."""
        self._group = None

    def wait(self) -> None:
        """Returns when all executors have called it.

        Raises:
            PeerLost: One of them left.
        """
        if self._group is not None:
            self._group.all_reduce(torch.zeros(1))


class DpCommunicator(_Communicator):
    """Collectives over one row per token. All executors make the same calls, idle ones too.

    A world of one moves nothing and needs no group.

    Args:
        place: Where this executor stands. Buffers are for groups as large as it is in now.
        max_tokens_per_rank: Most rows that an executor has between attention calls.
        hidden_size: Width of the hidden states.
        dtype: Their type.
        top_k: Experts per token, whose ids and weights travel with the hidden states.
        device: Where the tensors live.
    """

    def __init__(
        self,
        *,
        place: Place,
        max_tokens_per_rank: int,
        hidden_size: int,
        dtype: torch.dtype,
        top_k: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self._place = place
        self.max_tokens_per_rank = max_tokens_per_rank
        num_rows = max_tokens_per_rank if self.world_size > 1 else 0
        num_words = moe_words(hidden_size, dtype, top_k)
        self._sent = torch.zeros(num_rows * num_words, dtype=WORD, device=device)
        self._gathered = torch.zeros(
            self.world_size * num_rows * num_words, dtype=WORD, device=device
        )
        is_on_cpu = torch.device(device).type == "cpu"
        self._scratch = torch.zeros(
            self.world_size * num_rows * hidden_size if is_on_cpu else 0, dtype=dtype, device=device
        )
        self._summed = torch.zeros(num_rows * hidden_size, dtype=dtype, device=device)

    @classmethod
    def single(cls) -> "DpCommunicator":
        """Returns the communicator of a rank that has no peers."""
        return cls(place=Place(), max_tokens_per_rank=0, hidden_size=0, dtype=torch.float32)

    def join(self, groups: EpochGroups) -> None:
        """Uses the group of every executor from now on. The caller closes the one before.

        Raises:
            ValueError: It is not of the place's size, or this executor has another rank in it.
        """
        self._use("world", groups.world, self.topology.world_rank, self.world_size)

    def gather(self, x: torch.Tensor, layout: DpLayout) -> torch.Tensor:
        """Collects every executor's rows.

        Args:
            x: [layout.shard_num_rows, D].
            layout: This step's token counts.

        Returns:
            [layout.global_dp_buffer_len, D], executors at ``layout.offsets``. Padding rows hold
            leftovers. Overwritten by the next gather.
        """
        return self.gather_columns((x,), layout)[0]

    def gather_columns(
        self, columns: Sequence[torch.Tensor], layout: DpLayout
    ) -> tuple[torch.Tensor, ...]:
        """Collects several tensors of one row per token in one collective.

        They are laid side by side as words: a collective costs more to start than to fill.

        Args:
            columns: Each [layout.shard_num_rows, width], any dtype.
            layout: This step's token counts.

        Returns:
            Each [layout.global_dp_buffer_len, width], as ``gather`` does.
        """
        if self.world_size == 1:
            return tuple(columns)
        self._check(layout)
        if layout.global_dp_buffer_len == 0:
            return tuple(columns)
        num_words = sum(words_of(column.shape[1], column.dtype) for column in columns)
        gathered = view_rows(self._gathered, layout.global_dp_buffer_len, num_words)
        num_rows = len(columns[0])
        if layout.padding_mode is DpPaddingMode.MAX_LEN:
            sent = view_rows(self._sent, layout.padded_num_tokens, num_words)
            pack(columns, out=sent[:num_rows])
            self.group.all_gather(gathered, sent)
        else:
            first = layout.offsets[layout.world_rank]
            pack(columns, out=gathered[first : first + num_rows])
            self.group.all_gather_rows(gathered, layout.global_shard_num_rows)
        return unpack(gathered, columns)

    def scatter_sum(self, y: torch.Tensor, layout: DpLayout) -> torch.Tensor:
        """Sums every row over the executors and returns this one's rows.

        Args:
            y: [layout.global_dp_buffer_len, D], contiguous. SUM_LEN over NCCL overwrites it.
            layout: This step's token counts.

        Returns:
            [layout.shard_num_rows, D]. Overwritten by the next call. Padding rows hold leftovers.
        """
        if self.world_size == 1:
            return y
        self._check(layout)
        if layout.global_dp_buffer_len == 0:
            return y
        is_even = layout.padding_mode is DpPaddingMode.MAX_LEN
        num_rows = layout.padded_num_tokens if is_even else layout.shard_num_rows
        summed = view_rows(self._summed, num_rows, y.shape[1])
        counts = None if is_even else layout.global_shard_num_rows
        self.group.reduce_scatter(summed, y, self._scratch, counts)
        return summed[: layout.shard_num_rows]

    @property
    def topology(self) -> Topology:
        """Where this executor stands now."""
        return self._place.topology

    @property
    def world_size(self) -> int:
        return self._place.topology.world_size

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody else, and no group."""
        return self.world_size == 1 and self._group is None

    def _check(self, layout: DpLayout) -> None:
        assert len(layout.offsets) == self.world_size
        assert max(layout.global_shard_num_rows) <= self.max_tokens_per_rank, (
            f"a rank has {max(layout.global_shard_num_rows)} rows; "
            f"the buffers were made for {self.max_tokens_per_rank}"
        )


class AttnTpCommunicator(_Communicator):
    """Collectives inside one DP rank. All of its executors must make the same calls.

    With an ``attn_tp_size`` of 1 every method returns its argument, and no group is needed.

    Args:
        capacity: What this executor is built for.
        max_shard_tokens_per_rank: Most rows that an executor has between attention calls.
        hidden_size: Width of the hidden states.
        dtype: Their type, and that of logits before they are gathered.
        max_logits_rows: Most rows of logits.
        vocab_slice: Columns of logits that each executor computes.
        gathered_size: Width of the widest rows that are gathered: hidden states, with a draft's
            features beside them; that of hidden states if None.
        device: Where the tensors live.
    """

    def __init__(
        self,
        *,
        capacity: Capacity,
        max_shard_tokens_per_rank: int,
        hidden_size: int,
        dtype: torch.dtype,
        max_logits_rows: int = 0,
        vocab_slice: int = 0,
        gathered_size: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.capacity = capacity
        self.size = capacity.attn_tp_size
        self.max_shard_tokens_per_rank = max_shard_tokens_per_rank
        self.max_logits_rows = max_logits_rows
        shards = max_shard_tokens_per_rank if self.size > 1 else 0
        logits = max_logits_rows * vocab_slice * self.size if self.size > 1 else 0
        rows = shards * self.size * hidden_size

        def buffer(count: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        self._gathered = buffer(shards * self.size * max(hidden_size, gathered_size or 0))
        self._padded = buffer(rows)
        self._scratch = buffer(rows if torch.device(device).type == "cpu" else 0)
        self._summed = buffer(shards * hidden_size)
        self._logits_by_rank = buffer(logits)
        self._logits = buffer(logits, torch.float32)

    @classmethod
    def single(cls) -> "AttnTpCommunicator":
        """Returns the communicator of an executor that has a DP rank to itself."""
        return cls(
            capacity=Capacity(), max_shard_tokens_per_rank=0, hidden_size=0, dtype=torch.float32
        )

    def join(self, groups: EpochGroups) -> None:
        """Uses the attention-TP group from now on. The caller closes the one before.

        Raises:
            ValueError: It is not made of the ranks that the buffers were made for.
        """
        if self.size > 1 or groups.attn_tp is not None:
            self._use("attention-TP", groups.attn_tp, self.capacity.attn_tp_rank, self.size)

    def gather(self, x: torch.Tensor, layout: DpLayout) -> torch.Tensor:
        """Collects the DP rank's rows.

        Args:
            x: [layout.shard_num_rows, D], contiguous.
            layout: This step's token counts.

        Returns:
            [layout.num_rows, D]. Overwritten by the next gather.
        """
        if self.size == 1:
            return x
        self._check(x, layout.shard_num_rows, layout)
        if layout.num_rows == 0:
            return x
        width = x.shape[1]
        gathered = view_rows(self._gathered, layout.shard_num_rows * self.size, width)
        self.group.all_gather(gathered, x)
        return gathered[: layout.num_rows]

    def scatter_sum(self, y: torch.Tensor, layout: DpLayout) -> torch.Tensor:
        """Sums every row over the executors and returns this one's shard.

        Args:
            y: [layout.num_rows, D], contiguous: this executor's part of the sum.
            layout: This step's token counts.

        Returns:
            [layout.shard_num_rows, D]; padding rows are zeros. Overwritten by the next call.
        """
        if self.size == 1:
            return y
        self._check(y, layout.num_rows, layout)
        if layout.num_rows == 0:
            return y
        width = y.shape[1]
        num_rows = layout.shard_num_rows * self.size
        if num_rows > layout.num_rows:
            padded = view_rows(self._padded, num_rows, width)
            padded[: layout.num_rows] = y
            padded[layout.num_rows :] = 0
            y = padded
        summed = view_rows(self._summed, layout.shard_num_rows, width)
        self.group.reduce_scatter(summed, y, self._scratch)
        return summed

    def gather_logits(self, local: torch.Tensor) -> torch.Tensor:
        """Lays the executors' columns of logits side by side.

        Args:
            local: [L, vocab_slice], contiguous: the logits of this executor's part of the
                vocabulary.

        Returns:
            float32 [L, attn_tp_size * vocab_slice], the same bits on every executor. Overwritten
            by the next call.
        """
        if self.size == 1:
            return local
        count, width = local.shape
        assert count <= self.max_logits_rows, (
            f"{count} rows of logits; the buffers were made for {self.max_logits_rows}"
        )
        logits = view_rows(self._logits, count, self.size * width)
        if count == 0:
            return logits
        gathered = view_rows(self._logits_by_rank, self.size * count, width)
        self.group.all_gather(gathered, local)
        by_rank = gathered.view(self.size, count, width)
        logits.view(count, self.size, width).copy_(by_rank.transpose(0, 1))
        return logits

    def sum_(self, x: torch.Tensor) -> None:
        """Replaces ``x``, contiguous, by its sum over the executors, the same bits on each."""
        if self.size > 1 and x.numel():
            parts = x.new_empty(self.size, *x.shape)
            self.group.all_gather(parts.flatten(0, 1), x)
            add_up(parts, out=x)

    def agree(self, tokens: torch.Tensor) -> None:
        """Replaces ``tokens``, contiguous, by those of attn_tp_rank 0."""
        if self.size > 1 and tokens.numel():
            self.group.broadcast(tokens, 0)

    def shard(self, x: torch.Tensor, layout: DpLayout) -> torch.Tensor:
        """Returns this executor's rows of what all executors of the DP rank have. Moves nothing.

        Args:
            x: [layout.num_rows, ...], any dtype.
            layout: This step's token counts.

        Returns:
            [layout.shard_num_rows, ...], padded with zeros: a view of ``x`` where it needs none.
        """
        if self.size == 1:
            return x
        assert len(x) == layout.num_rows, f"{len(x)} rows, {layout.num_rows} in the layout"
        count = layout.shard_num_rows
        own = x[count * self.capacity.attn_tp_rank :][:count]
        if len(own) == count:
            return own
        return F.pad(own, (0, 0) * (x.dim() - 1) + (0, count - len(own)))

    def _check(self, x: torch.Tensor, num_rows: int, layout: DpLayout) -> None:
        assert len(x) == num_rows, f"{len(x)} rows, {num_rows} in the layout"
        assert layout.shard_num_rows <= self.max_shard_tokens_per_rank, (
            f"a shard has {layout.shard_num_rows} rows; "
            f"the buffers were made for {self.max_shard_tokens_per_rank}"
        )


def words_of(width: int, dtype: torch.dtype) -> int:
    """Returns the words of a row of ``width`` numbers.

    Raises:
        ValueError: It is not a whole number of words.
    """
    num_bytes = width * dtype.itemsize
    if num_bytes % WORD.itemsize:
        raise ValueError(
            f"{width} numbers of {dtype} are {num_bytes} bytes, and a row must be a multiple of "
            f"{WORD.itemsize}"
        )
    return num_bytes // WORD.itemsize


def moe_words(hidden_size: int, dtype: torch.dtype, top_k: int) -> int:
    """Returns the words of a row of hidden states, expert ids and weights."""
    return words_of(hidden_size, dtype) + 2 * words_of(top_k, WORD)


def view_rows(storage: torch.Tensor, num_rows: int, width: int) -> torch.Tensor:
    """Returns the start of ``storage`` as [num_rows, width]."""
    size = num_rows * width
    assert size <= storage.numel(), (
        f"{num_rows} rows of {width} numbers; the buffers were made for {storage.numel()} numbers"
    )
    return storage[:size].view(num_rows, width)


def pack(columns: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Lays the columns, each [num_rows, width], side by side in ``out`` [num_rows, words]."""
    torch.cat([column.view(WORD) for column in columns], dim=1, out=out)


def unpack(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns views of the columns, of the widths and dtypes of ``like``."""
    widths = [words_of(column.shape[1], column.dtype) for column in like]
    parts = packed.split_with_sizes(widths, dim=1)
    return tuple(part.view(column.dtype) for part, column in zip(parts, like, strict=True))
