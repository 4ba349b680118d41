"""Mixture-of-experts layer: route, dispatch, run experts, combine.

    x [T, D] ─┬▶ router ──▶ dispatch ──▶ experts ──▶ combine ─┬▶ [T, D]
              │                └─── other EP ranks ────┘      │
              └───────────── shared expert, if any ───────────┘

A dispatcher does both dispatch and combine, because one undoes the other. Any dispatcher works
with any runner: Dispatched is all they share.

Dimensions, here and in the files beside this one:
    T tokens on this rank    R rows received for this rank's experts    D model
    E experts, all ranks     L expert slots on this rank                F expert hidden
    K experts per token      P pairs of a row and one of its experts on this rank
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from executor.budget.report import BudgetLine
from executor.budget.token_budget import TokenBudget
from executor.model.flashinfer.operators import FlashInferOps
from executor.model.moe.routing import Router
from executor.model.moe.shared import SharedExpert
from executor.model.weights import KeptWeight, Weight
from executor.parallel.communicators import DpCommunicator
from executor.parallel.expert_places import ExpertPlaces
from executor.parallel.layout import DpLayout
from executor.parallel.process_groups import EpochGroups


@dataclass(slots=True)
class Dispatched:
    """Rows that this rank's experts must run.

    Attributes:
        x_RD: Hidden states. The last dimension is dense; rows may be strided.
        topk_ids_RK: int32 slots of experts on this rank, 0 to L - 1; L where it is elsewhere or
            the row is padding.
        topk_weights_RK: float32 routing weights.
        handle: The dispatcher's own note to ``combine``.
        out_RD: Where results should go, dense, if the dispatcher has a place for them. A runner that
            cannot write there returns another tensor, and ``combine`` copies it.
    """

    x_RD: torch.Tensor
    topk_ids_RK: torch.Tensor
    topk_weights_RK: torch.Tensor
    handle: Any = None
    out_RD: torch.Tensor | None = None

    def place_for_results(self) -> torch.Tensor:
        """Returns dense memory [R, D] for results: ``out_RD``, or new memory if there is none."""
        if self.out_RD is not None:
            assert self.out_RD.shape == self.x_RD.shape, "out_RD is for other rows"
            assert self.out_RD.is_contiguous(), "out_RD is not dense"
            return self.out_RD
        return self.x_RD.new_empty(self.x_RD.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchSetup:
    """What a dispatcher is made for.

    Attributes:
        communicator: Joins the ranks.
        budget: The most of a step.
        places: Of experts on the ranks.
        dtype: Type of the hidden states.
        device: Where the tensors live.
        ops: FlashInfer; None where it does not run.
    """

    communicator: DpCommunicator
    budget: TokenBudget
    places: ExpertPlaces
    dtype: torch.dtype
    device: torch.device
    ops: FlashInferOps | None = None


class Dispatcher(ABC):
    """Moves rows to the ranks of their experts, and results back.

    One dispatch is open at a time: all layers share a dispatcher and its buffers. A class says all
    of itself that sizes, graphs and the start-up table must know. ``dispatch.py`` has its name, and
    calls its classmethod ``build(setup: DispatchSetup)``, which raises ValueError where it does not
    run.

    Attributes:
        is_capturable: Whether a CUDA graph can record it: it never waits for the device on the host.
        max_rows: R at most, in any pass.
        workspace_bytes: Device memory that it takes when it first joins an epoch, and not before.
    """

    is_capturable: bool = True
    max_rows: int
    workspace_bytes: int = 0

    @classmethod
    def check(cls, budget: TokenBudget) -> None:
        """Checks that it can do a budget's sizes, before anything is made.

        Raises:
            ValueError: It cannot. Says which setting to change, and to what.
        """

    def lines(self) -> tuple[BudgetLine, ...]:
        """Returns the start-up table's lines of memory of its own."""
        return ()

    def join(self, groups: EpochGroups) -> None:
        """Uses an epoch's groups from now on, beyond what its communicator does."""

    def leave(self) -> None:
        """Forgets the epoch, and what a failed pass has dispatched."""

    @abstractmethod
    def dispatch(
        self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, layout: DpLayout
    ) -> Dispatched:
        """Sends each token to the ranks that hold its experts. Every rank must call it.

        A token whose expert ids are E is padding: it goes to no expert, and nor does a row past
        ``layout.shard_num_tokens``.

        Args:
            x_TD: Hidden states. T is ``layout.shard_num_rows``, and may be 0.
            ids_TK: int32 expert numbers, 0 to E.
            weights_TK: float32 routing weights.
            layout: This pass's token counts.

        Returns:
            Rows that are overwritten by the next dispatch.
        """

    @abstractmethod
    def combine(self, y_RD: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """Returns [T, D], each token's rows summed over ranks. Every rank must call it.

        Rows of padding are undefined. Overwritten by the next combine.
        """

    @staticmethod
    def check_rows(x_TD: torch.Tensor, layout: DpLayout) -> None:
        """Asserts that a pass has this executor's rows of the layout."""
        assert len(x_TD) == layout.shard_num_rows, (
            f"{len(x_TD)} rows, {layout.shard_num_rows} in the layout"
        )


class MoERunner(ABC):
    """Computes the experts of one layer that this rank holds."""

    @abstractmethod
    def run(self, dispatched: Dispatched) -> torch.Tensor:
        """Returns [R, D], each row's outputs of this rank's experts, weighted and summed."""


class ExpertBiases(NamedTuple):
    """Biases of stacked experts.

    Attributes:
        b13: [L, 2F], as the rows of w13 lie.
        b2: [L, D], added inside the routing weight. Zeros on all but one of the executors that share
            these experts, as their results are summed.
    """

    b13: torch.Tensor
    b2: torch.Tensor


class StackedMoERunner(MoERunner):
    """A runner of experts whose weights are two stacked tensors.

    Args:
        w13: [L, 2F, D], gate and up projections of each expert.
        w2: [L, D, F], down projections.
        biases: Of both; None without.

    Attributes:
        gate_first: Whether gate or up comes first in w13.

    Raises:
        ValueError: The weights do not fit one another.
    """

    gate_first: bool = True

    def __init__(self, w13: Weight, w2: Weight, biases: ExpertBiases | None = None) -> None:
        num_local, hidden_size, intermediate_size = w2.shape
        if tuple(w13.shape) != (num_local, 2 * intermediate_size, hidden_size):
            raise ValueError(
                f"w13 is {list(w13.shape)} and w2 {list(w2.shape)}: "
                f"need [L, 2F, D] and [L, D, F] with the same L, F and D"
            )
        self._w13, self._w2 = (x.numbers if isinstance(x, KeptWeight) else x for x in (w13, w2))
        self._scales: tuple[torch.Tensor, torch.Tensor] | None = None
        if isinstance(w13, KeptWeight) and isinstance(w2, KeptWeight):
            self._scales = w13.scales, w2.scales
        self._biases = biases

    @staticmethod
    def arrange(w13: torch.Tensor, /) -> torch.Tensor:
        """Returns one expert's gate and up [2F, D] as the kernel reads them."""
        return w13

    @staticmethod
    def arrange_down(w2: torch.Tensor, /) -> torch.Tensor:
        """Returns one expert's down [D, F] as the kernel reads it."""
        return w2

    @staticmethod
    def elements_per_row(top_k: int, hidden_size: int, intermediate_size: int) -> int:
        """Returns how many of x's elements a pass holds for each of R, beside scratch and ids, at most.

        Here rows made dense, and their results.

        Args:
            top_k: K.
            hidden_size: D.
            intermediate_size: F.
        """
        return 2 * hidden_size

    def refresh(self) -> None:
        """Brings up to date what it has derived from weights, where it is, after some were loaded."""

    def arrange_kept(self, w13: KeptWeight, w2: KeptWeight) -> None:
        """Lays one expert's gate and up, and down, as the kernel reads them, in place."""
        raise NotImplementedError(f"{type(self).__name__} takes no weights that are kept")


class ExpertScratch:
    """Memory of FlashInfer's kernels for experts, for the largest pass, known before any batch.

    All layers share one, as they never run at once; the first of them makes it.

    Args:
        ops: The library.
        max_num_rows: R at most, all passes and captures considered: ``Dispatcher.max_rows``.
        top_k: K.
    """

    def __init__(self, ops: FlashInferOps, *, max_num_rows: int, top_k: int) -> None:
        self.ops = ops
        self.max_num_rows = max_num_rows
        self.top_k = top_k

    def check(self, dispatched: Dispatched) -> None:
        """Asserts that a pass is none larger than it was made for."""
        num_rows, top_k = dispatched.topk_ids_RK.shape
        assert top_k == self.top_k, f"{top_k} experts; the scratch is for {self.top_k}"
        assert num_rows <= self.max_num_rows, (
            f"{num_rows} rows; the scratch is for {self.max_num_rows}"
        )


class MoELayer:
    """The experts of one decoder layer.

    Args:
        router: Chooses each token's experts.
        dispatcher: Moves rows between EP ranks.
        runner: Computes this rank's experts.
        shared: What every token goes through as well; None if there is nothing.
    """

    def __init__(
        self,
        router: Router,
        *,
        dispatcher: Dispatcher,
        runner: MoERunner,
        shared: SharedExpert | None = None,
    ) -> None:
        self.router = router
        self.dispatcher = dispatcher
        self.runner = runner
        self.shared = shared

    def __call__(
        self, x_TD: torch.Tensor, layout: DpLayout, is_padding_T1: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns [T, D]. Every EP rank must call it, also with T = 0.

        Args:
            x_TD: Hidden states.
            layout: This pass's token counts.
            is_padding_T1: bool, rows that no expert may see, though they are counted in
                ``layout``; None if there are none.
        """
        ids_TK, weights_TK = self.router(x_TD, is_padding_T1)
        dispatched = self.dispatcher.dispatch(x_TD, ids_TK, weights_TK, layout)
        y_RD = self.runner.run(dispatched)
        y_TD = self.dispatcher.combine(y_RD, dispatched)
        return y_TD if self.shared is None else self.shared(x_TD).add_(y_TD)
