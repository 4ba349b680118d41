"""Gathers hidden states of all DP ranks before the experts, and sums them back after.

    rank 0  x0 [3]  ─┐  MAX_LEN   x0 x0 x0 │ x1 x1 -- │ -- -- --    all-gather; padded
    rank 1  x1 [2]  ─┼▶
    rank 2  (idle)  ─┘  SUM_LEN   x0 x0 x0 x1 x1                    all-reduce over zeros

and back: MAX_LEN reduce-scatters, as an all-to-all and a sum over ranks in rank order, which over
gloo takes half the time of its own reduce-scatter and rounds once; SUM_LEN all-reduces.

Buffers are made once, for the most tokens that a rank may have. The group comes and goes with
epochs while they stay.
"""

from collections.abc import Sequence
from math import prod

import torch

from executor.dp_layout import DpLayout, DpPaddingMode
from executor.parallel import RankGroup
from executor.topology import Topology

_ALIGNMENT = 8  # bytes; each column of a packed row starts on a multiple


class DpCommunicator:
    """Collectives over one row per token. All ranks must make the same calls, idle ones too.

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
        row_bytes = _align(hidden_size * dtype.itemsize) + 2 * _align(top_k * 4)
        self._sent = torch.zeros(num_rows * row_bytes, dtype=torch.uint8, device=device)
        self._gathered = torch.zeros(
            self.world_size * num_rows * row_bytes, dtype=torch.uint8, device=device
        )
        self._received = torch.zeros(
            self.world_size * num_rows * hidden_size, dtype=dtype, device=device
        )
        self._summed = torch.zeros(num_rows * hidden_size, dtype=dtype, device=device)

    @classmethod
    def single(cls) -> "DpCommunicator":
        """Returns the communicator of a rank that has no peers."""
        return cls(topology=Topology(), max_tokens_per_rank=0, hidden_size=0, dtype=torch.float32)

    def join(self, group: RankGroup) -> None:
        """Uses ``group`` from now on. The caller closes the one before.

        Raises:
            ValueError: The group is not made of the ranks that the buffers were made for.
        """
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
        """Collects every DP rank's rows.

        Args:
            x: [layout.shard_num_rows, D].
            layout: This step's token counts.

        Returns:
            [layout.global_dp_buffer_len, D], ranks at ``layout.offsets``. Padding rows hold
            leftovers. Overwritten by the next gather.
        """
        return self.gather_columns((x,), layout)[0]

    def gather_columns(
        self, columns: Sequence[torch.Tensor], layout: DpLayout
    ) -> tuple[torch.Tensor, ...]:
        """Collects several tensors of one row per token in one collective.

        They are laid side by side as bytes: a collective costs more to start than to fill. The
        all-reduce adds bytes to zeros, which is exact for every dtype.

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
        offsets, row_bytes = _column_offsets(columns)
        gathered = _rows(self._gathered, layout.global_dp_buffer_len, row_bytes)
        if layout.padding_mode is DpPaddingMode.MAX_LEN:
            sent = _rows(self._sent, layout.padded_num_tokens, row_bytes)
            for column, offset in zip(columns, offsets, strict=True):
                _column(sent, column, offset)[: len(column)] = column
            self._joined.all_gather(gathered, sent)
        else:
            gathered.zero_()
            first = layout.offsets[layout.world_rank]
            for column, offset in zip(columns, offsets, strict=True):
                _column(gathered, column, offset)[first : first + len(column)] = column
            self._joined.all_reduce(gathered)
        return tuple(
            _column(gathered, column, offset)
            for column, offset in zip(columns, offsets, strict=True)
        )

    def scatter_sum(self, y: torch.Tensor, layout: DpLayout) -> torch.Tensor:
        """Sums every row over the ranks and returns this rank's rows.

        Args:
            y: [layout.global_dp_buffer_len, D], contiguous. SUM_LEN overwrites it.
            layout: This step's token counts.

        Returns:
            [layout.shard_num_rows, D]. Overwritten by the next call.
        """
        if self.world_size == 1:
            return y
        self._check(layout)
        if layout.global_dp_buffer_len == 0:
            return y
        if layout.padding_mode is DpPaddingMode.MAX_LEN:
            size = (layout.padded_num_tokens, y.shape[1])
            summed = self._summed[: prod(size)].view(size)
            received = self._received[: self.world_size * prod(size)].view(self.world_size, *size)
            self._joined.all_to_all(received, y)
            return torch.sum(received, dim=0, out=summed)[: layout.shard_num_rows]
        self._joined.all_reduce(y)
        first = layout.offsets[layout.world_rank]
        return y[first : first + layout.shard_num_rows]

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def _joined(self) -> RankGroup:
        assert self._group is not None, "join a group before the first step"
        return self._group

    def _check(self, layout: DpLayout) -> None:
        assert len(layout.offsets) == self.world_size
        assert max(layout.global_shard_num_rows) <= self.max_tokens_per_rank, (
            f"a rank has {max(layout.global_shard_num_rows)} rows; "
            f"the buffers were made for {self.max_tokens_per_rank}"
        )


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _column_offsets(columns: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Returns each column's first byte in a row, and the bytes of a row."""
    offsets, row_bytes = [], 0
    for column in columns:
        offsets.append(row_bytes)
        row_bytes += _align(column.shape[1] * column.element_size())
    return offsets, row_bytes


def _rows(storage: torch.Tensor, num_rows: int, row_bytes: int) -> torch.Tensor:
    """Returns the start of ``storage`` as uint8 [num_rows, row_bytes]."""
    assert num_rows * row_bytes <= storage.numel(), "a row is wider than the buffers were made for"
    return storage[: num_rows * row_bytes].view(num_rows, row_bytes)


def _column(rows: torch.Tensor, like: torch.Tensor, offset: int) -> torch.Tensor:
    """Returns the bytes of one column of ``rows`` in its own dtype, [num_rows, width]."""
    num_bytes = like.shape[1] * like.element_size()
    return rows[:, offset : offset + num_bytes].view(like.dtype)
