"""Dispatchers by name, and the choice between two of them by the phase of a step.

moe_a2a      steps without prompts    steps in which any rank extends
none         all-gather               all-gather
torch        all-to-all               all-gather, or all-to-all with moe_a2a_extend=all-to-all
flashinfer   FlashInfer's             all-gather, or FlashInfer's with moe_a2a_extend=all-to-all
"""

from dataclasses import replace

import torch

from executor.budget.report import BudgetLine
from executor.model.moe.dispatch_all_gather import AllGatherDispatcher
from executor.model.moe.dispatch_all_to_all import TorchAllToAllDispatcher
from executor.model.moe.dispatch_flashinfer import FlashInferDispatcher
from executor.model.moe.layer import Dispatched, Dispatcher, DispatchSetup
from executor.parallel.layout import DpLayout
from executor.parallel.process_groups import EpochGroups

Kind = type[AllGatherDispatcher] | type[TorchAllToAllDispatcher] | type[FlashInferDispatcher]
DISPATCHERS: dict[str, Kind] = {
    "none": AllGatherDispatcher,
    "torch": TorchAllToAllDispatcher,
    "flashinfer": FlashInferDispatcher,
}


def new_dispatcher(moe_a2a: str, moe_a2a_extend: str, setup: DispatchSetup) -> Dispatcher:
    """Makes the one dispatcher of a model; all its layers share it. Without peers nothing moves.

    Args:
        moe_a2a, moe_a2a_extend: As in ExecutorConfig, which checks them.
        setup: What it is for.

    Raises:
        ValueError: It does not run here.
    """
    if setup.communicator.world_size == 1:
        return AllGatherDispatcher.build(setup)
    dispatcher: Dispatcher = DISPATCHERS[moe_a2a].build(setup)
    if moe_a2a_extend == "all-to-all" or isinstance(dispatcher, AllGatherDispatcher):
        return dispatcher
    return PhaseDispatcher(decode=dispatcher, extend=AllGatherDispatcher.build(setup))


def require_capturable(
    moe_a2a: str, dispatcher: Dispatcher, *, has_decode_graphs: bool, has_prefill_graphs: bool
) -> None:
    """Refuses CUDA graphs over a dispatcher that no graph can record.

    Args:
        moe_a2a: Its name.
        dispatcher: From ``new_dispatcher``.
        has_decode_graphs: Whether decode steps are captured.
        has_prefill_graphs: Whether steps that extend are.

    Raises:
        ValueError: Says what to turn off.
    """
    decode = extend = dispatcher
    if isinstance(dispatcher, PhaseDispatcher):
        decode, extend = dispatcher.decode, dispatcher.extend
    others = " or ".join(name for name, kind in DISPATCHERS.items() if kind.is_capturable)
    for setting, is_captured, used in (
        ("decode_graphs", has_decode_graphs, decode),
        ("prefill_graphs", has_prefill_graphs, extend),
    ):
        if is_captured and not used.is_capturable:
            raise ValueError(
                f"moe_a2a={moe_a2a} reads counts on the host, which no CUDA graph can record: set "
                f"{setting}=off, or moe_a2a to {others}"
            )


class PhaseDispatcher(Dispatcher):
    """One dispatcher for steps without prompts, another for those in which any rank extends.

    The first send few rows, for which an all-to-all's buffers are sized; a prefill's would be many
    times larger. All ranks choose alike, because ``layout.has_extend`` is the same on all of them.

    Args:
        decode: For steps in which no rank runs more than one token of a sequence.
        extend: For the others.
    """

    def __init__(self, *, decode: Dispatcher, extend: Dispatcher) -> None:
        self.decode = decode
        self.extend = extend
        self.max_rows = max(decode.max_rows, extend.max_rows)
        self.workspace_bytes = decode.workspace_bytes + extend.workspace_bytes

    def lines(self) -> tuple[BudgetLine, ...]:
        return (*self.decode.lines(), *self.extend.lines())

    def join(self, groups: EpochGroups) -> None:
        self.decode.join(groups)
        self.extend.join(groups)

    def leave(self) -> None:
        self.decode.leave()
        self.extend.leave()

    def dispatch(
        self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, layout: DpLayout
    ) -> Dispatched:
        chosen = self.extend if layout.has_extend else self.decode
        dispatched = chosen.dispatch(x_TD, ids_TK, weights_TK, layout)
        return replace(dispatched, handle=(chosen, dispatched))

    def combine(self, y_RD: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        chosen, inner = dispatched.handle
        y_TD: torch.Tensor = chosen.combine(y_RD, inner)
        return y_TD
