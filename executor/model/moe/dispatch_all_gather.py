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
from executor.parallel.expert_places import ExpertPlaces, look_up
from executor.parallel.layout import DpLayout


class AllGatherDispatcher(Dispatcher):
    """Gathers rows from all ranks, and sums results over them.

    Args:
        communicator: Joins all ranks that hold experts or slices of them.
        places: Of experts, each whole or in part.
    """

    def __init__(self, communicator: DpCommunicator, places: ExpertPlaces) -> None:
        self._communicator = communicator
        self._places = places
        self.max_rows = communicator.world_size * communicator.max_tokens_per_rank

    @classmethod
    def build(cls, setup: DispatchSetup) -> Dispatcher:
        return cls(setup.communicator, setup.places)

    def dispatch(
        self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, layout: DpLayout
    ) -> Dispatched:
        self.check_rows(x_TD, layout)
        x_RD, ids_RK, weights_RK = self._communicator.gather_columns(
            (x_TD, ids_TK, weights_TK), layout
        )
        for first, stop in _padding(layout):  # which holds anything
            ids_RK[first:stop] = self._places.num_experts
        if not self._places.is_in_order:
            ids_RK = look_up(self._places.slot_of_expert, ids_RK)
        return Dispatched(x_RD, ids_RK, weights_RK, handle=layout)

    def combine(self, y_RD: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        return self._communicator.scatter_sum(y_RD, dispatched.handle)


def _padding(layout: DpLayout) -> list[tuple[int, int]]:
    """Returns the runs of gathered rows that are no token."""
    counts = zip(
        layout.offsets, layout.global_shard_num_tokens, layout.global_shard_num_rows, strict=True
    )
    return [(offset + real, offset + padded) for offset, real, padded in counts if real < padded]
