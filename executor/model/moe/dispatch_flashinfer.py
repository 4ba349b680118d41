"""Dispatch by FlashInfer's all-to-all: each row goes to the ranks of its experts and nowhere else.

Only where every EP rank has a GPU of its own and all of them see each other's memory. What travels:

    row of a token      to each rank with one of its experts, once, as its payload packs it
    padding row         to this rank itself: the kernels cannot take an expert that is none. It says
                        so on arrival, so no expert runs it. Its result is undefined
    unused places       marked by the library's kernel on arrival

Dimensions as in ``layer.py``.
"""

import torch

from executor.budget.report import A2A_TOKENS, BudgetLine, a2a_bound
from executor.budget.token_budget import TokenBudget, check_flashinfer_a2a
from executor.model.flashinfer.all_to_all import AllToAll, AllToAllSizes
from executor.model.flashinfer.payloads import PAYLOADS, Payload
from executor.model.moe.layer import Dispatched, Dispatcher, DispatchSetup
from executor.parallel.expert_places import ExpertPlaces, look_up
from executor.parallel.layout import DpLayout
from executor.parallel.process_groups import EpochGroups


class FlashInferDispatcher(Dispatcher):
    """Sends rows to their experts' ranks, and sums what comes back. All layers share one.

    Args:
        all_to_all: For sizes as large as any pass.
        places: Of experts on its ranks.
        device: Where rows are. It must be the current one of the thread that joins and steps.
        payload: How rows are sent; None: as they are.
        payload_in_workspace: Whether to offer runners the place where peers read results. One that
            does not take it has its results copied there.
    """

    def __init__(
        self,
        all_to_all: AllToAll,
        places: ExpertPlaces,
        *,
        device: torch.device,
        payload: Payload | None = None,
        payload_in_workspace: bool = True,
        bound: str = "max_dispatch_tokens_per_rank",
    ) -> None:
        sizes = all_to_all.sizes
        self.max_rows = sizes.ep_size * sizes.max_num_tokens
        self.workspace_bytes = sizes.bytes_per_rank
        self._all_to_all = all_to_all
        self._places = places
        self._bound = bound
        self._device = device
        self._payload = payload or Payload(sizes.dtype, device)
        self._in_place = payload_in_workspace

    @classmethod
    def check(cls, budget: TokenBudget) -> None:
        check_flashinfer_a2a(budget.ep_size, budget.top_k)
        _ = budget.a2a_workspace_bytes  # checks its sizes

    @classmethod
    def build(cls, setup: DispatchSetup) -> Dispatcher:
        budget = setup.budget
        if setup.ops is None:
            raise ValueError(
                f"moe_a2a=flashinfer needs a CUDA device and FlashInfer, and this executor runs on "
                f"{setup.device} or without the library; use moe_a2a=torch or none"
            )
        sizes = AllToAllSizes(
            ep_size=budget.ep_size,
            num_experts=setup.places.num_experts,
            num_slots=setup.places.num_slots,
            top_k=budget.top_k,
            hidden_size=budget.hidden_size,
            dtype=setup.dtype,
            max_num_tokens=budget.a2a_max_num_tokens,
            bytes_per_rank=budget.a2a_workspace_bytes,
        )
        all_to_all = AllToAll(setup.ops, sizes, setup.communicator.topology.ep_rank)
        payload = PAYLOADS[budget.quantized_dispatch or "off"](setup.dtype, setup.device)
        return cls(
            all_to_all,
            setup.places,
            device=setup.device,
            payload=payload,
            bound=a2a_bound(budget),
        )

    def lines(self) -> tuple[BudgetLine, ...]:
        tokens = self._all_to_all.sizes.max_num_tokens
        return (BudgetLine(A2A_TOKENS, self._bound, tokens, self.workspace_bytes),)

    def join(self, groups: EpochGroups) -> None:
        """Shares memory with the executors of an epoch. Every one must call it, before it captures.

        What was captured in an earlier epoch is void: memory may lie elsewhere now.

        Raises:
            RuntimeError: It cannot be shared.
        """
        if self._device.type == "cuda":  # every thread begins on the first one
            current = torch.cuda.current_device()
            assert current == self._device.index, f"cuda:{current} is current, not {self._device}"
        self._all_to_all.join(groups.host)

    def leave(self) -> None:
        self._all_to_all.leave()

    def dispatch(
        self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, layout: DpLayout
    ) -> Dispatched:
        self.check_rows(x_TD, layout)
        capacity = layout.runtime_max_tokens_per_rank
        if capacity == 0:  # on every rank
            return Dispatched(x_TD, ids_TK, weights_TK)
        if layout.shard_num_tokens < len(x_TD):
            ids_TK = ids_TK.clone()
            ids_TK[layout.shard_num_tokens :] = self._places.num_experts
        received = self._all_to_all.dispatch(
            self._payload.pack(x_TD),
            ids_TK,
            weights_TK,
            routes_TK=look_up(self._places.route_of_expert, ids_TK),
            capacity=capacity,
        )
        return Dispatched(
            self._payload.unpack(received.parts),
            look_up(self._places.slot_of_expert, received.ids),
            received.weights,
            handle=received,
            out_RD=received.out if self._in_place else None,
        )

    def combine(self, y_RD: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        if dispatched.handle is None:
            return y_RD
        return self._all_to_all.combine(y_RD, dispatched.handle)
