"""All-gather dispatch: every rank sees every token and runs its own experts on them.

Each rank routes its own tokens and sends the choice along with the hidden states, in the same
collective. Routing gathered tokens again on every rank would spare 8 bytes per expert choice, but
two machines whose gates round differently could then disagree about who computes a token.

A rank here is an executor of the world: it sends the rows that it holds between attention calls.
Where several hold slices of the same experts (MoE TP), their partial results are among those that
the combine sums.
"""

import torch

from executor.model.moe.layer import Dispatched, Dispatcher, DispatchSetup
from executor.parallel.communicators import DpCommunicator
from executor.parallel.layout import DpLayout


class AllGatherDispatcher(Dispatcher):
    """Gathers rows from all ranks, and sums results over them.

    Args:
        communicator: Joins all ranks that hold experts or slices of them.
        local_experts: The experts of this rank, whole or in part.
    """

    def __init__(self, communicator: DpCommunicator, local_experts: range) -> None:
        self._communicator = communicator
        self._local_experts = local_experts
        self.max_rows = communicator.world_size * communicator.max_tokens_per_rank

    @classmethod
    def build(cls, setup: DispatchSetup) -> Dispatcher:
        topology = setup.communicator.topology
        return cls(setup.communicator, topology.local_experts(setup.num_experts))

    def dispatch(
        self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, layout: DpLayout
    ) -> Dispatched:
        self.check_rows(x_TD, layout)
        x_RD, ids_RK, weights_RK = self._communicator.gather_columns(
            (x_TD, ids_TK, weights_TK), layout
        )
        num_local = len(self._local_experts)
        if self._communicator.world_size > 1:
            ids_RK = ids_RK - self._local_experts.start
            ids_RK.masked_fill_((ids_RK < 0) | (ids_RK >= num_local), num_local)
        for first, stop in _padding(layout):
            ids_RK[first:stop] = num_local
        return Dispatched(x_RD, ids_RK, weights_RK, handle=layout)

    def combine(self, y_RD: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        return self._communicator.scatter_sum(y_RD, dispatched.handle)


def _padding(layout: DpLayout) -> list[tuple[int, int]]:
    """Returns the runs of gathered rows that are no token."""
    counts = zip(
        layout.offsets, layout.global_shard_num_tokens, layout.global_shard_num_rows, strict=True
    )
    return [(offset + real, offset + padded) for offset, real, padded in counts if real < padded]
