"""FlashInfer's one-sided MoE all-to-all: each GPU writes rows into its peers' memory.

    T rows of this rank    D hidden    K experts per row    C rows per source rank in this pass

A rank's part of the shared workspace, after the counters and flags of the kernels:

    received ids, weights, rows: [ep_size, C, ...] each │ unused │ results: [ep_size, C, D]
    grows with C                                                   at a fixed place, sized for most

**C must be alike on all ranks** and at least T: the kernels check neither, and rows beyond C
overwrite another rank's. A row travels once to each rank that has one of its experts; which place
in its source's block it gets is left to chance, and places that nobody wrote hold old bytes.

Every rank calls ``dispatch`` and then ``combine`` equally often, also without rows: kernels wait on
the device for all peers. For one that never comes they spin 150 to 300 s, then trap, which ends the
CUDA context. Nothing is done on the host, so graphs capture both; T, C and addresses are then fixed.
Warm all ranks up before the first call, or some wait on the GPU while others compile.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from executor.budget.token_budget import (
    A2A_ALIGNMENT,
    check_flashinfer_a2a,
    dispatch_bytes_per_token,
)
from executor.model.flashinfer.bootstrap import (
    GroupCommunicator,
    HostGroup,
    MnnvlWorkspace,
    comm_of,
)
from executor.model.flashinfer.operators import FlashInferOps


@dataclass(frozen=True, kw_only=True, slots=True)
class AllToAllSizes:
    """What an all-to-all is made for, the same on all ranks.

    Attributes:
        ep_size: Ranks.
        num_experts: E.
        num_slots: S, places for experts on each rank, the same on all. Kernels take those of all ranks
            for experts, which rows are sent to as rank * S + slot.
        top_k: K.
        hidden_size: D.
        dtype: Of rows and of results.
        max_num_tokens: C at most: rows of one rank, not of all.
        bytes_per_rank: Of each rank's workspace. Its budget knows them; they contain ``ep_size``
            times ``max_num_tokens`` rows already.

    Raises:
        ValueError: The kernels cannot do that. Says which sizes there could be.
    """

    ep_size: int
    num_experts: int
    num_slots: int
    top_k: int
    hidden_size: int
    dtype: torch.dtype
    max_num_tokens: int
    bytes_per_rank: int

    def __post_init__(self) -> None:
        check_flashinfer_a2a(self.ep_size, self.top_k)
        if self.num_experts > self.ep_size * self.num_slots:
            raise ValueError(
                f"num_experts={self.num_experts} do not fit num_slots={self.num_slots} on each of "
                f"ep_size={self.ep_size} ranks"
            )
        if self.max_num_tokens < 1:
            raise ValueError(f"max_num_tokens={self.max_num_tokens}: need at least 1")

    @property
    def sent_bytes(self) -> int:
        """Bytes of a row on its way to its experts, with their ids and weights."""
        return dispatch_bytes_per_token(self.hidden_size, self.top_k, itemsize=self.dtype.itemsize)

    @property
    def result_bytes(self) -> int:
        """Bytes of a row on its way back."""
        return self.hidden_size * self.dtype.itemsize

    @property
    def result_offset(self) -> int:
        """First byte of the results, in each rank's part.

        The library proposes the first that is free in this pass. But a rank may be done with a
        pass, and have begun a larger one, while another still reads results of the first; rows
        received for the larger one must not lie over them.
        """
        most = self.ep_size * self.max_num_tokens * self.result_bytes
        return self.bytes_per_rank - -(-most // A2A_ALIGNMENT) * A2A_ALIGNMENT


@dataclass(frozen=True, slots=True)
class Received:
    """What came for this rank's experts. Views of the workspace, overwritten by the next dispatch.

    Attributes:
        ids: int32 [ep_size * C, K], experts of all ranks; E where no row came.
        weights: float32 [ep_size * C, K].
        parts: What was sent of rows, each [ep_size * C, ...].
        out: [ep_size * C, D], where ``combine`` finds results without copying them.
        num_rows: T of the dispatch.
        capacity: C.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    parts: tuple[torch.Tensor, ...]
    out: torch.Tensor
    num_rows: int
    capacity: int


class AllToAll:
    """One workspace and the kernels on it. All layers share it, as they never run at once.

    Args:
        ops: The library.
        sizes: The same on all ranks.
        ep_rank: This rank.

    Raises:
        ValueError: The workspace is smaller than the library wants it.
    """

    def __init__(self, ops: FlashInferOps, sizes: AllToAllSizes, ep_rank: int) -> None:
        assert 0 <= ep_rank < sizes.ep_size, f"rank {ep_rank} of {sizes.ep_size}"
        self._comm = comm_of(ops)
        # Also loads the kernels, or builds them: while they are launched, peers would wait.
        required = self._comm.moe_a2a_get_workspace_size_per_rank(
            ep_size=sizes.ep_size,
            max_num_tokens=sizes.max_num_tokens,
            total_dispatch_payload_size_per_token=sizes.sent_bytes,
            combine_payload_size_per_token=sizes.result_bytes,
            eplb_stats_num_experts=0,
            backend="trtllm",
        )
        if sizes.bytes_per_rank < required:
            raise ValueError(
                f"bytes_per_rank={sizes.bytes_per_rank}, but this FlashInfer needs {required} for "
                f"{sizes.ep_size} ranks of {sizes.max_num_tokens} tokens"
            )
        self._enable_pdl = ops.enable_pdl
        self._shared = MnnvlWorkspace(ops, sizes.bytes_per_rank)
        self._workspace: torch.Tensor | None = None
        self._metainfo: torch.Tensor | None = None
        self._active: Received | None = None
        self.sizes = sizes
        self.ep_rank = ep_rank

    # Once per epoch

    def join(self, group: HostGroup) -> bool:
        """Shares memory with the ranks of an epoch and clears it. Every rank must call it.

        Returns:
            Whether it lies elsewhere now, so that graphs captured before are void.

        Raises:
            RuntimeError: It cannot be shared. See ``MnnvlWorkspace``.
        """
        assert (group.rank, group.world_size) == (self.ep_rank, self.sizes.ep_size), (
            f"rank {group.rank} of {group.world_size} in the group, made for rank {self.ep_rank} "
            f"of {self.sizes.ep_size}"
        )
        self.leave()
        communicator = GroupCommunicator(group)
        has_moved = self._shared.join(communicator)
        assert self._shared.tensor is not None
        self.attach(self._shared.tensor)
        # A peer that went on before this rank had cleared its part would have its flags erased.
        communicator.barrier()
        return has_moved

    def attach(self, workspace: torch.Tensor) -> None:
        """Takes memory that all ranks see, and clears this rank's part of it.

        Dispatch only when every rank has.

        Args:
            workspace: uint8 [ep_size, bytes_per_rank]; rows may lie apart.
        """
        expected = (self.sizes.ep_size, self.sizes.bytes_per_rank)
        assert tuple(workspace.shape) == expected, f"{tuple(workspace.shape)}, need {expected}"
        self._metainfo = self._comm.moe_a2a_initialize(
            workspace=workspace,
            ep_rank=self.ep_rank,
            ep_size=self.sizes.ep_size,
            max_num_tokens=self.sizes.max_num_tokens,
            eplb_stats_num_experts=0,
            backend="trtllm",
        )
        self._workspace = workspace
        self._active = None

    def leave(self) -> None:
        """Forgets the epoch. The memory stays mapped, as a peer may still be in it."""
        self._workspace = self._metainfo = self._active = None

    # In every layer

    def dispatch(
        self,
        parts_T: Sequence[torch.Tensor],
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        *,
        routes_TK: torch.Tensor,
        capacity: int,
    ) -> Received:
        """Sends each row to the ranks of its routes.

        Args:
            parts_T: What is sent of rows: one to four matrices, by descending size of elements, of
                as many bytes of a row as one of the sizes' type takes, or fewer; T may be 0.
            ids_TK: int32, what receivers are told about each row.
            weights_TK: float32.
            routes_TK: int32, rank * S + slot and nothing else: where each row goes.
            capacity: C, the same on all ranks, and above 0.
        """
        sizes = self.sizes
        workspace, metainfo = self._attached
        assert self._active is None, "a dispatch is active: combine it before the next one"
        self._check_sizes(parts_T, len(ids_TK), capacity)
        assert ids_TK.dtype == routes_TK.dtype == torch.int32
        assert weights_TK.dtype == torch.float32
        # By descending element size, so that each starts at a multiple of its own.
        payloads = [x.contiguous() for x in (ids_TK, weights_TK, *parts_T)]
        received, end, _ = self._comm.moe_a2a_dispatch(
            token_selected_experts=routes_TK.contiguous(),
            input_payloads=payloads,
            workspace=workspace,
            metainfo=metainfo,
            runtime_max_tokens_per_rank=capacity,
            ep_rank=self.ep_rank,
            ep_size=sizes.ep_size,
            top_k=sizes.top_k,
            num_experts=sizes.ep_size * sizes.num_slots,
            enable_pdl=self._enable_pdl,
            eplb_local_stats=None,
            enable_rank_mask=False,
            active_rank_mask=None,
            backend="trtllm",
        )
        assert end <= sizes.result_offset, (
            f"received rows end at byte {end}, results start at {sizes.result_offset}: "
            f"bytes_per_rank={sizes.bytes_per_rank} is too little"
        )
        ids, weights, *parts = received
        self._comm.moe_a2a_sanitize_expert_ids(
            expert_ids=ids,
            workspace=workspace,
            metainfo=metainfo,
            ep_rank=self.ep_rank,
            invalid_expert_id=sizes.num_experts,
            enable_pdl=self._enable_pdl,
            backend="trtllm",
        )
        self._active = Received(
            ids=ids.flatten(0, 1),
            weights=weights.flatten(0, 1),
            parts=tuple(part.flatten(0, 1) for part in parts),
            out=self._results(capacity).flatten(0, 1),
            num_rows=len(ids_TK),
            capacity=capacity,
        )
        return self._active

    def combine(self, y_RD: torch.Tensor, received: Received) -> torch.Tensor:
        """Returns [T, D], the sum of each row's results over ranks, added in float32.

        Args:
            y_RD: [ep_size * C, D], result of each row received: ``received.out``, or a tensor of
                the same dtype, which is copied there.
            received: What the last dispatch returned.
        """
        sizes = self.sizes
        workspace, metainfo = self._attached
        assert self._active is not None, "nothing was dispatched"
        assert received is self._active, "another dispatch is active"
        shape = (sizes.ep_size, received.capacity, sizes.hidden_size)
        assert y_RD.dtype == sizes.dtype, f"{y_RD.dtype}, made for {sizes.dtype}"
        out = y_RD.new_empty(received.num_rows, sizes.hidden_size)
        in_place = y_RD.data_ptr() == received.out.data_ptr() and y_RD.is_contiguous()
        self._comm.moe_a2a_combine(
            payload=y_RD.contiguous().view(shape),
            local_num_tokens=received.num_rows,
            workspace=workspace,
            metainfo=metainfo,
            runtime_max_tokens_per_rank=received.capacity,
            ep_rank=self.ep_rank,
            ep_size=sizes.ep_size,
            top_k=sizes.top_k,
            combine_payload_offset=sizes.result_offset,
            payload_in_workspace=in_place,
            output=out,
            use_low_precision=False,
            enable_pdl=self._enable_pdl,
            enable_rank_mask=False,
            active_rank_mask=None,
            backend="trtllm",
        )
        self._active = None
        return out

    @property
    def _attached(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._workspace is not None, "join a group before the first step"
        assert self._metainfo is not None
        return self._workspace, self._metainfo

    def _check_sizes(self, parts: Sequence[torch.Tensor], num_rows: int, capacity: int) -> None:
        sizes = self.sizes
        assert num_rows <= capacity <= sizes.max_num_tokens, (
            f"{num_rows} rows, runtime_max_tokens_per_rank={capacity}, "
            f"max_num_tokens={sizes.max_num_tokens}: each must be at most the next"
        )
        assert capacity > 0, "no rank has rows: none may dispatch"
        row_bytes = sum(part.shape[1] * part.itemsize for part in parts)
        assert row_bytes <= sizes.result_bytes, (
            f"{row_bytes} of a row, at most {sizes.result_bytes}"
        )

    def _results(self, capacity: int) -> torch.Tensor:
        """Returns this rank's results [ep_size, C, D], a view."""
        sizes = self.sizes
        workspace, _ = self._attached
        first = self.ep_rank * workspace.stride(0) + sizes.result_offset
        num_bytes = sizes.ep_size * capacity * sizes.result_bytes
        results: torch.Tensor = self._comm.moe_a2a_wrap_payload_tensor_in_workspace(
            workspace=workspace,
            leading_shape=[sizes.ep_size, capacity],
            slice_start=first,
            slice_end=first + num_bytes,
            dtype=sizes.dtype,
        )
        return results
