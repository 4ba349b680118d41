"""Gathers every executor's rows before the experts, and sums them back after.

    executor 0  x0 [3]  ─┐  MAX_LEN   x0 x0 x0 │ x1 x1 -- │ -- -- --    all-gather; padded
    executor 1  x1 [2]  ─┼▶
    executor 2  (idle)  ─┘  SUM_LEN   x0 x0 x0 x1 x1                    all-reduce over zeros

and back: MAX_LEN reduce-scatters, SUM_LEN all-reduces. An executor's rows are those that it has
between attention calls: a shard of its DP rank's, whose last one or more may be padding.

Buffers are made once, for the most rows that an executor may have. The group comes and goes with
epochs while they stay.
"""

from collections.abc import Sequence

import torch

from executor.parallel.layout import DpLayout, DpPaddingMode
from executor.parallel.packed_rows import WORD, moe_words, pack, unpack, view_rows, words_of
from executor.parallel.process_groups import EpochGroups, RankGroup
from executor.parallel.topology import Topology


class DpCommunicator:
    """Collectives over one row per token. All executors make the same calls, idle ones too.

    A world of one moves nothing and needs no group.

    Args:
        topology: This executor's place in its group.
        max_tokens_per_rank: Most rows that an executor has between attention calls.
        hidden_size: Width of the hidden states.
        dtype: Their type.
        top_k: Experts per token, whose ids and weights travel with the hidden states.
        device: Where the tensors live.
    """

    def __init__(
        self,
        *,
        topology: Topology,
        max_tokens_per_rank: int,
        hidden_size: int,
        dtype: torch.dtype,
        top_k: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.topology = topology
        self.max_tokens_per_rank = max_tokens_per_rank
        self._group: RankGroup | None = None
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
        return cls(topology=Topology(), max_tokens_per_rank=0, hidden_size=0, dtype=torch.float32)

    def join(self, groups: EpochGroups) -> None:
        """Uses the group of every executor from now on. The caller closes the one before.

        Raises:
            ValueError: It is not made of the ranks that the buffers were made for.
        """
        group = groups.world
        if (group.rank, group.world_size) != (self.topology.world_rank, self.world_size):
            raise ValueError(
                f"the group has rank {group.rank} of {group.world_size}, "
                f"but the model was loaded for rank {self.topology.world_rank} of {self.world_size}"
            )
        self._group = group

    def leave(self) -> None:
        """Forgets the group. A collective before the next ``join`` is a bug."""
        self._group = None

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

        They are laid side by side as words: a collective costs more to start than to fill. The
        all-reduce adds words to zeros, which is exact for every dtype.

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
            gathered.zero_()
            first = layout.offsets[layout.world_rank]
            pack(columns, out=gathered[first : first + num_rows])
            self.group.all_reduce(gathered)
        return unpack(gathered, columns)

    def scatter_sum(self, y: torch.Tensor, layout: DpLayout) -> torch.Tensor:
        """Sums every row over the executors and returns this one's rows.

        Args:
            y: [layout.global_dp_buffer_len, D], contiguous. SUM_LEN overwrites it.
            layout: This step's token counts.

        Returns:
            [layout.shard_num_rows, D]. Overwritten by the next call. Padding rows hold leftovers.
        """
        if self.world_size == 1:
            return y
        self._check(layout)
        if layout.global_dp_buffer_len == 0:
            return y
        if layout.padding_mode is DpPaddingMode.MAX_LEN:
            width = y.shape[1]
            summed = self._summed[: layout.padded_num_tokens * width].view(-1, width)
            self.group.reduce_scatter(summed, y, self._scratch)
            return summed[: layout.shard_num_rows]
        self.group.all_reduce(y)
        first = layout.offsets[layout.world_rank]
        return y[first : first + layout.shard_num_rows]

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def group(self) -> RankGroup:
        """The group joined."""
        assert self._group is not None, "join a group before the first step"
        return self._group

    def _check(self, layout: DpLayout) -> None:
        assert len(layout.offsets) == self.world_size
        assert max(layout.global_shard_num_rows) <= self.max_tokens_per_rank, (
            f"a rank has {max(layout.global_shard_num_rows)} rows; "
            f"the buffers were made for {self.max_tokens_per_rank}"
        )
